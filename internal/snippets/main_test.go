package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
)

var sources = fstest.MapFS{"examples/a.go": {Data: []byte(`package a

func A() error {
	//snippet:body
	if err := b(); err != nil {

		return err
	}
	//snippet:end
	return nil
}
`)}}

const good = `# A

<!-- excerpt: examples/a.go#body -->
` + "```go" + `
if err := b(); err != nil {

	return err
}
` + "```" + `

` + "```sh" + `
make
` + "```" + `
`

func document(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "README.md")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestRun_AcceptsAnExcerpt(t *testing.T) {
	t.Parallel()
	if err := run(sources, []string{document(t, good)}, false); err != nil {
		t.Error(err)
	}
}

func TestRun_AcceptsAWholeFile(t *testing.T) {
	t.Parallel()
	plain := fstest.MapFS{"a.go": {Data: []byte("package a\n")}}
	if err := run(plain, []string{document(t, "<!-- excerpt: a.go -->\n```go\npackage a\n```\n")}, false); err != nil {
		t.Error(err)
	}
}

func TestRun_ReportsEachProblem(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ text, want string }{
		"differs":     {strings.Replace(good, "return err", "return nil", 1), ":7: differs"},
		"shortened":   {strings.Replace(good, "}\n", "", 1), "differs"},
		"no comment":  {"```go\nx := 1\n```\n", "line 1: Go code that is not an excerpt"},
		"no marker":   {strings.Replace(good, "#body", "#other", 1), "has no line //snippet:other"},
		"no file":     {strings.Replace(good, "examples/a.go", "examples/b.go", 1), "examples/b.go"},
		"misplaced":   {strings.Replace(good, "-->\n", "-->\ntext\n", 1), "directly above"},
		"not closed":  {"<!-- excerpt: examples/a.go -->\n```go\npackage a\n", "does not end"},
		"no document": {"", "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "absent.md")
			if test.text != "" {
				path = document(t, test.text)
			}
			if err := run(sources, []string{path}, false); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error is %v, want %q in it", err, test.want)
			}
		})
	}
}

func TestRun_WritesTheExcerpt(t *testing.T) {
	t.Parallel()
	path := document(t, strings.Replace(good, "return err", "return nil", 1))
	if err := run(sources, []string{path}, true); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != good {
		t.Errorf("%v\n%s", err, text)
	}
}
