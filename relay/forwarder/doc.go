// Package forwarder takes the place of Watermill's forwarder: an [Intake] moves what
// its producers have written, in a table of watermill-sql, into an outbox, from which a
// relay delivers it. It is for services that go over to the outbox; see
// docs/migrate-from-forwarder.md. It is apart from package relay so that nobody else
// links watermill-sql.
package forwarder
