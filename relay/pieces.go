package relay

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/outbox"
)

const (
	leastPiece = 64 << 10
	firstPiece = 256 << 10
	mostPiece  = 8 << 20

	// mostBegun bounds the bytes kept of partly read messages while another one begins,
	// except those of the message of which most has been read.
	mostBegun = 32 << 20

	// mostFailed bounds the number of tracked messages that could not be read.
	mostFailed = 1000
)

// pieces reads the payloads that reads leave out because they are too large for one
// read. It reads them in pieces, each with a separate call, so that a slow connection
// does not look like a silent one. Meanwhile the other lanes are read in between, and
// messages of one piece come first. The pieces read so far are kept, whatever comes in
// between, until reads have not returned the message for long: its lane may be another
// worker's.
type pieces struct {
	read func(ctx context.Context, of outboxstore.Ref, offset, most int) ([]byte, error)

	begun  []*begun
	size   int           // of the next piece
	slow   time.Duration // what one of twice the size took, after it was halved; 0: it was not
	vain   bool          // halving it has made it no quicker
	small  int           // the lane that the last message of one piece was of
	large  int           // and the last of more that was in turn
	finish bool          // the message goes first of which least is missing
	failed map[outboxstore.Ref]failedPiece
}

// begun is a partly read message. Its Ref includes the place: a message that is changed
// meanwhile starts again.
type begun struct {
	of      outboxstore.Ref
	payload []byte
	seen    time.Time
}

// failedPiece is why a message could not be read, and when to retry.
type failedPiece struct {
	err   error
	until time.Time
}

// complete reads the payloads that rows lack, as many as time and space permit, for
// each lane what it has room for, and not many more bytes than mostPiece. It returns
// the lanes of the rows that still lack theirs, with the error if there was one.
func (p *pieces) complete(ctx context.Context, w *worker, rows []*outboxstore.Row, s *space) (short map[int]error) {
	now := time.Now()
	p.forget(rows, now)
	if len(rows) == 0 {
		return nil
	}
	short = map[int]error{}
	var small, large []*outboxstore.Row
	var asked [outbox.Lanes]int // bytes
	for _, r := range rows {
		switch failed := p.failed[r.Ref]; {
		case now.Before(failed.until):
			short[r.Lane] = failed.err
			continue
		case asked[r.Lane] >= laneBytes:
			continue
		case r.Missing > leastPiece:
			large = append(large, r)
		default:
			small = append(small, r)
		}
		asked[r.Lane] += r.Missing
	}
	p.sort(small, large)
	end, bytes := now.Add(w.health.full/4), 0
	tried := map[bool]bool{} // by whether they are large
	for i, r := range slices.Concat(small, large) {
		isLarge := i >= len(small)
		// One of either kind is tried, however long the others take.
		if tried[isLarge] && (bytes+r.Missing > mostPiece || time.Now().After(end)) {
			continue
		}
		switch {
		case !isLarge:
			p.small = r.Lane
		case !s.has(r.Topic) || !p.mayBegin(r.Ref, now):
			short[r.Lane] = errBehind
			continue
		case !p.finish:
			p.large = r.Lane
		}
		tried[isLarge] = true
		payload, err := p.bring(ctx, w, r, end)
		if err != nil {
			short[r.Lane] = err
			w.log.Log(ctx, p.fail(r.Ref, err), "reading a large message failed; trying again",
				"lane", r.Lane, "id", r.ID, "message_id", r.MessageID, "bytes", r.Missing, "error", err)
		}
		if unanswered(err) {
			break // so may be the others
		}
		if payload == nil {
			continue
		}
		bytes += r.Missing
		if isLarge {
			s.take(r.Topic, r.Missing)
		}
		r.Payload, r.Missing = payload, 0
		delete(p.failed, r.Ref)
	}
	for _, r := range rows {
		if _, failed := short[r.Lane]; r.Missing > 0 && !failed {
			short[r.Lane] = nil // for now
		}
	}
	return short
}

// sort orders rows. Small ones take turns, by their lanes. Of the large ones, the one
// of which most has been read comes first: it is sure to be completed. Every other time
// the one with the least missing comes first, so that none waits for a much larger one.
func (p *pieces) sort(small, large []*outboxstore.Row) {
	turn := func(r *outboxstore.Row, last int) int { return (r.Lane - last - 1 + outbox.Lanes) % outbox.Lanes }
	slices.SortStableFunc(small, func(a, b *outboxstore.Row) int { return cmp.Compare(turn(a, p.small), turn(b, p.small)) })
	p.finish = !p.finish
	slices.SortStableFunc(large, func(a, b *outboxstore.Row) int {
		first := cmp.Compare(p.here(b), p.here(a))
		if p.finish {
			first = cmp.Compare(a.Missing-p.here(a), b.Missing-p.here(b))
		}
		return cmp.Or(first, cmp.Compare(turn(a, p.large), turn(b, p.large)))
	})
}

// here returns how many bytes of a message have been read.
func (p *pieces) here(r *outboxstore.Row) int {
	if i := p.find(r.Ref); i >= 0 {
		return len(p.begun[i].payload)
	}
	return 0
}

