package main

import (
	"context"
	"database/sql"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// The relay, who pauses, the producer and who resumes are processes of their own.
func TestPauseCommand_ReachesRelaysInOtherProcessesAndOutlivesThem(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"PostgreSQL", "SQLite"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			uri := testserver.RabbitMQ(t)
			declareQueue(t, uri, "orders")
			declareQueue(t, uri, "mails")
			path := filepath.Join(t.TempDir(), "shop.db")
			env, cfg := []string{"ONCEMILL_DATABASE=sqlite:" + path}, oncemill.Config{Dialect: oncemill.SQLite}
			var db *sql.DB
			if name == "PostgreSQL" {
				pg := testserver.Postgres(t)
				db, cfg, env = pg.DB, pg.Config, []string{"ONCEMILL_DATABASE=" + pg.DSN, "ONCEMILL_SCHEMA=" + pg.Config.Schema}
			} else {
				db = testserver.OpenSQLite(t, path)
			}
			run := runner(t, env)
			run(0, "migrate")
			box, err := outbox.New(db, outbox.Config{Database: cfg})
			if err != nil {
				t.Fatal(err)
			}
			waiting := func(queue string) int {
				t.Helper()
				conn, err := amqp.Dial(uri)
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				ch, err := conn.Channel()
				if err != nil {
					t.Fatal(err)
				}
				q, err := ch.QueueDeclarePassive(queue, true, false, false, false, nil)
				if err != nil {
					t.Fatal(err)
				}
				return q.Messages
			}
			sent := 0
			// publish publishes to both topics, and returns once the mail is delivered.
			publish := func() {
				t.Helper()
				sent++
				mails := waiting("mails") // with a repetition after a kill
				err := box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
					for _, topic := range []string{"orders", "mails"} {
						if err := box.Publisher(tx).Publish(topic, message.NewMessage(fmt.Sprint(topic, sent), nil)); err != nil {
							return err
						}
					}
					return nil
				})
				if err != nil {
					t.Fatal(err)
				}
				testserver.Eventually(t, "the mail is delivered", func() bool { return waiting("mails") > mails })
			}
			relay := func() (kill func()) {
				t.Helper()
				ctx, cancel := context.WithCancel(t.Context())
				cmd, _ := command(ctx, env, "relay", "--amqp-url", uri, "--topology", "queue", "--lease", "3s")
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				kill = func() { cancel(); _ = cmd.Wait() }
				t.Cleanup(cancel)
				return kill
			}
			kill := relay()
			publish()
			testserver.Eventually(t, "the order is delivered", func() bool { return waiting("orders") == 1 })
			run(0, "pause", "topic", "orders", "--reason", "a test")
			time.Sleep(4 * time.Second) // on a busy machine
			publish()
			kill()
			kill = relay()
			publish()
			if n := waiting("orders"); n != 1 {
				t.Errorf("%d orders were delivered while paused", n-1)
			}
			run(0, "resume", "topic", "orders")
			testserver.Eventually(t, "the orders are delivered", func() bool { return waiting("orders") >= sent })
			kill()
		})
	}
}
