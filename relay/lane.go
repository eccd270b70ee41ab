package relay

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// lane is a worker's memory of a lane that it holds. It belongs to the worker's loop.
//
// An id stays in entries from the read that returned it until its deletion, or its move
// to the table parked, has committed. Every read passes over the ids in entries when it
// starts. Reads of a lane do not overlap, so a confirmed row is never taken for a new
// one: a read that may have seen it before its deletion started while it was known, and
// a later one starts after the deletion.
type lane struct {
	number  int
	epoch   int64
	limits  *limits
	order   Order
	trusted time.Time // the lease may be relied on until then

	entries       map[rowID]*entry
	locked        int // of entries: they take no room, since nobody knows for how long
	chains        map[string]*chain
	ready         fifo
	failing       []*entry // unsorted; each once
	followers     []*entry
	commands      []int64  // commands on dead letters without a key
	commandedKeys []string // keys with commands
	bytes         int      // of payload and metadata in entries of the outbox
	retryingBytes int      // and in retrying entries
	inFlight      int

	// Rows that were forgotten after an attempt without an answer, to be read again: a copy
	// may have arrived. So are all that were created up to unsureUntil, if it is not zero:
	// they were too many.
	unsure      map[rowID]bool
	unsureUntil time.Time

	inheritedUntil time.Time // workers before may have sent what was created up to then; the lease says it

	loaded       bool            // the retrying keys are known
	loading      bool            // they are being read
	overlooked   bool            // by looks for due rows, since its lease was not trusted
	reading      bool            // a read of this lane is running
	refetch      bool            // something is to be sent whose payload is not here
	refetched    bool            // the result of that read is useless
	readAt       time.Time       // it is not read before
	readFailed   bool            // its last read failed
	unreadable   int             // how often it failed to be read alone, with answers to other reads between
	unreadableAt int             // engine.reads at the last of them
	readBegan    time.Time       // its last read
	swept        map[string]bool // retrying keys whose rows are moved behind their head without being read
	crowded      bool            // a key may have more than maxWaiting entries
	thinned      bool            // payloads of messages behind their key may have been freed
	stopping     bool            // a key may be stopped, to be swept
	keyFreed     bool            // a key that the read passes over ceased to be busy
	dry          bool            // the last read found less than it asked for

	taskAt       time.Time // after a task of this lane has failed: none before
	oneByOne     bool      // then: one failure, follower or dead letter at a time, to find what is wrong
	commandsNext bool      // commands have waited for a failure
	keyNext      bool      // of commands one by one, that of a key is next
	sweepOne     bool      // one swept key at a time, to find what is wrong
	sweptLast    string    // the key of the last such try
	followAt     time.Time // followers are moved then, unless there are many

	// otherTopic is the id of an unread message of a topic of which nothing has been
	// tried; 0: none has been found so far.
	otherTopic int64

	behind time.Time // since when there may be rows that it has not read; see lookAhead
	went   int       // confirmed lately
	waited int       // had to wait, lately

	crashes   int    // takeovers in a row without a window confirmed
	leftAlone int64  // id that was alone in flight when the former owner died; 0: none
	through   int    // messages of this lane that were deleted or refused, while crashes counts
	announced *entry // is published, alone or before others, once that is recorded
	written   bool   // the announcement is recorded
	alone     *entry // in flight, announced
	together  bool   // it has the turn, and it is recorded that several may be in flight

	sentInTurn int       // messages in a row
	turnBegan  time.Time // for this lane

	stale     bool // the database still names what is no longer alone
	mustClear bool // and must be updated before anything else is published

	// For a lane that is one pipeline: after a failure it resumes from its first
	// unconfirmed message, once everything in flight has its outcome.
	restarting bool
	term       uint64 // changes with each restart; see Message.Term
	repeat     []*entry
	retry      backoff.BackOff
	retryAt    time.Time

	draining bool // finish what is in flight, take nothing new
	putOff   bool // since then something of it could not be written, alone
	paused   bool // by an operator: read and send nothing
}

func (l *lane) hasRetryingKeys() bool {
	for _, c := range l.chains {
		if c.retrying {
			return true
		}
	}
	return false
}

// maxWaiting is how many entries of one key are kept waiting before reads pass over the
// key. It limits how far a burst of one key can fill a lane's memory.
const maxWaiting = 32

func newLane(number int, epoch int64, limits *limits, trusted time.Time) *lane {
	return &lane{
		number: number, epoch: epoch, limits: limits, order: limits.order, trusted: trusted,
		entries: map[rowID]*entry{}, chains: map[string]*chain{},
	}
}

// orderKey is the key that m has to wait for; empty for none.
func (l *lane) orderKey(m *entry) string {
	if l.order == OrderNone {
		return ""
	}
	return m.Key
}

