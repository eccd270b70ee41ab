// Package outboxstore holds the tables of an outbox: outbox, outbox_history and
// scheduled. It decides nothing about when to do what; see package outboxqueue.
package outboxstore
