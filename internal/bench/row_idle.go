package main

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

const idleFor = 10 * time.Second

// idle counts what a worker with nothing to do asks of the database and of the
// processor, next to a forwarder with its default settings.
func idle(ctx context.Context, b *bench) ([]result, error) {
	if err := initForwarder(ctx, b.db); err != nil {
		return nil, err
	}
	var counts, shares [2][]float64
	quiet := func(at, workers int, name string, start func(ctx context.Context, db *sql.DB) (stop func() error, err error)) side {
		return side{name: name, n: 1, run: func(ctx context.Context, _ int) (float64, error) {
			statements, processor, err := b.watchIdle(ctx, start)
			counts[at], shares[at] = append(counts[at], statements), append(shares[at], processor/float64(workers))
			return statements, err
		}}
	}
	_, err := b.rounds(ctx, "idle", "statements/s", quiet(0, 2, "ours, 16 lanes", b.idleWorker), quiet(1, 1, "forwarder", b.idleForwarder))
	if err != nil {
		return nil, err
	}
	const what, against = "an idle worker with 16 lanes", "Watermill's forwarder with its default settings, idle"
	// The first run of each was the warm-up.
	return []result{
		compare("idle-statements", what, against, "statements/s", oursAtMost(20), counts[0][1:], counts[1][1:]),
		compare("idle-cpu", what+", percent of one core, half of what two such workers use", against, "%", oursAtMost(1), shares[0][1:], shares[1][1:]),
	}, nil
}

// watchIdle counts for a while, after what it starts has come to rest.
func (b *bench) watchIdle(ctx context.Context, start func(context.Context, *sql.DB) (func() error, error)) (statements, percent float64, err error) {
	if err := b.exec(ctx, "empty tables", `truncate oncemill.outbox, oncemill.outbox_history`, forwarderReset); err != nil {
		return 0, 0, err
	}
	connector, err := pq.NewConnector(b.servers.postgres)
	if err != nil {
		return 0, 0, err
	}
	counter := &countingConnector{Connector: connector}
	db := sql.OpenDB(counter)
	defer db.Close()
	db.SetMaxIdleConns(idleConns)
	stop, err := start(ctx, db)
	if err != nil {
		return 0, 0, err
	}
	if err := pauseFor(ctx, 2*time.Second); err != nil {
		return 0, 0, errors.Join(err, stop())
	}
	count, used, begin := counter.statements.Load(), processorTime(), time.Now()
	err = pauseFor(ctx, idleFor)
	took := time.Since(begin).Seconds()
	statements = float64(counter.statements.Load()-count) / took
	percent = 100 * (processorTime() - used).Seconds() / took
	return statements, percent, errors.Join(err, stop())
}

func (b *bench) idleWorker(ctx context.Context, db *sql.DB) (func() error, error) {
	run, end := context.WithCancel(ctx)
	stopped := make(chan error, 2)
	// The other half of the lanes is with a worker on another pool.
	for _, db := range []*sql.DB{db, b.db} {
		box, err := outbox.New(db, outbox.Config{History: outbox.NoHistory, Logger: b.log})
		if err != nil {
			end()
			return nil, err
		}
		r, err := relay.New(box, newLedgerSink(b.traffic, 0), relay.Config{Logger: b.log})
		if err != nil {
			end()
			return nil, err
		}
		go func() { stopped <- r.Run(run) }()
	}
	stop := func() error {
		end()
		return errors.Join(<-stopped, <-stopped)
	}
	for even := 0; even != 2; {
		if err := b.db.QueryRowContext(ctx, sharesText, 2).Scan(&even); err != nil {
			return nil, errors.Join(err, stop())
		}
		if err := pauseFor(ctx, 50*time.Millisecond); err != nil {
			return nil, errors.Join(err, stop())
		}
	}
	return stop, nil
}

func (b *bench) idleForwarder(ctx context.Context, db *sql.DB) (func() error, error) {
	return startForwarder(ctx, db, b.topology(), forwarderSettings{}, newStopwatch(b.traffic, 0))
}

// processorTime is what this process has used.
func processorTime() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		panic(fmt.Sprint("getrusage: ", err)) // cannot fail for this process
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// countingConnector counts the statements of its connections.
type countingConnector struct {
	driver.Connector
	statements atomic.Int64
}

func (c *countingConnector) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	counted, ok := conn.(pqConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("%T lacks methods that lib/pq's connections had", conn), conn.Close())
	}
	return &countingConn{counted, &c.statements}, nil
}

// pqConn is what a connection of lib/pq can do.
type pqConn interface {
	driver.Conn
	driver.ConnBeginTx
	driver.QueryerContext
	driver.ExecerContext
	driver.ConnPrepareContext
	driver.Pinger
	driver.SessionResetter
	driver.Validator
	driver.NamedValueChecker
}

type countingConn struct {
	pqConn
	statements *atomic.Int64
}

func (c *countingConn) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	c.statements.Add(1)
	return c.pqConn.QueryContext(ctx, text, args)
}

func (c *countingConn) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	c.statements.Add(1)
	return c.pqConn.ExecContext(ctx, text, args)
}

// BeginTx counts for its begin and its commit.
func (c *countingConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	c.statements.Add(2)
	return c.pqConn.BeginTx(ctx, opts)
}
