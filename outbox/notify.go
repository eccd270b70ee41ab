package outbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
)

// notifyEvery bounds how often a Notifier sends: a hundred times a second.
const notifyEvery = 10 * time.Millisecond

// Notifier tells the relays of other processes, with PostgreSQL's NOTIFY, that
// this process has committed something. It is optional: relays poll, and nothing
// but the time until the next poll depends on it. The other end is a [Listener].
//
// It sends after the commit, as a statement of its own: a NOTIFY within the
// business transaction would take, at its commit, a lock that all of the
// cluster's notifying transactions wait for. Commits that come while one is being
// sent, or within 10 ms of it, share the next.
type Notifier struct {
	box   *Outbox
	text  string
	calls *bounded.Calls
}

// notifyLimit is how long a notification may take. A server that is silent does not
// keep Run from its end.
const notifyLimit = 5 * time.Second

// NewNotifier returns a notifier of box. The error is an [*oncemill.ConfigError]
// on a database that is not PostgreSQL.
func NewNotifier(box *Outbox) (*Notifier, error) {
	channel, err := notifyChannel("outbox.NewNotifier", box)
	if err != nil {
		return nil, err
	}
	return &Notifier{box: box, text: "notify " + pq.QuoteIdentifier(channel), calls: bounded.New(mostAbandoned)}, nil
}

// Run sends until ctx ends, and then returns nil. What is committed while no Run
// is under way is not announced. It uses a connection of the outbox's pool for
// each statement; a pooler in transaction mode is fine.
func (n *Notifier) Run(ctx context.Context) error {
	commits, stop := n.box.commits.listen()
	defer stop()
	failing := trouble{log: n.box.cfg.Logger, message: "relays are not notified of commits; they poll"}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-commits:
		}
		_, err := bounded.Do(ctx, n.calls, notifyLimit, func(ctx context.Context) (sql.Result, error) {
			return n.box.db.ExecContext(ctx, n.text)
		})
		failing.report(ctx, err)
		wait := notifyEvery
		if err != nil {
			n.box.commits.raise() // it is still to be told
			wait = time.Second
		}
		if !pause(ctx, wait) {
			return nil
		}
	}
}

// Listener wakes the relays of this process when a [Notifier] of another one says
// that something was committed. It is optional; see there.
type Listener struct {
	box     *Outbox
	dsn     string
	channel string
}

// NewListener returns a listener that wakes the relays of box. dsn is what lib/pq
// takes. It is for one connection of its own, that LISTEN stays on: it leads to
// the server itself, since over a pooler in transaction mode no notification
// arrives. It is not opened before Run. All bad values are reported at once, each
// as an [*oncemill.ConfigError].
func NewListener(box *Outbox, dsn string) (*Listener, error) {
	channel, err := notifyChannel("outbox.NewListener", box)
	if _, dsnErr := pq.NewConnector(dsn); dsn == "" || dsnErr != nil {
		// Neither its text nor the error's, which may hold it: a password is in it.
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
	names := box.cfg.Database
	if names.Dialect != oncemill.PostgreSQL {
		return "", &oncemill.ConfigError{Field: field + " box", Value: names.Dialect.String(), Problem: "only PostgreSQL has NOTIFY"}
	}
	const most = 63 // bytes of a channel's name; two that are cut to the same wake each other
	channel := names.Schema + "." + names.Prefix + "outbox"
	return channel[:min(len(channel), most)], nil
}

// Run listens until ctx ends, and then returns nil. It connects again whenever the
// connection is lost. Each time that it has begun to listen it wakes the relays
// once, for what was committed while nobody listened.
func (l *Listener) Run(ctx context.Context) error {
	failing := trouble{log: l.box.cfg.Logger, message: "relays do not hear of other processes' commits; they poll"}
	line := &line{}
	// pq.Listener pauses between attempts in a way that nothing ends; line.dial
	// does it instead.
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
		line.hangUp()
		_ = listener.Close() // it says only whether it was closed already
	})
	defer closing.Wait()
	for {
		// Blocks until the connection is there and LISTEN is done.
		err := listener.Listen(l.channel)
		if errors.Is(err, net.ErrClosed) {
			break
		}
		if err == nil {
			failing.report(ctx, nil)
			break
		}
		failing.report(ctx, fmt.Errorf("listen: %w", err)) // a standby, say
		pause(ctx, time.Second)
	}
	l.box.wake.raise()
	for range listener.Notify { // nil says that the connection is a new one
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
	dialled time.Time // the latest
	short   int       // lines in a row that did not last

	mu   sync.Mutex // guards conn
	conn net.Conn   // the latest
}

// dial connects, after a pause that grows with each connection that was lost soon.
func (l *line) dial(ctx context.Context, network, address string, timeout time.Duration) (net.Conn, error) {
	const lasting = 10 * time.Second
	if time.Since(l.dialled) > lasting {
		l.short = 0
	} else {
		pause(ctx, min(50*time.Millisecond<<min(l.short, 10), 5*time.Second))
		l.short++
	}
	l.dialled = time.Now()
	// A peer that is gone without a word is noticed within a minute.
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

// hangUp ends what is under way on the line. The context of dial has ended.
func (l *line) hangUp() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn != nil {
		_ = l.conn.Close() // pq closes it too
	}
}

// trouble logs the first error of a row, and its end.
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

// pause waits for d and reports whether ctx let it.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
