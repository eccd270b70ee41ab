package idempotency

import (
	"bytes"
	"database/sql/driver"
	"fmt"
	"os"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/pgmodel"
	"github.com/oncemill/oncemill/internal/statements"
)

// simDatabase is what the store's statements do in the model of PostgreSQL.
type simDatabase struct {
	server  *pgmodel.Server
	effects []simEffect
}

// The rows of its tables.
type (
	simKey struct {
		caller, fingerprint, owner      []byte
		fence, state, status            int64
		endpoint, location, resource    string
		response                        []byte
		lease, expires, forget, created time.Time
		completed                       time.Time
	}
	simEffect struct {
		key string
		run int64
	}
)

// The handlers' own statements.
const (
	simAddEffect = `insert into effects values ($1, $2)`
	simTouch     = `update totals set n = n + 1 where item = $1`
	simFails     = `select 1 / 0`
)

func newSimDatabase() *simDatabase {
	d := &simDatabase{}
	cfg := pgmodel.Config{
		Statements: map[string]pgmodel.Statement{simAddEffect: d.addEffect, simTouch: d.touch, simFails: d.fails},
		Instant:    map[string]bool{},
		Check: func(tx *pgmodel.Tx) error {
			if tx.Settings["seal"] == "open" {
				return &pgmodel.Error{State: "23503"}
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
		"claim": d.claim, "claim_group": d.claimGroup, "find": d.find, "take_over": d.takeOver, "outstanding": d.outstanding,
		"extend": d.extend, "release": d.release, "complete": d.complete, "purge": d.purge, "expire": d.nothing,
		"seal": d.seal, "finish": d.finish, "finish_group": d.finishGroup, "check": d.nothing,
	}
	where, err := database.Resolve(nil, oncemill.Config{Dialect: oncemill.PostgreSQL})
	if err != nil {
		panic(err)
	}
	for _, text := range statements.Read(os.DirFS("../internal/keystore"), "postgresql") {
		cfg.Statements[where.Expand(text.Text)] = does[text.Name]
		cfg.Instant[where.Expand(text.Text)] = text.Name == "seal" || text.Name == "check"
		delete(does, text.Name)
	}
	for name := range does {
		panic("no statement " + name)
	}
	d.server = pgmodel.New(cfg)
	return d
}

var simOneRow = [][]driver.Value{{}}

func simNumber(arg any) int64 { n, _ := arg.(int64); return n }

func simText(arg any) string { s, _ := arg.(string); return s }

func simBytes(arg any) []byte { b, _ := arg.([]byte); return b }

func simLater(arg any) time.Time {
	return time.Now().Add(time.Duration(simNumber(arg)) * time.Microsecond)
}

func simGet(tx *pgmodel.Tx, key []byte) (simKey, bool) {
	row, ok := tx.Get("keys", string(key)).(simKey)
	return row, ok
}

// dead reports whether the row is due for purging.
func (k *simKey) dead() bool {
	now := time.Now()
	return !k.forget.After(now) && (k.state != int64(StateStarted) || !k.lease.After(now))
}

func (k *simKey) ownedBy(owner []byte, fence int64) bool {
	return bytes.Equal(k.owner, owner) && k.fence == fence && k.state == int64(StateStarted)
}

// record returns the columns of a row, as statements that return it do.
func (k *simKey) record() []driver.Value {
	completed := int64(0)
	if !k.completed.IsZero() {
		completed = k.completed.UnixMicro()
	}
	return []driver.Value{
		k.caller, k.fingerprint, k.state, k.owner, k.fence, k.endpoint, k.status, k.response, k.location, k.resource, "", "",
		time.Until(k.lease).Microseconds(), time.Until(k.expires).Microseconds(), k.created.UnixMicro(), completed,
	}
}

func (*simDatabase) nothing(*pgmodel.Tx, []any) ([][]driver.Value, error) { return nil, nil }

func (*simDatabase) fails(*pgmodel.Tx, []any) ([][]driver.Value, error) {
	return nil, &pgmodel.Error{State: "22012"}
}

func (*simDatabase) addEffect(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	name := fmt.Sprint(args[1]) // a table without a unique constraint: a repeated effect shows
	if err := tx.Lock("effects", name); err != nil {
		return nil, err
	}
	tx.Put("effects", name, simEffect{simText(args[0]), simNumber(args[1])})
	return simOneRow, nil
}

func (*simDatabase) touch(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	if err := tx.Lock("totals", simText(args[0])); err != nil {
		return nil, err
	}
	n, _ := tx.Get("totals", simText(args[0])).(int)
	tx.Put("totals", simText(args[0]), n+1)
	return simOneRow, nil
}

func (*simDatabase) claim(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	record, err := simClaim(tx, args)
	if err != nil || record == nil {
		return nil, err
	}
	return [][]driver.Value{record}, nil
}

func simClaim(tx *pgmodel.Tx, args []any) ([]driver.Value, error) {
	key := simBytes(args[0])
	if row, ok := simGet(tx, key); ok && !row.dead() {
		return row.record(), nil
	}
	if err := tx.Lock("keys", string(key)); err != nil {
		return nil, err
	}
	row, ok := simGet(tx, key)
	switch {
	case !ok:
		row = simKey{
			caller: simBytes(args[1]), fingerprint: simBytes(args[2]), owner: simBytes(args[3]), endpoint: simText(args[4]),
			state: int64(StateStarted), fence: 1, lease: simLater(args[5]), expires: simLater(args[6]), forget: simLater(args[6]), created: time.Now(),
		}
		tx.Put("keys", string(key), row)
		return row.record(), nil
	case row.dead():
		tx.Put("keys", string(key), nil)
	}
	return nil, nil
}

func (*simDatabase) claimGroup(tx *pgmodel.Tx, args []any) (claimed [][]driver.Value, err error) {
	keys, _ := args[0].(*pq.ByteaArray)
	callers, _ := args[1].(*pq.ByteaArray)
	fingerprints, _ := args[2].(*pq.ByteaArray)
	owners, _ := args[3].(*pq.ByteaArray)
	endpoints, _ := args[4].(*pq.StringArray)
	leases, _ := args[5].(*pq.Int64Array)
	retentions, _ := args[6].(*pq.Int64Array)
	for i := range *keys {
		record, err := simClaim(tx, []any{(*keys)[i], (*callers)[i], (*fingerprints)[i], (*owners)[i], (*endpoints)[i], (*leases)[i], (*retentions)[i]})
		if err != nil {
			return nil, err
		}
		if record != nil {
			claimed = append(claimed, append([]driver.Value{int64(i + 1)}, record...))
		}
	}
	return claimed, nil
}

func (*simDatabase) find(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	if row, ok := simGet(tx, simBytes(args[0])); ok && !row.dead() {
		return [][]driver.Value{row.record()}, nil
	}
	return nil, nil
}

func (*simDatabase) takeOver(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	key, fence, successor := simBytes(args[0]), simNumber(args[2]), simBytes(args[3])
	_, err := simChange(tx, key, false, func(row *simKey) bool {
		if !row.ownedBy(simBytes(args[1]), fence) || row.lease.After(time.Now()) {
			return false
		}
		row.owner, row.fence = successor, fence+1
		row.lease, row.expires, row.forget = simLater(args[4]), simLater(args[5]), simLater(args[5])
		return true
	})
	if row, ok := simGet(tx, key); err == nil && ok && row.ownedBy(successor, fence+1) {
		return [][]driver.Value{row.record()}, nil
	}
	return nil, err
}

func (*simDatabase) outstanding(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	n := int64(0)
	for _, name := range tx.Rows("keys") {
		row, ok := simGet(tx, []byte(name))
		if ok && n < simNumber(args[1]) && bytes.Equal(row.caller, simBytes(args[0])) && row.state == int64(StateStarted) && row.lease.After(time.Now()) {
			n++
		}
	}
	return [][]driver.Value{{n}}, nil
}

// simChange changes a row if change wants to: as it is when the statement begins, and again
// once it is locked. Where it is not to wait, it leaves a row that another transaction has
// locked.
func simChange(tx *pgmodel.Tx, key []byte, wait bool, change func(row *simKey) bool) (bool, error) {
	if row, ok := simGet(tx, key); !ok || !change(&row) {
		return false, nil
	}
	if !wait && !tx.TryLock("keys", string(key)) {
		return false, nil
	}
	if err := tx.Lock("keys", string(key)); err != nil {
		return false, err
	}
	row, ok := simGet(tx, key)
	if !ok || !change(&row) {
		tx.Unlock("keys", string(key))
		return false, nil
	}
	tx.Put("keys", string(key), row)
	return true, nil
}

func (*simDatabase) extend(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	changed, err := simChange(tx, simBytes(args[0]), false, func(row *simKey) bool {
		if !row.ownedBy(simBytes(args[1]), simNumber(args[2])) {
			return false
		}
		row.lease = simLater(args[3])
		return true
	})
	if err != nil || !changed {
		return nil, err
	}
	return simOneRow, nil
}

func (*simDatabase) release(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	key := simBytes(args[0])
	changed, err := simChange(tx, key, true, func(row *simKey) bool { return row.ownedBy(simBytes(args[1]), simNumber(args[2])) })
	if err != nil || !changed {
		return nil, err
	}
	tx.Put("keys", string(key), nil)
	return simOneRow, nil
}

func (*simDatabase) complete(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	changed, err := simComplete(tx, args)
	return [][]driver.Value{{changed}}, err
}

func simComplete(tx *pgmodel.Tx, args []any) (bool, error) {
	return simChange(tx, simBytes(args[0]), true, func(row *simKey) bool {
		if !row.ownedBy(simBytes(args[1]), simNumber(args[2])) {
			return false
		}
		row.state, row.status, row.response = simNumber(args[3]), simNumber(args[4]), simBytes(args[5])
		row.location, row.resource, row.completed = simText(args[7]), simText(args[8]), time.Now()
		row.expires, row.forget = simLater(args[9]), simLater(args[10])
		return true
	})
}

func (*simDatabase) seal(tx *pgmodel.Tx, _ []any) ([][]driver.Value, error) {
	tx.Settings["seal"] = "open"
	return [][]driver.Value{{""}}, nil
}

func (*simDatabase) finish(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	if tx.Settings["seal"] != "open" {
		return [][]driver.Value{{false}}, nil
	}
	completed, err := simComplete(tx, args)
	if completed {
		tx.Settings["seal"] = ""
	}
	return [][]driver.Value{{completed}}, err
}

func (*simDatabase) finishGroup(tx *pgmodel.Tx, args []any) (stale [][]driver.Value, err error) {
	keys, _ := args[0].(*pq.ByteaArray)
	owners, _ := args[1].(*pq.ByteaArray)
	fences, _ := args[2].(*pq.Int64Array)
	states, _ := args[3].(*pq.Int64Array)
	statuses, _ := args[4].(*pq.Int64Array)
	responses, _ := args[5].(*pq.ByteaArray)
	retentions, _ := args[9].(*pq.Int64Array)
	forgets, _ := args[10].(*pq.Int64Array)
	for i := range *keys {
		completed, err := simComplete(tx, []any{(*keys)[i], (*owners)[i], (*fences)[i], (*states)[i], (*statuses)[i], (*responses)[i], false, "", "", (*retentions)[i], (*forgets)[i]})
		if err != nil {
			return nil, err
		}
		if !completed {
			stale = append(stale, []driver.Value{int64(i + 1)})
		}
	}
	if len(stale) == 0 {
		tx.Settings["seal"] = ""
	}
	return stale, nil
}

func (*simDatabase) purge(tx *pgmodel.Tx, _ []any) (deleted [][]driver.Value, err error) {
	for _, name := range tx.Rows("keys") {
		row, ok := simGet(tx, []byte(name))
		if !ok || !row.dead() || !tx.TryLock("keys", name) {
			continue
		}
		if row, ok = simGet(tx, []byte(name)); ok && row.dead() {
			tx.Put("keys", name, nil)
			deleted = append(deleted, nil)
		}
	}
	return deleted, nil
}
