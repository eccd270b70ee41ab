package outbox_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/json"
	"fmt"
	"maps"
	mathrand "math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// oddTexts are what a topic, an id, a key or metadata may hold.
var oddTexts = []string{
	`plain`, ` `, `''`, `"quoted"`, `back\slash\\`, `{a,b}`, `NULL`, `$1 ? ?1 :x @y %s %[1]d`, "tab\tand\nline\r\n", "\x01\x1f\x7f",
	`'; drop table outbox; --`, `Zoë Ünïcode`, `日本語`, `🚀👩‍👩‍👧`, "combining k\u0308", "\u2028\u2029\ufeff\ufffd", `</script>&amp;`, strings.Repeat("ü", 127),
}

func everyByte() []byte {
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	return all
}

func TestPublish_WhatIsReadIsWhatWasPublished(t *testing.T) {
	large := make([]byte, 1<<20)
	rand.Read(large)
	payloads := map[string][]byte{
		"every byte": everyByte(), "empty": {}, "nil": nil, "a NUL": {0}, "a backslash": []byte(`\x00\\`), "1 MiB": large,
		"not UTF-8": {0xff, 0xfe, 0xc3, 0x28}, "JSON": []byte(`{"note":"<Zoë>\u0000"}`),
	}
	metadata := message.Metadata{"empty": ""}
	for i, text := range oddTexts {
		metadata[text] = oddTexts[len(oddTexts)-1-i]
	}
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		for name, payload := range payloads {
			before := time.Now()
			p.inTx(t, func(tx *sql.Tx) {
				msg := message.NewMessage(name, payload)
				msg.Metadata = maps.Clone(metadata)
				if err := p.box.Publisher(tx).Publish("orders", msg); err != nil {
					t.Fatal(err)
				}
			})
			rows := p.read(t)
			if len(rows) != 1 {
				t.Fatalf("%s: %d rows", name, len(rows))
			}
			r := rows[0]
			if r.MessageID != name || r.Topic != "orders" || r.Key != "" || r.ID < 1 {
				t.Errorf("%s: got %+v", name, r.Ref)
			}
			if !bytes.Equal(r.Payload, payload) {
				t.Errorf("%s: the payload has changed, %d bytes are %d", name, len(payload), len(r.Payload))
			}
			// The clocks are those of one machine here.
			if r.CreatedAt.Before(before.Add(-time.Second)) || r.CreatedAt.After(time.Now().Add(time.Second)) {
				t.Errorf("%s: created at %v, now is %v", name, r.CreatedAt, time.Now())
			}
			got, err := outboxstore.DecodeMetadata(r.Metadata)
			if err != nil || !maps.Equal(got, metadata) {
				t.Errorf("%s: the metadata are %q, %v", name, got, err)
			}
			p.remove(t, r.Ref)
		}
	})
}

func TestPublish_TopicsIDsAndKeysRoundTrip(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.inTx(t, func(tx *sql.Tx) {
			for _, text := range oddTexts {
				msg := message.NewMessage(text, nil)
				outbox.SetKey(msg, text)
				if err := p.box.Publisher(tx).Publish(text, msg); err != nil {
					t.Fatalf("%q: %v", text, err)
				}
			}
		})
		rows := p.read(t)
		got := map[string]outboxstore.Row{}
		for _, r := range rows {
			got[r.MessageID] = r
		}
		for _, text := range oddTexts {
			if r := got[text]; r.Topic != text || r.Key != text || r.Lane != outbox.Lane(text, text) {
				t.Errorf("%q: got %+v", text, r)
			}
		}
		// Also on the way back into the database.
		p.remove(t, refs(rows)...)
		expectIDs(t, p.read(t))
	})
}

func TestPublish_NoMetadataAreNoBytes(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.publish(t, &message.Message{UUID: "without"})
		rows := p.read(t)
		if len(rows) != 1 || len(rows[0].Metadata) != 0 || len(rows[0].Payload) != 0 {
			t.Fatalf("got %+v", rows)
		}
		got, err := outboxstore.DecodeMetadata(rows[0].Metadata)
		if err != nil || got == nil || len(got) != 0 {
			t.Errorf("metadata are %v, %v", got, err)
		}
	})
}

func TestDecodeMetadata_RefusesWhatIsNotOurs(t *testing.T) {
	t.Parallel()
	for _, encoded := range []string{"{", `[]`, `{"a":1}`, `{"a":{}}`, "\x00", `"text"`} {
		if got, err := outboxstore.DecodeMetadata([]byte(encoded)); err == nil {
			t.Errorf("%s became %v", encoded, got)
		}
	}
}

