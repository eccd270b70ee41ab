package testserver

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
)

// Ports for servers of tests: above those of scripts/servers.sh, below those that the kernel
// gives to outgoing connections.
const firstPort, lastPort = 31000, 32699

var (
	drawnMu sync.Mutex
	drawn   = map[int]bool{} // guarded by drawnMu
)

// FreeAddress returns an address of the loopback interface for a server that is stopped and
// started again at the same one. No outgoing connection takes its port meanwhile, and no other
// call in this process returns it.
func FreeAddress(ctx context.Context) (string, error) {
	drawnMu.Lock()
	defer drawnMu.Unlock()
	last := errors.New("all were given out")
	for range 10 * (lastPort - firstPort) {
		port := firstPort + rand.IntN(lastPort-firstPort+1) //nolint:gosec // no secret
		if drawn[port] {
			continue
		}
		address := fmt.Sprint("127.0.0.1:", port)
		listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
		if err != nil {
			last = err
			continue
		}
		drawn[port] = true
		return address, listener.Close()
	}
	return "", fmt.Errorf("testserver: no port from %d to %d is free: %w", firstPort, lastPort, last)
}
