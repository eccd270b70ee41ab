// Package pgmodel is a model of PostgreSQL in memory, with a driver for database/sql, for
// simulations: the code of the library runs on it through hundreds of schedules a second.
//
// It models what the promises depend on. A transaction reads what was committed before its
// statement began. Rows are locked until the end of the transaction; an insert of a key that
// another transaction has inserted waits for that one. Waits end in a deadlock or a lock timeout.
// Connections are lost before a statement or before its answer, so the outcome of a COMMIT may be
// unknown. The transactions of a process that has died keep their locks until the server notices.
//
// It knows no SQL. A simulation gives it a function for each statement, so it finds no error in
// the text of a statement; the suites of the storage packages do.
//
// Nothing happens by itself: every statement and every COMMIT waits until the schedule lets it go
// on ([Server.Next]). That must be in a bubble of testing/synctest, where everything else has
// come to rest before the next choice. So a schedule is made of choices alone, and repeats with
// its random numbers.
package pgmodel
