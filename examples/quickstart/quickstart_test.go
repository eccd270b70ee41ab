package main

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/examples/internal/demo"
	"github.com/oncemill/oncemill/examples/internal/demotest"
)

// The demo starts this executable as its service.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "service" {
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
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

func TestDemo_RefusesABadFileOfOrders(t *testing.T) {
	path := filepath.Join(t.TempDir(), "orders.jsonl")
	if err := os.WriteFile(path, []byte("nonsense\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := runDemo(t.Context(), []string{"-orders", path}, os.Stdout); err == nil || !strings.Contains(err.Error(), path) {
		t.Fatalf("error %v, want one that names %s", err, path)
	}
}

// runSmallDemo runs the demo with 400 orders and returns its last line.
func runSmallDemo(t *testing.T, args ...string) (string, error) {
	t.Helper()
	args = append([]string{"-orders", demotest.Orders(t, 400)}, args...)
	return demotest.LastLine(t, func(out *os.File) error { return runDemo(t.Context(), args, out) })
}

func TestQuickstart_TakesAnOrderAndBooksItOnce(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	read, write := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := runQuickstart(ctx, []string{"-dir", t.TempDir(), "-listen", "127.0.0.1:0"}, write)
		_ = write.Close()
		ended <- err
	}()
	lines := bufio.NewScanner(read)
	address := find(t, lines, `The shop is open at (\S+);`)
	const order = `{"id": "order-1", "customer": "ana", "placed_at": "2026-11-21T12:00:00Z",
		"items": [{"sku": "SKU-1001", "quantity": 2, "price_cents": 2190}], "note": "ring twice"}`
	for _, want := range []int{http.StatusCreated, http.StatusOK} {
		response, err := http.Post(address+"/orders", "application/json", strings.NewReader(order))
		if err != nil {
			t.Fatal(err)
		}
		_ = response.Body.Close()
		if response.StatusCode != want {
			t.Fatalf("status %d, want %d", response.StatusCode, want)
		}
	}
	if who := find(t, lines, `booked  order order-1 of (\S+)`); who != "ana" {
		t.Fatalf("booked for %s", who)
	}
	stop()
	for lines.Scan() { // what was booked a second time would stand here
		t.Errorf("unexpected: %s", lines.Text())
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
}

func find(t *testing.T, lines *bufio.Scanner, pattern string) string {
	t.Helper()
	expression := regexp.MustCompile(pattern)
	for lines.Scan() {
		if match := expression.FindStringSubmatch(lines.Text()); match != nil {
			return match[1]
		}
	}
	t.Fatalf("no line matches %s", pattern)
	return ""
}
