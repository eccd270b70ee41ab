package inbox

import (
	"bytes"
	"database/sql/driver"
	"encoding/hex"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/pgmodel"
	"github.com/oncemill/oncemill/internal/statements"
)

// simDatabase is what the inbox's statements do in the model of PostgreSQL.
type simDatabase struct {
	server       *pgmodel.Server
	letters      int64  // ids given out
	recordsStart string // the statement
	effects      []simEffect
	shared       int // claims of several messages
}

// The rows of its tables.
type (
	simID struct {
		fingerprint []byte
		dead        bool
		received    time.Time
	}
	simFailure struct {
		failures, unavailable, starts, alone int64
		errors, key                          string
		seq                                  *int64
		again, changed                       time.Time
	}
	simLetter struct {
		id                              int64
		consumer, topic, messageID, key string
		payload, metadata               []byte
		reason, state, token            string
		died                            time.Time
	}
	simEffect struct {
		consumer, id string
		run          int64
	}
)

// The handlers' own statements.
const (
	simAddEffect = `insert into effects values ($1, $2, $3)`
	simTouch     = `update totals set n = n + 1 where item = $1`
	simFails     = `select 1 / 0`
)

func newSimDatabase() *simDatabase {
	d := &simDatabase{}
	cfg := pgmodel.Config{
		Statements: map[string]pgmodel.Statement{simAddEffect: d.addEffect, simTouch: d.touch, simFails: d.fails},
		Instant:    map[string]bool{},
		Check: func(tx *pgmodel.Tx) error {
			if tx.Writes("inbox") && tx.Settings["inbox"] != "sealed" {
				return &pgmodel.Error{State: "OMI01"}
			}
			return nil
		},
		Committed: func(_ pgmodel.Key, row any) {
			if e, ok := row.(simEffect); ok {
				d.effects = append(d.effects, e)
			}
		},
	}
	does := map[string]pgmodel.Statement{
		"claim": d.claim, "claim_group": d.claimGroup, "limit_lock_wait": d.nothing, "seal": d.seal, "same_fingerprint": d.sameFingerprint,
		"reopen": d.reopen, "mark_dead": d.markDead, "now": d.now, "ping": d.nothing,
		"record_start": d.recordStart, "charge": d.charge, "discharge": d.discharge, "record_end": d.recordEnd,
		"count_failure": d.countFailure, "keep_errors": d.keepErrors, "failed_deliveries": d.failedDeliveries, "delete_failures": d.deleteFailures,
		"purge_ids": d.purgeIDs, "failures_after": d.failuresAfter, "purge_handled": d.purgeHandled, "purge_failures": d.purgeFailures,
		"advance": d.advance, "last_sequence": d.lastSequence, "retried": d.retried,
		"add": d.addLetter, "check_replay": d.checkReplay, "end_replay": d.endReplay,
	}
	where, err := database.Resolve(nil, oncemill.Config{Dialect: oncemill.PostgreSQL})
	if err != nil {
		panic(err)
	}
	for _, of := range []string{"inboxstore", "dlqstore"} {
		for _, text := range statements.Read(os.DirFS("../internal/"+of), "postgresql") {
			if do := does[text.Name]; do != nil {
				cfg.Statements[where.Expand(text.Text)] = do
				delete(does, text.Name)
			}
			switch text.Name {
			case "record_start":
				d.recordsStart = where.Expand(text.Text)
			case "limit_lock_wait", "seal", "now", "ping", "failed_deliveries":
				cfg.Instant[where.Expand(text.Text)] = true
			}
		}
	}
	for name := range does {
		panic("no statement " + name)
	}
	d.server = pgmodel.New(cfg)
	return d
}

// reset empties the database for another schedule.
func (d *simDatabase) reset() {
	d.server.Reset()
	d.letters, d.effects, d.shared = 0, nil, 0
}

var simOneRow = [][]driver.Value{{}}

