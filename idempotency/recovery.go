package idempotency

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// mostFoundHeader bounds the names and values of Recovery.Header.
const mostFoundHeader = 64 << 10

// check returns a *RecoveryError if found cannot be sent to clients.
func (in *intent) check(found Recovery) error {
	switch {
	case found.RunAgain, found.Status == 0:
		return nil
	case found.Status < 200 || found.Status > 599:
		return &RecoveryError{"Status", "must be 200 to 599"}
	case in.isCommand() && found.Status >= http.StatusBadRequest:
		return &RecoveryError{"Status", "must be below 400 for a command: each answer of one is a result, for its callers a success"}
	case in.isCommand() && !json.Valid(found.Body):
		return &RecoveryError{"Body", "must be what encoding/json makes of the command's result"}
	case !in.isCommand() && len(found.Body) > 0 && !hasBody(found.Status):
		return &RecoveryError{"Body", "must be empty with this status"}
	}
	size := 0
	for name, values := range found.Header {
		if !isHeaderName(name) {
			return &RecoveryError{"Header", "has a name that is none: " + strconv.Quote(name)}
		}
		for _, value := range values {
			if strings.ContainsFunc(value, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }) {
				return &RecoveryError{"Header", "has a control character in " + strconv.Quote(name)}
			}
			size += len(name) + len(value)
		}
	}
	if size > mostFoundHeader {
		return &RecoveryError{"Header", "must have at most 64 KiB"}
	}
	return nil
}

// fits is the check for a Recovery that is to be stored whole.
func (in *intent) fits(found Recovery) error {
	most := in.cfg.Responses.MaxSize
	if in.isCommand() { // maybe of Engine.Watermill
		most = mostResponse
	}
	if len(found.Body) > most {
		return &RecoveryError{"Body", fmt.Sprintf("must have at most %d bytes", most)}
	}
	return in.check(found)
}

func (in *intent) isCommand() bool { return isCommand(in.claim.Endpoint) }

func isCommand(endpoint string) bool { return strings.HasPrefix(endpoint, commandEndpoint) }

// foundOut encodes the completion for a run whose outcome has been found out.
func (in *intent) foundOut(found Recovery) (Completion, error) {
	c := Completion{State: StateCompleted, Retention: in.cfg.retention(nil, found.Status), Refuse: in.cfg.Expiry.RefuseFor}
	if in.isCommand() {
		return in.sealed(c, found.Body)
	}
	c.Status = found.Status
	rec := &recorder{header: http.Header{}, limit: in.cfg.Responses.MaxSize}
	if err := rec.fill(found); err != nil {
		return c, err
	}
	return in.encoded(c, rec.result())
}
