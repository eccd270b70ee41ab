package main

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	_ "github.com/lib/pq" // the driver that both sides use
)

// bench is what the rows share.
type bench struct {
	servers *servers
	db      *sql.DB
	traffic *traffic
	pairs   int
	queue   string // its kind
	profile string // file for the CPU profile of our side, if any
	log     *slog.Logger
	begin   time.Time
	found   findings
	chosen  map[string]bool // ids of the rows to run
}

const (
	usualPairs = 3
	longPairs  = 5
	idleConns  = 16
)

// row is one line of the comparison, or a baseline alone.
type row struct {
	id    string
	alone bool // a single side: nothing to compare, runs only when it is named
	long  bool // takes minutes: runs with -long, or when it is named
	run   func(ctx context.Context, b *bench) ([]result, error)
}

var rows = []row{
	{id: "relay-rabbitmq", run: relayRabbitMQ},
	{id: vsForwarder, run: relayVsForwarder},
	{id: "relay-engine", run: relayEngine},
	{id: "relay-vs-skiplocked", run: relayVsSkipLocked},
	{id: "relay-wal", run: relayWAL},
	{id: "relay-hotkey", run: relayHotKey},
	{id: "publish", run: publish},
	{id: "latency", run: latency},
	{id: "dead-topics", run: deadTopics},
	{id: "idle", run: idle},
	{id: "scale-out", run: scaleOut},
	{id: "growth-xmin", long: true, run: growthXmin},
	{id: "idempotency", run: idempotencyRow},
	{id: "growth-keys", long: true, run: growthKeys},
	{id: "inbox", run: inboxRow},
	{id: "inbox-limit", run: inboxLimit},
	{id: "inbox-hot", run: inboxHot},
	{id: "growth-inbox", long: true, run: growthInbox}, // takes minutes to fill
	{id: "raw", alone: true, run: rawAlone},
	{id: "forwarder", alone: true, run: forwarderAlone},
	{id: "skiplocked", alone: true, run: skipLockedAlone},
	{id: "copy", alone: true, run: copyAlone},
	{id: "lean", alone: true, run: leanAlone},
}

type options struct {
	rows, root, profile string
	out, docs           string
	postgres, amqp      string
	queue               string
	pairs               int
	long                bool
}

func main() {
	var o options
	flag.StringVar(&o.rows, "rows", "", "comma-separated `ids` of rows to run; all comparisons if empty. There are: "+strings.Join(ids(rows), ", "))
	flag.IntVar(&o.pairs, "pairs", 0, fmt.Sprintf("`rounds` of each row; default: %d, or %d with -long", usualPairs, longPairs))
	flag.BoolVar(&o.long, "long", false, "more rounds, and the rows that take minutes")
	flag.StringVar(&o.out, "out", "", "`file` for the results as JSON; default: bench.json in the repository for a run of all rows, none for a run of some")
	flag.StringVar(&o.docs, "docs", "", "`directory` for the table and the plot; default: docs/bench in the repository for a run of all rows, none for a run of some")
	flag.StringVar(&o.root, "root", filepath.Join("..", ".."), "`directory` of the repository")
	flag.StringVar(&o.profile, "cpuprofile", "", "`file` for a CPU profile of our side's latest measured run")
	flag.StringVar(&o.postgres, "postgres", "", "`URL` of a PostgreSQL to use instead of a private one; its schema oncemill and some tables of public are overwritten")
	flag.StringVar(&o.amqp, "amqp", "", "`URI` of a RabbitMQ to use instead of a private one")
	flag.StringVar(&o.queue, "queue", "quorum", "`kind` of the queue that all sides publish to and consume from: quorum or classic")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) (err error) {
	chosen, err := choose(o.rows, o.long)
	if err != nil {
		return err
	}
	if err := o.fill(); err != nil {
		return err
	}
	if _, known := queueArguments[o.queue]; !known {
		return fmt.Errorf("-queue %s: must be quorum or classic", o.queue)
	}
	b := &bench{traffic: newTraffic(), pairs: o.pairs, queue: o.queue, profile: o.profile, begin: time.Now(), chosen: map[string]bool{}}
	for _, r := range chosen {
		b.chosen[r.id] = true
	}
	b.log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	b.say("starting servers")
	b.servers, err = startServers(ctx, o.root, o.postgres, o.amqp)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.servers.stop()) }()
	b.db, err = sql.Open("postgres", b.servers.postgres)
	if err != nil {
		return err
	}
	defer b.db.Close()
	// As a service with a relay would: else a third connection is made anew for
	// every statement that needs it.
	b.db.SetMaxIdleConns(idleConns)
	rep := report{Machine: thisMachine()}
	if rep.Versions, err = versionsOf(ctx, b.db, b.servers.amqp); err != nil {
		return err
	}
	if rep.Settings, err = b.settings(ctx); err != nil {
		return err
	}
	if err := b.prepare(ctx); err != nil {
		return err
	}
	if rep.Rows, err = b.measure(ctx, chosen); err != nil {
		return err
	}
	if len(rep.Rows) > 0 {
		if err := rep.table(os.Stdout); err != nil {
			return err
		}
	}
	if o.out != "" {
		if err := rep.writeJSON(o.out); err != nil {
			return err
		}
	}
	if o.docs != "" {
		return rep.writeDocs(o.docs)
	}
	return nil
}

func (b *bench) measure(ctx context.Context, chosen []row) ([]result, error) {
	var all []result
	for _, r := range chosen {
		results, err := r.run(ctx, b)
		if err != nil {
			return nil, err
		}
		for _, res := range results {
			b.say("%-20s ratio %s; %s", res.ID, human(res.Ratio), res.goalText())
		}
		all = append(all, results...)
	}
	b.say("done")
	return all, nil
}

// fill fills the defaults in.
func (o *options) fill() error {
	switch {
	case o.pairs < 0:
		return fmt.Errorf("-pairs %d: must be at least 1", o.pairs)
	case o.pairs == 0 && o.long:
		o.pairs = longPairs
	case o.pairs == 0:
		o.pairs = usualPairs
	}
	if o.rows != "" {
		return nil
	}
	if o.out == "" {
		o.out = filepath.Join(o.root, "bench.json")
	}
	if o.docs == "" {
		o.docs = filepath.Join(o.root, "docs", "bench")
	}
	return nil
}

// choose returns the rows with the given ids, in the order given; if none are
// named, all comparisons, with the long ones only if asked for.
func choose(list string, long bool) ([]row, error) {
	var chosen []row
	if list == "" {
		for _, r := range rows {
			if !r.alone && (long || !r.long) {
				chosen = append(chosen, r)
			}
		}
		return chosen, nil
	}
	for id := range strings.SplitSeq(list, ",") {
		at := slices.IndexFunc(rows, func(r row) bool { return r.id == id })
		if at < 0 {
			return nil, fmt.Errorf("-rows: there is no row %q; there are %s", id, strings.Join(ids(rows), ", "))
		}
		chosen = append(chosen, rows[at])
	}
	return chosen, nil
}

func ids(rows []row) []string {
	out := make([]string, len(rows))
	for i, r := range rows {
		out[i] = r.id
	}
	return out
}

// say reports progress.
func (b *bench) say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%6.1f s  "+format+"\n", append([]any{time.Since(b.begin).Seconds()}, args...)...)
}
