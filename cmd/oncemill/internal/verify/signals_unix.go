//go:build unix

package verify

import (
	"os"
	"syscall"
)

var freezeSignal, thawSignal os.Signal = syscall.SIGSTOP, syscall.SIGCONT
