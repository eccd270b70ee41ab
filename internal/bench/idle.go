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

	"github.com/oncemill/oncemill/relay"
)

const (
	idleSeconds = 6
	idleRest    = 6 * time.Second // until pauses are as long as they become
)

// idle counts what a worker with nothing to do asks of the database and of the processor.
// The floor is a pool that asks once a second whether there is a message.
func idle() scenario {
	what := "an idle worker with 16 lanes"
	return scenario{
		id: "idle", round: 24 * time.Second,
		sides: func(_ context.Context, b *bench) ([]side, error) {
			return []side{
				b.idleSide("ours", 2, b.idleWorkers),
				b.idleSide("the floor: an idle pool that polls once a second", 1, idlePool),
			}, nil
		},
		rows: []row{
			{"idle-statements", what, figure{0, 0}, figure{1, 0}, "statements/s", atMost(20)},
			{"idle-cpu", what + ", processor time of the process, half of what two such workers use", figure{0, 1}, figure{1, 1}, "ms/s", atMost(5)},
		},
	}
}

// idleSide counts for some seconds, after what it starts has come to rest. What is idle is
// so many times in the process, and on the counted pool once.
func (b *bench) idleSide(name string, times int, start func(ctx context.Context, db *sql.DB) (stop func() error, err error)) side {
	return side{name: name, n: idleSeconds, fixed: true, run: func(ctx context.Context, seconds int) (values, error) {
		if _, err := b.fresh(ctx, noHistory); err != nil {
			return nil, err
		}
		connector, err := pq.NewConnector(b.postgres)
		if err != nil {
			return nil, err
		}
		counter := &countingConnector{Connector: connector}
		db := sql.OpenDB(counter)
		defer db.Close()
		db.SetMaxIdleConns(idleConns)
		stop, err := start(ctx, db)
		if err != nil {
			return nil, err
		}
		err = pauseFor(ctx, idleRest)
		count, used, begin := counter.statements.Load(), processorTime(), time.Now()
		err = errors.Join(err, pauseFor(ctx, time.Duration(seconds)*time.Second))
		took := time.Since(begin).Seconds()
		statements := float64(counter.statements.Load() - count)
		processor := float64((processorTime() - used).Microseconds()) / 1000 / float64(times)
		return values{statements / took, processor / took}, errors.Join(err, stop())
	}}
}

// idleWorkers has 16 lanes on db, and the others on another pool.
func (b *bench) idleWorkers(ctx context.Context, db *sql.DB) (func() error, error) {
	_, stop, err := b.startWorkers(ctx, []*sql.DB{db, b.db}, newLedgerSink(b.traffic, 0), relay.Config{})
	return stop, err
}

func idlePool(ctx context.Context, db *sql.DB) (func() error, error) {
	ctx, cancel := context.WithCancel(ctx)
	stopped := make(chan error, 1)
	go func() {
		var err error
		for err == nil && pauseFor(ctx, time.Second) == nil {
			var waiting bool
			err = db.QueryRowContext(ctx, `select exists (select from oncemill.outbox)`).Scan(&waiting)
		}
		stopped <- err
	}()
	return func() error {
		cancel()
		if err := <-stopped; !errors.Is(err, context.Canceled) {
			return err
		}
		return nil
	}, nil
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
