package outbox_test

import (
	"bytes"
	"database/sql"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

func TestRead_ReturnsEachLaneTogetherAndInOrder(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		want := map[int][]string{} // by lane
		for i := range 5 {
			var msgs []*message.Message
			for j := range 40 {
				id, key := fmt.Sprintf("%d-%d", i, j), fmt.Sprint("key", j%13)
				if j%4 == 0 {
					key = ""
				}
				msgs = append(msgs, newMessage(id, key))
				lane := outbox.Lane(key, id)
				want[lane] = append(want[lane], id)
			}
			p.publish(t, msgs...)
		}
		// Lanes may be asked for in any order.
		lanes := allLanes()
		slices.Reverse(lanes)
		rows := p.readAs(t, outboxstore.ReadRequest{Lanes: lanes, Rows: 1000, Bytes: 1 << 20})
		got, seen := map[int][]string{}, map[int]bool{}
		for i, r := range rows {
			if i > 0 && r.Lane != rows[i-1].Lane {
				if seen[r.Lane] {
					t.Fatalf("lane %d comes in pieces", r.Lane)
				}
			} else if i > 0 && r.ID <= rows[i-1].ID {
				t.Fatalf("lane %d: id %d after %d", r.Lane, r.ID, rows[i-1].ID)
			}
			seen[r.Lane] = true
			got[r.Lane] = append(got[r.Lane], r.MessageID)
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("got %v\nwant %v", got, want)
		}
	})
}

func TestRead_ReturnsOnlyTheLanesAskedFor(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		// Keys of different lanes; see the golden vectors.
		p.publish(t, newMessage("a", "a"), newMessage("b", "b"), newMessage("c", "order-1"))
		read := func(lanes ...int) []outboxstore.Row {
			return p.readAs(t, outboxstore.ReadRequest{Lanes: lanes, Rows: 10, Bytes: 1000})
		}
		expectIDs(t, read())
		expectIDs(t, read(0))
		expectIDs(t, read(12), "a")
		expectIDs(t, read(5, 13), "b", "c")
		expectIDs(t, read(13, 12), "c", "a")
	})
}

// A lane is read from its start: what was not removed comes again.
func TestRead_ChangesNothing(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.publish(t, newMessage("1", "k"), newMessage("2", "k"))
		first := p.read(t)
		expectIDs(t, first, "1", "2")
		p.publish(t, newMessage("3", "k"))
		again := p.read(t)
		expectIDs(t, again, "1", "2", "3")
		if again[0].Ref != first[0].Ref {
			t.Errorf("the first row was %+v, is %+v", first[0].Ref, again[0].Ref)
		}
	})
}

func TestRead_LimitsTheRowsOfEachLane(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		for i := range 5 {
			p.publish(t, newMessage(fmt.Sprint("a", i), "a"), newMessage(fmt.Sprint("b", i), "b"))
		}
		read := func(rows int) []outboxstore.Row {
			return p.readAs(t, outboxstore.ReadRequest{Lanes: []int{12, 5}, Rows: rows, Bytes: 1 << 20})
		}
		expectIDs(t, read(1), "a0", "b0")
		expectIDs(t, read(3), "a0", "a1", "a2", "b0", "b1", "b2")
		expectIDs(t, read(99), "a0", "a1", "a2", "a3", "a4", "b0", "b1", "b2", "b3", "b4")
	})
}

func TestRead_StopsALaneOnceItHasTheBytes(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		sized := func(id, key string, payload, metadata int) *message.Message {
			msg := message.NewMessage(id, make([]byte, payload))
			msg.Metadata.Set("k", strings.Repeat("v", metadata-len(`{"k":""}`)))
			// The key itself would count among the metadata.
			p.use(t, p.db, func(cfg *outbox.Config) { cfg.Key = func(*message.Message) string { return key } })
			p.publish(t, msg)
			return msg
		}
		sized("a1", "a", 60, 40)
		sized("a2", "a", 0, 100)
		sized("a3", "a", 5000, 20)
		sized("a4", "a", 80, 20)
		sized("b1", "b", 90_000, 10)
		sized("b2", "b", 1, 10)
		read := func(bytes int) []outboxstore.Row {
			return p.readAs(t, outboxstore.ReadRequest{Lanes: []int{12, 5}, Rows: 100, Bytes: bytes})
		}
		// Each lane has its own budget and gives at least one row, however large.
		expectIDs(t, read(1), "a1", "b1")
		expectIDs(t, read(100), "a1", "b1")
		expectIDs(t, read(101), "a1", "a2", "b1")
		expectIDs(t, read(201), "a1", "a2", "a3", "b1")
		expectIDs(t, read(5220), "a1", "a2", "a3", "b1")
		expectIDs(t, read(5221), "a1", "a2", "a3", "a4", "b1")
		expectIDs(t, read(90_010), "a1", "a2", "a3", "a4", "b1")
		expectIDs(t, read(90_011), "a1", "a2", "a3", "a4", "b1", "b2")
	})
}

