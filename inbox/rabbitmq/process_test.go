package rabbitmq_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
)

// envConsumer makes the test binary a consumer: URI, DSN and schema in lines.
const envConsumer = "ONCEMILL_TEST_CONSUMER"

// consumeAsAProcess handles messages until it is told to stop. Those that say so
// end the process in the middle of their transaction.
func consumeAsAProcess() error {
	settings := strings.Split(os.Getenv(envConsumer), "\n")
	db, err := sql.Open("postgres", settings[1])
	if err != nil {
		return err
	}
	defer db.Close()
	db.SetMaxOpenConns(10)
	database := oncemill.Config{Dialect: oncemill.PostgreSQL, Schema: settings[2]}
	letters, err := dlq.New(db, dlq.Config{Database: database})
	if err != nil {
		return err
	}
	in, err := inbox.New(db, inbox.Config{
		Consumer: "stock", Database: database, DeadLetters: letters, Logger: quiet,
		Retry: inbox.Retry{Crashes: 2, Backoff: time.Millisecond},
	})
	if err != nil {
		return err
	}
	s, err := rabbitmq.New(queues(settings[0], 10), rabbitmq.Config{Logger: quiet, Malformed: in.Refuse})
	if err != nil {
		return err
	}
	router := message.NewDefaultRouter(watermill.NopLogger{})
	router.AddConsumerHandler("reserve", "orders", s, func(msg *message.Message) error {
		if err := addEffect(msg); err != nil {
			return err
		}
		switch string(msg.Payload) {
		case "exit":
			os.Exit(3)
		case "timeout":
			ctx, cancel := context.WithTimeout(msg.Context(), 10*time.Millisecond)
			defer cancel()
			tx, _ := inbox.TxFromContext(ctx)
			_, err := tx.ExecContext(ctx, `select pg_sleep(10)`)
			return inbox.Permanent(err)
		case "panic":
			panic(inbox.Permanent(errors.New("told to")))
		}
		return nil
	}).AddMiddleware(in.GroupMiddleware)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	return router.Run(ctx)
}

func addEffect(msg *message.Message) error {
	tx, _ := inbox.TxFromContext(msg.Context())
	_, err := tx.ExecContext(msg.Context(), `insert into effects (message_id) values ($1)`, msg.UUID)
	return err
}

// Real processes die of a message, again and again, with innocent ones in flight.
func TestSubscriber_DeadLettersAMessageThatKillsProcesses(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	pg, _ := withLetters(t)
	if _, err := pg.DB.ExecContext(t.Context(), `create table effects (message_id text)`); err != nil {
		t.Fatal(err)
	}
	a := newAdmin(t, uri)
	a.declare("orders", nil)
	const innocent = 40
	for i := range innocent {
		a.publish("orders", publishing(fmt.Sprintf("innocent %d", i), fmt.Sprint(i%7)))
		for at, deed := range map[int]string{5: "exit", 12: "panic", 20: "timeout"} {
			if i == at {
				a.publish("orders", amqp091.Publishing{MessageId: deed, Body: []byte(deed)})
			}
		}
	}
	count := func(query string) (n int) {
		if err := pg.DB.QueryRowContext(t.Context(), database.Of(pg.Config).Expand(query)).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	done := func() bool {
		return count(`select count(*) from {{dead_letters}}`) >= 3 && count(`select count(*) from effects`) >= innocent
	}
	deaths := 0
	for start := time.Now(); !done(); {
		if time.Since(start) > maxWait {
			t.Fatalf("%d effects, %d letters after %d deaths", count(`select count(*) from effects`), count(`select count(*) from {{dead_letters}}`), deaths)
		}
		child := exec.CommandContext(t.Context(), os.Args[0])
		child.Env = append(os.Environ(), envConsumer+"="+strings.Join([]string{uri, pg.DSN, pg.Config.Schema}, "\n"))
		child.Stderr = os.Stderr
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- child.Wait() }()
		for running := true; running; {
			select {
			case err := <-ended:
				var exit *exec.ExitError
				if !errors.As(err, &exit) || exit.ExitCode() != 3 {
					t.Fatalf("the process ended: %v", err)
				}
				deaths++
				running = false
			case <-time.After(10 * time.Millisecond):
				if time.Since(start) > maxWait {
					t.Errorf("%d effects, %d letters after %d deaths", count(`select count(*) from effects`), count(`select count(*) from {{dead_letters}}`), deaths)
					_ = child.Process.Signal(syscall.SIGQUIT) // tells what it waits for
					<-ended
					return
				}
				if done() {
					running = false
					if err := child.Process.Signal(syscall.SIGTERM); err != nil {
						t.Error(err)
					}
					if err := <-ended; err != nil {
						t.Errorf("a clean stop: %v", err)
					}
				}
			}
		}
	}
	// Unmarked, not alone, two times alone.
	if deaths != 4 {
		t.Errorf("%d deaths", deaths)
	}
	if n := count(`select count(*) from effects`); n != innocent {
		t.Errorf("%d effects", n)
	}
	if n := count(`select count(*) from {{dead_letters}} where message_id = reason or (message_id, reason) in (('exit', 'crashed'), ('panic', 'permanent'), ('timeout', 'permanent'))`); n != 3 || count(`select count(*) from {{dead_letters}}`) != 3 {
		t.Errorf("%d of %d letters are right", n, count(`select count(*) from {{dead_letters}}`))
	}
	if n, _ := a.left("orders"); n != 0 {
		t.Errorf("%d messages are left", n)
	}
}

