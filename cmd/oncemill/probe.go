package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/idempotency/conformance"
	"github.com/oncemill/oncemill/outbox"
)

type probeOptions struct {
	listen   string
	snapshot bool
}

func newProbe(opts *options) *cobra.Command {
	var o probeOptions
	cmd := &cobra.Command{
		Use:   "probe",
		Short: "Serve the probe of the conformance suite, for tests; creates its tables",
		Long: `Serve the probe of the conformance suite on a database. Use it for tests only:
it has no authentication, and its requests write to the database.`,
		Example: `  oncemill probe --database sqlite:probe.db --listen 127.0.0.1:8080`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := opts.logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			return opts.database.create(func(db *sql.DB, cfg oncemill.Config) error {
				engineConfig := idempotency.Config{
					Scope:     conformance.Scope,
					Timeout:   3 * time.Second,
					Logger:    log,
					Failures:  idempotency.FailureConfig{Lease: 6 * time.Second},
					Requests:  idempotency.RequestConfig{MaxBody: 2 << 20},
					Responses: idempotency.ResponseConfig{MaxSize: 200_000},
					Answers:   idempotency.AnswerConfig{StatusPath: "/status/"},
				}
				return o.serve(cmd, db, cfg, engineConfig)
			})
		},
	}
	cmd.Flags().StringVar(&o.listen, "listen", "127.0.0.1:8080", "address to listen on")
	cmd.Flags().BoolVar(&o.snapshot, "snapshot", false, "store answers without a transaction")
	return cmd
}

func (o *probeOptions) serve(cmd *cobra.Command, db *sql.DB, cfg oncemill.Config, engineConfig idempotency.Config) error {
	ctx := cmd.Context()
	if err := oncemill.Migrate(ctx, db, cfg, outbox.Migrations, idempotency.Migrations); err != nil {
		return err
	}
	table, err := cfg.Table(db, "probe_effects")
	outboxTable, outboxErr := cfg.Table(db, "outbox")
	if err := errors.Join(err, outboxErr); err != nil {
		return err
	}
	effects := probeEffects{db: db, table: table, outbox: outboxTable}
	if _, err := db.ExecContext(ctx, `create table if not exists `+effects.table+` (name text not null)`); err != nil {
		return fmt.Errorf("create the table of effects: %w", err)
	}
	store, storeErr := idempotency.NewSQLStore(db, idempotency.StoreConfig{Database: cfg})
	box, boxErr := outbox.New(db, outbox.Config{Database: cfg})
	if err := errors.Join(storeErr, boxErr); err != nil {
		return err
	}
	effects.box = box
	engine, err := idempotency.New(store, engineConfig)
	if err != nil {
		return err
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", o.listen)
	if err != nil {
		return err
	}
	probe := conformance.NewProbe(engine, effects, conformance.Capabilities{
		Transactional: !o.snapshot, FailuresUnknown: o.snapshot, Timeout: engineConfig.Timeout, MaxBody: engineConfig.Requests.MaxBody, MaxResponse: engineConfig.Responses.MaxSize,
	})
	server := &http.Server{Handler: probe, ReadHeaderTimeout: 10 * time.Second}
	fmt.Fprintf(cmd.OutOrStdout(), "probe at http://%s\n", listener.Addr())
	stop := context.AfterFunc(ctx, func() { _ = server.Close() }) // Serve returns http.ErrServerClosed
	defer stop()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// probeEffects are rows of a table and messages of the outbox.
type probeEffects struct {
	db            *sql.DB
	box           *outbox.Outbox
	table, outbox string // quoted names
}

func (e probeEffects) Add(ctx context.Context, name string) error {
	text := `insert into ` + e.table + ` (name) values ($1)`
	if tx, ok := idempotency.TxFromContext(ctx); ok {
		_, err := tx.ExecContext(ctx, text, name)
		return err
	}
	return e.box.RunInTx(ctx, func(ctx context.Context, tx *sql.Tx) error { // waits for its turn on SQLite
		_, err := tx.ExecContext(ctx, text, name)
		return err
	})
}

func (e probeEffects) Publish(ctx context.Context, name string) error {
	publish := func(ctx context.Context) error {
		return e.box.ContextPublisher().Publish(name, message.NewMessageWithContext(ctx, watermill.NewUUID(), nil))
	}
	if _, ok := idempotency.TxFromContext(ctx); ok {
		return publish(ctx)
	}
	return e.box.RunInTx(ctx, func(ctx context.Context, _ *sql.Tx) error { return publish(ctx) })
}

func (e probeEffects) Count(ctx context.Context, name string) (counts conformance.Counts, err error) {
	err = errors.Join(
		e.db.QueryRowContext(ctx, `select count(*) from `+e.table+` where name = $1`, name).Scan(&counts.Effects),
		e.db.QueryRowContext(ctx, `select count(*) from `+e.outbox+` where topic = $1`, name).Scan(&counts.Messages),
	)
	return counts, err
}
