package oncemill_test

import (
	"bytes"
	"errors"
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
	storage = regexp.MustCompile(`^(internal/(outbox|relay|dlq|inbox|key|usage|audit|doctor|steer)store/|internal/statements/plantest/|internal/(sqlitetx|turn)/|migrat|sqlite|cmd/oncemill/probe\.go$)`)

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

// docs/operations.md lists all log events, and no others.
func TestHouse_LogEventsAreDocumented(t *testing.T) {
	t.Parallel()
	logs := map[string]int{ // functions that log, and the argument that is the message
		"DebugContext": 1, "InfoContext": 1, "WarnContext": 1, "ErrorContext": 1, "Log": 2, "LogAttrs": 2,
		"Debug": 0, "Info": 0, "Warn": 0, "log": 2, "logLine": 2,
	}
	constants, code := map[string]string{}, map[string]bool{}
	library := regexp.MustCompile(`^(relay|inbox|idempotency|outbox|mill|internal/outboxqueue)/`)
	var files []*ast.File
	for _, path := range libraryFiles(t) {
		if !library.MatchString(path) {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
		ast.Inspect(file, func(n ast.Node) bool {
			if spec, ok := n.(*ast.ValueSpec); ok && len(spec.Names) == 1 && len(spec.Values) == 1 {
				if text, ok := literal(spec.Values[0]); ok {
					constants[spec.Names[0].Name] = text
				}
			}
			return true
		})
	}
	for _, file := range files {
		ast.Inspect(file, func(n ast.Node) bool {
			if pair, ok := n.(*ast.KeyValueExpr); ok { // the two of outbox.trouble
				if name, ok := pair.Key.(*ast.Ident); ok && name.Name == "message" {
					if text, ok := literal(pair.Value); ok {
						code[text] = true
					}
				}
			}
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			function, ok := call.Fun.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			at, logs := logs[function.Sel.Name]
			if !logs || len(call.Args) <= at {
				return true
			}
			if text, ok := literal(call.Args[at]); ok {
				code[text] = true
			} else if name, ok := call.Args[at].(*ast.Ident); ok && constants[name.Name] != "" {
				code[constants[name.Name]] = true
			}
			return true
		})
	}
	content, err := os.ReadFile("docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(content), "\n## Log events\n")
	section, _, _ = strings.Cut(section, "\n## ")
	documented := map[string]bool{"redis not reached; the store answers": true} // of a module of its own
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|").FindAllStringSubmatch(section, -1) {
		documented[row[1]] = true
		if !code[row[1]] && row[1] != "redis not reached; the store answers" {
			t.Errorf("nothing logs %q", row[1])
		}
	}
	for text := range code {
		if !documented[text] {
			t.Errorf("docs/operations.md does not list %q", text)
		}
	}
	if len(code) < 100 {
		t.Errorf("only %d log events found", len(code))
	}
}

func literal(e ast.Expr) (text string, ok bool) {
	l, ok := e.(*ast.BasicLit)
	if !ok || l.Kind != token.STRING {
		return "", false
	}
	text, err := strconv.Unquote(l.Value)
	return text, err == nil
}

// Modules agree on the versions of what they share, or it is compiled for each of them.
func TestHouse_ModulesAgreeOnVersions(t *testing.T) {
	t.Parallel()
	paths, err := filepath.Glob("go.mod")
	for _, pattern := range []string{"*/go.mod", "*/*/go.mod"} {
		more, failed := filepath.Glob(pattern)
		paths, err = append(paths, more...), errors.Join(err, failed)
	}
	if err != nil || len(paths) < 9 {
		t.Fatalf("%d modules, %v", len(paths), err)
	}
	required := regexp.MustCompile(`(?m)^(?:require)?\s+(\S+) (v\S+)`)
	versions := map[string]string{}
	for _, path := range paths {
		if path == filepath.Join("tools", "go.mod") { // nothing of it is linked with others
			continue
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range required.FindAllStringSubmatch(string(text), -1) {
			name, version := match[1], match[2]
			if first, known := versions[name]; known && first != version && !strings.HasPrefix(name, "github.com/oncemill/") {
				t.Errorf("%s requires %s %s, another module %s", path, name, version, first)
			}
			versions[name] = version
		}
	}
}
