package relay_test

import (
	"os"
	"testing"

	"github.com/oncemill/oncemill/internal/testserver"
)

// The tests run their workers in processes of their own where these are to be
// killed or stopped: this binary, told by the environment to be one.
func TestMain(m *testing.M) {
	if spec := os.Getenv(workerEnv); spec != "" {
		os.Exit(workerMain(spec))
	}
	os.Exit(testserver.Main(m))
}
