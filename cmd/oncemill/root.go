package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime/debug"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// usageError is a mistake in flags, variables or arguments.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

// flagOf maps fields of configurations to the flags that set them.
var flagOf = map[string]string{
	"oncemill.Config.Schema":            "--schema",
	"oncemill.Config.Prefix":            "--prefix",
	"doctor.Config.InboxRetention":      "--inbox-retention",
	"doctor.Config.LetterRetention":     "--letter-retention",
	"doctor.Config.Overdue":             "--overdue",
	"doctor.Config.SnapshotAge":         "--snapshot-age",
	"doctor.Config.ClockOffset":         "--clock-offset",
	"dlq.Filter.Limit":                  "--limit",
	"audit.Filter.Limit":                "--limit",
	"idempotency.Filter.Limit":          "--limit",
	"idempotency.Filter.Phases":         "--state",
	"idempotency.AdminConfig.Retention": "--retention",
	"dlq.Filter.States":                 "--state",
	"amqp.Config.Connection.AmqpURI":    "--amqp-url",
	"rabbitmq.Config.Admin":             "--amqp-admin",
	"rabbitmq.Config.Shards.Previous":   "--previous",
	"rabbitmq.Config.Shards.Count":      "--count",
	"relay.Config.UniqueName":           "--unique-name",
	"relay.Config.Lease":                "--lease",
	"relay.Config.StopTimeout":          "--stop-timeout",
	"relay.Config.PollMin":              "--poll-min",
	"relay.Config.PollMax":              "--poll-max",
	"relay.Config.Window":               "--window",
	"relay.Config.Retry.MaxAttempts":    "--max-attempts",
	"relay.Config.Retry.Initial":        "--retry-initial",
	"relay.Config.Retry.Max":            "--retry-max",
	"status.RetryingFilter.Limit":       "--limit",
}

// inFlags returns the text of an error, with flags in place of fields.
func inFlags(err error) string {
	text := strings.NewReplacer(
		"set rabbitmq.Config.AllowPlaintext", "add --amqp-allow-plaintext",
		"rabbitmq.Config.Addresses[", "further --amqp-url [",
		"or set rabbitmq.Config.AllowPlaintext", "or add --amqp-allow-plaintext",
	).Replace(err.Error())
	for field, flag := range flagOf {
		text = strings.ReplaceAll(text, field+" = ", flag+" ")
	}
	return text
}

// options are the flags that all commands share.
type options struct {
	config    string
	database  databaseOptions
	logFormat string
	logLevel  string

	readTimeout time.Duration
}

func newRoot() *cobra.Command {
	opts := &options{}
	root := &cobra.Command{
		Use:   "oncemill",
		Short: "Exactly-once effects over at-least-once infrastructure",
		Long: `oncemill creates and upgrades oncemill's tables, runs the relay that delivers
committed messages, shows what waits and who works, pauses and resumes what you name, finds
messages wherever they are, looks for faults of the set-up, lists and replays dead letters
and who did that, settles idempotency keys, deletes what has expired, tests the promises on your own
servers, and tests how HTTP services treat Idempotency-Key.

Every flag can also be set by an environment variable, --amqp-url by ONCEMILL_AMQP_URL,
and in a YAML file that --config names: a map of flags, and of commands with theirs. A
flag overrides its variable, which overrides the file.

Exit codes: 0 success (relay: stopped by a signal), 1 failure, also of an act that found
nothing to act on, 2 wrong usage.`,
		SilenceUsage:  true,
		SilenceErrors: true,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if err := fromEnvironment(cmd.Flags(), os.LookupEnv); err != nil {
				return err
			}
			if opts.config != "" {
				if err := fromFile(cmd, opts.config); err != nil {
					return err
				}
			}
			if opts.readTimeout < 0 {
				return &usageError{fmt.Errorf("--read-timeout %v: must be positive, or 0 for none", opts.readTimeout)}
			}
			opts.database.url = driverURL(opts.database.url) // before anything connects
			if socketFirst(opts.database.url) {
				return &usageError{errors.New("--database: the list of hosts begins with a socket, and then the driver uses TLS for none of them; give either sockets or hosts")}
			}
			log, err := opts.logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			if mode := unverified(opts.database.url); mode != "" {
				log.WarnContext(cmd.Context(), "database server's certificate is not verified; use sslmode=verify-full", "sslmode", mode)
			}
			return nil
		},
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &usageError{err} })
	flags := root.PersistentFlags()
	flags.StringVar(&opts.config, "config", "", "YAML file with further flags, such as lease: 15s, in a map for each command or for all (default: none)")
	opts.database.register(flags)
	flags.DurationVar(&opts.readTimeout, "read-timeout", readTimeout, "time limit of a command that only reads the database, and of others until they begin to change it; 0 for none")
	flags.StringVar(&opts.logFormat, "log-format", "text", "format of the log on standard error: text or json")
	flags.StringVar(&opts.logLevel, "log-level", "info", "lowest level to log: debug, info, warn or error")
	root.AddCommand(
		newMigrate(opts),
		newRelay(opts),
		newVersion(),
		newStatus(opts),
		newDoctor(opts),
		newDLQ(opts),
		newJobs(opts),
		newAudit(opts),
		newPause(opts),
		newResume(opts),
		newRelease(opts),
		newRetry(opts),
		newResend(opts),
		newMoveShards(opts),
		newPurge(opts),
		newKeys(opts),
		newRepairSequence(opts),
		newConformance(),
		newProbe(opts),
		newVerify(opts),
		newVerifyWorker(opts),
		newHistory(opts),
		newOutbox(opts),
		newRetrying(opts),
		newWorkers(opts),
		newInbox(opts),
	)
	root.InitDefaultCompletionCmd()
	for _, c := range append(root.Commands(), root) {
		if !c.Runnable() { // it has subcommands alone
			c.RunE, c.Args = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }, nil
		}
		if c.Args == nil {
			c.Args = wrongUse(noCommand)
		}
	}
	root.Version = version()
	root.SetVersionTemplate("{{.DisplayName}} {{.Version}}\n")
	root.SetHelpCommand(newHelp())
	return root
}

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version of this program and of Go",
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), "oncemill", version())
			return err
		},
	}
}

