package work

import (
	"os"
	"syscall"

	"github.com/oncemill/oncemill/crucible/history"
)

// crash ends the process as SIGKILL does, in the middle of an attempt.
func (w *worker) crash() error {
	if err := w.history.Add(history.Record{Event: history.EventState, State: "crash in a handler"}); err != nil {
		return err
	}
	return syscall.Kill(os.Getpid(), syscall.SIGKILL)
}
