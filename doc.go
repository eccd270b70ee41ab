// Package oncemill is the shared vocabulary of the oncemill building blocks:
// which database dialect is spoken ([Dialect]), where the tables are
// ([Config]), the transaction that the caller owns ([Tx]), the one way to carry
// it in a context ([ContextWithTx]), and the migrations that make the tables
// ([Migrate]).
//
// The building blocks live in the packages below it: outbox writes messages in
// the caller's transaction, relay delivers them, inbox applies a message's
// effects once, idempotency runs a retried HTTP request once.
//
//	cfg := oncemill.Config{}
//	err := oncemill.Migrate(ctx, db, cfg, outbox.Migrations, dlq.Migrations, relay.Migrations, inbox.Migrations, idempotency.Migrations)
package oncemill
