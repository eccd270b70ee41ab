package relay

import (
	"cmp"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/internal/text"
)

// identity is how the worker appears among the workers. Its texts are constant while its state
// is: a heartbeat at rest is written only if something has changed.
func (s *leaser) identity(hung bool) relaystore.Identity {
	problem := s.problem()
	if hung && problem == "" {
		problem = "hangs"
	}
	return relaystore.Identity{
		Owner: s.owner, Name: s.cfg.Name, Ready: problem == "", Stopping: s.stopping,
		Host: hostName(), Version: libraryVersion(), Problem: problem,
	}
}

// problem returns why the worker should not have lanes; empty if it should. It quotes no error:
// operators of other services may read it.
func (s *leaser) problem() string {
	if _, why := s.health.unfit(time.Now()); why != nil {
		return "the database does not answer all calls"
	}
	if s.unfit.Load() {
		return errTables.Error()
	}
	if r, ok := s.sink.(interface{ Ready() bool }); ok && !r.Ready() {
		return errSinkNotReady.Error()
	}
	return ""
}

var hostName = sync.OnceValue(func() string {
	name, err := os.Hostname()
	if err != nil {
		return ""
	}
	return text.Clean(name)
})

// libraryVersion is the version of this library in the running program.
var libraryVersion = sync.OnceValue(func() string {
	const path = "github.com/oncemill/oncemill"
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	if info.Main.Path == path {
		return cmp.Or(info.Main.Version, "(devel)")
	}
	for _, m := range info.Deps {
		if m.Path == path {
			return cmp.Or(m.Version, "(devel)")
		}
	}
	return "unknown"
})
