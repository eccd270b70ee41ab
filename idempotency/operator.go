package idempotency

import (
	"context"
	"encoding/base64"
	"strings"
)

// Settle ends a key whose outcome is unknown, for an operator who has found out: with
// found.RunAgain the key may run again, else its answer is stored, as Config.Recover's is.
// token is what stands behind Config.StatusPath in a status URL.
//
// It returns [ErrNotUnknown] for a key that has no run, runs, or has ended, and for a zero
// Recovery. Of several calls at once one settles the key.
func (e *Engine) Settle(ctx context.Context, token string, found Recovery) error {
	id, ok := parseToken(token)
	if !ok || !found.RunAgain && found.Status == 0 {
		return ErrNotUnknown
	}
	record, exists, err := e.store.Find(ctx, id)
	if err != nil {
		return err
	}
	if !exists || record.State != Started || record.LeaseLeft > 0 {
		return ErrNotUnknown
	}
	in := e.newIntent(false)
	in.claim.ID, in.claim.Endpoint = id, record.Endpoint
	taken, granted, err := e.store.TakeOver(ctx, in.claim, record.Owner)
	switch {
	case err != nil:
		return err
	case !granted:
		return ErrNotUnknown
	}
	if found.RunAgain {
		return e.store.Release(ctx, id, taken.Owner)
	}
	c, err := in.foundOut(found)
	if err != nil {
		return err
	}
	return e.store.Complete(ctx, id, taken.Owner, c)
}

// foundOut encodes what is stored of a run that somebody has found out about.
func (in *intent) foundOut(found Recovery) (Completion, error) {
	c := Completion{State: Completed, Retention: in.cfg.retention(nil, found.Status), Refuse: in.cfg.RefuseExpired}
	if strings.HasPrefix(in.claim.Endpoint, commandEndpoint) {
		return in.sealed(c, found.Body)
	}
	c.Status, c.Location = found.Status, printable(found.Header.Get("Location"), 2048)
	res := response{Status: found.Status, body: found.Body}
	for name, values := range found.Header {
		res.Header = append(res.Header, headerEntry{Name: name, Values: bytesOf(values)})
	}
	plain, err := res.marshal()
	if err != nil {
		return c, err
	}
	return in.sealed(c, plain)
}

func statusToken(id ID) string { return base64.RawURLEncoding.EncodeToString(id[:]) }

func parseToken(token string) (ID, bool) {
	raw, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil || len(raw) != len(ID{}) {
		return ID{}, false
	}
	return ID(raw), true
}
