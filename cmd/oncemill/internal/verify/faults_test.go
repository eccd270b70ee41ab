package verify

import (
	"reflect"
	"testing"
	"time"
)

func TestPlanFaults_IsThatOfItsSeed(t *testing.T) {
	t.Parallel()
	const length = 30 * time.Second
	plan := planFaults(7, length, faultKinds)
	if again := planFaults(7, length, faultKinds); !reflect.DeepEqual(plan, again) {
		t.Error("the same seed has another plan")
	}
	if other := planFaults(8, length, faultKinds); reflect.DeepEqual(plan, other) {
		t.Error("another seed has the same plan")
	}
}

func TestPlanFaults_HasEachPossibleKind(t *testing.T) {
	t.Parallel()
	for _, length := range []time.Duration{5 * time.Second, 30 * time.Second, 10 * time.Minute} {
		for seed := range uint64(50) {
			kinds := map[string]int{}
			for _, s := range planFaults(seed, length, faultKinds[:5]) {
				if s.at <= 0 || s.at > length {
					t.Fatalf("seed %d: a fault at %s of %s", seed, s.at, length)
				}
				if s.kind == faultCut && s.target[:len(roleService)] == roleService {
					t.Fatalf("seed %d: %s, which has no connection", seed, s.target)
				}
				kinds[s.kind]++
			}
			if len(kinds) != 5 {
				t.Fatalf("seed %d, %s: %v", seed, length, kinds)
			}
		}
	}
}
