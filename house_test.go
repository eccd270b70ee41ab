package oncemill_test

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// libraryFiles returns the Go files of the library and the command that are not tests.
func libraryFiles(t *testing.T) (files []string) {
	t.Helper()
	others := []string{".git", "crucible", "examples", "tools", "internal/bench", "internal/e2e", "internal/testserver"}
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && slices.Contains(others, path):
			return filepath.SkipDir
		case !d.IsDir() && strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go"):
			files = append(files, path)
		}
		return nil
	})
	if err != nil || len(files) < 200 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	return files
}

var (
	// Storage packages, and what works on the database itself: migrations, SQLite's
	// settings and files, the tests of statements, the effects of a probe.
	storage = regexp.MustCompile(`^(internal/(outbox|relay|dlq|inbox|key|doctor)store/|internal/statements/plantest/|internal/(sqlitetx|turn)/|migrat|sqlite|cmd/oncemill/probe\.go$)`)

	statement = regexp.MustCompile(`(?is)^\s*(select\s|insert\s+into|update\s+\S+\s+set|delete\s+from|with\s+\w+\s+as|create\s+(table|index|function)|alter\s+table|lock\s+table|pragma\s|truncate\s+table)`)
)

// A logic package holds no SQL: statements stand in the storage packages' files.
func TestHouse_SQLIsInStorageOnly(t *testing.T) {
	t.Parallel()
	for _, path := range libraryFiles(t) {
		if storage.MatchString(path) {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if literal, ok := n.(*ast.BasicLit); ok && literal.Kind == token.STRING {
				if text, err := strconv.Unquote(literal.Value); err == nil && statement.MatchString(text) {
					t.Errorf("%s holds SQL: %.60q", path, text)
				}
			}
			return true
		})
	}
}

// A logic package does not ask which database it has. The exceptions: what begins
// transactions, what reads SQL of handlers, and what works on one database only.
func TestHouse_OnlyStorageAsksForTheDialect(t *testing.T) {
	t.Parallel()
	allowed := regexp.MustCompile(`^(config\.go|cmd/oncemill/|internal/(database|names|boundtx|txhandle)/|idempotency/conformance/|relay/forwarder/)`)
	asks := regexp.MustCompile(`(==|!=|case) (oncemill\.)?(SQLite|PostgreSQL)\b`)
	for _, path := range libraryFiles(t) {
		if storage.MatchString(path) || allowed.MatchString(path) {
			continue
		}
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if found := asks.Find(content); found != nil {
			t.Errorf("%s asks for the dialect: %s", path, found)
		}
	}
}

func TestHouse_AFileIsReadInOneSitting(t *testing.T) {
	t.Parallel()
	for _, path := range libraryFiles(t) {
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if n := bytes.Count(content, []byte("\n")); n > 500 {
			t.Errorf("%s has %d lines: it is two concepts", path, n)
		}
	}
}
