// Package demotest runs the demos of the examples small enough for a test.
package demotest

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/examples/data"
)

// Orders writes the first n orders to a file and returns its path.
func Orders(t *testing.T, n int) string {
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
	for _, order := range orders[:n] {
		if err := encoder.Encode(order); err != nil {
			t.Fatal(err)
		}
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	return file.Name()
}

// LastLine runs run with a file to print to and returns the last line there,
// with run's error.
func LastLine(t *testing.T, run func(out *os.File) error) (string, error) {
	t.Helper()
	out, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	runErr := run(out)
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
	printed, err := os.ReadFile(out.Name())
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s", printed)
	lines := strings.Split(strings.TrimSpace(string(printed)), "\n")
	return lines[len(lines)-1], runErr
}
