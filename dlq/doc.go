// Package dlq keeps what could not be delivered or handled.
package dlq
