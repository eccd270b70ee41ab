package group

import "testing"

// If all groups above a certain size conflict, nearly all groups have that size, and one
// in hundreds is above it.
func TestPace_FindsTheSizeThatFits(t *testing.T) {
	for _, fits := range []int{1, 2, 3, 7, 20, 60} {
		p := newPace(100, 1000)
		const groups = 100_000
		given, members := 0, 0
		for range groups {
			n := p.size
			if n > fits {
				p.conflict(n)
				given++
				continue
			}
			p.clean(n)
			members += n
		}
		if given > groups/200 {
			t.Errorf("of %d that fit: %d groups of %d were given up", fits, given, groups)
		}
		if mean := float64(members) / groups; mean < 0.6*float64(fits) {
			t.Errorf("of %d that fit: %.1f in a group", fits, mean)
		}
	}
}

// The conflicts of groups that ran at the same time count once.
func TestPace_CountsOneConflictOfSeveralGroupsOnce(t *testing.T) {
	p := newPace(100, 1000)
	for range 3 {
		p.conflict(25)
	}
	if p.size != 12 || p.leaders() != 2 {
		t.Errorf("size %d, %d at once", p.size, p.leaders())
	}
	p.conflict(12)
	p.conflict(6)
	if p.size != 3 || p.leaders() != 4 {
		t.Errorf("size %d, %d at once", p.size, p.leaders())
	}
}

// Conflicts of single members do not prevent groups from being tried again.
func TestPace_GrowsAgainFromOne(t *testing.T) {
	p := newPace(100, 1000)
	for p.size > 1 {
		p.conflict(p.size)
	}
	for i := range 20_000 {
		if p.clean(p.size); i%100 == 0 && p.size == 1 {
			p.conflict(1)
		}
	}
	if p.size != 1 {
		t.Errorf("size %d, though one in a hundred conflicts", p.size)
	}
	for range needAtMost {
		p.clean(p.size)
	}
	if p.size < 10 {
		t.Errorf("size %d, long after the last conflict", p.size)
	}
}

// The commit of a group that is not full does not count, and neither does a conflict of
// one member.
func TestPace_IgnoresGroupsThatAreNotFull(t *testing.T) {
	p := newPace(100, 1000)
	p.clean(24)
	if p.size != 25 {
		t.Errorf("size %d", p.size)
	}
	p.clean(25)
	if p.size != 50 {
		t.Errorf("size %d", p.size)
	}
	p.conflict(1) // it would have conflicted alone too
	if p.size != 50 || p.leaders() != 3 {
		t.Errorf("size %d, %d at once", p.size, p.leaders())
	}
	p.conflict(2)
	if p.size != 25 {
		t.Errorf("size %d", p.size)
	}
}
