package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	_ "github.com/lib/pq" // the driver "postgres"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/crucible/work"
	"github.com/oncemill/oncemill/internal/testserver"
)

// site is the servers of a run, and the parent's own way to them, which no proxy is in.
type site struct {
	postgres   *testserver.Instance // nil if it is replicated
	replicated *replicated
	rabbit     *testserver.Instance // or a node of brokers
	brokers    *brokers             // nil if there is one alone
	db         *sql.DB
}

// Clusters that a run can have.
const (
	clusterPostgres = "postgres"       // a commit waits for a standby
	clusterAsync    = "postgres-async" // it does not
	clusterRabbitMQ = "rabbitmq"
)

var clusters = []string{clusterPostgres, clusterAsync, clusterRabbitMQ}

// cluster is a server of several nodes.
type cluster interface {
	turns() []turn
	awaitHealth(ctx context.Context) error
}

// cluster returns the one whose nodes fail; nil if there is none.
func (s *site) cluster() cluster {
	switch {
	case s.replicated != nil:
		return s.replicated
	case s.brokers != nil:
		return s.brokers
	}
	return nil
}

// amqpURLs returns the addresses of RabbitMQ, without a proxy.
func (s *site) amqpURLs() []string {
	if s.brokers != nil {
		return s.brokers.urls(0)
	}
	return []string{s.rabbit.URL()}
}

// canaryQueues returns the queues whose confirms tell whether RabbitMQ takes messages: on a
// cluster each queue has a leader of its own, and elects the next one when it can.
func (s *site) canaryQueues() []string {
	if s.brokers == nil {
		return []string{canaryQueue}
	}
	return emptyQueues
}

const accounts = 200

// newSite starts the servers and creates tables, exchanges and queues.
func newSite(ctx context.Context, dir string, o options) (s *site, err error) {
	s = &site{}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close(ctx))
		}
	}()
	if o.cluster == clusterPostgres || o.cluster == clusterAsync {
		s.replicated, err = newReplicated(ctx, filepath.Join(dir, "cluster"), o.cluster == clusterPostgres)
	} else {
		s.postgres, err = testserver.NewInstance(ctx, "postgres", filepath.Join(dir, "postgres"),
			"lock_timeout=0", "deadlock_timeout=500ms", "log_lock_waits=off")
	}
	if err != nil {
		return s, err
	}
	settings := []string{"heartbeat=6", "vm_memory_high_watermark.absolute=2GB", "disk_free_limit.absolute=1MB"}
	if o.cluster == clusterRabbitMQ {
		if s.brokers, err = newBrokers(ctx, filepath.Join(dir, "cluster"), settings...); err != nil {
			return s, err
		}
		s.rabbit = s.brokers.nodes[0]
	} else if s.rabbit, err = testserver.NewInstance(ctx, "rabbitmq", filepath.Join(dir, "rabbitmq"), settings...); err != nil {
		return s, err
	}
	if o.cluster == "" {
		prefer(s.rabbit)
	}
	if s.db, err = sql.Open("postgres", s.url()+"&application_name=crucible&connect_timeout=2"); err != nil {
		return s, err
	}
	s.db.SetMaxIdleConns(4)
	if err := s.createTables(ctx, o.upgradeFrom); err != nil {
		return s, err
	}
	if o.rival != "" {
		if err := work.PrepareRival(ctx, s.url(), o.rival); err != nil {
			return s, fmt.Errorf("prepare %s: %w", o.rival, err)
		}
	}
	return s, s.onChannel(s.declare)
}

// prefer lets a node have what it needs of the CPU, as if it had a machine of its own. Linux shares the
// CPU among sessions (autogroup in sched(7)), and every process of PostgreSQL is one: beside twenty
// that are busy, the node had a twentieth of two cores, and confirmed nothing for seconds. So its
// session counts for nine. Without the right to say so, or such sessions, it stays as it is.
func prefer(node *testserver.Instance) {
	remembered, err := os.ReadFile(filepath.Join(node.Dir(), "pid"))
	if err != nil {
		return
	}
	pid, _, _ := strings.Cut(string(remembered), " ")
	_ = os.WriteFile(filepath.Join("/proc", pid, "autogroup"), []byte("-10"), 0)
}

// url returns the URL of PostgreSQL, without a proxy of ours.
func (s *site) url() string {
	if s.replicated != nil {
		return s.replicated.proxy.URL()
	}
	return s.postgres.URL()
}