// newHelp is cobra's help command, but an unknown command is an error.
func newHelp() *cobra.Command {
	return &cobra.Command{
		Use:   "help [command]",
		Short: "Help about any command",
		RunE: func(cmd *cobra.Command, args []string) error {
			about, rest, err := cmd.Root().Find(args)
			if err != nil || len(rest) > 0 {
				return noCommand(about, args[len(args)-max(1, len(rest)):])
			}
			return about.Help()
		},
	}
}

// noCommand refuses arguments, which are mistyped commands, and suggests similar commands.
func noCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	text := fmt.Sprintf("unknown command %q for %q", args[0], cmd.CommandPath())
	if !cmd.HasSubCommands() {
		text = fmt.Sprintf("%q takes no argument %q", cmd.CommandPath(), args[0])
	}
	if cmd.SuggestionsMinimumDistance == 0 {
		cmd.SuggestionsMinimumDistance = 2
	}
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		text += "; did you mean " + strings.Join(near, " or ") + "?"
	}
	return &usageError{errors.New(text)}
}

// version returns the version this program was built from.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	text := cmp.Or(info.Main.Version, "(devel)")
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && !strings.Contains(text, s.Value[:min(12, len(s.Value))]) {
			text += " " + s.Value
		}
	}
	return text + " " + info.GoVersion
}

// wrongUse turns the errors of check into usage errors.
func wrongUse(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return &usageError{err}
		}
		return nil
	}
}

// noneEmpty returns an error if one of these flags was given without a value, as a variable of a
// script that is not set does. A command must not act on more than it was meant to.
func noneEmpty(cmd *cobra.Command, names ...string) error {
	for _, name := range names {
		f := cmd.Flags().Lookup(name)
		empty := f.Value.String() == ""
		if list, ok := f.Value.(pflag.SliceValue); ok {
			empty = len(list.GetSlice()) == 0
		}
		if f.Changed && empty {
			return &usageError{fmt.Errorf("--%s is empty; give it a value, or leave it out, in the environment and in --config too", name)}
		}
	}
	return nil
}

// fromEnvironment sets each flag that was not given from its variable.
func fromEnvironment(flags *pflag.FlagSet, lookup func(string) (string, bool)) error {
	var errs []error
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Changed || f.Name == "help" || f.Name == "version" {
			return
		}
		name := "ONCEMILL_" + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
		value, ok := lookup(name)
		if !ok {
			return
		}
		if err := flags.Set(f.Name, value); err != nil {
			// The value may be a secret, so the error only names the variable.
			errs = append(errs, fmt.Errorf("%s: invalid value for --%s (%s)", name, f.Name, f.Value.Type()))
		}
	})
	if err := errors.Join(errs...); err != nil {
		return &usageError{err}
	}
	return nil
}

func (o *options) logger(w io.Writer) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(o.logLevel)); err != nil {
		return nil, &usageError{fmt.Errorf("--log-level %q: must be debug, info, warn or error", o.logLevel)}
	}
	handlerOptions := &slog.HandlerOptions{Level: level}
	switch o.logFormat {
	case "text":
		return slog.New(slog.NewTextHandler(w, handlerOptions)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, handlerOptions)), nil
	}
	return nil, &usageError{fmt.Errorf("--log-format %q: must be text or json", o.logFormat)}
}
