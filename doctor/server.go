package doctor

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/oncemill/oncemill/internal/text"
)

// server judges the settings and the clock of the server.
func (e *examination) server(ctx context.Context) (found findings, err error) {
	begin := e.now()
	s, err := e.store.Server(ctx)
	if err != nil {
		return nil, err
	}
	// The server read its clock between the two.
	offset := max(s.Now.Sub(e.now()), begin.Sub(s.Now))
	if offset > e.cfg.ClockOffset {
		found.add(Warning, "clock", fmt.Sprintf("The clocks of this machine and of the database differ by %v.", offset.Round(time.Millisecond)),
			"Synchronize both (chrony, systemd-timesyncd). Times of messages and of logs do not fit together, and certificates may be refused.")
	}
	if s.Standby {
		found.add(Error, "standby", "The server is a standby: it accepts no writes.", "Connect to the primary, for example with target_session_attrs=read-write.")
	}
	if s.SynchronousCommit == "off" || s.SynchronousCommit == "local" {
		found.add(Error, "synchronous-commit", fmt.Sprintf("synchronous_commit is %s: the server can lose transactions that it has reported as committed, and publish messages of these.", s.SynchronousCommit),
			"Set it to on, at least for producers and consumers. Otherwise start relays with --require-durable.")
	}
	if !s.Fsync || !s.FullPageWrites {
		found.add(Error, "fsync", "fsync or full_page_writes is off: a power failure can destroy the database.", "Set both to on.")
	}
	if s.Standbys > 0 && !s.Synchronous {
		found.add(Warning, "asynchronous-failover", fmt.Sprintf("Standbys that follow asynchronously: %d. A failover loses the last transactions, and messages of these may have been published.", s.Standbys),
			"Set synchronous_standby_names and start relays with --require-durable, or keep a history and send the lost window again after a failover (oncemill resend).")
	}
	if s.Isolation != "" && s.Isolation != "read committed" {
		found.add(Warning, "isolation", fmt.Sprintf("default_transaction_isolation is %s: transactions of producers and consumers fail with serialization errors, and have to be repeated.", s.Isolation),
			"Set it to read committed, and a higher level where a transaction needs it.")
	}
	if !s.Autovacuum || !s.TrackCounts {
		found.add(Error, "autovacuum", "autovacuum or track_counts is off: tables grow with deleted rows, and reads become slow.", "Set both to on.")
	}
	return found, nil
}

func (e *examination) forgetfulRoles(ctx context.Context) (found findings, err error) {
	settings, err := e.store.ForgetfulRoles(ctx)
	for _, s := range settings {
		who := "All roles have"
		if s.Role != "" {
			who = "Role " + quoted(s.Role) + " has"
		}
		found.add(Error, "synchronous-commit", fmt.Sprintf("%s %s: the server can lose their transactions after it has reported them as committed.", who, s.Value),
			"If these are producers or consumers, run "+s.Reset+" and let them reconnect; or start relays with --require-durable.")
	}
	return found, err
}

func (e *examination) snapshots(ctx context.Context) (found findings, err error) {
	snapshots, err := e.store.Snapshots(ctx, e.cfg.SnapshotAge)
	if err != nil {
		return nil, err
	}
	for _, s := range snapshots {
		what := s.Kind + " " + quoted(s.Name)
		if s.PID != 0 {
			what += " (pid " + strconv.Itoa(s.PID) + ")"
		}
		found.add(Warning, "snapshots", fmt.Sprintf("A transaction of %s has been open for %v: vacuum removes no younger row, and reads pass over them.", what, s.Age.Truncate(time.Second)),
			"End it (pg_terminate_backend, rollback prepared). Set idle_in_transaction_session_timeout, and run long reports on a standby without hot_standby_feedback.")
	}
	slots, err := e.store.IdleSlots(ctx)
	for _, slot := range slots {
		found.add(Warning, "snapshots", fmt.Sprintf("Nobody reads replication slot %s: the server keeps deleted rows and its log for it.", quoted(slot)),
			"Start its subscriber, or remove it (pg_drop_replication_slot).")
	}
	return found, err
}

func (e *examination) sequences(ctx context.Context) (found findings, err error) {
	sequences, err := e.store.CachedSequences(ctx)
	for _, s := range sequences {
		found.add(Error, "sequence-cache", fmt.Sprintf("Sequence %s has cache %d: sessions use ids out of order, which breaks the order of keys.", s.Name, s.Cache),
			"Run alter sequence "+s.Name+" cache 1, and let producers reconnect: open sessions still have ids.")
	}
	return found, err
}

func (e *examination) autovacuum(ctx context.Context) (found findings, err error) {
	tables, err := e.store.WithoutAutovacuum(ctx)
	for _, table := range tables {
		found.add(Error, "autovacuum", fmt.Sprintf("Table %s has autovacuum_enabled off: it grows with deleted rows, and reads become slow.", table),
			"Run alter table "+table+" reset (autovacuum_enabled).")
	}
	return found, err
}

func (e *examination) subscription(ctx context.Context) (found findings, err error) {
	tables, err := e.store.Subscribed(ctx)
	if len(tables) > 0 {
		found.add(Error, "subscription", fmt.Sprintf("Tables are the target of a logical subscription: %s. Both servers deliver their messages, and a truncation on the publisher removes rows here.", strings.Join(tables, ", ")),
			"Drop the subscription before a relay works here, then run oncemill repair-sequence; see docs/operations.md, Logical replication.")
	}
	return found, err
}

func (e *examination) pooler(ctx context.Context) (found findings, err error) {
	pooled, err := e.store.Pooled(ctx)
	if pooled {
		found.add(Warning, "pooler", "The connection goes through a pooler that shares sessions of the server (PgBouncer in transaction mode): prepared statements and LISTEN do not work, and settings of a session reach others.",
			"With lib/pq set binary_parameters=yes, with pgx default_query_exec_mode=exec. Give relay --notify an address of the server itself. Nothing else needs to change.")
	}
	return found, err
}

// quoted returns a name in quotes, shortened.
func quoted(name string) string { return text.Quote(name, 64) }
