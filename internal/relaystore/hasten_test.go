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
		later := time.Now().Add(time.Minute)
		now := func(f Fence, topic, key string) int {
			t.Helper()
			n, err := p.RetryNow(t.Context(), f, Hastening{Topic: topic, Key: key, Asked: later}, 100)
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
		if _, err := p.RetryNow(t.Context(), former, Hastening{Asked: later}, 100); !errors.Is(err, ErrFenced) {
			t.Errorf("a former owner: %v", err)
		}
		for _, key := range []string{"", key} { // those that have failed since then wait
			if n, err := p.RetryNow(t.Context(), p.f, Hastening{Key: key, Asked: time.Now().Add(-time.Minute)}, 100); n != 0 || err != nil {
				t.Errorf("%d of key %q that failed afterwards, %v", n, key, err)
			}
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
