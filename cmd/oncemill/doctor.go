package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/doctor"
	"github.com/oncemill/oncemill/doctor/rabbitmq"
)

var errFindings = errors.New("errors were found; see above")

type doctorOptions struct {
	amqp     amqpOptions
	topology string
	broker   rabbitmq.Config
	tables   doctor.Config
}

func newDoctor(opts *options) *cobra.Command {
	var asJSON bool
	var o doctorOptions
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Look for settings that lose messages silently, and for tables that nobody purges",
		Long: `Look for what makes others lose messages silently: settings of the database and of its
server, missing indexes, and tables that nobody purges. Each finding has what to do.

It changes nothing and reads little. It sees what its role may see: give it a role with
pg_monitor, and once the role of your producers, whose settings may differ. It exits with
1 if there are errors; warnings alone are a success.

With --amqp-url it also checks RabbitMQ: whether the exchanges and queues of --topic and
--queue exist, and with --amqp-admin whether queues are bound, and whether they drop
messages: by a delivery limit, a maximal length, or an expiry.`,
		Example: `  oncemill doctor
  oncemill doctor --json | jq .
  oncemill doctor --amqp-url amqp://localhost --amqp-admin http://guest:guest@localhost:15672 --topic orders`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return opts.database.with(func(db *sql.DB, where oncemill.Config) error {
				o.tables.Database = where
				findings, err := o.check(cmd.Context(), db)
				var usage *usageError
				if errors.As(err, &usage) {
					return err
				}
				return errors.Join(report(cmd.OutOrStdout(), findings, err == nil, asJSON), err)
			})
		},
	}
	flags := cmd.Flags()
	o.amqp.register(flags)
	flags.Lookup("amqp-url").Usage = "amqp:// or amqps:// URL of RabbitMQ (default: it is not checked); repeat it for the other nodes of a cluster, or separate URLs with spaces"
	flags.StringVar(&o.broker.Admin, "amqp-admin", "", "http:// or https:// URL of RabbitMQ's management API, with user and password (default: none)")
	flags.StringVar(&o.topology, "topology", "pubsub", "what a topic is: pubsub (a durable fanout exchange) or queue (a durable queue)")
	flags.StringArrayVar(&o.broker.Topics, "topic", nil, "topic that producers publish to; repeat it for others")
	flags.StringArrayVar(&o.broker.Queues, "queue", nil, "queue of a consumer; repeat it for others")
	flags.BoolVar(&asJSON, "json", false, "print a JSON array of findings")
	flags.DurationVar(&o.tables.InboxRetention, "inbox-retention", 7*24*time.Hour, "how long consumers keep ids")
	flags.DurationVar(&o.tables.LetterRetention, "letter-retention", 90*24*time.Hour, "how long closed dead letters are kept")
	flags.DurationVar(&o.tables.Overdue, "overdue", 24*time.Hour, "how long what is past its retention may stay")
	flags.DurationVar(&o.tables.SnapshotAge, "snapshot-age", 10*time.Minute, "how long a transaction may keep deleted rows")
	flags.DurationVar(&o.tables.ClockOffset, "clock-offset", 2*time.Second, "how far clocks may differ")
	return cmd
}

// check examines the database, and the broker if it is named. It returns what it has found also
// with an error, since one of the two may work.
func (o *doctorOptions) check(ctx context.Context, db *sql.DB) ([]doctor.Finding, error) {
	d, err := doctor.New(db, o.tables)
	if err != nil {
		return nil, &usageError{err}
	}
	broker, err := o.brokerDoctor()
	if err != nil {
		return nil, &usageError{err}
	}
	findings, err := d.Check(ctx)
	if broker == nil || ctx.Err() != nil {
		return findings, err
	}
	more, brokerErr := broker.Check(ctx)
	return append(findings, more...), errors.Join(err, brokerErr)
}

// brokerDoctor returns nil if the broker is not to be checked.
func (o *doctorOptions) brokerDoctor() (*rabbitmq.Doctor, error) {
	if len(o.amqp.urls) == 0 {
		if o.broker.Admin != "" || len(o.broker.Topics)+len(o.broker.Queues) > 0 {
			return nil, errors.New("--amqp-admin, --topic and --queue require --amqp-url")
		}
		return nil, nil
	}
	urls, err := o.amqp.split()
	if err != nil {
		return nil, err
	}
	topology, err := topologyOf(o.topology, urls[0])
	if err != nil {
		return nil, err
	}
	if ambiguous(o.broker.Admin) {
		return nil, errors.New("--amqp-admin: " + howToEscape)
	}
	o.broker.Addresses, o.broker.AllowPlaintext = urls[1:], o.amqp.allowPlaintext
	return rabbitmq.New(topology, o.broker)
}

// topologyOf returns what a topic is.
func topologyOf(name, url string) (amqp.Config, error) {
	switch name {
	case "pubsub":
		return amqp.NewDurablePubSubConfig(url, nil), nil
	case "queue":
		return amqp.NewDurableQueueConfig(url), nil
	}
	return amqp.Config{}, &usageError{fmt.Errorf("--topology %q: must be pubsub or queue", name)}
}

// report prints findings, errors first, and returns an error if there is one. It prints nothing if
// there are none and not all was checked: an empty array would be good news.
func report(out io.Writer, findings []doctor.Finding, whole, asJSON bool) error {
	slices.SortStableFunc(findings, func(a, b doctor.Finding) int { return weight(a) - weight(b) })
	if len(findings) == 0 && !whole {
		return nil
	}
	if asJSON {
		if err := printJSON(out, findings, ""); err != nil {
			return err
		}
	} else if err := printFindings(out, findings); err != nil {
		return err
	}
	if slices.ContainsFunc(findings, func(f doctor.Finding) bool { return f.Severity == doctor.Error }) {
		return errFindings
	}
	return nil
}

func weight(f doctor.Finding) int {
	if f.Severity == doctor.Error {
		return 0
	}
	return 1
}

func printFindings(out io.Writer, findings []doctor.Finding) error {
	if len(findings) == 0 {
		_, err := fmt.Fprintln(out, "Nothing is wrong.")
		return err
	}
	const indent = "    "
	columns := columnsOf(out)
	for _, f := range findings {
		problem := wrapped(fmt.Sprintf("%s (%s): %s", f.Severity, f.Check, wholeLine(f.Problem)), columns, indent)
		if _, err := fmt.Fprintf(out, "%s\n%s\n", problem, wrapped(indent+wholeLine(f.Remedy), columns, indent)); err != nil {
			return err
		}
	}
	return nil
}

// wholeLine returns a text as one line, in which strangers can control no terminal.
func wholeLine(text string) string {
	return escaped(strings.ReplaceAll(text, "\n", " "), func(out *strings.Builder, r rune) {
		out.WriteString(strings.Trim(strconv.QuoteRuneToASCII(r), "'"))
	})
}