// A payload that is larger than what the lane is to bring stays where it is (PostgreSQL),
// and comes in pieces.
func TestRead_LeavesALargePayloadWhereItIs(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		payload := make([]byte, 90_000)
		for i := range payload {
			payload[i] = byte(i * i >> 3)
		}
		p.use(t, p.db, func(cfg *outbox.Config) { cfg.Key = func(*message.Message) string { return "one lane" } })
		p.publish(t, message.NewMessage("1", []byte("s")), message.NewMessage("2", payload), message.NewMessage("3", nil))
		lane := outbox.Lane("one lane", "")
		of := func(bytes int) []outboxstore.Row {
			return p.readAs(t, outboxstore.ReadRequest{Lanes: []int{lane}, Rows: 10, Bytes: bytes})
		}
		rows := of(90_000)
		last := rows[len(rows)-1]
		if last.Missing != 0 || !bytes.Equal(last.Payload, payload) {
			t.Errorf("there is room for the payload: %d bytes came, %d are missing", len(last.Payload), last.Missing)
		}
		rows = of(80_000)
		last = rows[len(rows)-1]
		switch {
		case p.isSQLite() && (last.Missing != 0 || !bytes.Equal(last.Payload, payload)):
			t.Errorf("on SQLite %d bytes came, %d are missing", len(last.Payload), last.Missing)
		case !p.isSQLite() && (last.Missing != len(payload) || last.Payload != nil || last.Metadata == nil || last.Hollow):
			t.Errorf("%d bytes came, %d are missing; metadata %q", len(last.Payload), last.Missing, last.Metadata)
		}
		piece := func(of outboxstore.Ref, offset, most int) []byte {
			t.Helper()
			piece, err := p.queue.ReadPiece(t.Context(), of, offset, most)
			expectNoError(t, err)
			return piece
		}
		var whole []byte
		for next := piece(last.Ref, 0, 25_000); len(next) > 0; next = piece(last.Ref, len(whole), 25_000) {
			whole = append(whole, next...)
		}
		if !bytes.Equal(whole, payload) {
			t.Errorf("%d bytes came in pieces, not those of the message", len(whole))
		}
		p.exec(t, `update {{outbox}} set payload = $1 where message_id = '2'`, make([]byte, len(payload)))
		if got := piece(last.Ref, 0, 10); len(got) != 0 && !p.isSQLite() {
			t.Error("a piece of what the row was not when it was read: a message would be made of two")
		}
		rows = of(80_000)
		last = rows[len(rows)-1]
		other := last.Ref
		other.CreatedAt = other.CreatedAt.Add(time.Microsecond)
		if got := piece(other, 0, 10); len(got) != 0 {
			t.Errorf("%d bytes of a row that is not there", len(got))
		}
		p.remove(t, last.Ref)
		if got := piece(last.Ref, 0, 10); len(got) != 0 {
			t.Errorf("%d bytes of a row that is gone", len(got))
		}
	})
}

// To a publisher that stores it, no bytes are not the same as NULL.
func TestRead_AnEmptyPayloadIsNotNil(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.publish(t, message.NewMessage("a", nil))
		rows := p.read(t)
		expectIDs(t, rows, "a")
		for _, r := range rows {
			if r.Payload == nil || r.Metadata == nil {
				t.Errorf("%s: payload %#v, metadata %#v", r.MessageID, r.Payload, r.Metadata)
			}
		}
	})
}

