// Package dlq keeps messages that could not be delivered or handled, with the reason,
// until an operator replays or discards them. Nothing is dropped.
//
//	letters, err := dlq.New(db, dlq.Config{})
//	...
//	page, err := letters.List(ctx, dlq.Filter{States: []dlq.State{dlq.StateDead, dlq.StateHeld}, Topic: "orders"})
//	...
//	accepted, err := letters.Replay(ctx, []int64{page[0].ID}, dlq.Act{By: "ada", Reason: "queue created"})
//
// Relays write dead letters for messages that cannot be published, consumers for
// messages that cannot be handled. A dead letter holds the whole message.
//
// # States
//
//	dead        given up; only the dead letter exists
//	held        given up by a relay that keeps the order of its key: the message
//	            waits in the relay's table, with its successors behind it
//	replaying   an operator wants it delivered; the relay or consumer that wrote it will do it
//	discarding  an operator wants the held message removed; its relay will do it
//	replayed    a relay has the message back, or a consumer has handled it; final
//	discarded   dropped by an operator, with a reason; final
//
// [Store.Replay] and [Store.Discard] change the state of a dead letter that is dead or
// held (Discard also of a consumer's that is replaying). They do so once, however often
// and by however many callers they are called. They move no message. The worker that
// holds the lane moves a relay's message, within its next polls. The consumer's inbox
// moves a consumer's message: it gives the message to that consumer alone, and ends the
// replay in the transaction of the effects (inbox.Replays). The message carries a token
// that the database generates for each replay, so that nobody can forge one. A
// dead letter in state dead is discarded at once, since nothing else exists.
//
// [Store.Restore] undoes a discard: discarded becomes dead again, and discarding held, unless
// the relay has removed a held message meanwhile. [Store.ReplayEdited] replays a consumer's
// message with other content. The dead letter keeps the original, and the edit beside it.
// [Store.Stuck] counts what no worker has carried out for a minute.
//
// A replayed message lives on under the same message id, with its attempts at zero. If
// it fails for good again, it gets a new dead letter, which [Letter.FailedAgain] of the old one
// names. The old one stays as it is until it is purged. Each dead letter records one failure,
// who ended it and why. [Filter.MessageID] finds all dead letters of a message.
//
// # Jobs
//
// [Store.StartJob] starts a replay job for all dead letters that a filter selects. The set is
// frozen when the job starts. The job requests the replays at a rate, first those of a canary,
// and pauses when replays fail again ([JobPlan]). Relays run the jobs, or a [Runner]. Each step
// is one transaction: states of dead letters, counts of the job, entries of the audit. So a
// process that dies loses nothing, and a dead letter that several jobs and operators want is
// replayed once.
//
// # Audit
//
// Each act of a person (replay, edit, discard, restore, note, import) writes an entry for each
// dead letter into the audit, in its own transaction; package audit lists them. The table of
// the audit is in a set of migrations of its own:
//
//	err := oncemill.Migrate(ctx, db, cfg, audit.Migrations, dlq.Migrations)
//
// Without it, reading works, and acts fail with [ErrNoAudit] and change nothing.
//
// # Export and import
//
// [Store.Export] writes dead letters as lines of JSON ([Line]), [Store.Import] adds them to a
// database, each once. An import makes nothing a replay: it takes no tokens, and an imported
// dead letter is replayed only when somebody asks for it.
//
// A message may be both dead and delivered: the broker's answer to one attempt is lost,
// and it refuses the next. Nobody then knows the outcome of the first attempt. Such a
// dead letter has [Letter.MayHaveBeenDelivered], and so do those of all messages that a
// worker may have had in flight when it died. If you replay it, a consumer with an inbox
// recognizes the duplicate. The mark may be missing if the database lost its latest
// commits between the two attempts, or if its clock was set, or differs from that of the
// server before, by more than a minute.
//
// The broker may confirm a message late, to a worker that had lost its lane meanwhile.
// The relay's dead letter is then closed as replayed by "relay".
//
// # What it does not do
//
// It does not take part in the application's transactions. It checks no permissions:
// whoever has the Store may do everything. The code in front of it has to authorize.
package dlq
