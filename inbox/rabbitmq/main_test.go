package rabbitmq_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/oncemill/oncemill/internal/testserver"
)

func TestMain(m *testing.M) {
	if os.Getenv(envConsumer) != "" {
		if err := consumeAsAProcess(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(testserver.Main(m))
}