func TestRead_PassesOverKnownRows(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.publish(t, newMessage("1", "k"), newMessage("2", "k"), newMessage("3", "k"), newMessage("4", "k"))
		rows := p.read(t)
		read := func(limit int, known ...outboxstore.Known) []outboxstore.Row {
			return p.readAs(t, outboxstore.ReadRequest{Lanes: allLanes(), Rows: limit, Bytes: 1 << 20, Known: known})
		}
		expectIDs(t, read(10, rows[0].Known()), "2", "3", "4")
		expectIDs(t, read(10, rows[2].Known(), rows[0].Known(), outboxstore.Known{ID: 99_999}), "2", "4")
		// They count neither as rows nor as bytes.
		expectIDs(t, read(1, rows[0].Known(), rows[1].Known()), "3")
		one := p.readAs(t, outboxstore.ReadRequest{Lanes: allLanes(), Rows: 10, Bytes: 1, Known: []outboxstore.Known{rows[0].Known()}})
		expectIDs(t, one, "2")
		expectIDs(t, read(10, rows[0].Known(), rows[1].Known(), rows[2].Known(), rows[3].Known()))
		expectIDs(t, read(10), "1", "2", "3", "4")
	})
}

func TestRead_PassesOverManyKnownRows(t *testing.T) {
	sizes := map[bool]int{false: 5000, true: 300}
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		n := sizes[p.isSQLite()]
		p.publish(t, messages("m", n)...)
		var known []outboxstore.Known
		for _, r := range p.read(t)[:n-10] {
			known = append(known, r.Known())
		}
		if n := len(p.readAs(t, outboxstore.ReadRequest{Lanes: allLanes(), Rows: 100, Bytes: 1 << 20, Known: known})); n != 10 {
			t.Errorf("%d rows, want 10", n)
		}
	})
}

func TestRead_PassesOverBusyKeys(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		// "a" and "A" share a lane with the unkeyed "a".
		p.publish(t, newMessage("1", "a"), newMessage("2", "A"), newMessage("a", ""), newMessage("3", "a"), newMessage("4", "A"))
		read := func(limit int, busy ...string) []outboxstore.Row {
			return p.readAs(t, outboxstore.ReadRequest{Lanes: []int{12}, Rows: limit, Bytes: 1 << 20, Busy: busy})
		}
		expectIDs(t, read(10), "1", "2", "a", "3", "4")
		expectIDs(t, read(10, "a"), "2", "a", "4")
		expectIDs(t, read(10, "A", "a", "absent"), "a")
		expectIDs(t, read(1, "a"), "2")
		expectIDs(t, read(10, oddTexts...), "1", "2", "a", "3", "4")
		// Both at once.
		third := p.read(t)[2]
		both := p.readAs(t, outboxstore.ReadRequest{Lanes: []int{12}, Rows: 10, Bytes: 1 << 20, Busy: []string{"a"}, Known: []outboxstore.Known{third.Known()}})
		expectIDs(t, both, "2", "4")
	})
}

func TestRead_BusyKeysMayHoldAnything(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.inTx(t, func(tx *sql.Tx) {
			for _, key := range oddTexts {
				if err := p.box.Publisher(tx).Publish("orders", newMessage(key, key)); err != nil {
					t.Fatal(err)
				}
			}
		})
		req := outboxstore.ReadRequest{Lanes: allLanes(), Rows: 100, Bytes: 1 << 20, Busy: oddTexts[1:]}
		expectIDs(t, p.readAs(t, req), oddTexts[0])
		req.Busy = oddTexts
		expectIDs(t, p.readAs(t, req))
	})
}

// Thousands of rows of one key in front of others must not starve them; the prototype
// that read past no key never came to them.
func TestRead_ABurstOfOneKeyHidesNobodyBehindIt(t *testing.T) {
	sizes := map[bool]int{false: testserver.Rounds(3, 20), true: 1}
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		for i := range sizes[p.isSQLite()] {
			burst := messages(fmt.Sprint("burst", i), 1000)
			for _, msg := range burst {
				outbox.SetKey(msg, "a")
			}
			p.publish(t, burst...)
		}
		p.publish(t, newMessage("other", "A")) // the same lane
		req := outboxstore.ReadRequest{Lanes: []int{12}, Rows: 500, Bytes: 1 << 20}
		for _, r := range p.readAs(t, req) {
			if r.Key != "a" {
				t.Fatalf("a naive read came to %+v", r.Ref)
			}
		}
		req.Busy = []string{"a"}
		expectIDs(t, p.readAs(t, req), "other")
	})
}

