// Package demo is the proof that the examples carry with them: a client that
// posts orders and repeats what failed, a parent that kills the processes in
// between, and a check of what is left in the tables and on the wire.
//
// A parent builds a [Demo] and calls Run. The processes it starts are its own
// executable with other arguments; in each of them a [Worker] holds the line to
// the parent. The check ([Check]) shares no code with the library: it reads
// tables with plain SQL and the broker with its plain client.
package demo
