package verify

import (
	"bufio"
	"context"
	"crypto/sha256"
	"database/sql"
	"database/sql/driver"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/lib/pq"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/inbox"
	queues "github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/mill"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

// Roles of processes.
const (
	roleService = "service" // answers requests
	roleRelay   = "relay"
	roleFirst   = "first"  // the consumer of the first hop: one active process, which keeps the order
	roleSecond  = "second" // the consumer of the second hop: several active processes
)

// Commands to a process, and the faults that they are.
const (
	commandStop = "stop"
	commandEnd  = "end database connections"
	commandCut  = "close RabbitMQ connections"
)

// Metadata of messages.
const (
	metaAttempt = "attempt" // that has sent the message
	metaKind    = "kind"
)

// Kinds of requests and of their messages.
const (
	kindPlain    = ""
	kindFlaky    = "flaky"     // the handler fails twice, then works
	kindPoison   = "poison"    // the handler always fails
	kindRollBack = "roll back" // the request's handler rolls back
)

// job is the task of a process: the first line of its standard input.
type job struct {
	Access

	Role, Name string
	Lease      time.Duration
}

// order is the body of a request.
type order struct {
	MessageID string `json:"message_id"`
	Account   int    `json:"account"`
	Kind      string `json:"kind"`
	Payload   []byte `json:"payload"`
}

// rolledBack is the header of an answer to a request whose handler rolls back.
const rolledBack = "Verify-Rolled-Back"

// worker is a running process.
type worker struct {
	job
	texts *texts
	db    *sql.DB
	log   *slog.Logger

	mu      sync.Mutex
	pids    []int64             // of backends that this process has opened
	sockets map[net.Conn]string // to RabbitMQ
}

// Work runs a process. It reads its job and commands from in, and writes a line to out when it
// works, and after each command. It ends when in ends.
func Work(ctx context.Context, in io.Reader, out io.Writer, log *slog.Logger) (err error) {
	signal.Ignore(os.Interrupt) // the parent decides
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	lines := bufio.NewScanner(in)
	w := &worker{log: log, sockets: map[net.Conn]string{}}
	if !lines.Scan() {
		return errors.New("verify: this command is for oncemill verify only")
	}
	if err := json.Unmarshal(lines.Bytes(), &w.job); err != nil {
		return fmt.Errorf("verify: %w", err)
	}
	w.texts = newTexts(w.Schema)
	connector, err := w.connector(w.Name)
	if err != nil {
		return err
	}
	w.db = sql.OpenDB(&noting{Connector: connector, text: w.texts.Backend, note: w.addPid})
	w.db.SetMaxOpenConns(poolSize)
	w.db.SetMaxIdleConns(poolSize)
	defer func() { err = errors.Join(err, w.db.Close()) }()
	go func() { // ends with the process: a read of standard input cannot be canceled
		for lines.Scan() {
			if lines.Text() == commandStop {
				stop()
				continue
			}
			w.obey(ctx, lines.Text(), out)
		}
		os.Exit(3) // the parent has gone
	}()
	m, err := mill.New(w.db, w.config())
	if err != nil {
		return err
	}
	parts := []func(context.Context) error{}
	address := make(chan string, 1)
	if w.Role == roleService {
		parts = append(parts, w.serve(m, address))
	} else {
		address <- "-"
	}
	parts = append(parts, func(ctx context.Context) error {
		for m.Ready() != nil {
			if !sleep.For(ctx, 20*time.Millisecond) {
				return nil
			}
		}
		select {
		case at := <-address:
			fmt.Fprintln(out, "ready", at)
		case <-ctx.Done():
		}
		return nil
	})
	return m.Run(ctx, parts...)
}

// poolSize is the number of database connections of a process.
const poolSize = 6

func (w *worker) config() mill.Config {
	cfg := mill.Config{Database: w.database(), NoMigrate: true, Logger: w.log, StopTimeout: 10 * time.Second}
	retry := inbox.Retry{Delay: time.Second, DelayMax: 2 * time.Second} // shorter than usual: the run waits for them
	switch w.Role {
	case roleService:
		cfg.Outbox = &outbox.Config{}
		cfg.Idempotency = &idempotency.Config{
			Scope: idempotency.SingleTenant(), Timeout: 3 * time.Second, Failures: idempotency.FailureConfig{Lease: 4 * time.Second},
		}
	case roleRelay:
		cfg.Outbox = &outbox.Config{}
		cfg.Relay.Name, cfg.Relay.Lease = w.Name, w.Lease
		// The parent has checked the addresses in the same way.
		cfg.Sink, _ = rabbitmq.New(w.broker(nil), rabbitmq.Config{Addresses: w.AMQP[1:], AllowPlaintext: w.AllowPlaintext, Logger: w.log})
	case roleFirst:
		cfg.Outbox = &outbox.Config{}
		cfg.Consumers = []mill.Consumer{{
			Name: roleFirst, Topic: w.topic(roleFirst), Subscriber: w.subscriber, Handler: w.handleFirst,
			Produces: w.topic(roleSecond), Inbox: inbox.Config{Retry: retry},
		}}
	case roleSecond:
		cfg.Consumers = []mill.Consumer{{
			Name: roleSecond, Topic: w.topic(roleSecond), Subscriber: w.subscriber, Group: true, Inbox: inbox.Config{Retry: retry},
			Handler: func(msg *message.Message) ([]*message.Message, error) {
				_, err := w.effect(msg, watermill.NewUUID())
				return nil, err
			},
		}}
	}
	return cfg
}

// broker returns the configuration of RabbitMQ, with connections that the process can close.
func (w *worker) broker(queue amqp.QueueNameGenerator) amqp.Config {
	config := amqp.NewDurablePubSubConfig(w.AMQP[0], queue)
	config.Connection.AmqpConfig = &amqp091.Config{Dial: func(network, address string) (net.Conn, error) {
		conn, err := amqp091.DefaultDial(dialTimeout)(network, address)
		if err != nil {
			return nil, err
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		w.sockets[conn] = address
		return conn, nil
	}}
	return config
}

func (w *worker) subscriber(in *inbox.Inbox) (message.Subscriber, error) {
	config := w.broker(amqp.GenerateQueueNameTopicNameWithSuffix(w.Role))
	config.Queue.Arguments = queueArguments(w.Role)
	config.Consume.Qos.PrefetchCount = 16
	return queues.New(config, queues.Config{Addresses: w.AMQP[1:], AllowPlaintext: w.AllowPlaintext, Malformed: in.Refuse, Logger: w.log})
}

// queueArguments are those of a consumer's queue.
func queueArguments(role string) amqp091.Table {
	if role == roleFirst {
		return amqp091.Table{"x-single-active-consumer": true}
	}
	return nil
}

func (w *worker) serve(m *mill.Mill, address chan<- string) func(context.Context) error {
	mux := http.NewServeMux()
	mux.Handle("POST /orders", m.Idempotency().TxMiddleware(w.place(m.Outbox())))
	return m.Serve(&http.Server{
		Addr: "127.0.0.1:0", Handler: mux, ReadHeaderTimeout: 10 * time.Second,
		BaseContext: func(l net.Listener) context.Context {
			address <- l.Addr().String()
			return context.Background()
		},
	})
}

// place runs a request, and answers with what no other run would answer.
func (w *worker) place(box *outbox.Outbox) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		ctx, attempt := r.Context(), watermill.NewUUID()
		tx, ok := idempotency.TxFromContext(ctx)
		var o order
		if err := json.NewDecoder(r.Body).Decode(&o); err != nil || !ok {
			http.Error(rw, "not an order", http.StatusBadRequest)
			return
		}
		_, err := tx.ExecContext(ctx, w.texts.LockAccount, o.Account)
		if err == nil {
			_, err = tx.ExecContext(ctx, w.texts.AddAnswer, r.Header.Get("Idempotency-Key"), attempt)
		}
		if err == nil {
			msg := message.NewMessage(o.MessageID, o.Payload)
			msg.Metadata = message.Metadata{metaAttempt: attempt, metaKind: o.Kind}
			outbox.SetKey(msg, fmt.Sprintf("account-%d", o.Account))
			if err = w.send(ctx, tx, w.topic(roleFirst), msg); err == nil {
				err = box.Publish(ctx, tx, w.topic(roleFirst), msg)
			}
		}
		switch {
		case err != nil:
			http.Error(rw, "please try again", http.StatusServiceUnavailable)
		case o.Kind == kindRollBack:
			rw.Header().Set(rolledBack, "yes")
			http.Error(rw, "rolled back", http.StatusServiceUnavailable)
		default:
			rw.WriteHeader(http.StatusCreated)
			_, _ = io.WriteString(rw, attempt) // held back until the commit, so it cannot fail
		}
	})
}

