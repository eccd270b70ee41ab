package relay

import "time"

// pace is the size of a call that is made again and again. It is learned: what is too
// much for a slow connection would fail again, at the next worker too. A call may take
// long whatever its size, for example because it passes over very many dead rows. Then
// twice as much is tried, and kept if that takes hardly longer.
type pace struct {
	size, least, most int
	tried             time.Duration // how long half of that took, if it was not quick; 0: nothing is tried, negative: it was no use
}

// failed records a call that had no answer, or not in time.
func (p *pace) failed() { p.size, p.tried = max(p.least, p.size/4), 0 }

// took records a call of full size.
func (p *pace) took(took, quick time.Duration) {
	switch {
	case took <= quick/8: // eight times as long would still be quick
		p.size, p.tried = min(8*p.size, p.most), 0
	case took <= quick:
		p.size, p.tried = min(2*p.size, p.most), 0
	case p.tried > 0 && took > p.tried*3/2:
		p.size, p.tried = max(p.least, p.size/2), -1
	case p.tried >= 0 && took <= quick*7/4: // twice as long would still be in time
		p.size, p.tried = min(2*p.size, p.most), took
	}
}