// Watermill hands the caller's message in: it must not be changed.
func TestPublish_LeavesTheMessageAlone(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		msg := newMessage("a", "k")
		before := msg.Copy()
		p.publish(t, msg)
		if !msg.Equals(before) {
			t.Errorf("got %+v, was %+v", msg, before)
		}
		select {
		case <-msg.Acked():
			t.Error("acknowledged")
		case <-msg.Nacked():
			t.Error("refused")
		default:
		}
	})
}

func TestPublish_ManyMessagesAreOneStatement(t *testing.T) {
	sizes := map[bool]map[int]int{ // messages: statements
		false: {1: 1, 2: 1, 500: 1, 10_000: 1, 10_001: 2},
		true:  {1: 1, 2: 1, 100: 1, 101: 2},
	}
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		for n, want := range sizes[p.isSQLite()] {
			msgs := messages(fmt.Sprint(n), n)
			for _, msg := range msgs {
				outbox.SetKey(msg, "k") // one lane, so that the order shows
			}
			p.inTx(t, func(tx *sql.Tx) {
				p.tap.sent()
				if err := p.box.Publisher(tx).Publish("orders", msgs...); err != nil {
					t.Fatal(err)
				}
				if got := len(p.tap.sent()); got != want {
					t.Errorf("%d messages were %d statements, want %d", n, got, want)
				}
			})
			rows := p.read(t)
			if len(rows) != n {
				t.Fatalf("%d messages became %d rows", n, len(rows))
			}
			for i, r := range rows {
				if r.MessageID != msgs[i].UUID || i > 0 && r.ID <= rows[i-1].ID {
					t.Fatalf("row %d is %+v: not in the order of the call", i, r.Ref)
				}
			}
			p.remove(t, refs(rows)...)
		}
	})
}

// A statement for all of them would be held several times over by the driver, and
// refused by the server above 1 GiB.
func TestPublish_CutsStatementsByBytes(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		const n, size, large = 100, 300 << 10, 9 << 20 // 27 to a statement
		p.use(t, p.db, func(cfg *outbox.Config) { cfg.MaxPayload = large })
		var msgs []*message.Message
		for _, msg := range append(messages("now", n), messages("later", n)...) {
			msg.Payload = bytes.Repeat([]byte(msg.UUID[:1]), size)
			if len(msgs) >= n {
				outbox.SetDeliverAfter(msg, time.Hour)
			}
			msgs = append(msgs, msg)
		}
		msgs[30].Payload = make([]byte, large)
		p.inTx(t, func(tx *sql.Tx) {
			p.tap.sent()
			expectNoError(t, p.box.Publisher(tx).Publish("orders", msgs...))
			var sizes []int
			for _, s := range p.tap.sent() {
				sum := 0
				for _, arg := range s.args {
					if payload, ok := arg.Value.([]byte); ok {
						sum += len(payload)
					}
				}
				sizes = append(sizes, sum/size)
			}
			if got, want := fmt.Sprint(sizes), "[27 3 30 27 27 15 27 27 27 19]"; got != want {
				t.Errorf("statements of %s messages, want %s", got, want)
			}
		})
		for table, order := range map[string]string{"outbox": "id", "scheduled": "seq"} {
			want := msgs[:n]
			if table == "scheduled" {
				want = msgs[n:]
			}
			got := testserver.Texts(t, p.db, p.expand(t, `select message_id from {{`+table+`}} order by `+order))
			if len(got) != n {
				t.Fatalf("%s: %d rows", table, len(got))
			}
			for i, id := range got {
				if id != want[i].UUID {
					t.Fatalf("%s: row %d is %q; want %q", table, i, id, want[i].UUID)
				}
			}
		}
	})
}

func TestPublish_NothingIsNoStatement(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.inTx(t, func(tx *sql.Tx) {
			p.tap.sent()
			expectNoError(t, p.box.Publisher(tx).Publish("orders"))
			expectNoError(t, p.box.ContextPublisher().Publish("orders"))
			if sent := p.tap.sent(); len(sent) != 0 {
				t.Errorf("sent %s", firstWords(sent))
			}
		})
	})
}