// send writes down that a transaction publishes a message.
func (w *worker) send(ctx context.Context, tx oncemill.ExecTx, topic string, msg *message.Message) error {
	_, err := tx.ExecContext(ctx, w.texts.AddSent, msg.UUID, topic, msg.Metadata.Get(outbox.KeyMetadata), msg.Metadata.Get(metaAttempt), sumOf(msg.Payload))
	return err
}

func sumOf(payload []byte) string {
	sum := sha256.Sum256(payload)
	return hex.EncodeToString(sum[:16])
}

var errFails = errors.New("the handler fails")

func (w *worker) handleFirst(msg *message.Message) ([]*message.Message, error) {
	attempt := watermill.NewUUID()
	tx, err := w.effect(msg, attempt)
	if err != nil {
		return nil, err
	}
	next := message.NewMessage(watermill.NewUUID(), []byte("message "+msg.UUID+" was handled by "+attempt))
	next.Metadata = message.Metadata{metaAttempt: attempt}
	outbox.SetKey(next, msg.Metadata.Get(outbox.KeyMetadata))
	if err := w.send(msg.Context(), tx, w.topic(roleSecond), next); err != nil {
		return nil, err
	}
	// At the end, so that a failure has something to undo.
	info, _ := inbox.AttemptFromContext(msg.Context())
	switch kind := msg.Metadata.Get(metaKind); {
	case kind == kindPoison:
		return nil, inbox.Permanent(errFails)
	case kind == kindFlaky && info.Try < 3:
		return nil, errFails
	}
	return []*message.Message{next}, nil
}

