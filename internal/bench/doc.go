// Command bench measures oncemill against what else does the job, on this
// machine, both sides in turn:
//
//	make bench                                  # all rows, three rounds
//	make bench-long                             # five
//	cd internal/bench
//	go run . -rows relay-engine -pairs 1        # one row, once
//	go run . -rows raw,copy                     # baselines alone
//	go run . -rows relay-engine -cpuprofile cpu.out
//
// It starts a PostgreSQL and a RabbitMQ of its own, with fsync on, and removes
// them at the end. What is measured of ours, and every client of the other side,
// runs in this process.
//
// A run fails if a message is missing, doubled, damaged or out of order. A goal
// that is not reached is reported, but is no failure.
//
// Each row_*.go is one comparison. The sides are in raw.go, forwarder.go,
// skiplocked.go, copy.go and ours.go; rounds.go, report.go and plot.go are the
// harness.
package main
