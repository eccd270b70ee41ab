package testserver_test

import (
	"errors"
	"net"
	"strconv"
	"syscall"
	"testing"

	"github.com/oncemill/oncemill/internal/testserver"
)

// The kernel gives no outgoing connection such a port, and a server can have it again.
func TestFreeAddress_IsKeptForOneServer(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	taken := 0 // by a test in another process, which drew the same
	for range 20 {
		address, err := testserver.FreeAddress(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		_, text, err := net.SplitHostPort(address)
		if port, portErr := strconv.Atoi(text); err != nil || portErr != nil || port < 31000 || port >= 32768 {
			t.Errorf("%s may be taken by a connection (%v)", address, err)
		}
		if seen[address] {
			t.Errorf("%s was given out twice", address)
		}
		seen[address] = true
		for range 2 {
			listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", address)
			if errors.Is(err, syscall.EADDRINUSE) {
				taken++
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := listener.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	if taken > 4 {
		t.Errorf("%d times of 40 the address was taken", taken)
	}
}
