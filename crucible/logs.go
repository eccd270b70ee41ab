package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/oncemill/oncemill/crucible/check"
)

// stateOfLog are the rare states that a line of a process's log shows, by its text and a part
// of its error.
var stateOfLog = []struct{ text, part, state string }{
	{"lanes taken over from a worker whose lease expired", "", "takeover"},
	{"leases lost to another worker", "", "lane lost"},
	{"lane taken by another worker; nothing was written", "", "fenced write"},
	{"rabbitmq blocks publishing", "", "blocked broker"},
	{"topic unavailable; its messages wait", "NO_ROUTE", "unroutable return"},
	{"publish failed; retrying to find out whether the message or the topic is at fault", "NO_ROUTE", "unroutable return"},
	{"rabbitmq channel replaced, messages sent later were confirmed", "", "channel replaced"},
	{"topic unavailable; its messages wait", "nacked", "nack"},
	{"message confirmed after all", "", "late confirm"},
	{"worker is unfit, its lanes go to other workers", "", "unfit worker"},
	{"consumption paused: the database or something that handlers need is unavailable", "", "consumption paused"},
	{"message dead-lettered", "", "dead letter"},
	{"rabbitmq consumer lost, consuming again", "", "consumer lost"},
	{"leases could not be renewed; publishing stops when they expire", "", "renewal failed"},
}

// wantedStates are those that every valid run sees.
var wantedStates = []string{
	"takeover", "blocked broker", "unroutable return", "nack", "late row", "message sent twice", "unknown commit",
	"dead letter", "dead letter replayed", "dead letter of a relay", "unfit worker", "consumer lost",
}

// settled is what a consumer logs when it acknowledges a message.
var settled = []string{"message handled", "duplicate acknowledged", "message dead-lettered"}

// readLogs counts the rare states in the logs of the processes, notes when messages were sent again
// and settled, and collects what the database has logged and nothing explains.
func (c *crucible) readLogs(in *check.Input) error {
	for name := range c.processes {
		err := lines(c.path(name+".log"), func(line string) {
			if strings.HasPrefix(line, "panic:") || strings.HasPrefix(line, "fatal error:") {
				in.Unclean = append(in.Unclean, name+": "+line)
			}
			var entry struct {
				Time       time.Time
				Msg, Error string
				Lane       int
				Consumer   string
				MessageID  string `json:"message_id"`
				InFlight   *int   `json:"in_flight"` // nil: some
			}
			if json.Unmarshal([]byte(line), &entry) != nil {
				return // not of the logger
			}
			if entry.Consumer != "" && slices.Contains(settled, entry.Msg) {
				in.Settled[entry.MessageID] = append(in.Settled[entry.MessageID], entry.Time)
			}
			inFlight := entry.InFlight == nil || *entry.InFlight > 0
			if inFlight && strings.HasPrefix(entry.Msg, "rabbitmq channel replaced") { // and what was is sent again
				in.Resent[entry.Lane] = append(in.Resent[entry.Lane], entry.Time)
			}
			for _, s := range stateOfLog {
				if entry.Msg == s.text && strings.Contains(entry.Error, s.part) {
					in.States[s.state]++
				}
			}
		})
		if err != nil {
			return err
		}
	}
	if c.site.replicated != nil {
		return nil // Patroni's lines are among them, and each failover makes many errors
	}
	return lines(c.site.postgres.Log(), func(line string) {
		if serious.MatchString(line) && !explained.MatchString(line) {
			in.Log = append(in.Log, line)
		}
	})
}

var (
	serious = regexp.MustCompile(`\b(ERROR|FATAL|PANIC):`)

	// explained are what faults cause: ended backends, timeouts, locks, servers that start or stop.
	explained = regexp.MustCompile(`terminating connection|canceling statement|canceling statement due to|deadlock detected|` +
		`the database system is|could not obtain lock|current transaction is aborted|connection to client lost|` +
		`could not send data to client|terminating background worker|duplicate key value violates unique constraint "inbox`)
)

// lines calls fn with every line of a file.
func lines(path string, fn func(string)) (err error) {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	scanner := bufio.NewScanner(file)
	scanner.Buffer(nil, 4<<20)
	for scanner.Scan() {
		fn(scanner.Text())
	}
	return scanner.Err()
}
