package nemesis_test

import (
	"reflect"
	"testing"
	"time"

	"github.com/oncemill/oncemill/crucible/nemesis"
)

var kinds = []nemesis.Kind{
	{Name: "kill", Targets: []string{"a", "b"}, Min: time.Second, Max: 3 * time.Second},
	{Name: "stop", Targets: []string{"broker"}, Min: time.Second, Max: 5 * time.Second, Alone: "broker"},
	{Name: "alarm", Targets: []string{"broker"}, Min: time.Second, Max: 5 * time.Second, Alone: "broker"},
}

func TestPlan_IsThatOfItsSeed(t *testing.T) {
	t.Parallel()
	first, again := nemesis.Plan(7, 3*time.Minute, kinds), nemesis.Plan(7, 3*time.Minute, kinds)
	if !reflect.DeepEqual(first, again) {
		t.Error("two plans of a seed differ")
	}
	if reflect.DeepEqual(first, nemesis.Plan(8, 3*time.Minute, kinds)) {
		t.Error("two seeds have one plan")
	}
}

func TestPlan_KeepsItsRules(t *testing.T) {
	t.Parallel()
	for seed := range uint64(50) {
		plan := nemesis.Plan(seed, 3*time.Minute, kinds)
		seen := map[string]int{}
		var alone time.Duration
		overlap := false
		for i, f := range plan {
			seen[f.Kind]++
			if f.At+f.For > 3*time.Minute+5*time.Second {
				t.Fatalf("seed %d: %+v lasts beyond the run", seed, f)
			}
			if f.Target == "broker" {
				if f.At < alone {
					t.Fatalf("seed %d: %+v begins before the last one of the broker has ended", seed, f)
				}
				alone = f.At + f.For
			}
			overlap = overlap || i > 0 && f.At < plan[i-1].At+plan[i-1].For
		}
		if len(seen) != len(kinds) || !overlap {
			t.Fatalf("seed %d: kinds %v, overlap %v", seed, seen, overlap)
		}
	}
}
