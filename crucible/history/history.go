// Package history is what the processes of the crucible write down while they run: one JSON
// object a line, one write(2) a line. A process that is killed leaves all that it had written.
// The package knows nothing of the library.
package history

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// Events.
const (
	EventBegin     = "begin"     // a producer is about to run a transaction with Messages
	EventEnd       = "end"       // it knows the Outcome
	EventWire      = "wire"      // the recorder received a copy of a message
	EventResources = "resources" // what a process uses
	EventFault     = "fault"     // a fault has ended; At is its end, Since its start
	EventSlow      = "slow"      // the canary has found the servers themselves slow or away
	EventReady     = "ready"     // a process works
	EventAnswer    = "answer"    // a customer has a final answer, or has given up
	EventState     = "state"     // a rare state was reached
)

// Outcomes of a transaction, as its producer knows them.
const (
	Committed  = "committed"
	RolledBack = "rolled back"
	Unknown    = "unknown"
)

// Record is one line. Each event uses some of the fields.
type Record struct {
	At      time.Time `json:"at"`
	Process string    `json:"process"`
	Event   string    `json:"event"`

	Tx       string    `json:"tx,omitempty"`
	Outcome  string    `json:"outcome,omitempty"`
	Messages []Message `json:"messages,omitempty"`
	Error    string    `json:"error,omitempty"`

	Copy *Copy `json:"copy,omitempty"`

	Fault *Fault `json:"fault,omitempty"`

	Answer *Answer `json:"answer,omitempty"`

	Resources *Resources `json:"resources,omitempty"`

	State string `json:"state,omitempty"`
}

// Message is a message that a producer wants to publish.
type Message struct {
	ID        string `json:"id"`
	Discarded bool   `json:"discarded,omitempty"` // by a rollback to a savepoint
}

// Copy is one message on the wire.
type Copy struct {
	MessageID   string `json:"id"`
	Topic       string `json:"topic"`
	Key         string `json:"key,omitempty"`
	Seq         int64  `json:"seq,omitempty"`
	Attempt     string `json:"attempt,omitempty"` // of the handler that produced it
	Row         string `json:"row,omitempty"`     // lane/id
	Sum         Sum    `json:"sum"`
	Redelivered bool   `json:"redelivered,omitempty"`
	Session     int    `json:"session"` // of the recorder
}

// Fault is an injected fault.
type Fault struct {
	Kind     string    `json:"kind"`
	Target   string    `json:"target"`
	Since    time.Time `json:"since"`
	Injected time.Time `json:"injected,omitzero"` // when it was there in full
	Error    string    `json:"error,omitempty"`   // it could not be injected or healed
}

// Answer is the answer to a request with an idempotency key.
type Answer struct {
	Key    string `json:"key"`
	Status int    `json:"status"` // 0: none in time
	Sum    string `json:"sum"`
	Other  bool   `json:"other,omitempty"` // the key was used for another request before

	At time.Time `json:"-"` // of the record
}

// Resources is what a process uses.
type Resources struct {
	Goroutines int   `json:"goroutines"`
	Heap       int64 `json:"heap"` // bytes in use
	Files      int   `json:"files"`
}

// Writer appends to the history of one process. It is safe for concurrent use.
type Writer struct {
	process string

	mu   sync.Mutex
	file *os.File
}

// Create opens the history of a process in dir. Later lives of the process append to it.
func Create(dir, process string) (*Writer, error) {
	file, err := os.OpenFile(filepath.Join(dir, process+suffix), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	if err := repair(file); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return &Writer{process: process, file: file}, nil
}

// repair removes a last line that a kill has cut off, which can only be a long one.
func repair(file *os.File) error {
	info, err := file.Stat()
	if err != nil {
		return err
	}
	tail := make([]byte, min(info.Size(), longest))
	if _, err := file.ReadAt(tail, info.Size()-int64(len(tail))); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	cut := len(tail) - 1 - bytes.LastIndexByte(tail, '\n')
	return file.Truncate(info.Size() - int64(cut))
}

const longest = 1 << 20 // bytes of a line

const suffix = ".history"

// Add writes a record down, with the time if it has none.
func (w *Writer) Add(r Record) error {
	if r.At.IsZero() {
		r.At = time.Now()
	}
	r.Process = w.process
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	_, err = w.file.Write(append(line, '\n'))
	return err
}

// Close closes the history.
func (w *Writer) Close() error { return w.file.Close() }

// Read calls fn with every record of all histories in dir, those of a process in their order. A
// last line that a kill has cut off is left out.
func Read(dir string, fn func(Record)) error {
	paths, err := filepath.Glob(filepath.Join(dir, "*"+suffix))
	if err != nil {
		return err
	}
	if len(paths) == 0 {
		return fmt.Errorf("no history in %s", dir)
	}
	for _, path := range paths {
		if err := readFile(path, fn); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return nil
}

func readFile(path string, fn func(Record)) (err error) {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	lines := bufio.NewReaderSize(file, longest)
	for number := 1; ; number++ {
		line, err := lines.ReadBytes('\n')
		switch {
		case errors.Is(err, io.EOF): // what follows the last line feed was never complete
			return nil
		case err != nil:
			return err
		}
		if len(bytes.TrimSpace(line)) == 0 {
			continue
		}
		var r Record
		if err := json.Unmarshal(line, &r); err != nil {
			return fmt.Errorf("line %d: %w", number, err)
		}
		fn(r)
	}
}
