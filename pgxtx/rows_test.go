package pgxtx_test

import (
	"context"
	"errors"
	"reflect"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/oncemill/oncemill/pgxtx"
)

// read has a handler of the inbox called.
func read(t *testing.T, fn func(ctx context.Context, tx *pgxtx.Tx) error) {
	t.Helper()
	t.Parallel()
	p := newTestDB(t)
	withInbox(t, p)
	if err := p.handle(t, "a", fn); err != nil {
		t.Error(err)
	}
}

type item struct {
	Name  string
	Parts []string
	Price pgtype.Numeric
	Note  *string
}

const items = `select 'chair' as name, array['leg', 'seat'] as parts, 12.5::numeric as price, null::text as note
	union all select 'desk', '{}', 7, '' order by name`

func TestRows_AreWhatPgxReads(t *testing.T) {
	read(t, func(ctx context.Context, tx *pgxtx.Tx) error {
		rows, err := tx.Query(ctx, items)
		if err != nil {
			return err
		}
		if tag := rows.CommandTag(); tag.String() != "SELECT 2" || len(rows.FieldDescriptions()) != 4 {
			t.Errorf("%s, %d fields", tag, len(rows.FieldDescriptions()))
		}
		found, err := pgx.CollectRows(rows, pgx.RowToStructByName[item])
		if err != nil || len(found) != 2 {
			t.Fatalf("%v, %v", found, err)
		}
		if c := found[0]; c.Name != "chair" || !reflect.DeepEqual(c.Parts, []string{"leg", "seat"}) || c.Note != nil || c.Price.Exp != -1 {
			t.Errorf("%+v", c)
		}
		if d := found[1]; d.Name != "desk" || len(d.Parts) != 0 || d.Note == nil || *d.Note != "" {
			t.Errorf("%+v", d)
		}
		rows, err = tx.Query(ctx, items)
		if err != nil {
			return err
		}
		maps, err := pgx.CollectRows(rows, pgx.RowToMap)
		if err != nil || maps[0]["name"] != "chair" || maps[0]["note"] != nil || maps[1]["note"] != "" {
			t.Errorf("%v, %v", maps, err)
		}
		rows, err = tx.Query(ctx, items, pgx.QueryResultFormats{pgx.TextFormatCode})
		if err != nil {
			return err
		}
		var name, price string
		n, err := pgx.ForEachRow(rows, []any{&name, nil, &price, nil}, func() error { return nil })
		if err != nil || n.RowsAffected() != 2 || name != "desk" || price != "7" {
			t.Errorf("%q %q, %v", name, price, err)
		}
		return nil
	})
}

func TestRows_AStatementMayRunForEachRow(t *testing.T) {
	read(t, func(ctx context.Context, tx *pgxtx.Tx) error {
		rows, err := tx.Query(ctx, `select i from generate_series(1, $1) i`, 3)
		if err != nil {
			return err
		}
		for rows.Next() {
			var i int
			if err := errors.Join(rows.Scan(&i), tx.QueryRow(ctx, addEffect+` returning n`, "a", i).Scan(&i)); err != nil {
				return err
			}
		}
		var n int
		if err := tx.QueryRow(ctx, `select sum(n) from effects`).Scan(&n); err != nil || n != 6 {
			t.Errorf("%d, %v", n, err)
		}
		return rows.Err()
	})
}

