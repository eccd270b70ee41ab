package main

import (
	"errors"
	"fmt"
	"os"
	"syscall"
)

// Packages are compiled in parallel and tested one after the other. Each package runs several
// tests at once; two packages at a time would only slow each other down. go test has no
// setting for this, so its -exec runs each test binary through this command, which first waits
// for a file lock.

// turnFlag is how go test -exec calls this command: -turn FILE BINARY ARGUMENTS...
const turnFlag = "-turn"

// takeTurn waits for the lock of the file and executes the command in its place. The lock
// belongs to the process: it survives exec (since Linux 5.11; before that, packages are tested
// in parallel), ends with the process, and is not inherited by child processes.
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
	return fmt.Errorf("start %s: %w", command[0], syscall.Exec(command[0], command, os.Environ())) //nolint:gosec // built by go test
}