// add adds the entries of a read, in the order of ids, and returns how many were new.
func (l *lane) add(entries []*entry) int {
	added := 0
	for _, m := range entries {
		if _, known := l.entries[m.rowID()]; known {
			continue
		}
		if m.ID >= l.otherTopic {
			l.otherTopic = 0
		}
		l.know(m)
		l.enqueue(m)
		added++
	}
	return added
}

func (l *lane) know(m *entry) {
	m.lane = l
	id := m.rowID()
	m.unanswered = m.unanswered || l.unsure[id] || l.unsureTime(m.CreatedAt) || l.inherited(m.CreatedAt)
	delete(l.unsure, id)
	l.entries[id] = m
	if m.locked {
		l.locked++
	}
	if m.retrying {
		l.retryingBytes += m.size()
	} else {
		l.bytes += m.size()
	}
}

// lockedOut records that an entry's row is locked.
func (l *lane) lockedOut(m *entry) {
	if !m.locked && l.entries[m.rowID()] == m {
		m.locked = true
		l.locked++
	}
}

// enqueue moves an entry to where it belongs: to those ready, behind its key, or to the
// followers.
func (l *lane) enqueue(m *entry) {
	key := l.orderKey(m)
	if key == "" {
		l.push(m)
		return
	}
	c := l.chain(key)
	if c.retrying && !m.retrying {
		if l.swept[key] {
			l.forget(m) // the sweep of its key moves it
			return
		}
		l.waited++
		m.state = stateFollower
		l.followers = append(l.followers, m)
		return
	}
	m.state = stateWaiting
	c.insert(m)
	l.crowded = l.crowded || c.length > l.limits.mostWaiting
	if c.stopped() {
		return
	}
	if c.head == m || l.order == OrderPerKeyPipelined {
		l.push(m)
	}
}

// push makes an entry ready.
func (l *lane) push(m *entry) {
	m.state = stateReady
	if m.ahead {
		l.ready.pushFirst(m)
		return
	}
	l.ready.push(m)
}

func (l *lane) chain(key string) *chain {
	c := l.chains[key]
	if c == nil {
		c = &chain{}
		l.chains[key] = c
	}
	return c
}

// resume makes ready what may be published of a key.
func (l *lane) resume(c *chain) {
	if c.stopped() {
		return
	}
	for m := c.head; m != nil; m = m.next {
		if m.state == stateWaiting {
			l.push(m)
		}
		if l.order != OrderPerKeyPipelined {
			return
		}
	}
}

// forgetKey forgets a key without any state left.
func (l *lane) forgetKey(key string, c *chain) {
	if c.head == nil && !c.retrying && !c.stopped() {
		delete(l.chains, key)
	}
}

// busy appends the keys that reads are to pass over: more of their rows would only
// wait. In a pipeline nothing waits.
func (l *lane) busy(keys []string) []string {
	for key := range l.swept {
		keys = append(keys, key)
	}
	for _, key := range l.followed() { // behind a failure that cannot be written down
		if !l.swept[key] {
			keys = append(keys, key)
		}
	}
	if l.order != OrderPerKey || !l.crowded && !l.thinned {
		return keys
	}
	crowded, thinned := false, false
	for key, c := range l.chains {
		long, thin := c.length > l.limits.mostWaiting, l.thinned && c.thinned()
		if long || thin {
			keys = append(keys, key)
		}
		crowded, thinned = crowded || long, thinned || thin
	}
	l.crowded, l.thinned = crowded, thinned
	return keys
}

// confirm marks an entry in flight as confirmed and lets its key continue. Its payload
// is no longer needed.
func (l *lane) confirm(m *entry) {
	m.state = stateConfirmed
	if !m.ahead { // those prove nothing about the messages in front of them
		l.went++
	}
	l.empty(m)
	key := l.orderKey(m)
	if key == "" {
		return
	}
	c := l.chains[key]
	if c == nil {
		return // the lane has forgotten what it had not sent
	}
	c.remove(m)
	if c.length == l.limits.mostWaiting {
		l.dry, l.keyFreed = false, true // there may be more of the key
	}
	l.resume(c)
	l.forgetKey(key, c)
}

// forget drops an entry whose deletion has committed. An entry in flight (its confirm
// was late, and it was sent again meanwhile) stays until its outcome.
func (l *lane) forget(m *entry) {
	if l.entries[m.rowID()] != m || m.state == stateInFlight {
		return
	}
	recorded := m.moving && m.state == stateFailed // with what is known of it; not so for a follower
	if m.unanswered && !m.told && m.state != stateConfirmed && !recorded {
		l.rememberUnsure(m)
	}
	l.empty(m) // its read's other entries may live on
	delete(l.entries, m.rowID())
	if m.locked {
		l.locked--
	}
	m.state = stateForgotten
}

// maxUnsure bounds the rows that a lane remembers to have sent without an answer.
const maxUnsure = 4096

