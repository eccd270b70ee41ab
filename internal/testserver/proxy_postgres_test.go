package testserver_test

import (
	"context"
	"database/sql"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/testserver"
)

func TestPostgresProxy_SilencesTheConnectionThatSendsAStatement(t *testing.T) {
	t.Parallel()
	proxy, dsn := testserver.NewPostgresProxy(t, testserver.Postgres(t).DSN)
	db, err := sql.Open("postgres", dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if got := queryText(t, db, "select 'before'"); got != "before" {
		t.Errorf("got %s", got)
	}
	proxy.Silence(func(statement string) bool { return strings.Contains(statement, "held") }, 1)
	answer := make(chan string, 1)
	go func() {
		var text string
		if err := db.QueryRowContext(context.WithoutCancel(t.Context()), "select $1::text || 'held'", "was ").Scan(&text); err != nil {
			text = err.Error()
		}
		answer <- text
	}()
	testserver.Eventually(t, "a connection is silent", func() bool { return proxy.Silenced() > 0 })
	if got := queryText(t, db, "select 'new ' || 'held'"); got != "new held" {
		t.Errorf("a new connection answers %s", got)
	}
	select {
	case got := <-answer:
		t.Errorf("a silent connection has answered %s", got)
	default:
	}
	proxy.Resume()
	if got := <-answer; got != "was held" {
		t.Errorf("after the silence: %s", got)
	}
}

func TestPostgresProxy_KeepsTheStatementFromTheServer(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	if _, err := pg.DB.ExecContext(t.Context(), "create table held (n int)"); err != nil {
		t.Fatal(err)
	}
	proxy, db := testserver.OpenSilenceable(t, pg.DSN)
	proxy.Silence(testserver.Containing("insert"), 1)
	done := make(chan error, 1)
	go func() {
		_, err := db.ExecContext(context.WithoutCancel(t.Context()), "insert into held values (1)")
		done <- err
	}()
	testserver.Eventually(t, "the connection is silent", func() bool { return proxy.Silenced() > 0 })
	testserver.Pause(t.Context(), 200*time.Millisecond) // if it got through, it has arrived by then
	if got := queryText(t, pg.DB, "select count(*)::text from held"); got != "0" {
		t.Errorf("%s rows while the connection was silent", got)
	}
	proxy.Resume()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if got := queryText(t, pg.DB, "select count(*)::text from held"); got != "1" {
		t.Errorf("%s rows after the silence", got)
	}
}

func TestPostgresProxy_SilencesEverything(t *testing.T) {
	t.Parallel()
	proxy, dsn := testserver.NewPostgresProxy(t, testserver.Postgres(t).DSN)
	db, err := sql.Open("postgres", dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	proxy.SilenceAll()
	failed := make(chan error, 1)
	go func() { failed <- db.PingContext(context.WithoutCancel(t.Context())) }()
	testserver.Eventually(t, "a connection is silent", func() bool { return proxy.Silenced() > 0 })
	proxy.Cut()
	if err := <-failed; err == nil {
		t.Error("a connection that was cut answers")
	}
	proxy.Resume()
	if err := db.PingContext(t.Context()); err != nil {
		t.Errorf("after the silence: %v", err)
	}
}

func TestPostgresProxy_CutsTheAnswerOfACommit(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	proxy, dsn := testserver.NewPostgresProxy(t, pg.DSN)
	db, err := sql.Open("postgres", dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	insert := func() error {
		tx, err := db.BeginTx(t.Context(), nil)
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(t.Context(), "insert into kept values (1)"); err != nil {
			return err
		}
		return tx.Commit()
	}
	if _, err := pg.DB.ExecContext(t.Context(), "create table kept (n int)"); err != nil {
		t.Fatal(err)
	}
	proxy.CutCommits(1)
	if err := insert(); err == nil {
		t.Error("the answer of the commit arrived")
	}
	if err := insert(); err != nil {
		t.Errorf("a further commit: %v", err)
	}
	if got := queryText(t, pg.DB, "select count(*)::text from kept"); got != "2" {
		t.Errorf("%s of 2 rows were committed", got)
	}
}

// Close cuts a client off that connects at that moment, too, though its connection is silent.
func TestProxies_CloseWhileClientsConnect(t *testing.T) {
	t.Parallel()
	server := testserver.Listen(t) // it answers nobody
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			conn, err := server.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				_, _ = io.Copy(io.Discard, conn) // until the proxy ends it
				_ = conn.Close()
			})
		}
	})
	defer serving.Wait()
	defer server.Close()
	dialing := func(t *testing.T, address string, closeProxy func()) {
		t.Helper()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var clients sync.WaitGroup
		for range 4 {
			clients.Go(func() {
				for ctx.Err() == nil {
					conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
					if err != nil {
						return
					}
					defer conn.Close()
				}
			})
		}
		testserver.Pause(ctx, time.Millisecond)
		closed := make(chan struct{})
		go func() { closeProxy(); close(closed) }()
		select {
		case <-closed:
		case <-time.After(testserver.MaxWait):
			t.Fatal("Close does not return")
		}
		cancel()
		clients.Wait()
	}
	for range 20 {
		postgres, dsn, err := testserver.StartPostgresProxy(t.Context(), "postgres://"+server.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		postgres.SilenceAll()
		dialing(t, strings.TrimPrefix(dsn, "postgres://"), postgres.Close)
		rabbit, uri, err := testserver.StartAMQPProxy(t.Context(), "amqp://"+server.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		rabbit.Frozen.Store(true)
		dialing(t, strings.TrimPrefix(uri, "amqp://"), rabbit.Close)
	}
}
