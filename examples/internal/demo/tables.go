package demo

import (
	"context"
	"database/sql"
	"fmt"
)

// The statements are the same on PostgreSQL and SQLite.
const (
	listOrders  = `select order_id from orders`
	listLedger  = `select message_id, order_id, customer, number from ledger order by entry`
	listStock   = `select sku, quantity from stock`
	countLedger = `select count(*) from ledger`
	countBooked = `select count(distinct order_id) from ledger`
	lastEntry   = `select coalesce(max(entry), 0) from ledger` // a cheap count, good enough to go by
)

// ReadTables reads what the example left in db.
func ReadTables(ctx context.Context, db *sql.DB) (Tables, error) {
	t := Tables{Stock: map[string]int64{}}
	err := each(ctx, db, listOrders, func(rows *sql.Rows) error {
		var id string
		if err := rows.Scan(&id); err != nil {
			return err
		}
		t.Orders = append(t.Orders, id)
		return nil
	})
	if err != nil {
		return Tables{}, fmt.Errorf("read orders: %w", err)
	}
	err = each(ctx, db, listLedger, func(rows *sql.Rows) error {
		var e Entry
		if err := rows.Scan(&e.MessageID, &e.OrderID, &e.Customer, &e.Number); err != nil {
			return err
		}
		t.Ledger = append(t.Ledger, e)
		return nil
	})
	if err != nil {
		return Tables{}, fmt.Errorf("read ledger: %w", err)
	}
	err = each(ctx, db, listStock, func(rows *sql.Rows) error {
		var sku string
		var quantity int64
		if err := rows.Scan(&sku, &quantity); err != nil {
			return err
		}
		t.Stock[sku] = quantity
		return nil
	})
	if err != nil {
		return Tables{}, fmt.Errorf("read stock: %w", err)
	}
	return t, nil
}

func each(ctx context.Context, db *sql.DB, query string, scan func(*sql.Rows) error) error {
	rows, err := db.QueryContext(ctx, query)
	if err != nil {
		return err
	}
	defer rows.Close() //nolint:errcheck // rows.Err below reports what went wrong
	for rows.Next() {
		if err := scan(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

func count(ctx context.Context, db *sql.DB, query string) (int, error) {
	var n int
	if err := db.QueryRowContext(ctx, query).Scan(&n); err != nil {
		return 0, fmt.Errorf("%s: %w", query, err)
	}
	return n, nil
}
