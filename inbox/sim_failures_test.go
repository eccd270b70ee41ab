package inbox

import (
	"database/sql/driver"
	"strings"
	"time"

	"github.com/oncemill/oncemill/internal/pgmodel"
)

func (*simDatabase) recordStart(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	name := simName(args, 2)
	replay, _ := args[2].(bool)
	if claimed, ok := simGet[simID](tx, "inbox", name); ok && (!claimed.dead || !replay) {
		return nil, nil
	}
	if err := tx.Lock("failures", name); err != nil { // the id is not looked at again
		return nil, err
	}
	f, ok := simGet[simFailure](tx, "failures", name)
	if !ok {
		f = simFailure{errors: "[]", again: time.Now()}
	}
	f.starts++
	f.changed = time.Now()
	tx.Put("failures", name, f)
	return [][]driver.Value{{f.starts > 1, max(time.Until(f.again).Microseconds(), 0)}}, nil
}

func (*simDatabase) charge(tx *pgmodel.Tx, args []any) (charged [][]driver.Value, err error) {
	_, err = simChange(tx, "failures", simName(args, 2), func(f simFailure) (any, bool) {
		f.alone++
		charged = [][]driver.Value{{f.alone}}
		return f, true
	})
	return charged, err
}

func (*simDatabase) discharge(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	return simChange(tx, "failures", simName(args, 2), func(f simFailure) (any, bool) { f.alone--; return f, f.alone >= 0 })
}

func (*simDatabase) recordEnd(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	charged, _ := args[2].(bool)
	return simChange(tx, "failures", simName(args, 2), func(f simFailure) (any, bool) {
		f.end(true, charged)
		return f, true
	})
}

func (f *simFailure) end(recorded, charged bool) {
	if recorded {
		f.starts = max(f.starts-1, 0)
	}
	if charged {
		f.alone = max(f.alone-1, 0)
	}
	f.changed = time.Now()
}

func (*simDatabase) countFailure(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	name := simName(args, 2)
	recorded, _ := args[2].(bool)
	charged, _ := args[3].(bool)
	if err := tx.Lock("failures", name); err != nil {
		return nil, err
	}
	f, ok := simGet[simFailure](tx, "failures", name)
	if !ok {
		f = simFailure{errors: "[]", again: time.Now()}
	}
	f.failures += simNumber(args[4])
	f.unavailable += simNumber(args[5])
	f.key, f.seq = simText(args[6]), nil
	if seq, ok := args[7].(int64); ok {
		f.seq = &seq
	}
	f.end(recorded, charged)
	tx.Put("failures", name, f)
	return [][]driver.Value{{f.failures, f.unavailable, f.errors, time.Now().UnixMicro()}}, nil
}

func (*simDatabase) keepErrors(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	return simChange(tx, "failures", simName(args, 2), func(f simFailure) (any, bool) {
		f.errors, f.again = simText(args[2]), time.Now().Add(time.Duration(simNumber(args[3]))*time.Microsecond)
		return f, true
	})
}

func (*simDatabase) failedDeliveries(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	f, ok := simGet[simFailure](tx, "failures", simName(args, 2))
	if !ok {
		return nil, nil
	}
	return [][]driver.Value{{f.failures, f.unavailable}}, nil
}

func (*simDatabase) deleteFailures(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	return simChange(tx, "failures", simName(args, 2), func(simFailure) (any, bool) { return nil, true })
}

// simPurge deletes the rows of a consumer that nobody has locked and that are old.
func simPurge[T any](tx *pgmodel.Tx, table string, consumer any, old func(name string, row T) bool) (deleted [][]driver.Value, err error) {
	for _, name := range tx.Rows(table) {
		row, ok := simGet[T](tx, table, name)
		id, ours := strings.CutPrefix(name, simText(consumer)+"/")
		if !ok || !ours || !old(id, row) || !tx.TryLock(table, name) {
			continue
		}
		if row, ok = simGet[T](tx, table, name); !ok || !old(id, row) { // as it is now
			continue
		}
		tx.Put(table, name, nil)
		deleted = append(deleted, nil)
	}
	return deleted, nil
}

func (*simDatabase) purgeIDs(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	return simPurge(tx, "inbox", args[0], func(_ string, row simID) bool { return !row.dead && row.received.Before(simAgo(args[1])) })
}

func (*simDatabase) failuresAfter(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	n, last := int64(0), ""
	for _, name := range tx.Rows("failures") {
		if id, ours := strings.CutPrefix(name, simText(args[0])+"/"); ours && id > simText(args[1]) {
			n, last = n+1, id
		}
	}
	return [][]driver.Value{{n, last}}, nil
}

func (*simDatabase) purgeHandled(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	return simPurge(tx, "failures", args[0], func(id string, _ simFailure) bool {
		claimed, ok := simGet[simID](tx, "inbox", simText(args[0])+"/"+id)
		return id > simText(args[1]) && id <= simText(args[2]) && ok && !claimed.dead
	})
}

func (*simDatabase) purgeFailures(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
	return simPurge(tx, "failures", args[0], func(_ string, f simFailure) bool { return f.changed.Before(simAgo(args[1])) })
}
