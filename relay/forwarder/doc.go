// Package forwarder replaces Watermill's forwarder. An [Intake] moves what the forwarder's
// producers have written, in a table of watermill-sql, into an outbox, from which a relay
// delivers it. It is for services that migrate to the outbox; see
// docs/migrate-from-forwarder.md. It is separate from package relay so that only its users
// link watermill-sql.
package forwarder
