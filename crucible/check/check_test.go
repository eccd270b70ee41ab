package check_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill/crucible/check"
	"github.com/oncemill/oncemill/crucible/history"
)

var begin = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func at(seconds float64) time.Time { return begin.Add(time.Duration(seconds * float64(time.Second))) }

// sound returns what a run without any fault leaves: transfers of two keys, one a tenth of a
// second, each handled twice.
func sound() *check.Input {
	in := &check.Input{
		Consumers: map[string]string{"transfers": "ledger", "receipts": "receipts"},
		Left:      map[string]int{}, Lease: 2 * time.Second, End: at(10), States: map[string]int{},
	}
	for i := range 100 {
		now := float64(i) / 10
		id, receipt, attempt := fmt.Sprint("m", i), fmt.Sprint("r", i), fmt.Sprint("a", i)
		tx, key, seq := fmt.Sprint("tx", i), fmt.Sprint("account-", i%2), int64(1+i/2)
		sum := history.Sum{Payload: "p" + id, Metadata: "m" + id}
		in.Txs = append(in.Txs, check.Tx{ID: tx, Outcome: history.Committed, Ended: at(now), Messages: []history.Message{{ID: id}}})
		in.Sent = append(in.Sent,
			check.Sent{Entry: int64(2 * i), Tx: tx, MessageID: id, Topic: "transfers", Key: key, Seq: seq, Sum: sum, At: at(now)},
			check.Sent{Entry: int64(2*i + 1), Tx: attempt, MessageID: receipt, Topic: "receipts", Key: "receipt-" + key, Seq: seq, Sum: sum, At: at(now + 0.02)})
		in.Wire = append(in.Wire,
			check.Copy{Copy: history.Copy{MessageID: id, Topic: "transfers", Key: key, Seq: seq, Sum: sum, Session: 1}, At: at(now + 0.01)},
			check.Copy{Copy: history.Copy{MessageID: receipt, Topic: "receipts", Key: "receipt-" + key, Seq: seq, Attempt: attempt, Sum: sum, Session: 1}, At: at(now + 0.03)})
		in.Effects = append(in.Effects,
			check.Effect{Entry: int64(2 * i), Consumer: "ledger", MessageID: id, Key: key, Seq: seq, Attempt: attempt, Sum: sum, At: at(now + 0.02)},
			check.Effect{Entry: int64(2*i + 1), Consumer: "receipts", MessageID: receipt, Key: "receipt-" + key, Seq: seq, Attempt: "b" + attempt, Sum: sum, At: at(now + 0.04)})
	}
	return in
}

func without[T any](all []T, drop func(T) bool) []T {
	return slices.DeleteFunc(slices.Clone(all), drop)
}

// poisoned makes a message a dead letter of the ledger.
func poisoned(in *check.Input, id, state string) {
	in.Letters = append(in.Letters, check.Letter{ID: 1, State: state, Source: "consumer", Consumer: "ledger", MessageID: id, Payload: "p" + id})
}

// delay moves the wire copies and effects of some messages.
func delay(in *check.Input, which func(id string, sent time.Time) bool, until time.Time) {
	late := map[string]bool{}
	for _, s := range in.Sent {
		late[s.MessageID] = which(s.MessageID, s.At)
	}
	for i := range in.Wire {
		if w := &in.Wire[i]; late[w.MessageID] && w.At.Before(until) {
			w.At = until
		}
	}
	for i := range in.Effects {
		if e := &in.Effects[i]; late[e.MessageID] && e.At.Before(until) {
			e.At = until.Add(10 * time.Millisecond)
		}
	}
}

// standing has the lane of account-0, which belongs to relay-1, stand from the third second on.
func standing(in *check.Input, until float64, faults ...check.Fault) {
	in.LaneWrites = []check.LaneWrite{{Kind: check.LaneTaken, Lane: check.LaneOf("account-0", ""), Epoch: 1, Writer: "relay-1/1", At: at(0)}}
	in.Faults = faults
	even := map[string]bool{}
	for i := 0; i < 100; i += 2 {
		even[fmt.Sprint("m", i)], even[fmt.Sprint("r", i)] = true, true
	}
	delay(in, func(id string, sent time.Time) bool { return even[id] && sent.After(at(3)) && sent.Before(at(until)) }, at(until))
}

