package idempotency_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/oncemill/oncemill/internal/testserver"
)

// TestMain is also the main function of the server processes that tests start.
func TestMain(m *testing.M) {
	if os.Getenv(serveVariable) != "" {
		if err := serveProcess(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(testserver.Main(m))
}