func TestRows_ReportWhatCannotBeScanned(t *testing.T) {
	read(t, func(ctx context.Context, tx *pgxtx.Tx) error {
		var n int
		var one, other string
		scans := map[string]func(rows pgx.Rows) error{
			"before Next":   func(rows pgx.Rows) error { return rows.Scan(&one) },
			"too many":      func(rows pgx.Rows) error { rows.Next(); return rows.Scan(&one, &other) },
			"another type":  func(rows pgx.Rows) error { rows.Next(); return rows.Scan(&n) },
			"after the end": func(rows pgx.Rows) error { rows.Close(); return rows.Scan(&one) },
			"no values":     func(rows pgx.Rows) error { _, err := rows.Values(); return err },
		}
		for name, scan := range scans {
			rows, err := tx.Query(ctx, `select 'text'`)
			if err != nil {
				return err
			}
			if err := scan(rows); err == nil {
				t.Errorf("%s: no error", name)
			}
		}
		if err := tx.QueryRow(ctx, `select 'text' where false`).Scan(&one); !errors.Is(err, pgx.ErrNoRows) {
			t.Errorf("no rows: %v", err)
		}
		if err := tx.QueryRow(ctx, `select i::text from generate_series(1, 3) i order by i`).Scan(&one); err != nil || one != "1" {
			t.Errorf("the first of several: %q, %v", one, err)
		}
		return nil
	})
}

func TestBatch_ResultsComeInOrder(t *testing.T) {
	read(t, func(ctx context.Context, tx *pgxtx.Tx) error {
		var called []int
		batch := new(pgx.Batch)
		batch.Queue(addEffect, "a", 1)
		batch.Queue(`select i from generate_series(1, 3) i`)
		batch.Queue(`select $1::int`, 7)
		batch.Queue(`select 8`).QueryRow(func(row pgx.Row) error {
			var n int
			err := row.Scan(&n)
			called = append(called, n)
			return err
		})
		batch.Queue(`update effects set n = 2`).Exec(func(tag pgconn.CommandTag) error {
			called = append(called, int(tag.RowsAffected()))
			return nil
		})
		results := tx.SendBatch(ctx, batch)
		tag, err := results.Exec()
		if err != nil || tag.RowsAffected() != 1 {
			t.Errorf("%s, %v", tag, err)
		}
		rows, err := results.Query()
		if err != nil {
			return err
		}
		if all, err := pgx.CollectRows(rows, pgx.RowTo[int]); err != nil || !reflect.DeepEqual(all, []int{1, 2, 3}) {
			t.Errorf("%v, %v", all, err)
		}
		var n int
		if err := results.QueryRow().Scan(&n); err != nil || n != 7 {
			t.Errorf("%d, %v", n, err)
		}
		if called != nil {
			t.Errorf("called before Close: %v", called)
		}
		for range 2 {
			if err := results.Close(); err != nil || !reflect.DeepEqual(called, []int{8, 1}) {
				t.Errorf("%v, %v", called, err)
			}
		}
		if _, err := results.Exec(); err == nil {
			t.Error("a result after Close")
		}
		if results.Tx() != nil {
			t.Error("a transaction of the batch")
		}
		return tx.SendBatch(ctx, new(pgx.Batch)).Close()
	})
}

func TestBatch_StopsAtTheQueryThatFails(t *testing.T) {
	t.Parallel()
	p := newTestDB(t)
	withInbox(t, p)
	err := p.handle(t, "a", func(ctx context.Context, tx *pgxtx.Tx) error {
		called := 0
		batch := new(pgx.Batch)
		batch.Queue(`select 1`)
		batch.Queue(`select 1 / $1::int`, 0)
		batch.Queue(`select 3`).Exec(func(pgconn.CommandTag) error { called++; return nil })
		results := tx.SendBatch(ctx, batch)
		if _, err := results.Exec(); err != nil {
			t.Errorf("the query before: %v", err)
		}
		var failure *pgconn.PgError
		if _, err := results.Exec(); !errors.As(err, &failure) {
			t.Errorf("the query: %v", err)
		}
		if err := results.QueryRow().Scan(); !errors.As(err, &failure) {
			t.Errorf("the query behind: %v", err)
		}
		err := results.Close()
		if !errors.As(err, &failure) || called != 0 {
			t.Errorf("close: %v, %d calls", err, called)
		}
		return err
	})
	if err == nil {
		t.Error("it succeeded")
	}
}
