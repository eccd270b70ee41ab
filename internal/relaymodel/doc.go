// Package relaymodel is a model of how relays share an outbox, small enough that a test visits
// every state of it: two workers, two lanes, three messages, and all orders of commits, reads,
// publishes, confirms, deletions and moves, with crashes, pauses beyond a lease, lost publishes,
// lost answers and refusals in between.
//
// It models the protocol of docs/architecture.md, not its code: the simulation in package relay
// runs the code, and cannot visit everything. Rules that are left out on purpose show that the
// states matter: the test then finds the promise that breaks.
package relaymodel
