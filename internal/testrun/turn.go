package main

import (
	"errors"
	"fmt"
	"os"
	"syscall"
)

// Packages are compiled side by side and tested one after the other: each runs several
// tests at once, against servers of its own, and two of them at a time only make each
// other's waits long. go test has no setting for that. It is told to start a test binary
// by way of this command, which first waits for the lock of a file.

// turnFlag is how go test -exec calls this command: -turn FILE BINARY ARGUMENTS...
const turnFlag = "-turn"

// takeTurn waits for the lock of the file and becomes the command. The lock is the
// process's own: it outlives exec (on Linux from 5.11 on; before that, packages are tested
// side by side), it ends with the process, and what the process starts does not have it.
func takeTurn(file string, command []string) error {
	fd, err := syscall.Open(file, syscall.O_CREAT|syscall.O_RDWR, 0o600) // not closed on exec
	if err != nil {
		return fmt.Errorf("open %s: %w", file, err)
	}
	for {
		err := syscall.FcntlFlock(uintptr(fd), syscall.F_SETLKW, &syscall.Flock_t{Type: syscall.F_WRLCK})
		if err == nil {
			break
		}
		if !errors.Is(err, syscall.EINTR) {
			return fmt.Errorf("lock %s: %w", file, err)
		}
	}
	return fmt.Errorf("start %s: %w", command[0], syscall.Exec(command[0], command, os.Environ())) //nolint:gosec // what go test has built
}
