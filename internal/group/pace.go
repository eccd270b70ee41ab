package group

// pace decides how large groups may be, and how many run at once. Guarded by the mu of
// its Group.
//
// Until the first conflict the size doubles with every clean group. A conflict halves
// it. After that it grows by a quarter after many clean groups, and each further conflict
// doubles that number. A conflict costs as much as dozens of groups, so a larger group
// saves nothing if one in a few hundred conflicts.
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

	// sharing is how many members may run at once in small groups after a conflict, and
	// single how many when the group size is one. Single members hold few locks, and
	// running many at once makes up for part of their commits.
	sharing = 12
	single  = 32
)

func newPace(most, writers int) pace {
	return pace{most: most, writers: writers, size: min(most, sizeAtFirst), need: 1}
}

// leaders returns how many groups may run at once. While one commits and another waits
// for a statement, a third can run. After conflicts it would only add to them.
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

// conflict records a contended group of n members. Of several groups that ran at once
// only the first counts, since the others had the same size. A single member's conflict
// is not about the group size.
func (p *pace) conflict(n int) {
	if n > p.size || n == 1 && p.size > 1 {
		return
	}
	p.streak = 0
	if p.size == 1 {
		return // already the smallest
	}
	p.size = max(1, p.size/2)
	p.need = min(max(2*p.need, needAtLeast), needAtMost)
}

// clean records that a group of n members committed. Only groups of the full size
// count.
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