// taken has relay-2 take the lane of account-0.
func taken(in *check.Input, when float64) {
	in.LaneWrites = append(in.LaneWrites, check.LaneWrite{
		Kind: check.LaneTaken, Lane: check.LaneOf("account-0", ""), Epoch: 2, Writer: "relay-2/1", At: at(when),
	})
}

// again has a message arrive once more.
func again(in *check.Input, copied int, when float64) {
	more := in.Wire[copied]
	more.At = at(when)
	in.Wire = append(in.Wire, more)
	slices.SortStableFunc(in.Wire, func(a, b check.Copy) int { return a.At.Compare(b.At) })
}

// behind has a message of account-0 come late, while another key of its lane goes on.
func behind(in *check.Input) {
	keep := func(id string) bool { return id == "m40" }
	delay(in, func(id string, _ time.Time) bool { return keep(id) }, at(10))
	in.Wire = without(in.Wire, func(w check.Copy) bool { // nothing else of its key, which would be out of order
		return w.Key == "account-0" && w.Seq > 21 || w.Key == "receipt-account-0" && w.Seq > 21
	})
	drop := func(key string, seq int64) bool {
		return (key == "account-0" || key == "receipt-account-0") && seq > 21
	}
	in.Sent = without(in.Sent, func(s check.Sent) bool { return drop(s.Key, s.Seq) })
	in.Effects = without(in.Effects, func(e check.Effect) bool { return drop(e.Key, e.Seq) })
	in.Txs = without(in.Txs, func(tx check.Tx) bool {
		return !slices.ContainsFunc(in.Sent, func(s check.Sent) bool { return s.Tx == tx.ID })
	})
	shareLane(in)
}

// shareLane gives the messages of account-1 another key, in the lane of account-0.
func shareLane(in *check.Input) {
	for i := range in.Sent {
		if in.Sent[i].Key == "account-1" {
			in.Sent[i].Key = sameLane("account-0")
		}
	}
	for i := range in.Wire {
		if in.Wire[i].Key == "account-1" {
			in.Wire[i].Key = sameLane("account-0")
		}
	}
	for i := range in.Effects {
		if in.Effects[i].Key == "account-1" {
			in.Effects[i].Key = sameLane("account-0")
		}
	}
}

