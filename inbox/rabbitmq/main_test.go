package rabbitmq_test

import (
	"fmt"
	"os"
	"testing"

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
	os.Exit(testserver.Main(m))
}
