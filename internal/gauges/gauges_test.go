package gauges_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncemill/oncemill/internal/gauges"
)

// run reads until the test ends, and begins with a collection.
func run(t *testing.T, read func(context.Context) (int, bool, error), report func(error)) *gauges.Reader[int] {
	t.Helper()
	r := gauges.New[int]()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Run(ctx, read, report)
	}()
	t.Cleanup(func() { cancel(); <-done })
	r.Collect()
	return r
}

// Readings that take long, as of many queues of a far broker, are no reason to report one for hours.
func TestReader_ReadsAgainWithinMinutesHoweverLongItTakes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := 0
		r := run(t, func(context.Context) (int, bool, error) {
			time.Sleep(time.Minute)
			n++
			return n, true, nil
		}, func(error) {})
		for want := range 3 {
			time.Sleep(61 * time.Second)
			synctest.Wait()
			if value, ok := r.Collect(); !ok || value != want+1 {
				t.Fatalf("got %d, %v, want %d", value, ok, want+1)
			}
			time.Sleep(4 * time.Minute)
		}
	})
}

// What is known is reported beside the error of what is not.
func TestReader_KeepsWhatIsReadBesideAnError(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		failure := errors.New("silent")
		reports, reads := make(chan error, 100), 0
		r := run(t, func(context.Context) (int, bool, error) {
			reads++
			return 7, reads == 1, failure
		}, func(err error) { reports <- err })
		if err := <-reports; !errors.Is(err, failure) {
			t.Errorf("reported %v", err)
		}
		if value, known := r.Collect(); !known || value != 7 {
			t.Errorf("got %d, %v", value, known)
		}
		time.Sleep(21 * time.Second)
		synctest.Wait()
		if _, known := r.Collect(); known {
			t.Error("a value is known after a reading without one")
		}
	})
}
