// Package outboxstore holds the tables of an outbox: outbox, outbox_history and
// scheduled.
package outboxstore
