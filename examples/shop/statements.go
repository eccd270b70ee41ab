package shop

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/oncemill/oncemill"
)

// statements are the texts that differ between the databases.
type statements struct {
	createTables string
	addProduct   string
	insertOrder  string
	insertItems  string
	nextNumber   string
	takeStock    string
	appendLedger string
}

func statementsFor(db *sql.DB) (statements, error) {
	dialect, err := oncemill.DialectOf(db)
	if err != nil {
		return statements{}, err
	}
	if dialect == oncemill.SQLite {
		return sqlite, nil
	}
	return postgres, nil
}

// CreateTables makes the shop's tables unless they are there.
func CreateTables(ctx context.Context, db *sql.DB) error {
	stmts, err := statementsFor(db)
	if err != nil {
		return err
	}
	if _, err := db.ExecContext(ctx, stmts.createTables); err != nil {
		return fmt.Errorf("create the shop's tables: %w", err)
	}
	return nil
}

// AddProducts puts products on sale. A product that is there keeps its stock.
func AddProducts(ctx context.Context, db *sql.DB, products []Product) error {
	stmts, err := statementsFor(db)
	if err != nil {
		return err
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("add products: %w", err)
	}
	defer tx.Rollback() //nolint:errcheck // after Commit it has nothing to do, before it the error in hand matters more
	for _, p := range products {
		if _, err := tx.ExecContext(ctx, stmts.addProduct, p.SKU, p.Name, p.PriceCents, p.Stock); err != nil {
			return fmt.Errorf("add product %s: %w", p.SKU, err)
		}
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("add products: %w", err)
	}
	return nil
}
