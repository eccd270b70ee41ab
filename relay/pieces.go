package relay

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/oncemill/oncemill/outbox"
)

const (
	leastPiece = 256 << 10
	mostPiece  = 8 << 20
)

// pieces is what the reader has of a message that is too large for one read: it comes
// in pieces, each of them a call of its own, so that a slow way to the database is none
// that is silent. While that lasts, the other lanes are read in between, and messages of
// one piece come before it. The reader keeps one at a time that has begun.
type pieces struct {
	read func(ctx context.Context, of outbox.Ref, offset, most int) ([]byte, error)

	// mayMiss is how many reads a message that has begun may miss. Then its lane is
	// another worker's, perhaps, and others may begin.
	mayMiss int

	of      outbox.Ref
	payload []byte // as far as it is here
	size    int    // of the next piece
	missed  int    // reads in a row that lacked others, and not this one
	small   int    // the lane that the last message of one piece was of

	failed map[outbox.Ref]failedPiece
}

// failedPiece is why a message could not be read, and when to try again.
type failedPiece struct {
	err   error
	until time.Time
}

// mostFailed bounds what is remembered of messages that could not be read.
const mostFailed = 1000

// complete brings the payloads that rows lack, as many as there is time for, and not
// many more bytes than mostPiece. It returns the lanes of the rows that still lack
// theirs, with the error if there was one.
func (p *pieces) complete(ctx context.Context, w *worker, rows []*outbox.Row) (short map[int]error) {
	if len(rows) == 0 {
		return nil
	}
	now := time.Now()
	short = map[int]error{}
	var small, large []*outbox.Row
	for _, r := range rows {
		switch failed := p.failed[placeless(r.Ref)]; {
		case now.Before(failed.until):
			short[r.Lane] = failed.err
		case r.Missing > leastPiece:
			large = append(large, r)
		default:
			small = append(small, r)
		}
	}
	end, bytes := now.Add(w.health.full/4), 0
	fill := func(r *outbox.Row, payload []byte, err error) (filled bool) {
		if err != nil {
			short[r.Lane] = err
			level := slog.LevelWarn
			if _, told := p.failed[placeless(r.Ref)]; told {
				level = slog.LevelDebug
			}
			if p.failed == nil || len(p.failed) >= mostFailed {
				p.failed = map[outbox.Ref]failedPiece{}
			}
			p.failed[placeless(r.Ref)] = failedPiece{err, time.Now().Add(readAgain)}
			w.log.Log(ctx, level, "reading a large message failed; trying again", "lane", r.Lane, "id", r.ID, "message_id", r.MessageID, "bytes", r.Missing, "error", err)
		}
		if payload != nil {
			r.Payload, r.Missing = payload, 0
			bytes += len(payload)
			delete(p.failed, placeless(r.Ref))
		}
		return payload != nil
	}
	p.sort(small, p.small+1)
	for _, r := range small {
		payload, err := p.read(ctx, placeless(r.Ref), 0, r.Missing)
		if err == nil && len(payload) != r.Missing {
			payload, err = nil, errOtherRow
		}
		p.small = r.Lane
		if !fill(r, payload, err) || bytes > mostPiece || time.Now().After(end) {
			break
		}
	}
	p.sort(large, p.of.Lane+1)
	p.seek(large)
	for i, r := range large {
		begun := len(p.payload) > 0
		if begun && placeless(r.Ref) != p.of || i > 0 && (bytes+r.Missing > mostPiece || time.Now().After(end)) {
			break
		}
		payload, err := p.bring(ctx, w, r, end)
		if !fill(r, payload, err) {
			break
		}
	}
	for _, r := range rows {
		if _, failed := short[r.Lane]; r.Missing > 0 && !failed {
			short[r.Lane] = nil // for now
		}
	}
	return short
}

// sort puts rows in the order of their lanes, from one on.
func (p *pieces) sort(rows []*outbox.Row, first int) {
	turn := func(r *outbox.Row) int { return (r.Lane - first + outbox.Lanes) % outbox.Lanes }
	slices.SortStableFunc(rows, func(a, b *outbox.Row) int { return turn(a) - turn(b) })
}

// seek puts the message first that has begun, and gives it up if reads lack others and
// not this one.
func (p *pieces) seek(large []*outbox.Row) {
	if len(p.payload) == 0 || len(large) == 0 {
		return
	}
	i := slices.IndexFunc(large, func(r *outbox.Row) bool { return placeless(r.Ref) == p.of })
	if i >= 0 {
		p.missed = 0
		r := large[i]
		copy(large[1:i+1], large)
		large[0] = r
		return
	}
	if p.missed++; p.missed > p.mayMiss {
		p.payload = nil
	}
}

// lackingRows returns those of rows that lack their payload.
func lackingRows(rows []outbox.Row) (lacking []*outbox.Row) {
	for i := range rows {
		if rows[i].Missing > 0 {
			lacking = append(lacking, &rows[i])
		}
	}
	return lacking
}

// placeless is what a row is known by, wherever it is.
func placeless(r outbox.Ref) outbox.Ref {
	r.Place = outbox.Place{}
	return r
}

// errOtherRow puts the lane's reads off for a moment: one that goes on finding a row
// whose pieces cannot be found would be repeated without a pause.
var errOtherRow = errors.New("the row is gone, or is not what it was")

// bring returns the payload of a row once all of it is here; nil: there is no more time.
func (p *pieces) bring(ctx context.Context, w *worker, r *outbox.Row, end time.Time) ([]byte, error) {
	of := placeless(r.Ref)
	if p.of != of {
		p.of, p.payload, p.missed = of, nil, 0
	}
	for n := 0; len(p.payload) < r.Missing; n++ {
		now := time.Now()
		if n > 0 && now.After(end) {
			return nil, nil
		}
		p.size = min(max(p.size, leastPiece), mostPiece)
		piece, err := p.read(ctx, of, len(p.payload), p.size)
		took := time.Since(now)
		switch {
		case err != nil:
			p.size /= 4
			return nil, err
		case len(piece) == 0 || len(p.payload)+len(piece) > r.Missing:
			p.payload = nil
			return nil, errOtherRow
		case took < w.health.full/20:
			p.size *= 2
		case took > w.health.full/5:
			p.size /= 2
		}
		p.payload = append(slices.Grow(p.payload, r.Missing-len(p.payload)), piece...)
	}
	payload := p.payload
	p.payload = nil
	return payload, nil
}
