package testserver

import (
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestLeak_ReportsWhatStays(t *testing.T) { //nolint:paralleltest // others begin goroutines
	stay := make(chan struct{})
	ignored := goleak.IgnoreCurrent()
	go func() { <-stay }()
	if err := Leak(10*time.Millisecond, ignored); err == nil || !strings.Contains(err.Error(), "TestLeak_ReportsWhatStays") {
		t.Errorf("a goroutine that stays: %v", err)
	}
	close(stay)
	if err := Leak(MaxWait, ignored); err != nil {
		t.Errorf("a goroutine that ended: %v", err)
	}
}