func TestPublish_NeedsNoSecondConnection(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.db.SetMaxOpenConns(1)
		ctx, cancel := context.WithTimeout(t.Context(), testserver.MaxWait)
		defer cancel()
		p.use(t, p.db, func(cfg *outbox.Config) {
			cfg.Archive = func(ctx context.Context, _ []outbox.HistoryRow) error { return p.db.PingContext(ctx) }
		})
		for i := range 3 {
			err := p.box.RunInTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
				msg := newMessage(fmt.Sprint("a", i), "k")
				msg.SetContext(ctx)
				if err := p.box.ContextPublisher().Publish("orders", msg); err != nil {
					return err
				}
				return p.box.Publisher(tx).Publish("orders", newMessage(fmt.Sprint("b", i), "k"))
			})
			expectNoError(t, err)
		}
		expectNoError(t, p.queue.Check(ctx))
		rows, err := p.queue.Read(ctx, outboxstore.ReadRequest{Lanes: allLanes(), Rows: 100, Bytes: 1 << 20})
		expectNoError(t, err)
		expectIDs(t, rows, "a0", "b0", "a1", "b1", "a2", "b2")
		_, err = p.queue.Remove(ctx, refs(rows))
		expectNoError(t, err)
		_, err = p.queue.Maintain(ctx, always)
		expectNoError(t, err)
		p.publish(t, at("c", "", time.Unix(1, 0)), after("d", "", time.Hour))
		_, err = p.queue.MoveDue(ctx, always)
		expectNoError(t, err)
		p.inTx(t, func(tx *sql.Tx) {
			_, err := p.box.CancelScheduled(ctx, tx, "d")
			expectNoError(t, err)
		})
		_, err = p.queue.Held(ctx)
		expectNoError(t, err)
		_, err = p.box.History().List(ctx, outbox.HistoryFilter{})
		expectNoError(t, err)
		_, err = p.box.History().Resend(ctx, outbox.HistoryFilter{Topic: "orders"})
		expectNoError(t, err)
		p.fillExpired(t, 3)
		_, err = p.queue.Archive(ctx, always)
		expectNoError(t, err)
		_, err = p.queue.RepairSequence(ctx, 0)
		expectNoError(t, err)
	})
}

func TestPublish_RolledBackMessagesLeaveNothing(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		tx, err := p.db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		expectNoError(t, p.box.Publisher(tx).Publish("orders", messages("never", 3)...))
		expectNoError(t, tx.Rollback())
		expectIDs(t, p.read(t))
		p.publish(t, newMessage("later", ""))
		expectIDs(t, p.read(t), "later")
		if n := p.count(t, `select count(*) from {{outbox}}`); n != 1 {
			t.Errorf("%d rows", n)
		}
	})
}

func TestPublish_SavepointsDecideOnTheirMessages(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.inTx(t, func(tx *sql.Tx) {
			do := func(text string) {
				t.Helper()
				if _, err := tx.ExecContext(t.Context(), text); err != nil {
					t.Fatal(err)
				}
			}
			publish := func(id string) {
				t.Helper()
				if err := p.box.Publisher(tx).Publish("orders", newMessage(id, "k")); err != nil {
					t.Fatal(err)
				}
			}
			publish("1 before")
			do(`savepoint outer_one`)
			publish("2 released")
			do(`savepoint inner_one`)
			publish("3 rolled back")
			do(`rollback to savepoint inner_one`)
			publish("4 after the rollback")
			do(`release savepoint outer_one`)
			do(`savepoint another`)
			publish("5 rolled back")
			do(`rollback to savepoint another`)
		})
		expectIDs(t, p.read(t), "1 before", "2 released", "4 after the rollback")
	})
}

// A failed statement spoils the caller's transaction; the caller is told.
func TestPublish_ReturnsWhatTheDatabaseSays(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.exec(t, `alter table {{outbox}} rename to hidden`)
		tx, err := p.db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		if err := p.box.Publisher(tx).Publish("orders", newMessage("a", "")); err == nil || !strings.Contains(err.Error(), "outbox") {
			t.Errorf("got %v", err)
		}
	})
}

// The context of a publisher of Watermill's is that of the message.
func TestPublish_ObeysItsContext(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		tx, err := p.db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		expectError(t, p.box.Publish(ctx, tx, "orders", newMessage("a", "")), context.Canceled)
		msg := newMessage("a", "")
		msg.SetContext(ctx)
		expectError(t, p.box.Publisher(tx).Publish("orders", msg), context.Canceled)
	})
}

