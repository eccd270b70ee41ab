//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oncemill/oncemill/internal/sleep"
)

// lockFile waits until no other open file has the lock. A process that holds it writes a few
// thousand lines, unless it is frozen.
func lockFile(ctx context.Context, file *os.File) error {
	for end := time.Now().Add(purgeLimit); ; {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB) //nolint:gosec // a descriptor is small
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR):
			return err
		case time.Now().After(end):
			return fmt.Errorf("another process has held it for %v", purgeLimit)
		case !sleep.For(ctx, 10*time.Millisecond):
			return ctx.Err()
		}
	}
}
