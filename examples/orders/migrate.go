package main

import (
	"context"
	"fmt"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/examples/data"
	"github.com/oncemill/oncemill/examples/shop"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

func runMigrate(ctx context.Context, args []string) error {
	var s settings
	if err := s.flags("migrate").Parse(args); err != nil {
		return err
	}
	if err := s.check(); err != nil {
		return err
	}
	return s.migrate(ctx)
}

// migrate makes the tables of the shop and of oncemill unless they are there, and
// puts the products on sale.
func (s *settings) migrate(ctx context.Context) error {
	db, err := s.open()
	if err != nil {
		return err
	}
	defer db.Close() //nolint:errcheck // every statement has been answered by then
	if _, err := db.ExecContext(ctx, "create schema if not exists "+pq.QuoteIdentifier(s.schema)); err != nil {
		return fmt.Errorf("create schema: %w", err)
	}
	if err := shop.CreateTables(ctx, db); err != nil {
		return err
	}
	if err := shop.AddProducts(ctx, db, data.Catalogue()); err != nil {
		return err
	}
	return oncemill.Migrate(ctx, db, s.tables(), outbox.Migrations, dlq.Migrations, relay.Migrations, inbox.Migrations, idempotency.Migrations)
}
