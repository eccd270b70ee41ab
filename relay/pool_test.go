package relay_test

import (
	"fmt"
	"testing"

	"github.com/oncemill/oncemill/relay"
)

// A small pool whose connections have all fallen silent, again and again, has room for
// new ones.
func TestRelay_ASilentServerUsesNoPoolUp(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	proxy, behind := p.behindProxy(t)
	behind.SetMaxOpenConns(4)
	w := &wire{}
	start(t, p.boxOn(t, behind, 0), &sink{name: "a", wire: w}, relay.Config{Lease: silenceLease})
	producer := p.boxOn(t, p.db, 0)
	const rounds, each = 4, 10
	for round := range rounds {
		commit(t, producer, ofLane(fmt.Sprint("round", round, "-"), 1, each, 1)...)
		until(t, "the messages are delivered", func() bool { return w.distinct() >= each*(round+1) }, still)
		proxy.Silence(nil, 0)
	}
	commit(t, producer, ofLane("last", 1, each, 1)...)
	w.await(t, each*(rounds+1))
	if n := proxy.Silenced(); n < 8 {
		t.Errorf("%d connections were silenced", n)
	}
}
