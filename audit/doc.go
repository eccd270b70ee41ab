// Package audit lists what people did to messages and workers: who, when, why and what.
//
//	log, err := audit.New(db, audit.Config{})
//	...
//	entries, err := log.List(ctx, audit.Filter{By: "ada", Since: time.Now().Add(-24 * time.Hour)})
//
// Each act of package dlq (replay, edit, discard, restore, note, import), of package steer
// (pause, resume, retry, release) and of idempotency.Admin (settle, release, erase) writes its
// entries in its own transaction: there is no act without its entries, and no entry of an act
// that did not happen. What workers do by themselves is not an act.
//
// # Migrations
//
// The table is in a migration set of its own, [Migrations], because not only dead letters
// are audited. Pass it to oncemill.Migrate together with dlq.Migrations. Without the table,
// acts fail with dlq.ErrNoAudit or idempotency.ErrNoAudit, and change nothing.
//
// # What it does not prove
//
// By and Reason are what the caller has said. On PostgreSQL, Role is the role that was
// logged in, by the server. With the grants of docs/operations.md, a role that acts can add
// entries, but only the owner of the table can change or delete them. On SQLite, everybody
// who may write the file can.
package audit
