package inbox_test

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox/payload"
)

// Messages that are refused take no id, whatever refuses them: the genuine one of that
// id is handled, also if a forged one comes between two deliveries of it.
func TestForgery_TakesNoID(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		codec := newCodec(t, nil)
		signed := func(m *message.Message) error {
			if m.Metadata.Get("sig") != "ok" {
				return errors.New("no signature")
			}
			return nil
		}
		for name, change := range map[string]func(*inbox.Config){
			"payload": func(cfg *inbox.Config) { cfg.Payload = codec },
			"verify":  func(cfg *inbox.Config) { cfg.Verify = signed },
		} {
			in, store, _ := p.replaying(t, change)
			genuine := encoded(t, codec, "orders", name, "tea")
			genuine.Metadata.Set("sig", "ok")
			forge := func() {
				for _, again := range []bool{false, true} {
					forged := redeliver(t, message.NewMessage(name, []byte("gold")), again)
					expectNoError(t, deliverMessage(t, in, forged, effect))
				}
			}
			forge()
			expectError(t, deliverMessage(t, in, genuine, func(*message.Message) ([]*message.Message, error) { return nil, errUndo }), errUndo)
			forge()
			expectNoError(t, deliverMessage(t, in, genuine, effect))
			forge()
			if n := p.count(t, `select count(*) from effects where message_id = $1`, name); n != 1 {
				t.Errorf("%s: %d effects of the genuine message", name, n)
			}
			list, err := store.List(t.Context(), dlq.Filter{Reason: string(inbox.ReasonUnverified), MessageID: name})
			if err != nil || len(list) != 6 {
				t.Errorf("%s: %d letters of 6 forged messages, %v", name, len(list), err)
			}
		}
		p.expect(t, 2, 2, 0)
	})
}

// Another message with the same payload and the marks of a letter is not its replay.
func TestForgery_AnotherMessageIsNoReplay(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, store, rec := p.replaying(t, nil)
		expectNoError(t, deliverMessage(t, in, message.NewMessage("a", []byte("pay 100")), bad))
		publishReplays(t, in, store)
		other := redeliver(t, rec.msgs[0], false)
		other.UUID = "b"
		for range 2 {
			expectNoError(t, deliverMessage(t, in, other, effect))
			expectNoError(t, deliverMessage(t, in, redeliver(t, rec.msgs[0], false), effect))
		}
		if n := p.count(t, `select count(*) from effects where message_id in ('a', 'b')`); n != 2 {
			t.Errorf("%d effects", n)
		}
		p.expect(t, 2, 2, 0)
	})
}

// A letter of what was refused has taken no id, so its replay takes none that is another's.
func TestForgery_AReplayOfWhatWasRefusedTakesNoDeadID(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		refuse := true
		in, store, rec := p.replaying(t, func(cfg *inbox.Config) {
			cfg.Verify = func(m *message.Message) error {
				if refuse && string(m.Payload) == "gold" {
					return errors.New("no signature")
				}
				return nil
			}
		})
		expectNoError(t, deliverMessage(t, in, message.NewMessage("a", []byte("gold")), effect))
		expectNoError(t, deliverMessage(t, in, message.NewMessage("a", []byte("tea")), bad))
		list, err := store.List(t.Context(), dlq.Filter{Reason: string(inbox.ReasonUnverified)})
		expectNoError(t, err)
		_, err = store.Replay(t.Context(), []int64{list[0].ID}, dlq.Act{By: "eve"})
		expectNoError(t, err)
		_, err = in.Replay(t.Context())
		expectNoError(t, err)
		refuse = false
		expectNoError(t, deliverMessage(t, in, redeliver(t, rec.msgs[0], false), effect))
		p.expect(t, 0, 1, 0)
		publishReplays(t, in, store)
		expectNoError(t, deliverMessage(t, in, redeliver(t, rec.msgs[1], false), effect))
		p.expect(t, 1, 1, 0)
	})
}

