package dlq_test

import (
	"testing"
	"time"

	"github.com/oncemill/oncemill/dlq"
)

func TestStore_GroupsWhatFailedAlike(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		if groups, err := p.Groups(t.Context()); err != nil || len(groups) != 0 {
			t.Errorf("empty: %+v, %v", groups, err)
		}
		for i := range 5 {
			p.write(t, letter{source: "consumer", consumer: "stock", fingerprint: "often", reason: "failed", topic: "orders", died: time.Duration(i+1) * time.Hour})
		}
		newest := p.write(t, letter{source: "consumer", consumer: "stock", fingerprint: "often", reason: "failed", topic: "returns", died: time.Minute})
		p.write(t, letter{fingerprint: "once", state: "held", died: 2 * time.Hour})
		p.write(t, letter{fingerprint: "closed", state: "replayed", died: time.Hour})

		groups, err := p.Groups(t.Context())
		if must(t, err); len(groups) != 2 {
			t.Fatalf("got %+v", groups)
		}
		often, once := groups[0], groups[1]
		if often.Fingerprint != "often" || often.Count != 6 || often.Newest != newest || often.Source != dlq.FromConsumer ||
			often.Consumer != "stock" || often.Topic != "returns" || often.Reason != "failed" {
			t.Errorf("the largest: %+v", often)
		}
		if since := often.Last.Sub(often.First); since < 4*time.Hour || since > 6*time.Hour {
			t.Errorf("from %s to %s", often.First, often.Last)
		}
		if once.Fingerprint != "once" || once.Count != 1 || once.Source != dlq.FromRelay {
			t.Errorf("the other: %+v", once)
		}
		listed, err := p.List(t.Context(), dlq.Filter{Fingerprint: often.Fingerprint})
		if err != nil || len(listed) != 6 {
			t.Errorf("%d listed, %v", len(listed), err)
		}
	})
}