// Each history is refused by the checker that is to see what is wrong with it, and by no other.
func TestRun_NamesTheBrokenPromise(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		checker string // those that find it; "": sound
		spoil   func(in *check.Input)
	}{
		{"nothing", "", func(*check.Input) {}},
		{"a committed message is not in the database", "C1", func(in *check.Input) {
			in.Txs[5].Messages = append(in.Txs[5].Messages, history.Message{ID: "gone"})
		}},
		{"a message never leaves", "C1", func(in *check.Input) {
			in.Wire = without(in.Wire, func(w check.Copy) bool { return w.MessageID == "m99" || w.MessageID == "r99" })
			in.Sent = without(in.Sent, func(s check.Sent) bool { return s.MessageID == "r99" })
			in.Effects = without(in.Effects, func(e check.Effect) bool { return e.MessageID == "m99" || e.MessageID == "r99" })
		}},
		{"a message has no effect", "C1", func(in *check.Input) {
			in.Effects = without(in.Effects, func(e check.Effect) bool { return e.MessageID == "r7" })
		}},
		{"something is left", "C1", func(in *check.Input) { in.Left["the outbox"] = 1 }},
		{"money is gone", "C1", func(in *check.Input) { in.Balance.Mirror = -5 }},
		{"a dead letter is an end", "", func(in *check.Input) {
			in.Effects = without(in.Effects, func(e check.Effect) bool { return e.MessageID == "r7" })
			in.Letters = append(in.Letters, check.Letter{State: "dead", Source: "consumer", Consumer: "receipts", MessageID: "r7", Payload: "pm7"})
		}},
		{"a list leaves dead letters out", "C13", func(in *check.Input) {
			in.Effects = without(in.Effects, func(e check.Effect) bool { return e.MessageID == "r7" })
			in.Letters = append(in.Letters, check.Letter{State: "dead", Source: "consumer", Consumer: "receipts", MessageID: "r7", Payload: "pm7"})
			in.Listed = map[string]int{"replayed": 1}
		}},
		{"a message of nobody is on the wire", "C2", func(in *check.Input) {
			in.Wire = append(in.Wire, check.Copy{Copy: history.Copy{MessageID: "ghost", Topic: "audit"}, At: at(10)})
		}},
		{"a rolled back message is committed", "C2", func(in *check.Input) { in.Txs[3].Outcome = history.RolledBack }},
		{"a savepoint's message is committed", "C2", func(in *check.Input) { in.Txs[3].Messages[0].Discarded = true }},
		{"a second effect", "C3", func(in *check.Input) {
			again := in.Effects[1]
			again.Entry = 1000
			in.Effects = append(in.Effects, again)
		}},
		{"a transaction that ran twice", "C3", func(in *check.Input) { in.Sent = append(in.Sent, in.Sent[6]) }},
		{"an effect of another consumer", "C3", func(in *check.Input) { in.Effects[1].Consumer = "stranger" }},
		{"a duplicate that nothing explains", "C3", func(in *check.Input) { again(in, 20, 9) }},
		{"a duplicate beside the fault of a consumer", "C3", func(in *check.Input) {
			again(in, 20, 9)
			in.Faults = []check.Fault{
				{Kind: "kill", Target: "ledger-1", Window: check.Window{From: at(1), To: at(1.5)}},
				{Kind: "topic-without-queue", Target: "topic audit", Window: check.Window{From: at(1), To: at(1.5)}},
				{Kind: "locked-table-inbox", Target: "table inbox", Window: check.Window{From: at(1), To: at(1.5)}},
			}
		}},
		{"a duplicate that a fault explains", "", func(in *check.Input) {
			again(in, 20, 9)
			in.Faults = []check.Fault{{Kind: "kill", Target: "relay-1", Window: check.Window{From: at(1), To: at(1.5)}}}
		}},
		{"a duplicate of what a channel had in flight that was replaced", "", func(in *check.Input) {
			again(in, 20, 9)
			lane := check.LaneOf(in.Wire[20].Key, in.Wire[20].MessageID)
			in.Resent = map[int][]time.Time{lane: {at(8)}}
		}},
		{"a duplicate beside the channel of another lane", "C3", func(in *check.Input) {
			again(in, 20, 9)
			lane := check.LaneOf(in.Wire[20].Key, in.Wire[20].MessageID)
			in.Resent = map[int][]time.Time{(lane + 1) % 32: {at(8)}, lane: {at(9.5)}}
		}},
		{"a copy that the recorder got twice", "", func(in *check.Input) {
			again := in.Wire[20]
			again.At, again.Redelivered, again.Session = at(9), true, 2
			in.Wire = append(in.Wire, again)
		}},
		{"the wire is out of order", "C4", func(in *check.Input) {
			in.Wire[8], in.Wire[12] = in.Wire[12], in.Wire[8] // m4 and m6, both of account-0
			in.Wire[8].At, in.Wire[12].At = in.Wire[12].At, in.Wire[8].At
		}},
		{"what was delivered to a lost connection of the recorder comes late", "", func(in *check.Input) {
			in.Wire[8], in.Wire[12] = in.Wire[12], in.Wire[8]
			in.Wire[8].At, in.Wire[12].At = in.Wire[12].At, in.Wire[8].At
			in.Wire[12].Redelivered, in.Wire[12].Session = true, 2
		}},
		{"the second hop is out of order on the wire", "C4", func(in *check.Input) {
			in.Wire[9], in.Wire[13] = in.Wire[13], in.Wire[9] // r4 and r6, both of account-0
			in.Wire[9].At, in.Wire[13].At = in.Wire[13].At, in.Wire[9].At
		}},
		{"out of order on the wire, and a dead letter of its consumer later", "C4", func(in *check.Input) {
			in.Wire[8], in.Wire[12] = in.Wire[12], in.Wire[8]
			in.Wire[8].At, in.Wire[12].At = in.Wire[12].At, in.Wire[8].At
			poisoned(in, "m4", "replayed")
		}},
		{"a dead letter of the relay is sent out of order", "", func(in *check.Input) {
			in.Wire[8], in.Wire[12] = in.Wire[12], in.Wire[8]
			in.Wire[8].At, in.Wire[12].At = in.Wire[12].At, in.Wire[8].At
			in.Letters = append(in.Letters, check.Letter{State: "replayed", Source: "relay", MessageID: "m4", Payload: "pm4"})
		}},
		{"an effect behind that of a successor, since the server lost the first one", "", func(in *check.Input) {
			in.Effects[8].Entry, in.Effects[12].Entry = in.Effects[12].Entry, in.Effects[8].Entry
			in.Lossy = []check.Window{{From: at(9), To: at(9.5)}}
			in.Settled = map[string][]time.Time{in.Effects[8].MessageID: {at(9.2), at(11)}, in.Effects[12].MessageID: {at(9.8)}}
		}},
		{"an effect behind that of a successor, after the server lost something", "C4", func(in *check.Input) {
			in.Effects[8].Entry, in.Effects[12].Entry = in.Effects[12].Entry, in.Effects[8].Entry
			in.Lossy = []check.Window{{From: at(9), To: at(9.5)}}
			in.Settled = map[string][]time.Time{in.Effects[8].MessageID: {at(11)}, in.Effects[12].MessageID: {at(9.8)}}
		}},
		{"effects are out of order", "C4", func(in *check.Input) {
			in.Effects[8].Entry, in.Effects[12].Entry = in.Effects[12].Entry, in.Effects[8].Entry
		}},
		{"dead and delivered", "C5", func(in *check.Input) { poisoned(in, "m4", "dead") }},
		{"discarded and delivered", "C5", func(in *check.Input) { poisoned(in, "m4", "discarded") }},
		{"dead again after a replay, and delivered", "C5", func(in *check.Input) { poisoned(in, "m4", "replayed"); poisoned(in, "m4", "dead") }},
		{"replayed and delivered", "", func(in *check.Input) { poisoned(in, "m4", "replayed") }},
		{"a replay that does not end", "C5", func(in *check.Input) { poisoned(in, "m4", "replaying") }},
		{"dead at the relay and on the wire", "C5", func(in *check.Input) {
			in.Letters = append(in.Letters, check.Letter{State: "dead", Source: "relay", MessageID: "m4", Payload: "pm4"})
		}},
		{"said to be maybe delivered", "", func(in *check.Input) {
			in.Letters = append(in.Letters, check.Letter{State: "dead", Source: "relay", MessageID: "m4", Payload: "pm4", MaybeDelivered: true})
		}},
		{"the output of an attempt that was rolled back", "C6", func(in *check.Input) {
			in.Wire[9].Attempt = "another"
		}},
		{"the same answer again", "", func(in *check.Input) {
			in.Answers = []check.Answer{{Key: "k", Status: 201, Sum: "a"}, {Key: "k", Status: 201, Sum: "a"}, {Key: "k", Status: 422, Other: true}}
			in.Answered = map[string]int{"k": 1}
		}},
		{"two answers to a key", "C7", func(in *check.Input) {
			in.Answers = []check.Answer{{Key: "k", Status: 201, Sum: "a"}, {Key: "k", Status: 201, Sum: "b"}}
			in.Answered = map[string]int{"k": 1}
		}},
		{"two effects of a key", "C7", func(in *check.Input) {
			in.Answers = []check.Answer{{Key: "k", Status: 201, Sum: "a"}}
			in.Answered = map[string]int{"k": 2}
		}},
		{"an answer without an effect", "C7", func(in *check.Input) { in.Answers = []check.Answer{{Key: "k", Status: 201, Sum: "a"}} }},
		{"a key for two requests", "C7", func(in *check.Input) { in.Answers = []check.Answer{{Key: "k", Status: 201, Other: true}} }},
		{"a key that hangs", "C7", func(in *check.Input) { in.Answers = []check.Answer{{Key: "k"}} }},
		{"a transaction lost by the server, after its message was sent and handled", "", func(in *check.Input) {
			in.Lossy = []check.Window{{From: at(9), To: at(9.5)}}
			in.Sent = without(in.Sent, func(s check.Sent) bool { return s.MessageID == "m92" })
		}},
		{"a number given out again after the server lost it", "", func(in *check.Input) {
			in.Lossy = []check.Window{{From: at(9), To: at(9.5)}}
			in.Sent = without(in.Sent, func(s check.Sent) bool { return s.MessageID == "m92" })
			for i := range in.Effects {
				if in.Effects[i].MessageID == "m92" { // the lost one was handled late
					in.Effects[i].Entry, in.Effects[i].Seq = 1000, 1
				}
			}
		}},
		{"a transaction lost when the server lost nothing", "C1 C2", func(in *check.Input) {
			in.Lossy = []check.Window{{From: at(3), To: at(9)}}
			in.Sent = without(in.Sent, func(s check.Sent) bool { return s.MessageID == "m92" })
		}},
		{"a part of a transaction lost by the server", "C1", func(in *check.Input) {
			in.Lossy = []check.Window{{From: at(9), To: at(9.5)}}
			in.Txs[92].Messages = append(in.Txs[92].Messages, history.Message{ID: "second"})
		}},
		{"a message lost that the server has", "C1 C6", func(in *check.Input) {
			in.Lossy = []check.Window{{From: at(9), To: at(9.9)}}
			drop := func(id string) bool { return id == "r93" }
			in.Wire = without(in.Wire, func(w check.Copy) bool { return drop(w.MessageID) })
			in.Effects = without(in.Effects, func(e check.Effect) bool { return drop(e.MessageID) })
		}},
		{"an effect lost by the server", "", func(in *check.Input) {
			in.Lossy, in.Settled = []check.Window{{From: at(9), To: at(9.5)}}, map[string][]time.Time{"r93": {at(9.2)}}
			in.Effects = without(in.Effects, func(e check.Effect) bool { return e.MessageID == "r93" })
		}},
		{"an effect lost by the server whose message came long before", "", func(in *check.Input) {
			in.Lossy, in.Settled = []check.Window{{From: at(99), To: at(99.5)}}, map[string][]time.Time{"r93": {at(99.2)}}
			in.Effects = without(in.Effects, func(e check.Effect) bool { return e.MessageID == "r93" })
		}},
		{"an effect lost that was there after the server lost some", "C1", func(in *check.Input) {
			in.Lossy, in.Settled = []check.Window{{From: at(9), To: at(9.5)}}, map[string][]time.Time{"r93": {at(9.6)}}
			in.Effects = without(in.Effects, func(e check.Effect) bool { return e.MessageID == "r93" })
		}},
		{"a message that was never handled, when the server lost something", "C1", func(in *check.Input) {
			in.Lossy = []check.Window{{From: at(9), To: at(9.5)}}
			in.Effects = without(in.Effects, func(e check.Effect) bool { return e.MessageID == "r93" })
		}},
		{"a consumer whose effects the server lost", "", forgotten},
		{"a consumer that stands while the server loses effects", "C1 C10", func(in *check.Input) {
			forgotten(in)
			for i := 35; i < 80; i++ {
				delete(in.Settled, fmt.Sprint("r", i))
			}
		}},
		{"a consumer that stands before the server loses effects", "C1 C10", func(in *check.Input) {
			forgotten(in)
			in.Lossy[0].From = at(7.5)
		}},
		{"a consumer that handles the same again and again", "C1 C10", func(in *check.Input) {
			forgotten(in)
			for i := 31; i < 80; i++ {
				in.Settled["r31"] = append(in.Settled["r31"], in.Settled[fmt.Sprint("r", i)]...)
				if i > 31 {
					delete(in.Settled, fmt.Sprint("r", i))
				}
			}
		}},
		{"a receipt sent after the server lost its transaction", "", func(in *check.Input) { unfounded(in, 2.6) }},
		{"a receipt sent just before a primary had nothing more to send", "", func(in *check.Input) { unfounded(in, 7.9) }},
		{"a receipt sent long after the server lost something", "C2", func(in *check.Input) { unfounded(in, 8.1) }},
		{"a message of a kept transaction that was rolled back to a savepoint", "C2", func(in *check.Input) {
			in.Lossy = []check.Window{{From: at(9), To: at(9.5)}}
			in.Txs[92].Messages = append(in.Txs[92].Messages, history.Message{ID: "discarded", Discarded: true})
			in.Wire = append(in.Wire, check.Copy{Copy: history.Copy{MessageID: "discarded", Topic: "audit"}, At: at(9.3)})
		}},
		{"a message behind its successor, since the server lost its dead letter", "", func(in *check.Input) { overtaken(in, 9) }},
		{"a message behind its successor long after the server lost something", "C4", func(in *check.Input) { overtaken(in, 0.5) }},
		{"an answer lost by the server", "", func(in *check.Input) {
			in.Lossy = []check.Window{{From: at(9), To: at(9.5)}}
			in.Answers = []check.Answer{{Key: "k", Status: 201, Sum: "a", At: at(9.2)}, {Key: "k", Status: 201, Sum: "b", At: at(9.7)}}
			in.Answered = map[string]int{"k": 1}
		}},
		{"a damaged payload", "C8", func(in *check.Input) { in.Wire[4].Sum.Payload = "other" }},
		{"damaged metadata", "C8", func(in *check.Input) { in.Effects[4].Sum.Metadata = "other" }},
		{"a damaged dead letter", "C8", func(in *check.Input) {
			poisoned(in, "m4", "replayed")
			in.Letters[0].Payload = "other"
		}},
		{"writes by the owner", "", func(in *check.Input) {
			in.LaneWrites = []check.LaneWrite{
				{Kind: check.LaneTaken, Lane: 1, Epoch: 1, Writer: "relay-1/1"},
				{Kind: "a dead letter", Lane: 1, Epoch: 1, Writer: "relay-1/1"},
				{Kind: check.LaneTaken, Lane: 1, Epoch: 2, Writer: "relay-1/2"},
				{Kind: "a dead letter", Lane: 1, Epoch: 2, Writer: "relay-1/2"},
			}
		}},
		{"a write by a former owner", "C9", func(in *check.Input) {
			in.LaneWrites = []check.LaneWrite{
				{Kind: check.LaneTaken, Lane: 1, Epoch: 1, Writer: "relay-1/1"},
				{Kind: check.LaneTaken, Lane: 1, Epoch: 2, Writer: "relay-1/2"},
				{Kind: "a dead letter", Lane: 1, Epoch: 2, Writer: "relay-1/1"},
			}
		}},
		{"a write by nobody", "C9", func(in *check.Input) {
			in.LaneWrites = []check.LaneWrite{{Kind: "an attempt", Lane: 1, Writer: "relay-1/1"}}
		}},
		{"two owners of an epoch", "C9", func(in *check.Input) {
			in.LaneWrites = []check.LaneWrite{
				{Kind: check.LaneTaken, Lane: 1, Epoch: 1, Writer: "relay-1/1"},
				{Kind: check.LaneTaken, Lane: 1, Epoch: 1, Writer: "relay-2/1"},
			}
		}},
		{"everything stands", "C10", func(in *check.Input) {
			delay(in, func(_ string, sent time.Time) bool { return sent.After(at(3)) && sent.Before(at(8)) }, at(8))
		}},
		{"everything stands with the database", "", func(in *check.Input) {
			delay(in, func(_ string, sent time.Time) bool { return sent.After(at(3)) && sent.Before(at(8)) }, at(8))
			in.Faults = []check.Fault{{Kind: "crash", Target: "postgres", Window: check.Window{From: at(3), To: at(7)}}}
		}},
		{"everything stands beside a dead relay", "C10", func(in *check.Input) {
			delay(in, func(_ string, sent time.Time) bool { return sent.After(at(3)) && sent.Before(at(8)) }, at(8))
			in.Faults = []check.Fault{{Kind: "kill", Target: "relay-1", Window: check.Window{From: at(3), To: at(8)}}}
		}},
		{"a lane stands beside one fault of its relay", "C10", func(in *check.Input) {
			standing(in, 8, check.Fault{Target: "relay-1", Window: check.Window{From: at(2.9), To: at(5)}})
		}},
		{"a lane sends again what it had sent before its relay died", "", func(in *check.Input) {
			standing(in, 8, check.Fault{Kind: "kill", Target: "relay-1", Window: check.Window{From: at(2.9), To: at(5)}})
			taken(in, 5)
			again(in, 60, 5.5) // m30
		}},
		{"a lane sends the same again and again", "C10", func(in *check.Input) {
			standing(in, 8, check.Fault{Kind: "kill", Target: "relay-1", Window: check.Window{From: at(0), To: at(1)}})
			again(in, 60, 4.9)
			again(in, 60, 6.5)
		}},
		{"a lane stands through two faults of its relay", "", func(in *check.Input) {
			standing(in, 8,
				check.Fault{Target: "relay-1", Window: check.Window{From: at(2.9), To: at(4.2)}},
				check.Fault{Target: "relay-1", Window: check.Window{From: at(5), To: at(7)}})
		}},
		{"a lane stands beside a fault of another relay", "C10", func(in *check.Input) {
			standing(in, 8,
				check.Fault{Target: "relay-1", Window: check.Window{From: at(2.9), To: at(3.3)}},
				check.Fault{Target: "relay-2", Window: check.Window{From: at(5.5), To: at(6)}})
		}},
		{"a lane stands beside a fault of the relay that had it before", "C10", func(in *check.Input) {
			standing(in, 8,
				check.Fault{Target: "relay-1", Window: check.Window{From: at(2.9), To: at(4.2)}},
				check.Fault{Target: "relay-1", Window: check.Window{From: at(5), To: at(7)}})
			taken(in, 4.9)
		}},
		{"a lane stands for longer than a lease of its relay's second fault", "C10", func(in *check.Input) {
			standing(in, 9.9,
				check.Fault{Target: "relay-1", Window: check.Window{From: at(2.9), To: at(6.4)}},
				check.Fault{Target: "relay-1", Window: check.Window{From: at(6.5), To: at(9.9)}})
		}},
		{"a key is left behind", "C10", behind},
		{"a key is sent again before it goes on", "", func(in *check.Input) {
			behind(in)
			taken(in, 6)
			again(in, 72, 7) // m36, the one before
			in.Faults = []check.Fault{{Kind: "kill", Target: "relay-1", Window: check.Window{From: at(1), To: at(1.5)}}}
		}},
		{"goroutines are left", "C11", func(in *check.Input) {
			in.Processes = map[string][]check.Usage{"relay-1": make([]check.Usage, 10)}
			in.Processes["relay-1"][9].Goroutines = 1000
		}},
		{"an error in the log", "C11", func(in *check.Input) { in.Log = []string{"ERROR: relation does not exist"} }},
		{"a process panicked", "C11", func(in *check.Input) { in.Unclean = []string{"relay-1 panicked"} }},
		{"a state was not reached", "C12", func(in *check.Input) { in.Wanted = []string{"takeover"} }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			in := sound()
			c.spoil(in)
			_, results := check.Run(in)
			for _, r := range results {
				if broken := len(r.Findings) > 0; broken != slices.Contains(strings.Fields(c.checker), r.Checker) {
					t.Errorf("%s: %q", r.Checker, r.Findings)
				}
			}
		})
	}
}