// What a message says of itself is believed of a replay that can be checked, and
// otherwise ignored: it is neither run again nor lost.
func TestForgery_MarksAreIgnored(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		codec := newCodec(t, nil)
		in, store, rec := p.replaying(t, func(cfg *inbox.Config) { cfg.Payload = codec })
		ran := map[string]int{}
		h := func(m *message.Message) ([]*message.Message, error) {
			ran[string(m.Payload)]++
			return effect(m)
		}
		recorded := encoded(t, codec, "orders", "pay-1", "pay 100")
		expectNoError(t, deliverMessage(t, in, recorded, h))
		expectNoError(t, deliverMessage(t, in, encoded(t, codec, "orders", "x", "other"), bad))
		ids := publishReplays(t, in, store)
		genuine := rec.msgs[0]
		token := genuine.Metadata.Get(inbox.TokenMetadata)
		if len(token) != 32 {
			t.Errorf("token %q", token)
		}
		mark := func(m *message.Message, marks map[string]string) *message.Message {
			c := m.Copy()
			c.SetContext(recorded.Context())
			for name, value := range marks {
				c.Metadata.Set(name, value)
			}
			return c
		}
		letter := strconv.FormatInt(ids[0], 10)
		for _, marks := range []map[string]string{
			{inbox.ReplayMetadata: letter},
			{inbox.ReplayMetadata: letter, inbox.TokenMetadata: token},
			{inbox.ReplayMetadata: letter, inbox.TokenMetadata: token, "oncemill_uuid": "x", "oncemill_replay_id": "x"},
			{inbox.ReplayMetadata: "yes"},
			{inbox.ConsumerMetadata: "mail"},
			{inbox.TokenMetadata: token},
			{inbox.ReplayMetadata: letter, inbox.TokenMetadata: "\xff"},
			{inbox.ReplayMetadata: letter, inbox.TokenMetadata: "\x00"},
		} {
			expectNoError(t, deliverMessage(t, in, mark(recorded, marks), h))
		}
		if ran["pay 100"] != 1 {
			t.Errorf("a recorded message ran %d times", ran["pay 100"])
		}
		// New messages with stray marks.
		for i, marks := range []map[string]string{
			{inbox.ConsumerMetadata: "nobody"}, {inbox.ReplayMetadata: "yes"}, {inbox.ReplayMetadata: letter, inbox.TokenMetadata: token},
		} {
			expectNoError(t, deliverMessage(t, in, mark(encoded(t, codec, "orders", fmt.Sprint("new ", i), fmt.Sprint("tea ", i)), marks), h))
			if ran[fmt.Sprint("tea ", i)] != 1 {
				t.Errorf("a message with the marks %v was lost", marks)
			}
		}
		// With the letter's own marks, and another payload or no signature.
		stripped := mark(genuine, nil)
		delete(stripped.Metadata, payload.SignatureMetadata)
		expectNoError(t, deliverMessage(t, in, stripped, h))
		for range 3 {
			expectNoError(t, deliverMessage(t, in, mark(genuine, nil), h))
		}
		if got := statesOf(t, store); ran["other"] != 1 || got["replayed permanent"] != 1 || got["dead unverified"] != 1 {
			t.Errorf("the genuine replay ran %d times; letters %v", ran["other"], got)
		}
	})
}

// 10,000 messages of a stranger who records what is on the wire, and changes it as he
// likes: every genuine message has its one effect, and nothing else has any.
func TestForgery_AnyNumberOfForgedMessages(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		seed := uint64(time.Now().UnixNano())
		if given, err := strconv.ParseUint(os.Getenv("ONCEMILL_SEED"), 10, 64); err == nil {
			seed = given
		}
		t.Logf("ONCEMILL_SEED=%d", seed)
		forge(t, p, rand.New(rand.NewPCG(seed, 0)), testserver.Rounds(400, 10_000))
	})
}

// FuzzForgery chooses the stranger's deeds.
func FuzzForgery(f *testing.F) {
	f.Add(uint64(1), uint64(2))
	f.Fuzz(func(t *testing.T, a, b uint64) {
		forge(t, testDBs["sqlite"](t), rand.New(rand.NewPCG(a, b)), 40)
	})
}