func TestPublish_WantsATransaction(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		for _, none := range []oncemill.ExecTx{nil, (*sql.Tx)(nil)} {
			expectError(t, p.box.Publish(t.Context(), none, "orders", newMessage("a", "")), outbox.ErrNoTx)
			_, err := p.box.CancelScheduled(t.Context(), none, "a")
			expectError(t, err, outbox.ErrNoTx)
			_, err = p.box.History().ResendTx(t.Context(), none, outbox.HistoryFilter{Topic: "orders"})
			expectError(t, err, outbox.ErrNoTx)
			// The context of the message carries another one, which a bound publisher does not use.
			p.inTx(t, func(tx *sql.Tx) {
				msg := newMessage("b", "")
				msg.SetContext(oncemill.ContextWithTx(t.Context(), tx))
				expectError(t, p.box.Publisher(none).Publish("orders", msg), outbox.ErrNoTx)
			})
		}
		expectIDs(t, p.read(t))
	})
}

// A message goes on with its own trace, and one that has none with that of the call.
func TestPublish_GoesOnWithTheTrace(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.use(t, p.db, func(cfg *outbox.Config) { cfg.Propagator = propagation.TraceContext{} })
		inTrace := func(id byte) context.Context {
			return trace.ContextWithSpanContext(t.Context(), trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{id}, SpanID: trace.SpanID{id}}))
		}
		own, none := newMessage("own", ""), newMessage("none", "")
		own.SetContext(inTrace(7))
		p.inTx(t, func(tx *sql.Tx) { expectNoError(t, p.box.Publish(inTrace(9), tx, "orders", own, none)) })
		for _, row := range p.read(t) {
			metadata, err := outboxstore.DecodeMetadata(row.Metadata)
			expectNoError(t, err)
			want := map[string]string{"own": "00-07", "none": "00-09"}[row.MessageID]
			if got := metadata.Get("traceparent"); !strings.HasPrefix(got, want) {
				t.Errorf("%s goes on with %q, want %s", row.MessageID, got, want)
			}
		}
	})
}

// endlessTx fails the test when the library ends a transaction that it does not
// own.
type endlessTx struct {
	*sql.Tx
	t *testing.T
}

func (tx endlessTx) Commit() error   { tx.t.Error("commit by the library"); return nil }
func (tx endlessTx) Rollback() error { tx.t.Error("rollback by the library"); return nil }

func TestPublisher_LeavesTheTransactionToItsOwner(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.inTx(t, func(tx *sql.Tx) {
			endless := endlessTx{tx, t}
			publisher := p.box.Publisher(endless)
			expectNoError(t, publisher.Publish("orders", newMessage("a", "k")))
			if err := publisher.Publish("", newMessage("b", "")); err == nil {
				t.Error("no error")
			}
			expectNoError(t, publisher.Close())
			msg := newMessage("c", "k")
			msg.SetContext(oncemill.ContextWithTx(t.Context(), endless))
			bound := p.box.ContextPublisher()
			expectNoError(t, bound.Close())
			expectNoError(t, bound.Publish("orders", msg))
		})
		expectIDs(t, p.read(t), "a", "c")
	})
}

// The short way through what our encoder writes gives what encoding/json gives.
func TestDecodeMetadata_AgreesWithEncodingJSON(t *testing.T) {
	pieces := []string{`{`, `}`, `"`, `":"`, `","`, `{"`, `"}`, `a`, `é`, "\x80", "\x00", "\n", `\`, `\"`, `\u0041`, ` `, `,`, `:`, `null`, `1`, `{"a":"b"`, `,"c":"d"`}
	t.Parallel()
	random := mathrand.New(mathrand.NewPCG(1, 2))
	agreed := 0
	for range 200_000 {
		var b strings.Builder
		b.WriteString([]string{`{"`, ``}[random.IntN(2)])
		for range random.IntN(8) {
			b.WriteString(pieces[random.IntN(len(pieces))])
		}
		encoded := b.String() + []string{`"}`, `}`, ``}[random.IntN(3)]
		if encoded == "" {
			continue
		}
		var want map[string]string
		wantErr := json.Unmarshal([]byte(encoded), &want)
		got, err := outboxstore.DecodeMetadata([]byte(encoded))
		if (err != nil) != (wantErr != nil) || err == nil && !maps.Equal(want, map[string]string(got)) {
			t.Fatalf("%q: got %v, %v; want %v, %v", encoded, got, err, want, wantErr)
		}
		if err == nil {
			agreed++
		}
	}
	if agreed < 1000 {
		t.Errorf("only %d texts could be decoded: the test shows little", agreed)
	}
}
