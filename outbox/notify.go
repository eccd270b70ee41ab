package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/sleep"
)

// notifyEvery bounds how often a Notifier sends: a hundred times a second.
const notifyEvery = 10 * time.Millisecond

// Notifier notifies relays of other processes, with PostgreSQL's NOTIFY, that this
// process has committed something. It is optional: relays poll, and without it they
// only learn of new messages at their next poll. The receiving side is a [Listener].
//
// It sends after the commit, in a separate statement. A NOTIFY in the business
// transaction would take a lock at its commit that all notifying transactions of the
// cluster wait for. Commits that arrive while one is being sent, or within 10 ms of it,
// share the next.
type Notifier struct {
	box   *Outbox
	calls *bounded.Calls
}

// notifyLimit is how long a notification may take. A silent server does not keep Run
// from ending.
const notifyLimit = 5 * time.Second

// NewNotifier returns a notifier of box. The error is an [*oncemill.ConfigError] on a
// database other than PostgreSQL.
func NewNotifier(box *Outbox) (*Notifier, error) {
	if _, err := notifyChannel("outbox.NewNotifier", box); err != nil {
		return nil, err
	}
	return &Notifier{box: box, calls: bounded.New(mostAbandoned)}, nil
}

// Run sends until ctx ends, and then returns nil. Commits made while no Run is active
// are not announced. It uses a connection of the outbox's pool for each statement; a
// pooler in transaction mode is fine.
func (n *Notifier) Run(ctx context.Context) error {
	commits, stop := n.box.commits.listen()
	defer stop()
	failing := trouble{log: n.box.cfg.Logger, message: "notifying relays of commits failed; they poll"}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-commits:
		}
		_, err := bounded.Do(ctx, n.calls, notifyLimit, func(ctx context.Context) (struct{}, error) {
			return struct{}{}, n.box.store.Notify(ctx)
		})
		failing.report(ctx, err)
		wait := notifyEvery
		if err != nil {
			n.box.commits.raise() // not announced yet
			wait = time.Second
		}
		if !sleep.For(ctx, wait) {
			return nil
		}
	}
}

// Listener wakes the relays of this process when the [Notifier] of another process
// announces a commit. It is optional; see Notifier.
type Listener struct {
	box     *Outbox
	dsn     string
	channel string
}

// NewListener returns a listener that wakes the relays of box. dsn is a lib/pq
// connection string. It is used for one dedicated connection, which LISTEN needs. It
// must lead to the server itself: no notification arrives through a pooler in
// transaction mode. Run opens the connection. All bad values are reported at once, each
// as an [*oncemill.ConfigError].
func NewListener(box *Outbox, dsn string) (*Listener, error) {
	channel, err := notifyChannel("outbox.NewListener", box)
	if _, dsnErr := pq.NewConnector(dsn); dsn == "" || dsnErr != nil {
		// Show neither the dsn nor the error, which may contain it: it holds a
		// password.
		err = errors.Join(err, &oncemill.ConfigError{Field: "outbox.NewListener dsn", Value: "(not shown)", Problem: "must be a connection string of lib/pq"})
	}
	if err != nil {
		return nil, err
	}
	return &Listener{box: box, dsn: dsn, channel: channel}, nil
}

// notifyChannel returns the channel of box: the name of its table.
func notifyChannel(field string, box *Outbox) (string, error) {
	if box == nil {
		return "", &oncemill.ConfigError{Field: field + " box", Value: "nil", Problem: "an outbox is needed"}
	}
	channel := box.store.Channel()
	if channel == "" {
		return "", &oncemill.ConfigError{Field: field + " box", Value: box.cfg.Database.Dialect.String(), Problem: "only PostgreSQL has NOTIFY"}
	}
	return channel, nil
}

// Run listens until ctx ends, and then returns nil. It reconnects whenever the
// connection is lost. Each time it starts to listen it wakes the relays once, for
// commits made while nobody listened.
func (l *Listener) Run(ctx context.Context) error {
	failing := trouble{log: l.box.cfg.Logger, message: "listening for commits of other processes failed; relays poll"}
	line := &line{}
	// The pauses of pq.Listener between attempts cannot be interrupted; line.dial
	// pauses instead.
	listener := pq.NewDialListener(dialFunc(func(network, address string, timeout time.Duration) (net.Conn, error) {
		return line.dial(ctx, network, address, timeout)
	}), l.dsn, time.Millisecond, time.Millisecond, func(event pq.ListenerEventType, err error) {
		switch event {
		case pq.ListenerEventConnected, pq.ListenerEventReconnected:
			failing.report(ctx, nil)
			l.box.wake.raise()
		case pq.ListenerEventDisconnected, pq.ListenerEventConnectionAttemptFailed:
			failing.report(ctx, err)
		}
	})
	var closing sync.WaitGroup
	closing.Go(func() {
		<-ctx.Done()
		line.close()
		_ = listener.Close() // the error only means that it was already closed
	})
	defer closing.Wait()
	for {
		// Blocks until the connection is up and LISTEN is done.
		err := listener.Listen(l.channel)
		if errors.Is(err, net.ErrClosed) {
			break
		}
		if err == nil {
			failing.report(ctx, nil)
			break
		}
		failing.report(ctx, fmt.Errorf("listen: %w", err)) // for example on a standby
		sleep.For(ctx, time.Second)
	}
	l.box.wake.raise()
	for range listener.Notify { // nil means a new connection
		l.box.wake.raise()
	}
	return nil // closed: ctx has ended
}

// dialFunc is a pq.Dialer.
type dialFunc func(network, address string, timeout time.Duration) (net.Conn, error)

func (f dialFunc) Dial(network, address string) (net.Conn, error) {
	return f(network, address, 10*time.Second)
}

func (f dialFunc) DialTimeout(network, address string, timeout time.Duration) (net.Conn, error) {
	return f(network, address, timeout)
}

// line is the connection of a Listener. One goroutine dials.
type line struct {
	dialed time.Time // the latest
	short  int       // short-lived connections in a row

	mu   sync.Mutex // guards conn
	conn net.Conn   // the latest
}

// dial connects, after a pause that grows with each short-lived connection.
func (l *line) dial(ctx context.Context, network, address string, timeout time.Duration) (net.Conn, error) {
	const lasting = 10 * time.Second
	if time.Since(l.dialed) > lasting {
		l.short = 0
	} else {
		sleep.For(ctx, min(50*time.Millisecond<<min(l.short, 10), 5*time.Second))
		l.short++
	}
	l.dialed = time.Now()
	// Keepalives detect a vanished peer within a minute.
	dialer := net.Dialer{Timeout: timeout, KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 10 * time.Second, Count: 3}}
	conn, err := dialer.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := ctx.Err(); err != nil {
		_ = conn.Close() // nothing was sent on it
		return nil, err
	}
	l.conn = conn
	return conn, nil
}

// close ends what is running on the connection. The context of dial has ended.
func (l *line) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn != nil {
		_ = l.conn.Close() // pq closes it too
	}
}

// trouble logs the first error of a series, and its end.
type trouble struct {
	log     *slog.Logger
	message string

	mu sync.Mutex // guards on
	on bool
}

func (t *trouble) report(ctx context.Context, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case err != nil && !t.on && ctx.Err() == nil:
		t.on = true
		t.log.WarnContext(ctx, t.message, "error", err) //nolint:sloglint // one of two constants
	case err == nil && t.on:
		t.on = false
		t.log.InfoContext(ctx, "notifications work again")
	}
}
