package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// packagesAtOnce is how many packages are tested at once, at most. Fewer of them leave the two
// processors idle while their tests wait. Packages are compiled at the same time. go test has no
// setting for this, so its -exec runs each test binary through this command, which first locks a
// byte of a file, its place.
const packagesAtOnce = 3

// heavy are the packages whose tests take two thirds of the time. One of them is tested at a time: on
// a slow machine, several make some of their tests wait for so long that time limits end. More of
// its tests run at a time than of others, since one after the other these packages take longest, and
// many of their tests wait for a silent server.
var heavy = []string{"relay", "idempotency", "inbox", "outbox"}

// moreTests is for a test binary of a heavy package.
const moreTests = "-test.parallel=10"

// heavyPlace is the place of the heavy package. The others take those after it.
const heavyPlace = 0

// mostRunnable is how many threads for each processor may want to run, on average over lookFor, if
// a package that is not heavy is to begin beside another. The processors are busy with fewer.
const (
	mostRunnable = 3
	lookFor      = 500 * time.Millisecond // so long that what began last shows
)

// turnFlag is how go test -exec calls this command: -turn FILE BINARY ARGUMENTS...
const turnFlag = "-turn"

// door is the byte that is locked by the one command that looks whether it may begin.
const door = packagesAtOnce

// takeTurn waits for one of the places of the file and executes the command in its place. The
// lock belongs to the process: it survives exec (since Linux 5.11; before that, all packages are
// tested in parallel), ends with the process, and is not inherited by child processes.
func takeTurn(file string, command []string) error {
	fd, err := syscall.Open(file, syscall.O_CREAT|syscall.O_RDWR, 0o600) // not closed on exec
	if err != nil {
		return fmt.Errorf("open %s: %w", file, err)
	}
	turns, take := places(fd), places.takeOther
	if isHeavy() {
		take, command = places.takeHeavy, append(command, moreTests)
	}
	for taken := false; !taken; {
		if taken, err = take(turns); err != nil {
			return fmt.Errorf("lock %s: %w", file, err)
		}
		if !taken {
			time.Sleep(50 * time.Millisecond) // F_SETLKW waits for one byte only
		}
	}
	return fmt.Errorf("start %s: %w", command[0], syscall.Exec(command[0], command, os.Environ())) //nolint:gosec // built by go test
}

// isHeavy tells whether the package in this directory, where go test runs its binary, is heavy.
func isHeavy() bool {
	dir, err := os.Getwd()
	return err == nil && slices.ContainsFunc(heavy, func(name string) bool { return strings.HasSuffix(dir, "/"+name) })
}

// places is the descriptor of the file. It has a byte for each place, and one for the door.
type places int

func (p places) takeHeavy() (taken bool, err error) {
	return p.set(heavyPlace, syscall.F_WRLCK)
}

// takeOther takes a place if nobody has one, or if one is left and the processors are not busy.
func (p places) takeOther() (taken bool, err error) {
	if mine, err := p.set(door, syscall.F_WRLCK); err != nil || !mine {
		return false, err
	}
	defer func() {
		_, unlocked := p.set(door, syscall.F_UNLCK)
		err = errors.Join(err, unlocked)
	}()
	mine, others := -1, 0
	for place := range packagesAtOnce {
		free, err := p.set(place, syscall.F_WRLCK)
		switch {
		case err != nil:
			return false, err
		case !free:
			others++
		case mine < 0 && place != heavyPlace:
			mine = place
		default: // it has one, or may not have this one
			if _, err := p.set(place, syscall.F_UNLCK); err != nil {
				return false, err
			}
		}
	}
	if mine < 0 || others == 0 || !busy() {
		return mine >= 0, nil
	}
	_, err = p.set(mine, syscall.F_UNLCK)
	return false, err
}

// set locks or unlocks a byte. It returns false if another process has locked it.
func (p places) set(place int, to int16) (done bool, err error) {
	err = syscall.FcntlFlock(uintptr(p), syscall.F_SETLK, &syscall.Flock_t{Type: to, Start: int64(place), Len: 1})
	if errors.Is(err, syscall.EAGAIN) || errors.Is(err, syscall.EACCES) {
		return false, nil
	}
	return err == nil, err
}

// busy tells whether more threads want to run than the processors bear. Tests have another.
var busy = func() bool {
	const every = 25 * time.Millisecond
	sum := 0
	for range lookFor / every {
		time.Sleep(every)
		sum += runnable()
	}
	return sum > mostRunnable*runtime.NumCPU()*int(lookFor/every)
}

// runnable returns how many threads of the machine run or want to, besides this one (0 where
// there is no /proc).
func runnable() int {
	text, _ := os.ReadFile("/proc/loadavg") // "1.15 0.87 0.50 3/345 12345"
	fields := strings.Fields(string(text))
	if len(fields) < 4 {
		return 0
	}
	n, _, _ := strings.Cut(fields[3], "/")
	running, _ := strconv.Atoi(n)
	return max(running-1, 0)
}
