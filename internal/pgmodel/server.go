package pgmodel

import (
	"cmp"
	"database/sql/driver"
	"errors"
	"maps"
	"slices"
	"sync"
)

// Key is where a row is.
type Key struct{ Table, Row string }

func (k Key) compare(other Key) int {
	return cmp.Or(cmp.Compare(k.Table, other.Table), cmp.Compare(k.Row, other.Row))
}

// Statement is what a statement does. The result has an entry for each row that the statement
// returns or changes.
type Statement func(tx *Tx, args []any) ([][]driver.Value, error)

// Config is what a simulation gives a server.
type Config struct {
	Statements map[string]Statement // by text

	// Instant are the texts of statements that look at no row. They do not wait for the
	// schedule.
	Instant map[string]bool

	// Check is called before a commit, and may refuse it. Default: nothing is refused.
	Check func(tx *Tx) error

	// Committed is called for each row that a commit has written, in the order of their keys;
	// nil: deleted. Default: nothing is called.
	Committed func(k Key, row any)
}

// Server is a database and what waits for it.
type Server struct {
	cfg Config

	mu      sync.Mutex
	rows    map[Key]any // what is committed
	holders map[Key]*Tx
	open    map[*Tx]bool
	calls   []*Call
	dead    map[int]bool // processes
	down    bool
	epoch   int // of the connections
	begun   int // transactions
	counts  map[string]int
	unknown []string        // statements
	spared  map[string]bool // statements
}

// New returns an empty server.
func New(cfg Config) *Server {
	if cfg.Check == nil {
		cfg.Check = func(*Tx) error { return nil }
	}
	if cfg.Committed == nil {
		cfg.Committed = func(Key, any) {}
	}
	s := &Server{cfg: cfg}
	s.Reset()
	return s
}

// Reset empties the server and closes its connections, for another schedule.
func (s *Server) Reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rows, s.holders, s.open = map[Key]any{}, map[Key]*Tx{}, map[*Tx]bool{}
	s.dead, s.down, s.counts, s.spared = map[int]bool{}, false, map[string]int{}, map[string]bool{}
	s.epoch++
}

// Counts returns how often things have happened since Reset.
func (s *Server) Counts() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.counts)
}

// Unknown returns the texts of statements that the server does not know.
func (s *Server) Unknown() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.unknown)
}

// Spare keeps faults away from a statement until Reset.
func (s *Server) Spare(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.spared[text] = true
}

// Set writes a committed row, as an operator would.
func (s *Server) Set(k Key, row any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rows[k] = row
}

// Committed returns the rows of a table that are committed.
func (s *Server) Committed(table string) map[string]any {
	s.mu.Lock()
	defer s.mu.Unlock()
	found := map[string]any{}
	for k, row := range s.rows {
		if k.Table == table {
			found[k.Row] = row
		}
	}
	return found
}

// Tx is a transaction.
type Tx struct {
	// Settings end with the transaction.
	Settings map[string]string

	server  *Server
	actor   Actor
	number  int
	writes  map[Key]any
	aborted bool
	orphan  bool // its client is gone; the server has not noticed yet
	waits   *Tx  // for whose end it waits
	text    string
	done    <-chan struct{} // of the context of the statement
}

// Error is an error of the server.
type Error struct{ State string }

func (e *Error) Error() string { return "the model of PostgreSQL reports SQLSTATE " + e.State }

// SQLState returns the SQLSTATE.
func (e *Error) SQLState() string { return e.State }

var (
	errLost     = errors.New("connection lost")
	errEnded    = errors.New("context ended")
	errAborted  = &Error{"25P02"}
	errRollback = errors.New("pq: could not complete operation in a failed transaction")
)

// Writes reports whether the transaction has written rows of a table, and not only deleted some.
func (tx *Tx) Writes(table string) bool {
	tx.server.mu.Lock()
	defer tx.server.mu.Unlock()
	for k, row := range tx.writes {
		if k.Table == table && row != nil {
			return true
		}
	}
	return false
}

// Get reads a row: the transaction's own version, or what is committed. nil: there is none.
func (tx *Tx) Get(table, row string) any {
	tx.server.mu.Lock()
	defer tx.server.mu.Unlock()
	k := Key{table, row}
	if own, ok := tx.writes[k]; ok {
		return own
	}
	return tx.server.rows[k]
}

