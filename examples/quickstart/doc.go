// Command quickstart is a shop that needs no server: a SQLite file, an embedded
// NATS JetStream server as the broker, an HTTP API that takes orders, a relay
// and a consumer, all in one process.
//
//	go run ./quickstart         runs it and says what to try
//	go run ./quickstart demo    proves it: 10,000 orders, killed again and again
//
// service.go is the part to read and to copy.
package main
