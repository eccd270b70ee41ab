package main

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"
)

// packagesAtOnce is how many packages are tested at once. Fewer of them leave the two
// processors idle while their tests wait; more would slow each other down. Packages are compiled
// at the same time. go test has no setting for this, so its -exec runs each test binary through
// this command, which first locks a byte of a file.
const packagesAtOnce = 4

// turnFlag is how go test -exec calls this command: -turn FILE BINARY ARGUMENTS...
const turnFlag = "-turn"

// takeTurn waits for one of the locks of the file and executes the command in its place. The
// lock belongs to the process: it survives exec (since Linux 5.11; before that, all packages are
// tested in parallel), ends with the process, and is not inherited by child processes.
func takeTurn(file string, command []string) error {
	fd, err := syscall.Open(file, syscall.O_CREAT|syscall.O_RDWR, 0o600) // not closed on exec
	if err != nil {
		return fmt.Errorf("open %s: %w", file, err)
	}
	for place := int64(0); ; place = (place + 1) % packagesAtOnce {
		err := syscall.FcntlFlock(uintptr(fd), syscall.F_SETLK, &syscall.Flock_t{Type: syscall.F_WRLCK, Start: place, Len: 1})
		if err == nil {
			break
		}
		if !errors.Is(err, syscall.EAGAIN) && !errors.Is(err, syscall.EACCES) {
			return fmt.Errorf("lock %s: %w", file, err)
		}
		time.Sleep(50 * time.Millisecond) // F_SETLKW waits for one byte only
	}
	return fmt.Errorf("start %s: %w", command[0], syscall.Exec(command[0], command, os.Environ())) //nolint:gosec // built by go test
}
