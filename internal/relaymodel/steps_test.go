package relaymodel

// next calls visit with every state that can follow s. overtaken reports that the step lets a
// message overtake another one of its key.
func (c *scene) next(s state, visit func(next state, overtaken bool)) {
	then := func(change func(n *state)) {
		n := s
		change(&n)
		visit(n, false)
	}
	for m := range messages {
		if s.row[m] == rowAbsent && c.mayCommit(&s, m) {
			then(func(n *state) { n.row[m] = rowOwed })
		}
	}
	for lane := range lanes {
		if c.mayExpire(&s, lane) {
			then(func(n *state) { n.expired[lane] = true })
		}
	}
	for w := range workers {
		c.faults(&s, w, then)
		for m := range messages {
			c.network(&s, w, m, visit)
		}
		if !s.worker[w].runs() {
			continue
		}
		for lane := range lanes {
			c.leases(&s, w, lane, then)
		}
		for m := range messages {
			c.work(&s, w, m, then)
		}
	}
}

// mayCommit: producers of a key serialize on it. Ids of different keys commit in any order.
func (c *scene) mayCommit(s *state, m int) bool {
	for earlier := range m {
		if c.key[earlier] == c.key[m] && s.row[earlier] == rowAbsent {
			return false
		}
	}
	return true
}

// mayExpire: a worker that runs stops to trust its lease before it expires. One that is down or
// paused cannot.
func (c *scene) mayExpire(s *state, lane int) bool {
	if s.owner[lane] == 0 || s.expired[lane] || c.keepLeases {
		return false
	}
	w := int(s.owner[lane]) - 1
	return !s.worker[w].runs() || !s.worker[w].held[lane] || !s.holds(w, lane)
}

// faults are crashes and pauses. What a worker has sent may still arrive.
func (c *scene) faults(s *state, w int, then func(func(n *state))) {
	me := &s.worker[w]
	switch {
	case me.down:
		then(func(n *state) { n.worker[w].down = false })
	case me.paused:
		then(func(n *state) { n.worker[w].paused = false })
	default:
		if s.left.crashes > 0 {
			then(func(n *state) {
				n.left.crashes--
				dead := worker{down: true}
				for m, what := range me.wire {
					if what == publish {
						dead.wire[m] = publish
					}
				}
				n.worker[w] = dead
			})
		}
		if s.left.pauses > 0 {
			then(func(n *state) { n.left.pauses--; n.worker[w].paused = true })
		}
	}
}

// network moves what is between the worker and the broker. A worker that is down learns nothing.
func (c *scene) network(s *state, w, m int, visit func(state, bool)) {
	me := &s.worker[w]
	answer := func(n *state, what uint8) {
		if me.down {
			what = nothing
		}
		n.worker[w].wire[m] = what
	}
	switch me.wire[m] {
	case publish:
		n := s.clone()
		n.arrived[m] = min(2, n.arrived[m]+1)
		answer(&n, confirm)
		visit(n, c.overtakes(s, m))
		if s.left.losses > 0 {
			n := s.clone()
			n.left.losses--
			answer(&n, lost)
			visit(n, false)
		}
		if s.left.refusals > 0 {
			n := s.clone()
			n.left.refusals--
			answer(&n, refusal)
			visit(n, false)
		}
	case confirm:
		if s.left.losses > 0 {
			n := s.clone()
			n.left.losses--
			n.worker[w].wire[m] = lost
			visit(n, false)
		}
	default:
	}
	if me.runs() && me.wire[m] > publish {
		n := s.clone()
		n.worker[w].wire[m] = nothing
		c.outcome(&n, w, m, me.wire[m])
		visit(n, false)
	}
}

func (s *state) clone() state { return *s }

// outcome tells a worker what has become of a publish. A confirm counts whoever owns the lane.
func (c *scene) outcome(n *state, w, m int, what uint8) {
	me := &n.worker[w]
	mine := me.held[c.lane[m]]
	switch {
	case what == confirm, what == lost && c.lostConfirmLoses:
		me.know[m] = confirmed
	case what == refusal, what == lost && c.unknownIsRefusal:
		me.know[m] = refused // a move checks whose the lane is
	case mine:
		me.know[m], me.doubt[m] = ready, true
	default:
		me.know[m] = unknown
	}
}

