package outboxqueue

import (
	"context"
	"testing"
)

type stateError string

func (e stateError) Error() string    { return string(e) }
func (e stateError) SQLState() string { return string(e) }

// A statement that was canceled because its time was over was not held up by a lock: what it was to
// do has to be reported as not done.
func TestNotNow_IsNoStatementWhoseTimeIsOver(t *testing.T) {
	t.Parallel()
	ended, end := context.WithCancel(t.Context())
	end()
	for _, state := range []stateError{"55P03", "57014", "40P01"} {
		if !notNow(t.Context(), state) {
			t.Errorf("%s is an error of the statement", state)
		}
		if notNow(ended, state) {
			t.Errorf("%s after the end is a lock", state)
		}
	}
	if notNow(t.Context(), stateError("42P01")) {
		t.Error("a missing table is a lock")
	}
}
