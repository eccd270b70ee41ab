package testserver

import (
	"flag"
	"fmt"
	"math"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// Main runs the tests of a package, and fails if goroutines are left:
//
//	func TestMain(m *testing.M) { os.Exit(testserver.Main(m)) }
//
// It runs more tests at once than there are processors, unless -parallel is set: tests mostly
// wait for leases and servers.
func Main(m *testing.M, options ...goleak.Option) int {
	if err := flag.Set("test.parallel", strconv.Itoa(4*runtime.GOMAXPROCS(0))); err != nil {
		panic(err) // the testing package has no such flag
	}
	code := m.Run()
	if err := upkeep.close(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if code != 0 {
		return code
	}
	if err := Leak(30*time.Second, options...); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// Leak reports goroutines that are left once none has ended for so long. Those in which lib/pq
// cancels statements wait for a server that may be slow.
func Leak(still time.Duration, options ...goleak.Option) error {
	fewest, since := math.MaxInt, time.Now()
	for {
		err := goleak.Find(options...)
		if err == nil {
			return nil
		}
		if n := strings.Count(err.Error(), "Goroutine "); n < fewest {
			fewest, since = n, time.Now()
		}
		if time.Since(since) > still {
			return err
		}
	}
}