func TestRun_ReportsAKeyThatIsLeftBehindOnce(t *testing.T) {
	t.Parallel()
	in := sound()
	shareLane(in)
	standing(in, 9) // the messages behind the first one wait for the same
	_, results := check.Run(in)
	for _, r := range results {
		if r.Checker == "C10" && len(r.Findings) != 1 {
			t.Errorf("%q", r.Findings)
		}
	}
}

// sameLane returns another key of the lane of a key.
func sameLane(key string) string {
	for i := 2; ; i++ {
		if other := fmt.Sprint("account-", i); check.LaneOf(other, "") == check.LaneOf(key, "") {
			return other
		}
	}
}

func TestLaneOf_IsTheLaneOfTheStoredFormat(t *testing.T) {
	t.Parallel()
	// FNV-1a of the key, modulo 32, as anybody can compute it.
	for key, want := range map[string]int{"a": 0xaf63dc4c8601ec8c % 32, "foobar": 0x85944171f73967e8 % 32} {
		if got := check.LaneOf(key, "ignored"); got != want {
			t.Errorf("%q: lane %d instead of %d", key, got, want)
		}
	}
}

func TestOutages_EndWithTheFirstOfTwoWritesThatSucceed(t *testing.T) {
	t.Parallel()
	slow := func(target string, from, to float64) check.Fault {
		return check.Fault{Kind: "slow", Target: target, Window: check.Window{From: at(from), To: at(to)}}
	}
	got := check.Outages([]check.Fault{
		slow("postgres", 1, 3), slow("relay-1", 2, 8), slow("rabbitmq", 2.5, 3.5), slow("postgres", 3, 5), slow("postgres", 5.25, 6),
	})
	want := []check.Fault{slow("postgres", 1, 5), slow("postgres", 5.25, 6), slow("rabbitmq", 2.5, 3.5)}
	if !slices.Equal(got, want) {
		t.Errorf("%v", got)
	}
}
