package group

import "testing"

// Where groups of more than some size always meet others, nearly all groups are as large
// as may be, and one in hundreds is given up.
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

// Groups that were under way together tell the same: that they were too large, once.
func TestPace_OneMeetingCountsOnce(t *testing.T) {
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

// What singles meet does not keep groups from being tried again.
func TestPace_LeavesGroupsOfOne(t *testing.T) {
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
		t.Errorf("size %d, though one in a hundred meets another", p.size)
	}
	for range needAtMost {
		p.clean(p.size)
	}
	if p.size < 10 {
		t.Errorf("size %d, long after the last meeting", p.size)
	}
}

// A group that is not full tells nothing by committing, and one of one member nothing at
// all.
func TestPace_FewSayLittle(t *testing.T) {
	p := newPace(100, 1000)
	p.clean(24)
	if p.size != 25 {
		t.Errorf("size %d", p.size)
	}
	p.clean(25)
	if p.size != 50 {
		t.Errorf("size %d", p.size)
	}
	p.conflict(1) // what stopped it, it would have met alone
	if p.size != 50 || p.leaders() != 3 {
		t.Errorf("size %d, %d at once", p.size, p.leaders())
	}
	p.conflict(2)
	if p.size != 25 {
		t.Errorf("size %d", p.size)
	}
}
