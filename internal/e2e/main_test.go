package e2e

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/oncemill/oncemill/internal/testserver"
)

// A test that kills workers runs them as processes of their own: this binary,
// told by the environment to be one.
func TestMain(m *testing.M) {
	if spec := os.Getenv(workerEnv); spec != "" {
		os.Exit(workerMain(spec))
	}
	if spec := os.Getenv(hopEnv); spec != "" {
		os.Exit(hopMain(spec))
	}
	if spec := os.Getenv(natsNodeEnv); spec != "" {
		os.Exit(natsNodeMain(spec))
	}
	// Watermill's suite closes the subscriber of its test for order before it
	// subscribes, so that what this one starts never ends.
	os.Exit(testserver.Main(
		m,
		goleak.IgnoreAnyFunction("github.com/ThreeDotsLabs/watermill/internal/subscriber.(*multiplier).Subscribe.func2"),
		goleak.IgnoreAnyFunction("github.com/ThreeDotsLabs/watermill/internal/subscriber.(*multiplier).Subscribe.func3"),
		goleak.IgnoreAnyFunction("github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp.(*Subscriber).Subscribe.func1"),
		goleak.IgnoreAnyFunction("github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp.(*ConnectionWrapper).handleConnectionClose"),
	))
}
