package relay_test

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/relay"
)

// A worker on a file that is not the database any more would relay what nobody sees,
// and see nothing of what others commit. It ends and says why.
func TestRun_EndsWhenTheFileOfSQLiteWasReplaced(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	box := p.box(t)
	r, err := relay.New(box, &sink{wire: &wire{}}, relay.Config{Lease: 3 * time.Second, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- r.Run(t.Context()) }()
	eventually(t, "it is ready", func() bool { return r.Ready() == nil })
	commit(t, box, keyed("a", 0, 1)...)
	p.awaitNothingOwed(t)

	path := strings.TrimPrefix(p.dsn[:strings.Index(p.dsn, "?")], "file:")
	if err := errors.Join(os.Rename(path, path+".old"), os.WriteFile(path, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if !errors.Is(err, oncemill.ErrDatabaseReplaced) {
			t.Errorf("got %v", err)
		}
	case <-time.After(maxWait):
		t.Fatal("it goes on")
	}
	if err := r.Ready(); !errors.Is(err, relay.ErrNotRunning) {
		t.Errorf("ready: %v", err)
	}
}
