package keystore

import (
	"database/sql"
	"errors"
	"time"
)

// scanRow scans a record that may not exist.
func scanRow(id ID, row *sql.Row) (Record, bool, error) {
	r, err := scan(id, row)
	if errors.Is(err, sql.ErrNoRows) {
		return Record{}, false, nil
	}
	return r, err == nil, err
}

// scan scans a record, after columns that go into before. A response that has expired is
// left out, whether or not it has been purged.
func scan(id ID, row interface{ Scan(dest ...any) error }, before ...any) (Record, error) {
	r := Record{ID: id}
	var caller, fingerprint, token []byte
	var lease, expires, created, completed int64
	err := row.Scan(append(before, &caller, &fingerprint, &r.State, &token, &r.Owner.Fence,
		&r.Endpoint, &r.Status, &r.Response, &r.Location, &r.ResourceID, &r.CorrelationID, &r.TraceID,
		&lease, &expires, &created, &completed)...)
	if err != nil {
		return Record{}, err
	}
	copy(r.Caller[:], caller)
	copy(r.Fingerprint[:], fingerprint)
	copy(r.Owner.Token[:], token)
	r.LeaseLeft = time.Duration(lease) * time.Microsecond
	r.ExpiresIn = time.Duration(expires) * time.Microsecond
	r.CreatedAt = time.UnixMicro(created).UTC()
	if completed != 0 {
		r.CompletedAt = time.UnixMicro(completed).UTC()
	}
	if r.State != StateStarted && r.ExpiresIn <= 0 {
		r.State, r.Response = StateExpired, nil
	}
	return r, nil
}

// claimArgs are the arguments of claim.
func claimArgs(c Claim) []any {
	return []any{
		c.ID[:], c.Caller[:], c.Fingerprint[:], c.Token[:], c.Endpoint,
		c.Lease.Microseconds(), c.Retention.Microseconds(), c.CorrelationID, c.TraceID,
	}
}

// takeOverArgs are the arguments of take_over.
func takeOverArgs(c Claim, from Owner) []any {
	return []any{c.ID[:], from.Token[:], from.Fence, c.Token[:], c.Lease.Microseconds(), c.Retention.Microseconds()}
}

// completionArgs are the arguments of complete and finish.
func completionArgs(id ID, owner Owner, c Completion) []any {
	return []any{
		id[:], owner.Token[:], owner.Fence, int(c.State), c.Status, c.Response, c.Large,
		c.Location, c.ResourceID, c.Retention.Microseconds(), (c.Retention + c.Refuse).Microseconds(),
	}
}
