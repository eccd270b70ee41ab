package idempotency

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
)

// response is a handler's answer in its stored form.
type response struct {
	Status   int           `json:"s"`
	Header   []headerEntry `json:"h,omitempty"`
	Trailer  []headerEntry `json:"t,omitempty"`
	Pointer  bool          `json:"p,omitempty"` // the body is not stored, by configuration
	body     []byte
	overflow bool // the body is not all of it
}

// headerEntry is what a handler did to a header that may already have been set.
type headerEntry struct {
	Name   string   `json:"n"`
	Values [][]byte `json:"v,omitempty"` // bytes: JSON's strings could not hold them all
	Add    bool     `json:"a,omitempty"` // after the existing values; else instead of them
	Empty  bool     `json:"e,omitempty"` // set to no values, so that net/http does not choose one
}

// marshal puts the JSON of the head before the body, with its length.
func (res *response) marshal() ([]byte, error) {
	head, err := json.Marshal(res)
	if err != nil {
		return nil, fmt.Errorf("encode response: %w", err)
	}
	out := make([]byte, 0, 4+len(head)+len(res.body))
	out = binary.BigEndian.AppendUint32(out, uint32(len(head))) //nolint:gosec // headers are far below 4 GiB
	return append(append(out, head...), res.body...), nil
}

func unmarshalResponse(stored []byte) (*response, error) {
	if len(stored) < 4 {
		return nil, fmt.Errorf("%w: it is too short", ErrDecode)
	}
	size := int(binary.BigEndian.Uint32(stored))
	if size < 0 || len(stored)-4 < size {
		return nil, fmt.Errorf("%w: it is too short", ErrDecode)
	}
	var r response
	if err := json.Unmarshal(stored[4:4+size], &r); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrDecode, err)
	}
	r.body = stored[4+size:]
	return &r, nil
}

func (res *response) header(name string) string {
	for _, e := range res.Header {
		if e.Name == name && len(e.Values) > 0 {
			return string(e.Values[0])
		}
	}
	return ""
}

// transient reports whether an error asks the client to retry.
func (res *response) transient() bool {
	return res.header("Retry-After") != "" || res.passesOn(ProblemInProgress) || res.passesOn(ProblemOutcomeUnknown)
}

// passesOn reports whether the response is a problem of a downstream: that its request is running, or that it
// does not know what became of it.
func (res *response) passesOn(kind string) bool {
	if res.Status != http.StatusConflict && res.Status != http.StatusAccepted || !strings.HasPrefix(res.header("Content-Type"), problemContentType) {
		return false
	}
	var problem struct {
		Type string `json:"type"`
	}
	return json.Unmarshal(res.body, &problem) == nil && problem.Type[strings.LastIndexAny(problem.Type, "/#")+1:] == kind
}
