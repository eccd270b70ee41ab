package main

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill/cmd/oncemill/internal/verify"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

// verifyWorker is the hidden command that runs a process of oncemill verify.
const verifyWorker = "verify-worker"

type verifyOptions struct {
	verify.Config

	json, html string // files
}

func newVerify(opts *options) *cobra.Command {
	var o verifyOptions
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Test the promises on your own PostgreSQL and RabbitMQ; prints a certificate",
		Long: `Run a small service on your own PostgreSQL and RabbitMQ, disturb it, and check that
no message is lost, invented, reordered or handled twice, and that all copies of a
request get the same answer. The result is a certificate with the settings and
versions of the servers: text on standard output, and JSON and HTML files.

The command creates a schema, two exchanges and three queues with a random name
that begins with oncemill_verify_, fails if one of them exists, and removes them
at the end, also after an error or a signal. It uses nothing else: no table of
yours (--schema and --prefix have no effect), no server setting, no management API.
The database role must be allowed to create a schema. Eight processes open up to 50
database connections and 10 connections to RabbitMQ.

The faults are gentle: its own processes are killed, stopped and frozen for longer
than the lease; its own database and RabbitMQ connections are closed; messages are
published twice and requests sent in several copies at once. The servers are not
disturbed, but they have to carry the load (--rate).

Exit code 1 if a promise is broken.`,
		Example: `  oncemill verify --database postgres://app@localhost/shop --amqp-url amqp://localhost
  oncemill verify --time 10m --rate 500 --html certificate.html --database ... --amqp-url ...`,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd, opts) },
	}
	flags := cmd.Flags()
	flags.StringArrayVar(&o.AMQP, "amqp-url", nil, "amqp:// or amqps:// URL of RabbitMQ (required); repeat it for the other nodes of a cluster, or separate URLs with spaces")
	flags.BoolVar(&o.AllowPlaintext, "amqp-allow-plaintext", false, "allow amqp:// to hosts that are not loopback")
	flags.DurationVar(&o.Time, "time", 30*time.Second, "how long to send requests and inject faults, at least 5s; start and end take some more seconds")
	flags.Float64Var(&o.Rate, "rate", 100, "requests a second, 1 to 10000; the servers may be slower")
	flags.Uint64Var(&o.Seed, "seed", 0, "seed of requests and faults, for the same ones again (default: random)")
	flags.DurationVar(&o.Lease, "lease", 3*time.Second, "lease of the relays, 1s to 1m; a frozen process is frozen for one and a half")
	flags.DurationVar(&o.Patience, "patience", time.Minute, "how long nothing may move at the end before what is missing counts as lost; use at least four leases")
	flags.StringVar(&o.Schema, "name", "", "name of the schema, and the beginning of the names of exchanges and queues; must begin with "+verify.NamePrefix+" (default: random)")
	flags.BoolVar(&o.Keep, "keep", false, "do not remove the schema, the exchanges and the queues, or the logs of the processes")
	flags.StringVar(&o.json, "json", "", "file to write the certificate to as JSON")
	flags.StringVar(&o.html, "html", "", "file to write the certificate to as an HTML page")
	return cmd
}

func newVerifyWorker(opts *options) *cobra.Command {
	return &cobra.Command{
		Use:    verifyWorker,
		Hidden: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := opts.logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			return verify.Work(cmd.Context(), cmd.InOrStdin(), cmd.OutOrStdout(), log)
		},
	}
}

const randomName = "abcdefghijklmnopqrstuvwxyz0123456789"

