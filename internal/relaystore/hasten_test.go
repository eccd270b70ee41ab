package relaystore

import (
	"errors"
	"testing"
	"time"
)

func TestRetries_AnOperatorMakesRetryingMessagesDue(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		key := laneKey(1)
		rows := p.publish(t, append(named(key, 2), named(laneKey(2), 1)...)...)
		for i, r := range rows {
			if i == 1 {
				continue
			}
			f := failing(r, FateRetry)
			f.RetryIn = time.Hour
			p.mustFail(t, []Failure{f})
		}
		p.mustFail(t, nil, rows[1])
		now := func(f Fence, topic, key string) int {
			t.Helper()
			n, err := p.RetryNow(t.Context(), f, topic, key, 100)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		if n := now(p.f, "another", "") + now(p.f, "another", key) + now(p.f, "", "another"); n != 0 {
			t.Errorf("%d of what does not exist", n)
		}
		former := p.f
		former.Epoch--
		if _, err := p.RetryNow(t.Context(), former, "", "", 100); !errors.Is(err, ErrFenced) {
			t.Errorf("a former owner: %v", err)
		}
		p.expectDue(t)
		if n := now(p.f, rows[0].Topic, key); n != 1 {
			t.Errorf("%d of the key", n)
		}
		p.expectDue(t, named(key, 2)...)
		if n := now(p.f, "", ""); n != 1 {
			t.Errorf("%d of all", n)
		}
		if n := now(p.f, "", ""); n != 0 {
			t.Errorf("%d once more", n)
		}
		p.expectDue(t, append(named(key, 2), named(laneKey(2), 1)...)...)
	})
}
