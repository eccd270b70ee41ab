package dlq_test

import (
	"encoding/hex"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/dlqstore"
)

func (p *testDB) add(t *testing.T, l *dlqstore.Letter) error {
	t.Helper()
	tx, err := p.db.BeginTx(t.Context(), nil)
	must(t, err)
	defer tx.Rollback()
	if err := p.stored.Add(t.Context(), tx, l); err != nil {
		return err
	}
	return tx.Commit()
}

// incompressible is text that an index cannot make smaller.
func incompressible(bytes int) string {
	random := rand.NewChaCha8([32]byte{7})
	raw := make([]byte, bytes/2)
	_, _ = random.Read(raw) // never fails
	return hex.EncodeToString(raw)
}

func TestStore_AddWritesWhateverAStrangerSent(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		const trace = "0af7651916cd43dd8448eb211c80319c"
		parent := func(id string) message.Metadata {
			return message.Metadata{"traceparent": "00-" + id + "-b7ad6b7169203331-01"}
		}
		long, nul, bad := incompressible(8000), "a\x00b", "a\xffb"
		for name, l := range map[string]*dlqstore.Letter{
			"a NUL in the trace":       {Metadata: parent(nul + trace[3:])},
			"bad UTF-8 in the trace":   {Metadata: parent(bad + trace[3:])},
			"no digits in the trace":   {Metadata: parent(strings.Repeat("-", 32))},
			"a long key":               {Key: long},
			"a long topic":             {Topic: long},
			"a long id":                {MessageID: long},
			"long and multibyte":       {Key: strings.Repeat("é", 3000), Topic: strings.Repeat("\U0001f600", 2000)},
			"NULs":                     {Topic: nul, MessageID: nul, Key: nul, Reason: nul, Error: nul, Stack: nul, Metadata: message.Metadata{nul: nul}},
			"bad UTF-8":                {Topic: bad, MessageID: bad, Key: bad, Reason: bad, Error: bad, Stack: bad, Metadata: message.Metadata{bad: bad}},
			"long texts":               {Reason: long, Error: strings.Repeat(long, 20), Stack: strings.Repeat(long, 20)},
			"made before Christ":       {CreatedAt: time.Date(-4000, 1, 1, 0, 0, 0, 0, time.UTC)},
			"made at the end of times": {CreatedAt: time.Unix(math.MaxInt64/2, 0)},
			"many attempts":            {Tries: math.MaxInt},
			"attempts of strangers":    {Attempts: []dlqstore.Attempt{{At: time.Unix(math.MaxInt64/2, 0), Class: nul, Error: bad}}},
		} {
			l.Consumer = "stock"
			if err := p.add(t, l); err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			page, err := p.List(t.Context(), dlq.Filter{Limit: 1})
			must(t, err)
			got, err := p.Get(t.Context(), page[0].ID)
			must(t, err)
			if got.TraceID != "" || got.MayHaveBeenDelivered || got.CreatedAt != (time.Time{}) {
				t.Errorf("%s: got %+v", name, got)
			}
			// It is found by what it has now.
			for by, f := range map[string]dlq.Filter{"topic": {Topic: got.Topic}, "key": {Key: got.Key}, "id": {MessageID: got.MessageID}, "fingerprint": {Fingerprint: got.Fingerprint}} {
				if found, err := p.List(t.Context(), f); err != nil || len(found) == 0 || found[0].ID != got.ID {
					t.Errorf("%s: not found by its %s: %v, %v", name, by, ids(found), err)
				}
			}
		}
		must(t, p.add(t, &dlqstore.Letter{Consumer: "stock", Metadata: parent(trace)}))
		if page, err := p.List(t.Context(), dlq.Filter{Limit: 1}); err != nil || page[0].TraceID != trace {
			t.Errorf("got %+v, %v", page[0], err)
		}
	})
}

// A relay's letter holds what its row holds, which another program may have written.
func TestStore_TakesAndListsAnyLetterOfARelay(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		one, other := incompressible(6000), incompressible(6000)+"2"
		first := p.write(t, letter{topic: one, key: one, messageID: one})
		p.write(t, letter{topic: other, key: other, messageID: other})
		for by, f := range map[string]dlq.Filter{"topic": {Topic: one}, "key": {Key: one}, "id": {MessageID: one}} {
			if found, err := p.List(t.Context(), f); err != nil || len(found) != 1 || found[0].ID != first {
				t.Errorf("by %s: %v, %v", by, ids(found), err)
			}
		}
		if accepted, err := p.Replay(t.Context(), []int64{first}, ada); err != nil || len(accepted) != 1 {
			t.Errorf("accepted %v, %v", accepted, err)
		}
		p.exec(t, `update {{dead_letters}} set maybe_delivered = $1`, true)
		for _, forever := range map[bool][]any{false: {"infinity", "-infinity", "294276-12-31T00:00:00Z"}, true: {math.MaxInt64, math.MinInt64}}[p.cfg.Dialect.String() == "sqlite"] {
			p.exec(t, `update {{dead_letters}} set created_at = $1`, forever)
			page, err := p.List(t.Context(), dlq.Filter{})
			if err != nil || len(page) != 2 || !page[0].MayHaveBeenDelivered {
				t.Errorf("made at %v: %d letters, %v", forever, len(page), err)
			}
		}
	})
}