// Whatever foreign producers send, it is handled or becomes a dead letter, once.
func TestSubscriber_TakesWhatForeignProducersSend(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	pg, letters := withLetters(t)
	pg.DB.SetMaxOpenConns(10)
	if _, err := pg.DB.ExecContext(t.Context(), `create table effects (message_id text)`); err != nil {
		t.Fatal(err)
	}
	in, err := inbox.New(pg.DB, inbox.Config{Consumer: "stock", Database: pg.Config, DeadLetters: letters, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	s := subscriber(t, queues(uri, 10), rabbitmq.Config{Malformed: in.Refuse})
	router := message.NewDefaultRouter(watermill.NopLogger{})
	router.AddConsumerHandler("reserve", "orders", s, addEffect).AddMiddleware(in.GroupMiddleware)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	defer cancel()
	stopped := make(chan error, 1)
	go func() { stopped <- router.Run(ctx) }()
	<-router.Running()
	a := newAdmin(t, uri)
	long := strings.Repeat("x", 1<<20)
	nested := amqp091.Table{"a": amqp091.Table{"b": []any{int32(1), amqp091.Table{"c": nil}}}}
	death := amqp091.Table{"x-death": []any{amqp091.Table{"count": int64(3), "queue": "orders", "reason": "rejected", "time": time.Now()}}}
	all := []amqp091.Publishing{
		{MessageId: "x-death", Headers: death},
		{MessageId: "integer", Headers: amqp091.Table{"n": int64(7), "m": int8(1), "f": 1.5, "t": true, "d": amqp091.Decimal{Scale: 2, Value: 1}}},
		{MessageId: "array", Headers: amqp091.Table{"list": []any{"a", int32(1), nil}}},
		{MessageId: "nested", Headers: nested},
		{MessageId: "empty body"},
		{MessageId: "large body", Body: []byte(long)},
		{MessageId: "bytes", Headers: amqp091.Table{"raw": []byte{0, 0xff}}},
		{MessageId: "old clock", Timestamp: time.Unix(1, 0)},
		{MessageId: "other properties", ContentType: "text/plain", ContentEncoding: "gzip", Priority: 9, CorrelationId: "c", ReplyTo: "r", Type: "t", AppId: "a", Expiration: "60000"},
		{MessageId: "key of another kind", Headers: amqp091.Table{rabbitmq.KeyHeader: int32(7)}},
		{Headers: amqp091.Table{uuidHeader: "id in the header"}},
		{MessageId: "duplicate"},
		{MessageId: "duplicate"},
		{MessageId: "duplicate", Body: []byte("another body")},
		{},
		{Body: []byte("no id")},
		{MessageId: "nul\x00"}, // letters
	}
	const effects, dead = 12, 3
	a.publish("orders", all...)
	count := func(query string) (n int) {
		if err := pg.DB.QueryRowContext(t.Context(), database.Of(pg.Config).Expand(query)).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	eventually(t, "everything has its end", func() bool {
		return count(`select count(*) from effects`) >= effects && count(`select count(*) from {{dead_letters}}`) >= dead
	})
	if err := errors.Join(router.Close(), <-stopped); err != nil {
		t.Error(err)
	}
	if n, m := count(`select count(distinct message_id) from effects`), count(`select count(*) from effects`); n != effects || m != effects {
		t.Errorf("%d effects, %d different", m, n)
	}
	if n := count(`select count(*) from {{dead_letters}} where reason = 'no-message-id'`); n != dead || count(`select count(*) from {{dead_letters}}`) != dead {
		t.Errorf("%d letters for missing ids of %d", n, count(`select count(*) from {{dead_letters}}`))
	}
	// A copy may still have been waiting when the router stopped.
	n, which := a.left("orders")
	if delete(which, "duplicate"); len(which) > 0 || n > 2 {
		t.Errorf("%d messages are left, also %v", n, which)
	}
}

// A message that waits for its predecessor lets it pass.
func TestSubscriber_OneThatGivesWayLetsItsKeyPass(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	out := subscribe(t, subscriber(t, queues(uri, 10), rabbitmq.Config{NackDelay: time.Millisecond}), "orders")
	a.publish("orders", publishing("a2", "a"), publishing("a1", "a"), publishing("a3", "a"))
	early := next(t, out)
	d, _ := inbox.DeliveryFromContext(early.Context())
	d.Yield()
	d.DelayNack(20 * time.Millisecond)
	early.Nack()
	first := next(t, out)
	if early.UUID != "a2" || first.UUID != "a1" {
		t.Fatalf("got %q, %q", early.UUID, first.UUID)
	}
	time.Sleep(40 * time.Millisecond) // a2 is due, and lines up behind a3
	none(t, out)
	first.Ack()
	for _, want := range []string{"a3", "a2"} {
		msg := next(t, out)
		if msg.UUID != want {
			t.Errorf("got %q, want %q", msg.UUID, want)
		}
		msg.Ack()
	}
}
