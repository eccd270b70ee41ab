package turn

// Waiting returns how many wait.
func (t *Turns) Waiting() (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, w := range t.waiting {
		n += len(w)
	}
	return n
}

// Held reports that somebody has the turn.
func (t *Turns) Held() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.held
}

// Handles returns the number of handles that have Turns.
func Handles() int {
	all.Lock()
	defer all.Unlock()
	return len(all.turns)
}

// MaxWait is how long writers wait for one holder.
const MaxWait = maxWait