func (l *lane) rememberUnsure(m *entry) {
	if l.unsureTime(m.CreatedAt) || l.inherited(m.CreatedAt) {
		return
	}
	if len(l.unsure) >= maxUnsure {
		latest := int64(math.MinInt64)
		for id := range l.unsure {
			latest = max(latest, id.created)
		}
		l.unsure, l.unsureUntil = nil, time.UnixMicro(latest)
	}
	if l.unsure == nil {
		l.unsure = map[rowID]bool{}
	}
	l.unsure[m.rowID()] = true
}

// unsureTime reports whether all rows of that time may have been sent without an answer.
func (l *lane) unsureTime(created time.Time) bool {
	return !l.unsureUntil.IsZero() && !created.After(l.unsureUntil)
}

func (l *lane) inherited(created time.Time) bool {
	return !l.inheritedUntil.IsZero() && !created.After(l.inheritedUntil)
}

// isUnsure reports whether the next worker may send again what has arrived, and neither its row nor
// the lease says so: it had no answer, or its row is locked and cannot be deleted.
func (l *lane) isUnsure() bool {
	if len(l.unsure) > 0 || !l.unsureUntil.IsZero() {
		return true
	}
	for _, m := range l.entries {
		if (m.state == stateInFlight || m.state == stateConfirmed || m.unanswered) && !m.told && !l.inherited(m.CreatedAt) {
			return true
		}
	}
	return false
}

// empty frees the payload of an entry. The sink has a copy of what it was handed.
func (l *lane) empty(m *entry) {
	if l.entries[m.rowID()] == m {
		if m.retrying {
			l.retryingBytes -= m.size()
		} else {
			l.bytes -= m.size()
		}
	}
	m.Payload, m.Metadata, m.metadata = nil, nil, nil
	m.hollow = true
}

// forgetUnsent drops entries that are not in flight, confirmed or being moved, to be
// read again. After an error the database may be another server, one that lost its
// latest commits: what it no longer holds must not be sent.
func (l *lane) forgetUnsent() {
	keep := func(m *entry) bool { return m.state == stateInFlight || m.state == stateConfirmed || m.moving }
	for _, m := range l.entries {
		if !keep(m) {
			l.forget(m)
		}
	}
	for key, c := range l.chains {
		var kept chain
		for m := c.head; m != nil; {
			next := m.next
			if m.next = nil; keep(m) {
				kept.insert(m)
			}
			m = next
		}
		c.head, c.tail, c.length, c.commands = kept.head, kept.tail, kept.length, nil
		c.sweeping = false
		if c.failing != nil && !c.failing.moving {
			c.failing = nil
		}
		l.forgetKey(key, c)
	}
	gone := func(m *entry) bool { return !m.moving }
	l.failing = slices.DeleteFunc(l.failing, gone)
	l.followers = slices.DeleteFunc(l.followers, gone)
	l.repeat = nil
	l.ready, l.commands, l.commandedKeys, l.swept = fifo{}, nil, nil, nil
	l.cancel()
	l.dry, l.loaded, l.loading = false, false, false
}

// cancel takes back an announcement. If it is recorded, the database names a
// message that is not alone.
func (l *lane) cancel() {
	if m := l.announced; m != nil && m.state == stateAnnouncing {
		m.state = stateWaiting
	}
	l.stale = l.stale || l.written
	l.announced, l.written = nil, false
}

// nothingToSend reports whether the lane knows rows, and all of them are about to be
// deleted or moved.
func (l *lane) nothingToSend() bool {
	return len(l.entries) > 0 && l.inFlight == 0 && l.ready.len() == 0
}

// hung reports whether an outcome from the sink is long overdue. Such a lane's lease is
// not renewed.
func (l *lane) hung(now time.Time, grace time.Duration) bool {
	if l.inFlight == 0 {
		return false
	}
	for _, m := range l.entries {
		if m.state == stateInFlight && now.Sub(m.deadline) > grace {
			return true
		}
	}
	return false
}

// restart lets a lane that is one pipeline resume from its first unconfirmed message,
// once everything in flight has its outcome.
func (l *lane) restart(now time.Time) bool {
	if !l.restarting || l.inFlight > 0 {
		return false
	}
	l.restarting = false
	l.stopFailing()
	l.retryAt = now.Add(l.retry.NextBackOff())
	unsent := l.repeat
	for _, m := range l.ready.pop(l.ready.len()) {
		if m.state == stateReady {
			unsent = append(unsent, m)
		}
	}
	l.repeat = nil
	slices.SortFunc(unsent, func(a, b *entry) int { return cmp.Compare(a.ID, b.ID) })
	for _, m := range unsent {
		if m.state == stateAgain || m.state == stateReady {
			l.push(m)
		}
	}
	return true
}
