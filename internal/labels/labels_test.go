package labels_test

import (
	"strconv"
	"sync"
	"testing"

	"github.com/oncemill/oncemill/internal/labels"
)

func TestSet_KeepsSomeValuesAndPoolsTheRest(t *testing.T) {
	t.Parallel()
	var s labels.Set
	var mu sync.Mutex
	kept := map[string]bool{}
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			for i := range 5 * labels.Most {
				got := s.Of(strconv.Itoa(i))
				if got != strconv.Itoa(i) && got != labels.Other {
					t.Errorf("%d became %s", i, got)
				}
				mu.Lock()
				kept[got] = true
				mu.Unlock()
			}
		})
	}
	group.Wait()
	if len(kept) != labels.Most+1 {
		t.Errorf("%d values, want %d and the rest", len(kept), labels.Most)
	}
	if got := s.Of("0"); got != "0" {
		t.Errorf("the first became %s", got)
	}
}