// simName returns the name of a row whose key begins with the first n arguments.
func simName(args []any, n int) string {
	parts := make([]string, n)
	for i := range n {
		parts[i], _ = args[i].(string)
	}
	return strings.Join(parts, "/")
}

func simNumber(arg any) int64 { n, _ := arg.(int64); return n }

func simText(arg any) string { s, _ := arg.(string); return s }

func simAgo(arg any) time.Time {
	return time.Now().Add(-time.Duration(simNumber(arg)) * time.Microsecond)
}

// get returns a row, or its zero value.
func simGet[T any](tx *pgmodel.Tx, table, name string) (T, bool) {
	row, ok := tx.Get(table, name).(T)
	return row, ok
}

func (*simDatabase) nothing(*pgmodel.Tx, []any) ([][]driver.Value, error) { return nil, nil }

func (*simDatabase) fails(*pgmodel.Tx, []any) ([][]driver.Value, error) {
	return nil, &pgmodel.Error{State: "22012"}
}

func (*simDatabase) now(*pgmodel.Tx, []any) ([][]driver.Value, error) {
	return [][]driver.Value{{time.Now().UnixMicro()}}, nil
}

func (*simDatabase) addEffect(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	e := simEffect{simText(args[0]), simText(args[1]), simNumber(args[2])}
	name := fmt.Sprint(e.run) // a table without a unique constraint: a repeated effect shows
	if err := tx.Lock("effects", name); err != nil {
		return nil, err
	}
	tx.Put("effects", name, e)
	return simOneRow, nil
}

func (*simDatabase) touch(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	if err := tx.Lock("totals", simText(args[0])); err != nil {
		return nil, err
	}
	n, _ := simGet[int](tx, "totals", simText(args[0]))
	tx.Put("totals", simText(args[0]), n+1)
	return simOneRow, nil
}

func (*simDatabase) claim(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	fingerprint, _ := args[3].([]byte)
	claimed, err := simClaim(tx, simName(args, 2), fingerprint)
	if err != nil || !claimed {
		return nil, err
	}
	return simOneRow, nil
}

func simClaim(tx *pgmodel.Tx, name string, fingerprint []byte) (bool, error) {
	if err := tx.Lock("inbox", name); err != nil {
		return false, err
	}
	if tx.Get("inbox", name) != nil {
		tx.Unlock("inbox", name)
		return false, nil
	}
	tx.Put("inbox", name, simID{fingerprint: fingerprint, received: time.Now()})
	tx.Settings["inbox"] = "open"
	return true, nil
}

func (d *simDatabase) claimGroup(tx *pgmodel.Tx, args []any) (claimed [][]driver.Value, err error) {
	ids, _ := args[1].(*pq.StringArray)
	fingerprints, _ := args[3].(*pq.StringArray)
	for i, id := range *ids {
		var fingerprint []byte
		if text, given := strings.CutPrefix((*fingerprints)[i], `\x`); given {
			if fingerprint, err = hex.DecodeString(text); err != nil {
				return nil, err
			}
		}
		ok, err := simClaim(tx, simText(args[0])+"/"+id, fingerprint)
		if err != nil {
			return nil, err
		}
		if ok {
			claimed = append(claimed, []driver.Value{id, "open"})
		}
	}
	if len(claimed) > 1 {
		d.shared++
	}
	return claimed, nil
}

func (*simDatabase) seal(tx *pgmodel.Tx, _ []any) ([][]driver.Value, error) {
	if tx.Settings["inbox"] != "open" {
		return nil, nil
	}
	tx.Settings["inbox"] = "sealed"
	return simOneRow, nil
}

func (*simDatabase) sameFingerprint(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	row, ok := simGet[simID](tx, "inbox", simName(args, 2))
	if !ok {
		return nil, nil
	}
	fingerprint, _ := args[2].([]byte)
	return [][]driver.Value{{row.fingerprint == nil || bytes.Equal(row.fingerprint, fingerprint)}}, nil
}

