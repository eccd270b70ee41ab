package mill

import (
	"errors"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// It neither answers nor refuses connections.
func TestRun_ReportsADatabaseThatDoesNotAnswerAtTheStart(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	proxy, db := testserver.OpenSilenceable(t, pg.URL(t))
	proxy.SilenceAll()
	m, err := New(db, Config{Database: pg.Config, Outbox: &outbox.Config{}})
	if err != nil {
		t.Fatal(err)
	}
	m.answerLimit = 100 * time.Millisecond
	if err := m.Run(t.Context()); !errors.Is(err, errSilent) {
		t.Errorf("it returned %v", err)
	}
	proxy.Cut()
	testserver.Eventually(t, "nothing uses the database", func() bool { return db.Stats().InUse == 0 })
}
