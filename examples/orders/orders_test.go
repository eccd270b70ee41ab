package main

import (
	"errors"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/examples/internal/demo"
	"github.com/oncemill/oncemill/examples/internal/demotest"
	"github.com/oncemill/oncemill/internal/testserver"
)

// The demo starts this executable as its API, relay and inventory.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && commands[os.Args[1]] != nil {
		main()
		os.Exit(0)
	}
	os.Exit(testserver.Main(m))
}

func TestDemo_KeepsItsPromisesUnderFire(t *testing.T) {
	t.Parallel()
	line, err := runSmallDemo(t)
	if err != nil {
		t.Fatalf("%v\n%s", err, line)
	}
	want := regexp.MustCompile(`^demo: orders=400 messages=400 effects=400 lost=0 duplicate_effects=0 reordered=0 wire_duplicates=[1-9]\d* seconds=\d+\.\d$`)
	if !want.MatchString(line) {
		t.Fatalf("last line: %s", line)
	}
}

// Without the inbox the same run has to fail, or its success says nothing.
func TestDemo_ReportsDuplicatesWithoutInbox(t *testing.T) {
	t.Parallel()
	line, err := runSmallDemo(t, "-no-inbox")
	if !errors.Is(err, demo.ErrBroken) {
		t.Fatalf("error %v, want ErrBroken\n%s", err, line)
	}
	want := regexp.MustCompile(`^demo: orders=400 messages=400 effects=\d+ lost=0 duplicate_effects=[1-9]\d* reordered=0 wire_duplicates=[1-9]`)
	if !want.MatchString(line) {
		t.Fatalf("last line: %s", line)
	}
}

func TestCommands_SayWhichServersTheyNeed(t *testing.T) {
	for name := range commands {
		err := run(t.Context(), []string{name, "-postgres", "", "-amqp", ""})
		if !errors.Is(err, errNoServers) || !strings.Contains(err.Error(), "scripts/servers.sh up") {
			t.Errorf("%s: error %v, want errNoServers", name, err)
		}
	}
}

// runSmallDemo runs the demo with 400 orders and returns its last line.
func runSmallDemo(t *testing.T, args ...string) (string, error) {
	t.Helper()
	args = append([]string{
		"-postgres", testserver.Postgres(t).DSN,
		"-amqp", testserver.RabbitMQ(t),
		"-orders", demotest.Orders(t, 400),
	}, args...)
	return demotest.LastLine(t, func(out *os.File) error { return runDemo(t.Context(), args, out) })
}