func forge(t *testing.T, p *testDB, r *rand.Rand, n int) {
	const keep = 20
	codec := newCodec(t, nil)
	in, store, rec := p.replaying(t, func(cfg *inbox.Config) {
		cfg.Payload, cfg.KeepRefused, cfg.Logger = codec, keep, slog.New(slog.DiscardHandler)
	})
	var mended atomic.Bool
	handler := func(m *message.Message) ([]*message.Message, error) {
		if m.UUID[0] == 'd' && !mended.Load() {
			return nil, inbox.Permanent(errUndo)
		}
		return nil, handlerExec(m, `insert into effects (message_id, note) values ($1, $2)`, m.UUID, string(m.Payload))
	}
	settle := func(m *message.Message) {
		c := m.Copy()
		c.SetContext(routed(t, m.UUID, "results").Context())
		for try := 0; ; try++ {
			_, err := in.Middleware(handler)(c)
			if !errors.Is(err, inbox.ErrBeingHandled) || try == 100 {
				expectNoError(t, err)
				return
			}
		}
	}
	const genuine = 10
	var recorded []*message.Message // what the stranger knows
	for i := range genuine {
		recorded = append(recorded, encoded(t, codec, "orders", fmt.Sprint("m", i), fmt.Sprint("pay ", i%3)))
	}
	for i := range genuine { // that die, and are replayed
		m := encoded(t, codec, "orders", fmt.Sprint("d", i), fmt.Sprint("pay ", i%3))
		settle(m)
		recorded = append(recorded, m)
	}
	mended.Store(true)
	ids := publishReplays(t, in, store)
	first := len(recorded)
	recorded = append(recorded, rec.msgs...)
	var all sync.WaitGroup
	wire := make(chan *message.Message)
	for range 8 {
		all.Go(func() {
			for m := range wire {
				settle(m)
			}
		})
	}
	for range n {
		wire <- forgeOne(r, recorded, ids)
	}
	close(wire)
	all.Wait()
	for i, m := range recorded {
		if i < genuine || i >= first { // the replays in place of what died
			settle(m)
		}
	}
	if got := p.count(t, `select count(*) from effects`); got != 2*genuine {
		t.Errorf("%d effects of %d messages", got, 2*genuine)
	}
	for i := range genuine {
		for _, kind := range []string{"m", "d"} {
			if got := p.count(t, `select count(*) from effects where message_id = $1 and note = $2`, fmt.Sprint(kind, i), fmt.Sprint("pay ", i%3)); got != 1 {
				t.Errorf("%s%d has %d effects", kind, i, got)
			}
		}
	}
	got := statesOf(t, store)
	if got["replayed permanent"] != genuine || got["dead unverified"] > keep || got["dead malformed"] > keep || got["dead permanent"]+got["replaying permanent"] > 0 {
		t.Errorf("letters %v", got)
	}
}

// forgeOne is a deed of the stranger's.
func forgeOne(r *rand.Rand, recorded []*message.Message, letters []int64) *message.Message {
	any := func() *message.Message { return recorded[r.IntN(len(recorded))] }
	m := any().Copy()
	for range r.IntN(4) {
		other := any()
		switch r.IntN(10) {
		case 0:
			m.Metadata.Set(inbox.ReplayMetadata, strconv.FormatInt(letters[r.IntN(len(letters))], 10))
		case 1:
			m.Metadata.Set(inbox.ReplayMetadata, []string{"yes", "0", "-1", "9223372036854775808", "1"}[r.IntN(5)])
		case 2:
			m.Metadata.Set(inbox.TokenMetadata, other.Metadata.Get(inbox.TokenMetadata))
		case 3:
			m.Metadata.Set(inbox.TokenMetadata, []string{strconv.FormatUint(r.Uint64(), 16), "\x00", "\xff", strings.Repeat("x", 300)}[r.IntN(4)])
		case 4:
			m.Metadata.Set(inbox.ConsumerMetadata, []string{"stock", "mail", ""}[r.IntN(3)])
		case 5:
			m.Metadata.Set(payload.SignatureMetadata, other.Metadata.Get(payload.SignatureMetadata))
		case 6:
			delete(m.Metadata, payload.SignatureMetadata)
		case 7:
			m.Payload = other.Payload
		case 8:
			m.UUID = other.UUID
		case 9:
			for _, name := range []string{inbox.ReplayMetadata, inbox.TokenMetadata} {
				m.Metadata.Set(name, other.Metadata.Get(name))
			}
		}
	}
	return m
}

// 100,000 forged messages make a bounded number of letters, and are counted.
func TestForgery_LettersAreBounded(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		n := testserver.Rounds(500, 100_000)
		in, store, _ := p.replaying(t, func(cfg *inbox.Config) {
			cfg.Payload, cfg.KeepRefused, cfg.Logger = newCodec(t, nil), 10, slog.New(slog.DiscardHandler)
		})
		var all sync.WaitGroup
		wire := make(chan int)
		for range 50 {
			all.Go(func() {
				for i := range wire {
					m := message.NewMessage(fmt.Sprint("m", i), []byte("gold"))
					m.SetContext(routed(t, m.UUID, "results").Context())
					_, err := in.Middleware(effect)(m)
					expectNoError(t, err)
				}
			})
		}
		for i := range n {
			wire <- i
		}
		close(wire)
		all.Wait()
		if got := statesOf(t, store); got["dead unverified"] != 10 || len(got) != 1 {
			t.Errorf("letters %v", got)
		}
		p.expect(t, 0, 0, 0)
		if got := p.count(t, `select sum(refused) from {{inbox_refused}} where total = refused and topic = 'orders' and reason = 'unverified'`); got != n {
			t.Errorf("%d of %d were counted", got, n)
		}
	})
}
