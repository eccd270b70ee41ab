package relaymodel

// The size of the model.
const (
	workers  = 2
	lanes    = 2
	messages = 3
)

// What has become of the row of a message.
const (
	rowAbsent = iota // its transaction has not committed
	rowOwed
	rowDeleted
	rowDead // moved to the dead letters
)

// What a worker knows of a message.
const (
	unknown     = iota
	ready       // read
	decided     // to be published; the check of the lease is behind it
	inFlight    // handed to the sink
	confirmed   // to be deleted
	refused     // to be moved to the dead letters
	deleted     // remembered: a read that has begun before may still show it
	forgettable // deleted before the read that is under way began
)

// What is on the way between a worker and the broker.
const (
	nothing = iota
	publish
	confirm
	refusal
	lost // the worker will learn that nobody knows
)

// scene is what a run of the model begins with.
type scene struct {
	lane [messages]int
	key  [messages]int // messages of one key are committed in the order of their ids
	rules
	budget
}

// rules are what the protocol promises its promises by. Each can be left out.
type rules struct {
	noFence           bool // a move does not check owner and epoch
	noTrust           bool // a worker publishes whatever its lease is
	deleteEarly       bool // a row is deleted when its message is handed to the sink
	readAhead         bool // a read passes over ids below one that was read before
	forgetAtOnce      bool // what was deleted is not remembered until a later read
	keysSideBySide    bool // two messages of a key may be in flight
	unknownIsRefusal  bool // an unknown outcome makes a dead letter
	lostConfirmLoses  bool // an unknown outcome is taken for a confirm
	letterSaysNothing bool // a dead letter does not say that it may have been delivered
	keepLeases        bool // the lease of a dead worker never expires
}

// budget is how often each of these may happen in one run.
type budget struct {
	releases int8 // a worker gives a lane back
	crashes  int8
	pauses   int8 // of a process; a lease may expire meanwhile
	lapses   int8 // a worker stops to trust its lease, because its renewals take too long
	losses   int8 // of a publish, of a confirm, or of the database's answer
	refusals int8 // by the broker
}

// faultless reports whether nothing but releases has happened.
func (s *state) faultless(c *scene) bool {
	left := s.left
	left.releases = c.releases
	return left == c.budget
}

// state is a state of the model. Equal states have equal futures.
type state struct {
	row     [messages]uint8
	maybe   [messages]bool  // the dead letter says that it may have been delivered
	arrived [messages]uint8 // copies at the broker, at most two are counted
	owner   [lanes]uint8    // 0: nobody
	epoch   [lanes]uint8
	expired [lanes]bool
	worker  [workers]worker
	left    budget
}

// worker is a process and what is on the way between it and the broker.
type worker struct {
	down, paused bool
	held         [lanes]bool // it believes that it owns the lane
	epoch        [lanes]uint8
	reading      [lanes]bool
	snapshot     [messages]bool // of the read that is under way
	newest       [lanes]uint8   // the highest id that it has read, and one
	know         [messages]uint8
	doubt        [messages]bool // an attempt has had an unknown outcome
	wire         [messages]uint8
}

// number returns a number that differs for workers that differ.
func (w *worker) number() uint64 {
	var n uint64
	add := func(bits int, v uint8) { n = n<<bits | uint64(v) }
	flag := func(b bool) {
		if b {
			add(1, 1)
		} else {
			add(1, 0)
		}
	}
	flag(w.down)
	flag(w.paused)
	for l := range lanes {
		flag(w.held[l])
		flag(w.reading[l])
		add(4, w.epoch[l])
		add(2, w.newest[l])
	}
	for m := range messages {
		flag(w.snapshot[m])
		flag(w.doubt[m])
		add(3, w.know[m])
		add(3, w.wire[m])
	}
	return n
}

// canonical returns the state, or its mirror image: the workers are alike.
func (s *state) canonical() state {
	if s.worker[0].number() <= s.worker[1].number() {
		return *s
	}
	n := *s
	n.worker[0], n.worker[1] = s.worker[1], s.worker[0]
	for l := range lanes {
		if n.owner[l] > 0 {
			n.owner[l] = 3 - n.owner[l]
		}
	}
	return n
}

// owns reports whether the lease of a lane is the worker's, and lasts.
func (s *state) owns(w, lane int) bool {
	me := &s.worker[w]
	return me.held[lane] && s.holds(w, lane) && !s.expired[lane]
}

// holds reports whether owner and epoch in the table are the worker's.
func (s *state) holds(w, lane int) bool {
	return int(s.owner[lane]) == w+1 && s.epoch[lane] == s.worker[w].epoch[lane]
}

// runs reports whether the worker can do anything.
func (w *worker) runs() bool { return !w.down && !w.paused }

// broken returns the promise that this state breaks.
func (c *scene) broken(s *state) string {
	for m := range messages {
		switch {
		case s.row[m] == rowDeleted && s.arrived[m] == 0:
			return "loss: a row is deleted and its message was never at the broker"
		case s.row[m] == rowAbsent && s.arrived[m] > 0:
			return "ghost: a message is at the broker and was never committed"
		case s.row[m] == rowDead && s.arrived[m] > 0 && !s.maybe[m]:
			return "dead and delivered: and the dead letter does not say that it may be"
		case s.faultless(c) && s.arrived[m] > 1:
			return "repeated: a message was sent twice, and nothing had failed"
		}
	}
	return ""
}

// overtakes reports whether m, which arrives for the first time, overtakes one of its key.
func (c *scene) overtakes(s *state, m int) bool {
	for earlier := range m {
		if c.key[earlier] == c.key[m] && s.row[earlier] == rowOwed && s.arrived[earlier] == 0 && s.arrived[m] == 0 {
			return true
		}
	}
	return false
}

// done reports whether nothing is owed.
func (s *state) done() bool {
	for m := range messages {
		if s.row[m] != rowDeleted && s.row[m] != rowDead {
			return false
		}
	}
	return true
}
