// Package steer changes what running workers do: it pauses and resumes topics, sinks, lanes,
// keys and consumers, gives lanes to other workers, and has retrying messages tried at once.
//
//	control, err := steer.New(db, steer.Config{})
//	...
//	err = control.Pause(ctx, steer.Target{Kind: steer.Topic, Name: "orders"}, steer.Act{By: "ada", Reason: "their queue is full"})
//
// It works from any process that reaches the database. Workers read it once a second. Each act
// writes its entry of the audit in its own transaction; see package audit.
//
// # What a pause does
//
// A pause stays until somebody resumes it, through restarts of every process. Nothing is lost,
// no attempts are used up, and relays write no dead letters because of a pause. A message that is
// older than inbox.Config.Retention when its consumer gets it becomes a dead letter there, as after
// any delay.
//
//   - A topic: no message of it is handed to a sink. Other topics go on. A message whose key
//     has an earlier message of a paused topic waits behind it. With
//     relay.OrderPerKeyPipelined the lanes of the topic stop.
//   - A sink: all topics of a route of a relay.Router, by its name; see relay.Route. A relay
//     without a router has one sink, named #.
//   - A lane: its worker reads and sends nothing of it, and keeps its lease.
//   - A key: no message with this ordering key is handed to a sink, of whatever topic.
//   - A consumer: its inbox begins to handle no message; see package inbox.
//
// What is in flight or being handled when a worker learns of the pause is finished. If a read
// fails, a worker keeps to what it read last. A worker or consumer that has just started publishes
// or handles nothing before its first read.
//
// Messages of what is paused stay in the outbox, or, where they would keep others from the
// memory of their worker, among the retrying messages. If Retry.TimeLimit passes while a retrying
// message is paused, it is still tried twice after the resumption.
//
// # Migrations
//
// The tables are in a migration set of their own, [Migrations]; acts also need those of
// audit.Migrations. Without these tables nothing is paused, and acts fail.
package steer
