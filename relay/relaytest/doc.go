// Package relaytest helps to test services that publish through an outbox, without a
// broker. [Sink] records what is delivered, and refuses or fails the messages it is told
// to. [Drain] delivers everything in the outbox and returns.
//
//	sink := &relaytest.Sink{}
//	if err := shop.Order(ctx, "tea"); err != nil { ... }
//	if err := relaytest.Drain(ctx, box, sink); err != nil { ... }
//	for _, m := range sink.Messages() { ... }
//
// The database is a real one; a SQLite file is enough. Nothing here is meant for
// production.
package relaytest
