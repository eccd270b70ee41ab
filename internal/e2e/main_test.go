package e2e

import (
	"os"
	"testing"

	"github.com/oncemill/oncemill/internal/testserver"
)

// A test that kills workers runs them as processes of their own: this binary,
// told by the environment to be one.
func TestMain(m *testing.M) {
	if spec := os.Getenv(workerEnv); spec != "" {
		os.Exit(workerMain(spec))
	}
	os.Exit(testserver.Main(m))
}
