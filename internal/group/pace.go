package group

// pace says how large groups may be now, and how many at once. Guarded by the mu of its
// group.
//
// Until the first conflict the size doubles with every clean group. A conflict halves
// it. From then on it grows by a quarter after many clean groups, after more of them the
// more often that went wrong: a conflict costs as much as dozens of groups, so what a
// larger one saves is lost if one in a few hundred meets another.
type pace struct {
	most    int
	writers int // transactions that the database lets write at once
	size    int
	streak  int // clean groups since the last change
	need    int // clean groups to grow; 1 before the first conflict
}

const (
	sizeAtFirst = 25
	needAtLeast = 256 // after a conflict
	needAtMost  = 1 << 16

	// sharing and single are how many members may be worked on at once after a conflict, in
	// small groups, and of those that still wait when groups are of one. These hold few
	// locks, and many of them make up for some of their commits.
	sharing = 12
	single  = 32
)

func newPace(most, writers int) pace {
	return pace{most: most, writers: writers, size: min(most, sizeAtFirst), need: 1}
}

// leaders returns how many groups may be worked on at once: while one commits and
// one waits for what a statement returns, a third has something to do. Where groups
// are in each other's way it would be in the way.
func (p *pace) leaders() int {
	groups := 3
	switch {
	case p.size == 1:
		groups = single
	case p.need > 1 && p.size < p.most:
		groups = max(2, sharing/p.size)
	}
	return min(groups, p.writers)
}

// conflict notes that a group of n members was given up. Of several that were under way
// the first one counts: the others were as large. One member shares nothing.
func (p *pace) conflict(n int) {
	if n > p.size || n == 1 && p.size > 1 {
		return
	}
	p.streak = 0
	if p.size == 1 {
		return // there was nothing larger
	}
	p.size = max(1, p.size/2)
	p.need = min(max(2*p.need, needAtLeast), needAtMost)
}

// clean notes that a group of n members was committed. Only one that was as
// large as allowed tells something.
func (p *pace) clean(n int) {
	if n < p.size {
		return
	}
	if p.need == 1 {
		p.size = min(p.most, 2*p.size)
		return
	}
	if p.streak++; p.streak >= p.need {
		p.streak = 0
		p.size = min(p.most, p.size+max(1, p.size/4))
		p.need = max(needAtLeast, p.need/2)
	}
}