// leases takes a lane, reads it, or stops to trust its lease.
func (c *scene) leases(s *state, w, lane int, then func(func(n *state))) {
	me := &s.worker[w]
	if s.owner[lane] == 0 || s.expired[lane] {
		take := func(n *state) { n.owner[lane], n.epoch[lane], n.expired[lane] = uint8(w+1), n.epoch[lane]+1, false }
		then(func(n *state) {
			take(n)
			c.forget(n, w, lane)
			n.worker[w].held[lane], n.worker[w].epoch[lane] = true, n.epoch[lane]
		})
		if s.left.losses > 0 { // the answer is lost: it is the owner and does not know
			then(func(n *state) { n.left.losses--; take(n) })
		}
	}
	if me.held[lane] && s.left.lapses > 0 { // its renewals take too long
		then(func(n *state) { n.left.lapses--; c.forget(n, w, lane) })
	}
	if s.left.releases > 0 && s.owns(w, lane) && c.idle(me, lane) {
		then(func(n *state) { n.left.releases--; c.forget(n, w, lane); n.owner[lane] = 0 })
	}
	switch {
	case !s.owns(w, lane):
	case !me.reading[lane]:
		then(func(n *state) {
			reader := &n.worker[w]
			reader.reading[lane] = true
			for m := range messages {
				if c.lane[m] != lane {
					continue
				}
				reader.snapshot[m] = s.row[m] == rowOwed && (!c.readAhead || m >= int(me.newest[lane]))
				if reader.know[m] == deleted {
					reader.know[m] = forgettable
				}
			}
		})
	default:
		then(func(n *state) {
			reader := &n.worker[w]
			reader.reading[lane] = false
			for m := range messages {
				if c.lane[m] != lane {
					continue
				}
				if reader.snapshot[m] && reader.know[m] == unknown {
					reader.know[m] = ready
					if c.readAhead {
						reader.newest[lane] = max(reader.newest[lane], uint8(m+1))
					}
				}
				if reader.know[m] == forgettable {
					reader.know[m] = unknown
				}
				reader.snapshot[m] = false
			}
		})
	}
}

// idle reports whether a worker can give a lane back.
func (c *scene) idle(me *worker, lane int) bool {
	for m := range messages {
		if c.lane[m] == lane && me.know[m] >= decided && me.know[m] <= refused {
			return false
		}
	}
	return true
}

// forget ends a worker's belief in a lane. What was decided or is on the way goes on.
func (c *scene) forget(n *state, w, lane int) {
	me := &n.worker[w]
	me.held[lane], me.reading[lane], me.newest[lane] = false, false, 0
	for m := range messages {
		if c.lane[m] != lane {
			continue
		}
		me.snapshot[m] = false
		switch me.know[m] {
		case ready, deleted, forgettable:
			me.know[m], me.doubt[m] = unknown, false
		default:
		}
	}
}

// work publishes a message, deletes its row, or moves it to the dead letters.
func (c *scene) work(s *state, w, m int, then func(func(n *state))) {
	me, lane := &s.worker[w], c.lane[m]
	switch me.know[m] {
	case ready:
		if (c.noTrust || s.owns(w, lane)) && me.held[lane] && c.inOrder(me, m) {
			then(func(n *state) { n.worker[w].know[m] = decided })
		}
	case decided: // the lease may have expired since
		if me.wire[m] == nothing {
			then(func(n *state) {
				n.worker[w].know[m], n.worker[w].wire[m] = inFlight, publish
				if c.deleteEarly {
					n.remove(m)
				}
			})
		}
	case confirmed:
		then(func(n *state) { n.remove(m); c.ended(n, w, m) })
		if s.left.losses > 0 { // the answer is lost: it is deleted again
			then(func(n *state) { n.left.losses--; n.remove(m) })
		}
	case refused:
		then(func(n *state) {
			if (c.noFence || s.holds(w, lane)) && n.row[m] == rowOwed {
				n.row[m] = rowDead
				// After a takeover another worker may have sent it.
				n.maybe[m] = !c.letterSaysNothing && (me.doubt[m] || me.epoch[lane] > 1)
			}
			c.ended(n, w, m)
		})
	default:
	}
}

// ended: a read that is under way may still show the row.
func (c *scene) ended(n *state, w, m int) {
	me := &n.worker[w]
	me.know[m], me.doubt[m] = unknown, false
	if me.held[c.lane[m]] && !c.forgetAtOnce {
		me.know[m] = deleted
	}
}

// remove deletes the row, or the dead letter that it has become: the message was delivered.
func (s *state) remove(m int) {
	if s.row[m] != rowAbsent {
		s.row[m], s.maybe[m] = rowDeleted, false
	}
}

// inOrder: at most one unconfirmed message of a key is on the way.
func (c *scene) inOrder(me *worker, m int) bool {
	for earlier := range m {
		if c.key[earlier] != c.key[m] {
			continue
		}
		switch me.know[earlier] {
		case ready, refused:
			return false
		case decided, inFlight:
			return c.keysSideBySide
		default:
		}
	}
	return true
}