func (p *pieces) find(of outboxstore.Ref) int {
	return slices.IndexFunc(p.begun, func(b *begun) bool { return b.of == of })
}

// keepFor is how long the pieces of a message are kept that no read returns. The lane
// of a message that could not be read is delayed for as long as readRarely.
const keepFor = 2 * readRarely

// forget drops messages that no read has returned for long.
func (p *pieces) forget(rows []*outboxstore.Row, now time.Time) {
	for _, r := range rows {
		if i := p.find(r.Ref); i >= 0 {
			p.begun[i].seen = now
		}
	}
	p.begun = slices.DeleteFunc(p.begun, func(b *begun) bool { return now.Sub(b.seen) > keepFor })
}

// mayBegin reports whether a message has begun, or may: not too much is kept of others
// that reads return. Messages that reads do not return are dropped to make room, except
// the one of which most has been read.
func (p *pieces) mayBegin(of outboxstore.Ref, now time.Time) bool {
	if p.find(of) >= 0 {
		return true
	}
	most, kept := p.kept()
	if kept > mostBegun {
		p.begun = slices.DeleteFunc(p.begun, func(b *begun) bool { return b != most && b.seen.Before(now) })
		_, kept = p.kept()
	}
	return kept <= mostBegun
}

// kept returns the message of which most has been read, and the bytes kept of the
// others.
func (p *pieces) kept() (most *begun, bytes int) {
	for _, b := range p.begun {
		bytes += cap(b.payload)
		if most == nil || cap(b.payload) > cap(most.payload) {
			most = b
		}
	}
	if most != nil {
		bytes -= cap(most.payload)
	}
	return most, bytes
}

// begin returns what has been read of a message.
func (p *pieces) begin(of outboxstore.Ref) *begun {
	if i := p.find(of); i >= 0 {
		return p.begun[i]
	}
	b := &begun{of: of, seen: time.Now()}
	p.begun = append(p.begun, b)
	return b
}

func (p *pieces) end(of outboxstore.Ref) {
	p.begun = slices.DeleteFunc(p.begun, func(b *begun) bool { return b.of == of })
}

// fail records that a message could not be read, and returns the log level for it: it
// is logged once.
func (p *pieces) fail(of outboxstore.Ref, err error) slog.Level {
	level := slog.LevelWarn
	if _, logged := p.failed[of]; logged {
		level = slog.LevelDebug
	}
	if p.failed == nil || len(p.failed) >= mostFailed {
		p.failed = map[outboxstore.Ref]failedPiece{}
	}
	p.failed[of] = failedPiece{err, time.Now().Add(readAgain)}
	return level
}

// errBehind delays the lane's reads for a moment: other messages are read or sent
// first.
var errBehind = errors.New("others come first")

// errOtherRow delays the lane's reads for a moment. A read that keeps finding a row
// whose pieces cannot be found would otherwise be repeated without a pause.
var errOtherRow = errors.New("the row is gone, or is not what it was")

// bring returns the payload of a row once all of it has been read; nil: time has run
// out.
func (p *pieces) bring(ctx context.Context, w *worker, r *outboxstore.Row, end time.Time) ([]byte, error) {
	b := p.begin(r.Ref)
	for n := 0; len(b.payload) < r.Missing; n++ {
		now := time.Now()
		if n > 0 && now.After(end) {
			return nil, nil
		}
		p.size = min(max(cmp.Or(p.size, firstPiece), leastPiece), mostPiece)
		piece, err := p.read(ctx, r.Ref, len(b.payload), p.size)
		took := time.Since(now)
		switch {
		case err != nil:
			p.size, p.slow, p.vain = max(leastPiece, p.size/4), 0, false
			return nil, err
		case len(piece) == 0 || len(b.payload)+len(piece) > r.Missing:
			p.end(r.Ref)
			return nil, errOtherRow
		}
		b.add(piece, r.Missing)
		if len(piece) == p.size {
			p.adapt(took, w.health.full)
		}
	}
	p.end(r.Ref)
	return b.payload, nil
}

// adapt learns the size of pieces from the time that one took: about a tenth of the
// time of a call. A piece may take long whatever its size. For a compressed payload,
// for example, the server reads everything before it. Then the size is not reduced.
func (p *pieces) adapt(took, full time.Duration) {
	switch {
	case took < full/20:
		p.size, p.slow, p.vain = 2*p.size, 0, false
	case p.slow > 0 && took > p.slow*3/4:
		p.size, p.slow, p.vain = 2*p.size, 0, true
	case took > full/5 && !p.vain:
		p.size, p.slow = p.size/2, took
	default:
		p.slow = 0
	}
}

// add appends a piece. Pieces not yet read take no memory.
func (b *begun) add(piece []byte, whole int) {
	if need := len(b.payload) + len(piece); need > cap(b.payload) {
		grown := make([]byte, len(b.payload), min(max(2*len(b.payload), need), whole))
		copy(grown, b.payload)
		b.payload = grown
	}
	b.payload = append(b.payload, piece...)
}

// lackingRows returns those of rows that lack their payload.
func lackingRows(rows []outboxstore.Row) (lacking []*outboxstore.Row) {
	for i := range rows {
		if rows[i].Missing > 0 {
			lacking = append(lacking, &rows[i])
		}
	}
	return lacking
}
