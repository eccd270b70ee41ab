// Package recipes shows oncemill with the libraries that people use for SQL: pgxpool, GORM,
// sqlc and bun. For each there is a function that places an order, and publishes it, in a
// transaction of the library, and a handler that reserves for an order in the transaction
// of an inbox. They are excerpts of docs/recipes.md.
package recipes
