package rabbitmq_test

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/oncemill/oncemill/internal/testserver"
)

func TestMain(m *testing.M) {
	for name, process := range map[string]func() error{envConsumer: consumeAsAProcess, envShards: consumeShardsAsAProcess} {
		if os.Getenv(name) == "" {
			continue
		}
		if err := process(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	// Watermill's suite stops reading when it has each message once. What comes again
	// after that waits in its own goroutines, which never end.
	os.Exit(testserver.Main(
		m,
		goleak.IgnoreAnyFunction("github.com/ThreeDotsLabs/watermill/internal/subscriber.(*multiplier).Subscribe.func2"),
		goleak.IgnoreAnyFunction("github.com/ThreeDotsLabs/watermill/internal/subscriber.(*multiplier).Subscribe.func3"),
	))
}