// A server that lost its tail gives ids out again. The row that has a known id now
// is another one, and no later row of its key may overtake it.
func TestRead_ReturnsANewRowThatHasAKnownID(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.publish(t, newMessage("1", "k"), newMessage("2", "k"), newMessage("3", "k"))
		if p.isSQLite() { // whose clock tells milliseconds
			p.exec(t, `update {{outbox}} set created_at = created_at + id`)
		}
		rows := p.read(t)
		known := []outboxstore.Known{rows[0].Known(), rows[1].Known()}
		known[0].CreatedAt = known[0].CreatedAt.Add(-time.Microsecond) // of the row that was lost
		known[1].CreatedAt = known[1].CreatedAt.In(time.FixedZone("elsewhere", 20_700))
		expectIDs(t, p.readAs(t, outboxstore.ReadRequest{Lanes: allLanes(), Rows: 10, Bytes: 1 << 20, Known: known}), "1", "3")
		both := append([]outboxstore.Known{rows[0].Known()}, known...)
		expectIDs(t, p.readAs(t, outboxstore.ReadRequest{Lanes: allLanes(), Rows: 10, Bytes: 1 << 20, Known: both}), "3")
		// The time of one known row and the id of another are no known row.
		known[0].CreatedAt, known[1].CreatedAt = rows[1].CreatedAt, rows[0].CreatedAt
		expectIDs(t, p.readAs(t, outboxstore.ReadRequest{Lanes: allLanes(), Rows: 10, Bytes: 1 << 20, Known: known}), "1", "2", "3")
	})
}

func TestRead_HollowTopicsComeWithoutTheirBytes(t *testing.T) {
	// With the small budget PostgreSQL reads the lane row by row.
	budgets := map[string]int{"packed": 1 << 20, "bulky": 600}
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.inTx(t, func(tx *sql.Tx) {
			for i, topic := range []string{"closed", "orders", "closed", oddTexts[0], "orders", "Closed", "orders"} {
				msg := message.NewMessage(fmt.Sprint(i), make([]byte, 100))
				outbox.SetKey(msg, "k")
				if err := p.box.Publisher(tx).Publish(topic, msg); err != nil {
					t.Fatal(err)
				}
			}
			empty := message.NewMessage("empty", nil)
			if err := p.box.Publisher(tx).Publish("orders", empty); err != nil {
				t.Fatal(err)
			}
		})
		full := map[string]outboxstore.Row{}
		for _, r := range p.read(t) {
			if r.Hollow {
				t.Errorf("%s is hollow without being asked for", r.MessageID)
			}
			full[r.MessageID] = r
		}
		for name, bytes := range budgets {
			rows := p.readAs(t, outboxstore.ReadRequest{Lanes: allLanes(), Rows: 10, Bytes: bytes, Hollow: []string{"closed", oddTexts[0], "absent"}})
			byID := map[string]outboxstore.Row{}
			for _, r := range rows {
				byID[r.MessageID] = r
			}
			if len(byID) != len(full) {
				t.Errorf("%s: %v, want all", name, ids(rows))
			}
			for id, r := range byID {
				want := full[id]
				want.Hollow = r.Topic == "closed" || r.Topic == oddTexts[0]
				if want.Hollow {
					want.Payload, want.Metadata = nil, nil
				}
				if !reflect.DeepEqual(r, want) {
					t.Errorf("%s: got %+v\nwant %+v", name, r, want)
				}
			}
		}
		// A lane of nothing but hollow rows is read to its end, whatever its bytes.
		all := p.readAs(t, outboxstore.ReadRequest{Lanes: allLanes(), Rows: 10, Bytes: 1, Hollow: []string{"closed", "orders", "Closed", oddTexts[0]}})
		if len(all) != len(full) {
			t.Errorf("%d rows of %d", len(all), len(full))
		}
		rows := p.readAs(t, outboxstore.ReadRequest{Lanes: allLanes(), Rows: 2, Bytes: 1, Hollow: []string{"closed"}})
		if got := fmt.Sprint(ids(rows)); !strings.Contains(got, "0 1") || strings.Contains(got, "2") {
			t.Errorf("got %s", got)
		}
	})
}
