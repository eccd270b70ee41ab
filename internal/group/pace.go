package group

// pace says how large groups may be now. Guarded by the mu of its group.
//
// Until the first conflict the size doubles with every clean group. A conflict halves
// it and makes the number of clean groups that it takes to grow by a quarter four
// times as many, so that groups which cannot work are tried ever less often.
type pace struct {
	most    int
	writers int // transactions that the database lets write at once
	size    int
	streak  int // clean groups since the last change
	need    int // clean groups to grow; 1 before the first conflict
}

const (
	sizeAtFirst = 25
	needAtFirst = 8
	needAtMost  = 4096
	// inParallel is the number of members that are worked on at once, in groups
	// of any size: one transaction each is slow because of the commits, and many
	// of them at once make up for some of it.
	inParallel = 32
)

func newPace(most, writers int) pace {
	return pace{most: most, writers: writers, size: min(most, sizeAtFirst), need: 1}
}

// leaders returns how many groups may be worked on at once: while one commits and
// one waits for what a statement returns, a third has something to do. Where groups
// are in each other's way it would be in the way.
func (p *pace) leaders() int {
	groups := 3
	if p.need > 1 {
		groups = 2
	}
	return min(max(groups, inParallel/p.size), p.writers)
}

func (p *pace) conflict() {
	p.size = max(1, p.size/2)
	p.streak = 0
	p.need = min(max(4*p.need, needAtFirst), needAtMost)
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
		p.need = max(needAtFirst, p.need*3/4)
	}
}
