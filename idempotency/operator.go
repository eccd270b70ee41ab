package idempotency

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// Settle ends a key whose outcome is unknown, for an operator who has found out the
// outcome. With found.RunAgain the key may run again; otherwise its answer is stored, like
// that of Config.Failures.Recover. token is the part of a status URL after Config.Answers.StatusPath.
//
// Settle returns [ErrNotUnknown] for a key that has no run, is running, or has ended, and
// for a zero Recovery. It returns a [*RecoveryError] for an answer that cannot be stored.
// Of several concurrent calls, one settles the key.
func (e *Engine) Settle(ctx context.Context, token string, found Recovery) error {
	id, ok := parseToken(token)
	if !ok || !found.RunAgain && found.Status == 0 {
		return ErrNotUnknown
	}
	record, exists, err := e.store.Find(ctx, id)
	if err != nil {
		return err
	}
	if !exists || record.State != StateStarted || record.LeaseLeft > 0 {
		return ErrNotUnknown
	}
	in := e.newIntent(false)
	in.claim.ID, in.claim.Caller, in.claim.Endpoint = id, record.Caller, record.Endpoint
	if err := in.fits(found); err != nil {
		return err
	}
	taken, granted, err := e.store.TakeOver(ctx, in.claim, record.Owner)
	switch {
	case err != nil:
		return err
	case !granted:
		return ErrNotUnknown
	}
	in.own(taken)
	if found.RunAgain {
		return e.store.Release(ctx, id, in.owner)
	}
	c, err := in.foundOut(found)
	if err != nil {
		return err
	}
	return e.store.Complete(ctx, id, in.owner, c)
}

// mostFoundHeader bounds the names and values of Recovery.Header.
const mostFoundHeader = 64 << 10

// check returns a *RecoveryError if found cannot be sent to clients.
func (in *intent) check(found Recovery) error {
	switch {
	case found.RunAgain, found.Status == 0:
		return nil
	case found.Status < 200 || found.Status > 599:
		return &RecoveryError{"Status", "must be 200 to 599"}
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

func (in *intent) isCommand() bool { return strings.HasPrefix(in.claim.Endpoint, commandEndpoint) }

// foundOut encodes the completion for a run whose outcome somebody has found out.
func (in *intent) foundOut(found Recovery) (Completion, error) {
	c := Completion{State: StateCompleted, Retention: in.cfg.retention(nil, found.Status), Refuse: in.cfg.Expiry.RefuseFor}
	if in.isCommand() {
		return in.sealed(c, found.Body)
	}
	c.Status = found.Status
	rec := &recorder{header: http.Header{}, limit: in.cfg.Responses.MaxSize, dropped: in.cfg.Responses.DropHeaders}
	if err := rec.fill(found); err != nil {
		return c, err
	}
	return in.encoded(c, rec.result())
}

func statusToken(id ID) string { return base64.RawURLEncoding.EncodeToString(id[:]) }

func parseToken(token string) (ID, bool) {
	raw, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil || len(raw) != len(ID{}) {
		return ID{}, false
	}
	return ID(raw), true
}
