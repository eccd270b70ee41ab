package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// write makes the files of a repository.
func write(t *testing.T, files map[string]string) (root string) {
	t.Helper()
	root = t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

var repository = map[string]string{
	"go.mod":        "module example.com/sum\n\ngo 1.26\n",
	"sum/sum.go":    "package sum\n\nfunc Sum(a, b int) int {\n\treturn a + b\n}\n",
	"sum/texts.sql": "select 1\n",
	"sum/sum_test.go": `package sum

import (
	_ "embed"
	"testing"
)

//go:embed texts.sql
var texts string

func TestSum(t *testing.T) {
	for name, want := range map[string]int{"small": 3, "large": 3} {
		t.Run(name, func(t *testing.T) {
			switch got := Sum(1, 2); {
			case got == 99:
				panic("no catch")
			case got != want:
				t.Errorf("%d", got)
			}
		})
	}
}

func TestTexts(t *testing.T) {
	if texts != "select 1\n" {
		t.Error(texts)
	}
}
`,
}

func planted(test, file, from, to string) string {
	return "harm: wrong sums\ntest: ./sum " + test + "\nfile: " + file + "\n-- from --\n" + from + "\n-- to --\n" + to + "\n"
}

func TestRun_CountsOnlyWhatTheTestNoticed(t *testing.T) {
	t.Parallel()
	const whole, file = "\treturn a + b", "sum/sum.go"
	for name, c := range map[string]struct {
		bug  string
		want string
	}{
		"noticed":         {planted("TestSum", file, whole, "\treturn a - b"), "caught=1"},
		"by a subtest":    {planted("TestSum/small", file, whole, "\treturn a - b"), "caught=1"},
		"in a text":       {planted("TestTexts", "sum/texts.sql", "select 1", "select 2"), "caught=1"},
		"not noticed":     {planted("TestTexts", file, whole, "\treturn a - b"), "the test has passed"},
		"panic":           {planted("TestSum", file, whole, "\treturn 99"), "no catch: panic: no catch"},
		"not compiled":    {planted("TestSum", file, whole, "\treturn c"), "[build failed]"},
		"no such test":    {planted("TestNone", file, whole, "\treturn a - b"), "no test TestNone has passed"},
		"no such subtest": {planted("TestSum/none", file, whole, "\treturn a - b"), "no test TestSum/none has passed"},
		"no longer there": {planted("TestSum", file, "\treturn a * b", "\treturn a"), "0 times in sum/sum.go"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			root := write(t, repository)
			path := filepath.Join(root, plantedDir, "wrong.bug")
			if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(c.bug), 0o600); err != nil {
				t.Fatal(err)
			}
			var out bytes.Buffer
			err := run(t.Context(), root, "", &out)
			if err != nil {
				out.WriteString(err.Error())
			}
			if !strings.Contains(out.String(), c.want) || (err == nil) != (c.want == "caught=1") {
				t.Errorf("%v\n%s", err, out.String())
			}
		})
	}
}

func TestRun_FailsWithoutABug(t *testing.T) {
	t.Parallel()
	if err := run(context.Background(), write(t, repository), "", &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), "no bug") {
		t.Errorf("%v", err)
	}
}

func TestParse_SaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	good := planted("TestSum", "sum/sum.go", "a", "b")
	for change, want := range map[[2]string]string{
		{"-- from --", "-- of --"}:           "-- from --",
		{"harm: wrong sums\n", ""}:           "harm",
		{"test: ./sum TestSum", "test: sum"}: "test",
		{"file:", "where:"}:                  `unknown field "where"`,
		{"-- to --\nb", "-- to --\na"}:       "changes nothing",
	} {
		if _, err := parse("x", strings.Replace(good, change[0], change[1], 1)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", change, err, want)
		}
	}
	if _, err := parse("x", good); err != nil {
		t.Error(err)
	}
}

// A bug that no longer fits would be noticed only by make mutants, which takes minutes.
func TestPlanted_AllFit(t *testing.T) {
	t.Parallel()
	bugs, err := load(filepath.Join("..", ".."), regexp.MustCompile(""))
	if err != nil {
		t.Fatal(err)
	}
	const least = 40
	if len(bugs) < least {
		t.Errorf("%d bugs, want %d", len(bugs), least)
	}
}
