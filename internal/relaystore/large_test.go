package relaystore

import (
	"bytes"
	"slices"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/outbox"
)

// Large messages that are due take all places of a look; one that passes them over brings
// the others, of the same topic.
func TestRetries_LooksPassLargeMessagesOverIfAsked(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		const large, heads = 20, 8
		var messages []*message.Message
		ids := loose(large + 3)
		for i, id := range ids {
			size := 10_000
			if i >= large {
				size = 10
			}
			messages = append(messages, message.NewMessage(id, bytes.Repeat([]byte("x"), size)))
		}
		var failures []Failure
		for _, r := range p.publishAll(t, messages) {
			failures = append(failures, failing(r, FateRetry))
		}
		p.mustFail(t, failures)
		req := DueRequest{Lanes: []int{testLane}, Topics: 10, Heads: heads, Rows: 32, Bytes: 20_000}
		found, err := p.Due(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		if n := lacking(found.Rows); n != heads && !p.sqlite() { // which brings them
			t.Fatalf("%d large ones of %d places: the test shows nothing", n, heads)
		}
		req.Inline = true
		if found, err = p.Due(t.Context(), req); err != nil {
			t.Fatal(err)
		}
		if got := dueNames(found.Rows); !p.sqlite() && !slices.Equal(got, ids[large:]) {
			t.Errorf("the others are %v, want %v", got, ids[large:])
		}
	})
}

// A look brings no more bytes than it asks for, and the payload of a large message not at
// all, however many are due.
func TestRetries_LooksBringWhatTheWayCarries(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		const each, all = 10_000, 40
		var messages []*message.Message
		ids := loose(all)
		for i := range all {
			size := each
			if i == 2 {
				size = 3 * each
			}
			m := message.NewMessage(ids[i], bytes.Repeat([]byte{byte('a' + i%26), 'x'}, size/2))
			outbox.SetKey(m, laneKey(i%4)) // 0: none
			messages = append(messages, m)
		}
		var failures []Failure
		payloads := map[string][]byte{}
		for _, r := range p.publishAll(t, messages) {
			failures, payloads[r.MessageID] = append(failures, failing(r, FateRetry)), r.Payload
		}
		p.mustFail(t, failures)
		waiting := p.count(t, `select count(*) from {{parked}} where lane = $1`, testLane)
		req := DueRequest{Lanes: []int{testLane}, Topics: 10, Heads: 64, Rows: 32, Bytes: 8 * each}
		seen := map[string]bool{}
		for looks := 0; len(seen) < waiting; looks++ {
			found, err := p.Due(t.Context(), req)
			if err != nil {
				t.Fatal(err)
			}
			bytesLeft := req.Bytes
			for _, r := range found.Rows {
				if bytesLeft <= 0 {
					t.Errorf("%s is beyond the bytes that were asked for", r.MessageID)
				}
				bytesLeft -= rowBytes + len(r.Payload) + len(r.Metadata)
				if r.Missing > 0 {
					if r.Missing <= req.mostInline() || r.Missing != len(payloads[r.MessageID]) || r.Payload != nil || p.sqlite() {
						t.Errorf("%s: %d bytes are missing, %d came", r.MessageID, r.Missing, len(r.Payload))
					}
					for next := []byte("some"); len(next) > 0 && err == nil; {
						if next, err = p.ReadPiece(t.Context(), r.Ref, len(r.Payload), 7_000); err == nil {
							r.Payload = append(r.Payload, next...)
						}
					}
					if err != nil {
						t.Fatal(err)
					}
				}
				if !bytes.Equal(r.Payload, payloads[r.MessageID]) {
					t.Errorf("%s: %d bytes came, not those of the message", r.MessageID, len(r.Payload))
				}
				seen[r.MessageID] = true
				p.mustRemove(t, r)
			}
			if looks > all {
				t.Fatalf("%d looks found %d of %d", looks, len(seen), waiting)
			}
		}
	})
}

// No message is made of pieces of two versions of a row.
func TestRetries_APieceIsOfTheVersionThatWasLookedAt(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		if p.sqlite() {
			t.Log("no payload is missing from a look there")
			return
		}
		row := p.publish(t, loose(1)...)[0]
		p.mustFail(t, []Failure{failing(row, FateRetry)})
		due := p.expectDue(t, row.MessageID)[0]
		if piece, err := p.ReadPiece(t.Context(), due.Ref, 0, 5); err != nil || string(piece) != "paylo" {
			t.Errorf("got %q, %v", piece, err)
		}
		p.exec(t, `update {{parked}} set payload = 'another' where lane = $1`, testLane)
		if piece, err := p.ReadPiece(t.Context(), due.Ref, 0, 5); err != nil || len(piece) > 0 {
			t.Errorf("got %q of what the row was not, %v", piece, err)
		}
	})
}

// lacking counts the rows that lack their payload.
func lacking(rows []Row) (n int) {
	for _, r := range rows {
		if r.Missing > 0 {
			n++
		}
	}
	return n
}