// effect writes the effect of a message down.
func (w *worker) effect(msg *message.Message, attempt string) (oncemill.Tx, error) {
	tx, ok := inbox.TxFromContext(msg.Context())
	if !ok {
		return nil, inbox.ErrNoInbox
	}
	_, err := tx.ExecContext(msg.Context(), w.texts.AddEffect, w.Role, msg.UUID, attempt, sumOf(msg.Payload))
	return tx, err
}

// noting is a connector that notes the backend of each connection.
type noting struct {
	*pq.Connector

	text string
	note func(pid int64)
}

func (n *noting) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := n.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	if pid, ok := pidOf(ctx, conn, n.text); ok {
		n.note(pid)
	}
	return conn, nil
}

// pidOf asks for the backend of a connection. If it fails, the connection will fail as well.
func pidOf(ctx context.Context, conn driver.Conn, text string) (int64, bool) {
	asker, ok := conn.(driver.QueryerContext)
	if !ok {
		return 0, false
	}
	found, err := asker.QueryContext(ctx, text, nil)
	if err != nil {
		return 0, false
	}
	defer found.Close() //nolint:errcheck // it was read
	row := make([]driver.Value, 1)
	if found.Next(row) != nil {
		return 0, false
	}
	pid, ok := row[0].(int64)
	return pid, ok
}

const notedPids = 100 // older backends have ended

func (w *worker) addPid(pid int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pids = append(w.pids, pid)
	w.pids = w.pids[max(0, len(w.pids)-notedPids):]
}

// obey runs a command and writes what came of it.
func (w *worker) obey(ctx context.Context, command string, out io.Writer) {
	n := 0
	var err error
	switch command {
	case commandCut:
		n = w.cut()
	case commandEnd:
		w.mu.Lock()
		pids := slices.Clone(w.pids)
		w.mu.Unlock()
		ctx, cancel := context.WithTimeout(ctx, dialTimeout)
		defer cancel()
		err = w.db.QueryRowContext(ctx, w.texts.EndBackends, w.application(w.Name), pq.Array(pids)).Scan(&n)
	}
	switch {
	case err != nil:
		fmt.Fprintf(out, "failed %q %q\n", command, err.Error())
	case n > 0:
		fmt.Fprintf(out, "done %q\n", command)
	}
}

// cut closes the connections to RabbitMQ and returns how many there were.
func (w *worker) cut() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for conn := range w.sockets {
		if conn.Close() == nil { // or it has ended before
			n++
		}
		delete(w.sockets, conn)
	}
	return n
}
