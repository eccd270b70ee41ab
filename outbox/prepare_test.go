package outbox_test

import (
	"context"
	"database/sql"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/outbox"
)

func TestPublish_KeepsItsStatementPrepared(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.db.SetMaxOpenConns(1)
		p.use(t, p.db, func(cfg *outbox.Config) { cfg.Prepare = true })
		p.tap.sent()
		inserts := func() (prepared, plain int) {
			for _, s := range p.tap.sent() {
				switch text := strings.ToLower(s.text); {
				case strings.HasPrefix(text, "prepare insert into"):
					prepared++
				case strings.HasPrefix(text, "insert into"):
					plain++
				}
			}
			return prepared, plain
		}
		publish := func(id string, under context.Context) {
			expectNoError(t, p.box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
				if under != nil {
					ctx = under
				}
				return p.box.Publish(ctx, tx, "orders", newMessage(id, ""))
			}))
		}
		for _, id := range []string{"a", "b", "c"} {
			publish(id, nil)
		}
		if prepared, plain := inserts(); prepared != 1 || plain != 1 { // the first is not prepared yet
			t.Errorf("prepared %d times, and executed %d times without", prepared, plain)
		}
		// Nobody knows whose pool another transaction is of.
		publish("d", t.Context())
		other := sql.OpenDB(p.tap)
		defer other.Close()
		tx, err := other.BeginTx(t.Context(), nil)
		expectNoError(t, err)
		expectNoError(t, p.box.Publish(t.Context(), tx, "orders", newMessage("e", "")))
		expectNoError(t, tx.Commit())
		if prepared, plain := inserts(); prepared != 0 || plain != 2 {
			t.Errorf("prepared %d times, and executed %d times without", prepared, plain)
		}
		if got := ids(p.read(t)); len(got) != 5 {
			t.Errorf("there are %v", got)
		}
	})
}
