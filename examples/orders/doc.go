// Command orders is the shop on PostgreSQL and RabbitMQ, each part a process of
// its own, as in production:
//
//	orders migrate      makes the tables
//	orders inventory    consumes: each message has its effect once
//	orders relay        relays: what the outbox owes goes to RabbitMQ
//	orders api          takes orders
//	orders demo         runs them all and kills them, again and again
//
// The servers come from -postgres and -amqp, or from the environment variables
// ONCEMILL_TEST_POSTGRES and ONCEMILL_TEST_AMQP:
//
//	eval "$(scripts/servers.sh up)"
//
// Start the inventory before the relay: it declares its queue, and RabbitMQ
// hands a message only to the queues that are there.
package main
