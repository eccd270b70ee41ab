// Package dlq keeps what could not be delivered or handled, with why, until an
// operator has it replayed or discards it. Nothing is dropped.
//
//	letters, err := dlq.New(db, dlq.Config{})
//	...
//	page, err := letters.List(ctx, dlq.Filter{States: []dlq.State{dlq.StateDead, dlq.StateHeld}, Topic: "orders"})
//	...
//	accepted, err := letters.Replay(ctx, []int64{page[0].ID}, dlq.Act{By: "ada", Reason: "queue made"})
//
// Letters are written by relays, for messages that cannot be published, and by
// consumers, for messages that cannot be handled. A letter holds the whole
// message.
//
// # States
//
//	dead        given up; nothing but the letter exists
//	held        given up by a relay that keeps the order of its key: the message
//	            waits in the relay's table, and its successors behind it
//	replaying   an operator wants it delivered; whoever wrote the letter will do it
//	discarding  an operator wants the held message removed; its relay will do it
//	replayed    a relay has the message back, or a consumer has handled it; the end
//	discarded   dropped by an operator, with a reason; the end
//
// [Store.Replay] and [Store.Discard] change the state of a letter that is dead or
// held (Discard also of a consumer's that is replaying), once, however often and by how many they are called; they move no
// message. That is done by the one who owns it: a relay's letter by the worker
// that holds its lane, within its next polls, and a consumer's by its inbox, which
// gives the message to that consumer alone, and ends the replay with the effects
// (inbox.Replays). The message carries a token that the database makes for each replay, so
// that nobody else can make one ([Store.ReplayToken], [Store.CheckReplay]). A letter that is dead is
// discarded at once, since nothing else exists.
//
// The message of a letter that was replayed lives on under the same message id,
// with its attempts at zero. If it fails for good again it gets a new letter;
// the old one stays as it is, until it is forgotten: each letter tells of one
// death, who ended it and why, and [Filter.MessageID] finds all letters of a
// message.
//
// A message may be dead and delivered. When the broker's answer to one attempt is
// lost and it refuses the next, nobody knows what became of the first: such a letter
// has [Letter.MayHaveBeenDelivered]. A consumer with an inbox takes a replay of it
// for the duplicate that it is.
//
// A relay's letter whose message the broker confirms after all, late, to a worker
// that had lost its lane meanwhile, is closed as replayed by "relay".
//
// # What it does not
//
// It has no place in a transaction of the application, and asks for no rights:
// whoever has the Store may do all. What stands in front of it has to ask.
package dlq