// resolve checks the flags and fills in what is random.
func (o *verifyOptions) resolve(database databaseOptions) error {
	database.schema, database.prefix = o.Schema, ""
	if o.Schema == "" {
		name := []byte(verify.NamePrefix)
		for range 8 {
			name = append(name, randomName[rand.IntN(len(randomName))]) //nolint:gosec // not a secret
		}
		o.Schema = string(name)
	}
	o.AMQP = strings.Fields(strings.Join(o.AMQP, " "))
	bad := func(condition bool, problem string) error {
		if !condition {
			return nil
		}
		return &usageError{errors.New(problem)}
	}
	if err := errors.Join(
		bad(strings.HasPrefix(database.url, "sqlite:"), "--database: verify needs PostgreSQL"),
		bad(len(o.AMQP) == 0, "--amqp-url or ONCEMILL_AMQP_URL is required"),
		bad(slices.ContainsFunc(o.AMQP, ambiguous), "--amqp-url: "+howToEscape),
		bad(!strings.HasPrefix(o.Schema, verify.NamePrefix), "--name: must begin with "+verify.NamePrefix),
		bad(o.Time < 5*time.Second, "--time: must be at least 5s"),
		bad(o.Rate < 1 || o.Rate > 10_000, "--rate: must be 1 to 10000"),
		bad(o.Lease < time.Second || o.Lease > time.Minute, "--lease: must be 1s to 1m"),
		bad(o.Patience < time.Second, "--patience: must be at least 1s"),
	); err != nil {
		return err
	}
	// The same checks as for a relay.
	db, _, err := database.open(false)
	if err != nil {
		return err
	}
	if err := db.Close(); err != nil {
		return err
	}
	if _, err := rabbitmq.New(amqp.NewDurablePubSubConfig(o.AMQP[0], nil), rabbitmq.Config{Addresses: o.AMQP[1:], AllowPlaintext: o.AllowPlaintext}); err != nil {
		return &usageError{err}
	}
	for o.Seed == 0 {
		o.Seed = rand.Uint64() //nolint:gosec // not a secret
	}
	o.Database = database.url
	return nil
}

var errPromise = errors.New("a promise was broken; see the certificate")

func (o *verifyOptions) run(cmd *cobra.Command, opts *options) error {
	if err := o.resolve(opts.database); err != nil {
		return err
	}
	log, err := opts.logger(cmd.ErrOrStderr())
	if err != nil {
		return err
	}
	// An unwritable file is found now, not after the run.
	files := map[string]func(*verify.Certificate, io.Writer) error{o.json: (*verify.Certificate).JSON, o.html: (*verify.Certificate).HTML}
	delete(files, "")
	for name := range files {
		if err := os.WriteFile(name, nil, 0o600); err != nil {
			return &usageError{err}
		}
	}
	o.Version, o.Worker, o.Migrations = version(), []string{verifyWorker, "--log-level", opts.logLevel}, sets
	line := newProgressLine(cmd.ErrOrStderr())
	o.Progress = line.show
	log.InfoContext(cmd.Context(), "verify starting", "name", o.Schema, "seed", o.Seed, "time", o.Time)
	certificate, err := verify.Run(cmd.Context(), o.Config)
	line.clear()
	if err != nil {
		return err
	}
	if o.Keep {
		log.InfoContext(cmd.Context(), "schema, exchanges and queues kept", "name", o.Schema)
	}
	for name, write := range files {
		if err := writeFile(name, func(out io.Writer) error { return write(certificate, out) }); err != nil {
			return err
		}
	}
	if err := certificate.Text(cmd.OutOrStdout()); err != nil {
		return err
	}
	if !certificate.Passed() {
		return errPromise
	}
	return nil
}

func writeFile(name string, write func(io.Writer) error) (err error) {
	file, err := os.Create(name) //nolint:gosec // the operator names it
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	return write(file)
}

// progressLine is a line of a terminal that is overwritten. Elsewhere nothing is shown.
type progressLine struct {
	out  io.Writer // nil: not a terminal
	last verify.Progress
	at   time.Time
}

func newProgressLine(out io.Writer) *progressLine {
	file, ok := out.(*os.File)
	if !ok {
		return &progressLine{}
	}
	if info, err := file.Stat(); err != nil || info.Mode()&os.ModeCharDevice == 0 {
		return &progressLine{}
	}
	return &progressLine{out: file}
}

func (l *progressLine) show(p verify.Progress) {
	if l.out == nil {
		return
	}
	now := time.Now()
	rate := float64(p.Requests-l.last.Requests) / now.Sub(l.at).Seconds()
	l.last, l.at = p, now
	left := ""
	if p.Left > 0 {
		left = fmt.Sprintf(", %s left", p.Left.Round(time.Second))
	}
	fmt.Fprintf(l.out, "\r\x1b[K%s: %d requests, %.0f/s, %d messages, %d faults%s", p.Phase, p.Requests, max(0, rate), p.Messages, p.Faults, left)
}

func (l *progressLine) clear() {
	if l.out != nil {
		fmt.Fprint(l.out, "\r\x1b[K")
	}
}