func (*simDatabase) reopen(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	return simChange(tx, "inbox", simName(args, 2), func(row simID) (any, bool) { return nil, row.dead })
}

func (*simDatabase) markDead(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	return simChange(tx, "inbox", simName(args, 2), func(row simID) (any, bool) { row.dead = true; return row, true })
}

// simChange locks a row that exists and replaces it, if change wants to.
func simChange[T any](tx *pgmodel.Tx, table, name string, change func(row T) (any, bool)) ([][]driver.Value, error) {
	if tx.Get(table, name) == nil {
		return nil, nil
	}
	if err := tx.Lock(table, name); err != nil {
		return nil, err
	}
	row, ok := simGet[T](tx, table, name)
	if !ok {
		tx.Unlock(table, name)
		return nil, nil
	}
	next, ok := change(row)
	if !ok {
		tx.Unlock(table, name)
		return nil, nil
	}
	tx.Put(table, name, next)
	return simOneRow, nil
}

func (*simDatabase) advance(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	name, seq := simName(args, 2), simNumber(args[2])
	skip, _ := args[3].(bool)
	if err := tx.Lock("sequences", name); err != nil {
		return nil, err
	}
	if last, ok := simGet[int64](tx, "sequences", name); ok && (last >= seq || !skip && last != seq-1) {
		return nil, nil // and it stays locked
	}
	tx.Put("sequences", name, seq)
	return [][]driver.Value{{seq}}, nil
}

func (*simDatabase) lastSequence(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	if last, ok := simGet[int64](tx, "sequences", simName(args, 2)); ok {
		return [][]driver.Value{{last}}, nil
	}
	return nil, nil
}

func (*simDatabase) retried(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	last, known := simGet[int64](tx, "sequences", simName(args, 2))
	found := false
	for _, name := range tx.Rows("failures") {
		f, ok := simGet[simFailure](tx, "failures", name)
		found = found || ok && known && strings.HasPrefix(name, simText(args[0])+"/") && f.key == simText(args[1]) &&
			f.seq != nil && *f.seq < simNumber(args[2]) && *f.seq > last && f.again.After(simAgo(args[3]))
	}
	return [][]driver.Value{{found}}, nil
}

func (d *simDatabase) addLetter(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	d.letters++
	payload, _ := args[4].([]byte)
	metadata, _ := args[5].([]byte)
	l := simLetter{
		id: d.letters, consumer: simText(args[0]), topic: simText(args[1]), messageID: simText(args[2]), key: simText(args[3]),
		payload: payload, metadata: metadata, reason: simText(args[6]), state: "dead", died: time.Now(),
	}
	name := fmt.Sprint(l.id)
	if err := tx.Lock("letters", name); err != nil {
		return nil, err
	}
	tx.Put("letters", name, l)
	return simOneRow, nil
}

func (*simDatabase) checkReplay(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	l, ok := simGet[simLetter](tx, "letters", fmt.Sprint(args[0]))
	if !ok || l.token == "" || l.token != simText(args[1]) {
		return nil, nil
	}
	return [][]driver.Value{{
		l.id, l.state, int64(1), "consumer", l.consumer, nil, nil, l.topic, l.messageID, l.key, int64(len(l.payload)), nil, l.died.UnixMicro(),
		l.reason, "", "", int64(1), "", "", false, "", "", nil, nil, l.metadata, l.payload, []byte("[]"),
		false, nil, nil, nil, "", "", // never edited
	}}, nil
}

func (*simDatabase) endReplay(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	payload, _ := args[3].([]byte)
	return simChange(tx, "letters", fmt.Sprint(args[0]), func(l simLetter) (any, bool) {
		ours := l.consumer == simText(args[1]) && l.state == "replaying" && l.token != "" && l.token == simText(args[2]) && bytes.Equal(l.payload, payload)
		l.state = "replayed"
		return l, ours
	})
}
