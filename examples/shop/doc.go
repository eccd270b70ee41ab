// Package shop is the business of the chaos demo: an HTTP API that takes orders and an
// inventory that books them.
//
// An order, its items, the customer's counter and the message "order placed"
// commit in one transaction ([Shop.Place]). The inventory handles that message:
// it takes the items from stock and appends to a ledger ([Inventory.Handle]).
// The ledger has no unique constraint on purpose: an effect that happened twice
// would stand there twice.
//
// The same code runs on PostgreSQL and SQLite; the two differ in their
// statements only.
package shop
