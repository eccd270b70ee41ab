package main

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/examples/data"
	"github.com/oncemill/oncemill/internal/testserver"
)

// The run starts this executable as the processes of the shop.
func TestMain(m *testing.M) {
	if os.Getenv(jobVariable) != "" {
		main()
		os.Exit(0)
	}
	os.Exit(testserver.Main(m))
}

func onEachSite(t *testing.T, test func(t *testing.T, site []string)) {
	t.Run("Embedded", func(t *testing.T) {
		t.Parallel()
		test(t, nil)
	})
	t.Run("Servers", func(t *testing.T) {
		t.Parallel()
		test(t, onServers(t))
	})
}

func onServers(t *testing.T) []string {
	t.Helper()
	return []string{"-servers", "-postgres", testserver.Postgres(t).DSN, "-amqp", testserver.RabbitMQ(t)}
}

func TestChaos_KeepsThePromises(t *testing.T) {
	test := func(t *testing.T, site []string) {
		line, err := runSmall(t, site...)
		if err != nil {
			t.Fatalf("%v\n%s", err, line)
		}
		want := regexp.MustCompile(`^demo: orders=400 messages=400 effects=400 lost=0 duplicate_effects=0 reordered=0 wire_duplicates=[1-9]\d* seconds=\d+\.\d$`)
		if !want.MatchString(line) {
			t.Fatalf("last line: %s", line)
		}
	}
	if testserver.Long() {
		onEachSite(t, test)
	} else {
		test(t, onServers(t))
	}
}

// Without the inbox's deduplication the same run must fail; otherwise its success proves
// nothing. What finds them is the same on each site.
func TestChaos_ReportsDuplicatesWithoutDedup(t *testing.T) {
	test := func(t *testing.T, site []string) {
		line, err := runSmall(t, append(site, "-no-dedup")...)
		if !errors.Is(err, errBroken) {
			t.Fatalf("error %v, want errBroken\n%s", err, line)
		}
		want := regexp.MustCompile(`^demo: orders=400 messages=400 effects=\d+ lost=0 duplicate_effects=[1-9]\d* reordered=0 wire_duplicates=[1-9]`)
		if !want.MatchString(line) {
			t.Fatalf("last line: %s", line)
		}
	}
	if testserver.Long() {
		onEachSite(t, test)
	} else {
		test(t, nil)
	}
}

func TestChaos_RefusesABadFileOfOrders(t *testing.T) {
	path := filepath.Join(t.TempDir(), "orders.jsonl")
	if err := os.WriteFile(path, []byte("nonsense\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := run(t.Context(), []string{"-orders", path}, os.Stdout); err == nil || !strings.Contains(err.Error(), path) {
		t.Fatalf("error %v, want one that names %s", err, path)
	}
}

func TestChaos_NamesTheServersItNeeds(t *testing.T) {
	for _, args := range [][]string{{"-postgres", ""}, {"-amqp", ""}, {"-postgres", "", "-amqp", ""}} {
		err := run(t.Context(), append([]string{"-servers", "-postgres", "postgres://x", "-amqp", "amqp://x"}, args...), os.Stdout)
		if !errors.Is(err, errNoServers) || !strings.Contains(err.Error(), "scripts/servers.sh up") {
			t.Errorf("%v: error %v, want errNoServers", args, err)
		}
	}
}

// runSmall runs with 400 orders and returns the last line.
func runSmall(t *testing.T, args ...string) (string, error) {
	t.Helper()
	orders, err := data.Orders()
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.Create(filepath.Join(t.TempDir(), "orders.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	encoder := json.NewEncoder(file)
	for _, order := range orders[:400] {
		if err := encoder.Encode(order); err != nil {
			t.Fatal(err)
		}
	}
	out, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil || file.Close() != nil {
		t.Fatal("a file cannot be written: ", err)
	}
	runErr := run(t.Context(), append(args, "-orders", file.Name()), out)
	printed, err := os.ReadFile(out.Name())
	if err != nil || out.Close() != nil {
		t.Fatal("the output cannot be read: ", err)
	}
	t.Logf("%s", printed)
	lines := strings.Split(strings.TrimSpace(string(printed)), "\n")
	return lines[len(lines)-1], runErr
}
