package main

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
	lastEntry   = `select coalesce(max(entry), 0) from ledger` // a cheap approximate count
)

// tables is the content of the database at the end.
type tables struct {
	orders []string         // ids of the orders taken, in any order
	ledger []entry          // in the order of booking
	stock  map[string]int64 // units left, by SKU
}

// entry is one line of the ledger.
type entry struct {
	messageID, orderID, customer string
	number                       int64
}

func readTables(ctx context.Context, db *sql.DB) (t tables, err error) {
	t.stock = map[string]int64{}
	var id string
	err = each(ctx, db, listOrders, []any{&id}, func() { t.orders = append(t.orders, id) })
	if err != nil {
		return tables{}, err
	}
	var e entry
	err = each(ctx, db, listLedger, []any{&e.messageID, &e.orderID, &e.customer, &e.number}, func() { t.ledger = append(t.ledger, e) })
	if err != nil {
		return tables{}, err
	}
	var quantity int64
	err = each(ctx, db, listStock, []any{&id, &quantity}, func() { t.stock[id] = quantity })
	return t, err
}

// each scans every row into columns and calls row.
func each(ctx context.Context, db *sql.DB, query string, columns []any, row func()) error {
	rows, err := db.QueryContext(ctx, query)
	if err != nil {
		return fmt.Errorf("%s: %w", query, err)
	}
	defer rows.Close() //nolint:errcheck // rows.Err below reports what went wrong
	for rows.Next() {
		if err := rows.Scan(columns...); err != nil {
			return fmt.Errorf("%s: %w", query, err)
		}
		row()
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
