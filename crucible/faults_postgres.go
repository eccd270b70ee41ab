package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/oncemill/oncemill/crucible/work"
)

// terminate ends half of the backends of all processes.
const terminate = `select count(pg_terminate_backend(pid)) from pg_stat_activity
	where application_name ~ '^(relay|ledger|receipts|producer|service)-' and random() < 0.5`

func (h *hurt) databaseFaults() []fault {
	all := append(h.proxied(),
		fault{alone("heartbeats", kind("postgres-stale-lane-writes", relays, long, long)), h.onProxy(func(w ways) {
			w.postgres.Silence(heartbeat.MatchString, 1000)
			w.postgres.Delay(laneWrite.MatchString, staleness)
		}, func(w ways) {
			w.postgres.Delay(nil, 0)
			w.postgres.Resume()
		})},
		fault{alone("postgres", kind("postgres-crash", database, 0, 0)), func(ctx context.Context, _ string) (heal, error) {
			return h.site.postgres.Start, h.site.postgres.Crash(ctx)
		}},
		fault{kind("postgres-backends-terminated", database, 0, 0), func(ctx context.Context, _ string) (heal, error) {
			_, err := h.site.db.ExecContext(ctx, terminate)
			return done, err
		}},
		fault{kind("postgres-old-snapshot", []string{"snapshot"}, short, long), h.lock(
			"begin isolation level repeatable read; select count(*) from app.canary")},
		fault{kind("locked-rows-outbox", []string{"rows outbox"}, brief, short), h.lock(
			"begin; select from " + work.MillSchema + ".outbox order by id limit 20 for update skip locked")},
		fault{kind("locked-rows-accounts", []string{"rows accounts"}, brief, short), h.lock(
			"begin; select from app.accounts where id < 3 for update")},
		fault{kind("locked-rows-leases", []string{"rows leases"}, brief, short), h.lock(
			"begin; select from " + work.MillSchema + ".relay_leases where lane between 3 and 5 for update")},
	)
	for _, table := range []string{
		"outbox", "outbox_history", "scheduled", "relay_leases", "relay_workers", "parked", "dead_letters",
		"inbox", "inbox_failures",
	} {
		all = append(all, fault{kind("locked-table-"+strings.ReplaceAll(table, "_", "-"), []string{"table " + table}, brief, short), h.lock(
			"begin; lock table " + work.MillSchema + "." + table + " in access exclusive mode")})
	}
	return all
}

// A worker whose heartbeats get no answer goes on until its lease ends. What it writes for a
// lane is held back meanwhile, and so arrives when another worker has the lane. The library lets
// the server end a transaction that waits for longer than 2 s.
var (
	heartbeat = regexp.MustCompile(`insert into \S*relay_workers\b`)
	laneWrite = regexp.MustCompile(`(insert into|update) \S*(parked|dead_letters)\b`)
)

const staleness = 1500 * time.Millisecond

// lock holds a transaction open that has done something.
func (h *hurt) lock(statement string) func(context.Context, string) (heal, error) {
	return func(ctx context.Context, _ string) (heal, error) {
		db, err := sql.Open("postgres", h.site.postgres.URL()+"&application_name=locker&connect_timeout=2")
		if err != nil {
			return nil, err
		}
		db.SetMaxOpenConns(1)
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		if _, err := db.ExecContext(ctx, "set idle_in_transaction_session_timeout = '30s'; "+statement); err != nil {
			return nil, errors.Join(fmt.Errorf("%s: %w", statement, err), db.Close())
		}
		return func(context.Context) error { return db.Close() }, nil // which rolls back
	}
}