// Rows returns the names of a table's rows, sorted.
func (tx *Tx) Rows(table string) []string {
	tx.server.mu.Lock()
	defer tx.server.mu.Unlock()
	names := map[string]bool{}
	for k := range tx.server.rows {
		if k.Table == table {
			names[k.Row] = true
		}
	}
	for k, row := range tx.writes {
		if k.Table == table {
			names[k.Row] = row != nil
		}
	}
	maps.DeleteFunc(names, func(_ string, there bool) bool { return !there })
	return slices.Sorted(maps.Keys(names))
}

// Put writes a row, which the transaction has locked. nil deletes it.
func (tx *Tx) Put(table, row string, value any) {
	s, k := tx.server, Key{table, row}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.holders[k] != tx {
		panic("pgmodel: a row was written without its lock")
	}
	tx.writes[k] = value
}

// TryLock locks a row unless another transaction has it, as skip locked does.
func (tx *Tx) TryLock(table, row string) bool {
	s, k := tx.server, Key{table, row}
	s.mu.Lock()
	defer s.mu.Unlock()
	if holder := s.holders[k]; holder != nil && holder != tx {
		return false
	}
	s.holders[k] = tx
	return true
}

// Unlock unlocks a row that the transaction has not written: it only waited for it.
func (tx *Tx) Unlock(table, row string) {
	s, k := tx.server, Key{table, row}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, written := tx.writes[k]; written || s.holders[k] != tx {
		return
	}
	delete(s.holders, k)
	for _, c := range s.calls {
		if c.on == tx {
			c.on = nil // it looks again
		}
	}
}

// Lock locks a row, or the place of one that does not exist yet. It waits for a transaction
// that has locked it; then Get returns what that one has left.
func (tx *Tx) Lock(table, row string) error {
	s, k := tx.server, Key{table, row}
	for {
		s.mu.Lock()
		holder := s.holders[k]
		if holder == nil || holder == tx {
			s.holders[k] = tx
			s.mu.Unlock()
			return nil
		}
		for other := holder; other != nil; other = other.waits {
			if other == tx {
				s.counts["deadlocks"]++
				s.mu.Unlock()
				return &Error{"40P01"}
			}
		}
		tx.waits = holder
		s.counts["waits"]++
		s.mu.Unlock()
		fault, ok := s.wait(&Call{Actor: tx.actor, text: tx.text, on: holder, inside: true}, tx.done)
		s.mu.Lock()
		tx.waits = nil
		s.mu.Unlock()
		switch {
		case !ok:
			return errEnded
		case fault == lockTimeout:
			return &Error{"55P03"}
		case fault == serialization:
			return &Error{"40001"}
		case fault == lostBefore:
			return errLost
		}
	}
}

// begin begins a transaction.
func (s *Server) begin(actor Actor) *Tx {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.begun++
	tx := &Tx{Settings: map[string]string{}, server: s, actor: actor, number: s.begun, writes: map[Key]any{}}
	s.open[tx] = true
	return tx
}

// commit commits a transaction, if it may.
func (s *Server) commit(tx *Tx) error {
	err := s.cfg.Check(tx)
	if tx.aborted {
		err = errRollback
	}
	s.mu.Lock()
	if !s.open[tx] { // the server has ended it
		err = &Error{"25P03"}
	}
	if err == nil {
		for k, row := range tx.writes {
			if row == nil {
				delete(s.rows, k)
			} else {
				s.rows[k] = row
			}
		}
	}
	s.end(tx)
	s.mu.Unlock()
	if err == nil {
		for _, k := range slices.SortedFunc(maps.Keys(tx.writes), Key.compare) {
			s.cfg.Committed(k, tx.writes[k])
		}
	}
	return err
}

// rollback rolls back, unless the transaction has ended.
func (s *Server) rollback(tx *Tx) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end(tx)
}

// end releases what a transaction has locked. Called with mu held.
func (s *Server) end(tx *Tx) {
	delete(s.open, tx)
	maps.DeleteFunc(s.holders, func(_ Key, holder *Tx) bool { return holder == tx })
	for _, c := range s.calls {
		if c.on == tx {
			c.on = nil
		}
	}
}

// abandon leaves a transaction to the server, which notices later that its client is gone.
func (s *Server) abandon(tx *Tx) {
	s.mu.Lock()
	defer s.mu.Unlock()
	tx.orphan = true
}

// orphans returns the open transactions whose clients are gone. Called with mu held.
func (s *Server) orphans() []*Tx {
	var found []*Tx
	for tx := range s.open {
		if tx.orphan {
			found = append(found, tx)
		}
	}
	slices.SortFunc(found, func(a, b *Tx) int { return cmp.Or(a.actor.compare(b.actor), a.number-b.number) })
	return found
}