// createTables creates the tables, those of the library as an older build needs them, if one is
// given.
func (s *site) createTables(ctx context.Context, older string) error {
	if _, err := s.db.ExecContext(ctx, work.Tables); err != nil {
		return fmt.Errorf("create tables: %w", err)
	}
	for _, statement := range []string{
		"insert into app.accounts (id, balance) select i, 1000000 from generate_series(0, $1 - 1) i",
		"insert into app.mirror (id, delta) select i, 0 from generate_series(0, $1 - 1) i",
	} {
		if _, err := s.db.ExecContext(ctx, statement, accounts); err != nil {
			return err
		}
	}
	migrate := func() error { return work.Migrate(ctx, s.db) }
	if older != "" {
		migrate = func() error { return migrateWith(ctx, older, s.url()) }
	}
	if err := migrate(); err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	_, err := s.db.ExecContext(ctx, work.Witness)
	return err
}

// Queues of the crucible itself.
const (
	mirrorQueue = "mirror"    // gets a copy of everything, for the record
	boxQueue    = "audit_box" // nobody reads it; a fault fills it
	canaryQueue = "canary"
)

// onChannel runs do on a channel of a connection of its own, without a proxy.
func (s *site) onChannel(do func(*amqp091.Channel) error) (err error) {
	conn, err := amqp091.Dial(s.rabbit.URL())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	return do(ch)
}

// declare creates what the processes would declare themselves, so that nothing is unroutable
// while they start, and the queues of the crucible.
func (s *site) declare(ch *amqp091.Channel) error {
	queues := []struct {
		name string
		args amqp091.Table
	}{
		{mirrorQueue, nil},
		{boxQueue, amqp091.Table{"x-max-length": 10}},
		{canaryQueue, amqp091.Table{"x-max-length": 10}},
		{work.Queue(work.TopicTransfers, work.RoleLedger), amqp091.Table{"x-single-active-consumer": true}},
		{work.Queue(work.TopicReceipts, work.RoleReceipts), nil},
	}
	for _, q := range queues {
		if s.brokers != nil {
			if q.args == nil {
				q.args = amqp091.Table{}
			}
			q.args[amqp091.QueueTypeArg] = amqp091.QueueTypeQuorum
		}
		if _, err := ch.QueueDeclare(q.name, true, false, false, false, q.args); err != nil {
			return err
		}
	}
	for _, topic := range []string{work.TopicTransfers, work.TopicReceipts, work.TopicAudit} {
		if err := ch.ExchangeDeclare(topic, amqp091.ExchangeFanout, true, false, false, false, nil); err != nil {
			return err
		}
	}
	for _, b := range [][2]string{
		{mirrorQueue, work.TopicTransfers},
		{mirrorQueue, work.TopicReceipts},
		{mirrorQueue, work.TopicAudit},
		{boxQueue, work.TopicAudit},
		{work.Queue(work.TopicTransfers, work.RoleLedger), work.TopicTransfers},
		{work.Queue(work.TopicReceipts, work.RoleReceipts), work.TopicReceipts},
	} {
		if err := ch.QueueBind(b[0], "", b[1], false, nil); err != nil {
			return err
		}
	}
	return nil
}

// queue is what the management API says of a queue.
type queue struct {
	Name     string `json:"name"`
	Messages int    `json:"messages"` // ready and unacknowledged
}

// close removes the servers.
func (s *site) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Minute)
	defer cancel()
	var errs []error
	if s.db != nil {
		errs = append(errs, s.db.Close())
	}
	all := []*testserver.Instance{s.postgres}
	if s.brokers != nil {
		all = append(all, s.brokers.nodes...)
	} else {
		all = append(all, s.rabbit)
	}
	if s.replicated != nil {
		all = append(all, s.replicated.proxy)
		all = append(all, s.replicated.nodes...)
		all = append(all, s.replicated.etcd)
	}
	for _, i := range all {
		if i == nil {
			continue
		}
		if log, err := os.ReadFile(i.Log()); err == nil { // for whoever looks at a failure
			errs = append(errs, os.WriteFile(i.Dir()+".log", log, 0o600))
		}
		errs = append(errs, i.Remove(ctx))
	}
	return errors.Join(errs...)
}

// ways are the proxies of one process.
type ways struct {
	postgres *testserver.PostgresProxy
	amqp     *testserver.AMQPProxy
}

// newWays starts the proxies of a process and returns their URLs. A cluster is reached
// directly: there is no proxy to it.
func (s *site) newWays(ctx context.Context) (w ways, postgres, amqp string, err error) {
	if s.replicated == nil {
		if w.postgres, postgres, err = testserver.StartPostgresProxy(ctx, s.postgres.URL()); err != nil {
			return w, "", "", err
		}
	}
	if s.brokers == nil {
		w.amqp, amqp, err = testserver.StartAMQPProxy(ctx, s.rabbit.URL())
	}
	return w, postgres, amqp, err
}

func (w ways) close() {
	if w.postgres != nil {
		w.postgres.Close()
	}
	if w.amqp != nil {
		w.amqp.Close()
	}
}

// escaped returns a path segment of the management API.
func escaped(s string) string { return url.PathEscape(s) }
