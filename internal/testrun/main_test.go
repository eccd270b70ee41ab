package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// busyFlag is a variable of the environment: set, the machine is busy.
const busyFlag = "TESTRUN_BUSY"

// The test binary is what go test -exec is given as this command.
func TestMain(m *testing.M) {
	busy = func() bool { return os.Getenv(busyFlag) != "" }
	if len(os.Args) > 3 && os.Args[1] == turnFlag {
		fmt.Fprintln(os.Stderr, takeTurn(os.Args[2], os.Args[3:]))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// runIn makes a module of the files, runs its tests and returns the output and the error.
func runIn(t *testing.T, files map[string]string, args ...string) (string, error) {
	t.Helper()
	root := t.TempDir()
	files["go.mod"] = "module example.com/probe\n\ngo 1.26\n"
	write(t, root, files)
	var out strings.Builder
	err := run(t.Context(), root, args, &out)
	return out.String(), err
}

func write(t *testing.T, root string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// tests returns a test file with the functions.
func tests(functions string) map[string]string {
	return map[string]string{"probe_test.go": "package probe\n\nimport \"testing\"\n\n" + functions}
}

const (
	passing  = "func TestPasses(t *testing.T) { t.Log(\"not shown\") }\n"
	skipping = "func TestSkips(t *testing.T) { t.Run(\"inner\", func(t *testing.T) { t.Skip(\"no server\") }) }\n"
	failing  = "func TestFails(t *testing.T) { t.Error(\"wrong sum\") }\n"
)

func TestRun_CountsPassedTests(t *testing.T) {
	t.Parallel()
	out, err := runIn(t, tests(passing))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out, "tests: modules=1 passed=1 failed=0 skipped=0") || strings.Contains(out, "not shown") {
		t.Errorf("output:\n%s", out)
	}
}

func TestRun_FailsOnASkipThatIsNotListed(t *testing.T) {
	t.Parallel()
	out, err := runIn(t, tests(passing+skipping))
	if err == nil || !strings.Contains(err.Error(), "example.com/probe.TestSkips/inner") {
		t.Errorf("error is %v, want one that names the skipped test", err)
	}
	if !strings.Contains(out, "no server") {
		t.Errorf("the reason is not shown:\n%s", out)
	}
}

func TestRun_AcceptsAListedSkip(t *testing.T) {
	t.Parallel()
	none := filepath.Join(t.TempDir(), "none")
	write(t, filepath.Dir(none), map[string]string{"none": "# none\n"})
	for name, accepted := range map[string]bool{"TestSkips/inner": true, "TestSkips/*": true, "TestSkips": false, "TestOther/*": false} {
		list := filepath.Join(t.TempDir(), "skips")
		if err := os.WriteFile(list, []byte("# why\nexample.com/probe."+name+" # a feature flag\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if out, err := runIn(t, tests(passing+skipping), "-skips", none+","+list); (err == nil) != accepted || accepted && !strings.Contains(out, "skipped=1") {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
	}
}

func TestRun_TestsThePackagesOfAList(t *testing.T) {
	t.Parallel()
	files := map[string]string{}
	for _, name := range []string{"a", "b", "c"} {
		files[name+"/probe_test.go"] = tests(passing)["probe_test.go"]
	}
	if out, err := runIn(t, files, "-packages", "./a,./c"); err != nil || !strings.Contains(out, "passed=2") {
		t.Errorf("%v\n%s", err, out)
	}
	if out, err := runIn(t, files, "-packages", "./a,./renamed"); err == nil {
		t.Errorf("a package that is not there is no error:\n%s", out)
	}
}

func TestRun_ShowsTheOutputOfAFailure(t *testing.T) {
	t.Parallel()
	out, err := runIn(t, tests(passing+failing))
	if err == nil || !strings.Contains(out, "wrong sum") || !strings.Contains(out, "failed=1") {
		t.Errorf("%v\n%s", err, out)
	}
}

// The detector reports a race while any test runs; the one that fails for it may be another.
func TestRun_ShowsARaceThatATestHasPassedWith(t *testing.T) {
	t.Parallel()
	out, err := runIn(t, tests("func TestRaces(t *testing.T) { t.Log(\"WARNING: DATA RACE\") }\n"+failing))
	if err == nil || !strings.Contains(out, "DATA RACE") {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestRun_ShowsAPanicAndACompilerError(t *testing.T) {
	t.Parallel()
	out, err := runIn(t, tests("func TestPanics(*testing.T) { panic(\"torn\") }\n"))
	if err == nil || !strings.Contains(out, "panic: torn") {
		t.Errorf("%v\n%s", err, out)
	}
	out, err = runIn(t, tests("func TestX(t *testing.T) { undefinedName() }\n"))
	if err == nil || !strings.Contains(out, "undefinedName") {
		t.Errorf("%v\n%s", err, out)
	}
}

// go test takes what a process writes when it dies for that of a test that has passed.
func TestRun_ShowsWhyAProcessDied(t *testing.T) {
	t.Parallel()
	for how, die := range map[string]string{"torn": `panic("torn")`, "signal: killed": `syscall.Kill(syscall.Getpid(), syscall.SIGKILL)`} {
		out, err := runIn(t, map[string]string{"probe_test.go": `package probe

import (
	"syscall"
	"testing"
	"time"
)

var _ = syscall.Kill

func TestDies(t *testing.T) {
	for _, name := range []string{"passes", "hangs"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if name == "hangs" {
				time.Sleep(time.Second)
				` + die + `
			}
			time.Sleep(100 * time.Millisecond)
			t.Log("goes on")
		})
	}
}
`})
		if err == nil || !strings.Contains(out, how) {
			t.Errorf("%v\n%s", err, out)
		}
	}
}

func TestRun_FailsOnAModuleWithoutTests(t *testing.T) {
	t.Parallel()
	if _, err := runIn(t, map[string]string{"probe.go": "package probe\n"}); err == nil {
		t.Error("no error")
	}
}

func TestModules_FindsAllButTools(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	for _, dir := range []string{".", "examples", "internal/bench", "tools", ".cache", "x/testdata/y"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, dir, "go.mod"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	dirs, err := modules(root)
	if err != nil {
		t.Fatal(err)
	}
	for i, dir := range dirs {
		dirs[i], _ = filepath.Rel(root, dir)
	}
	if got, want := strings.Join(dirs, " "), ". examples internal/bench"; got != want {
		t.Errorf("found %q, want %q", got, want)
	}
}

// A few packages are tested at a time, those of other modules too, if one of them is heavy. The first
// tests wait for each other; one more would find them all.
func TestRun_TestsAFewPackagesAtATime(t *testing.T) {
	t.Parallel()
	here, met := t.TempDir(), filepath.Join(t.TempDir(), "met")
	files := map[string]string{"second/go.mod": "module example.com/second\n\ngo 1.26\n"}
	names := []string{"a", "b", "relay", "second/d", "second/e", "second/f"}
	if len(names) <= packagesAtOnce {
		t.Fatal("too few packages")
	}
	for _, name := range names {
		files[name+"/few_test.go"] = "package " + filepath.Base(name) + `

import (
	"os"
	"testing"
	"time"
)

func TestIsOneOfFew(t *testing.T) {
	const here, met, few = ` + fmt.Sprintf("%q, %q, %d", here, met, packagesAtOnce) + `
	own, err := os.CreateTemp(here, "")
	if err != nil {
		t.Fatal(err)
	}
	defer os.Remove(own.Name())
	for begin := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		others, err := os.ReadDir(here)
		if err != nil || len(others) > few {
			t.Fatal(others, err)
		}
		if len(others) == few {
			if err := os.WriteFile(met, nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := os.Stat(met); err == nil && time.Since(begin) > 300*time.Millisecond {
			return
		}
		if time.Since(begin) > time.Minute {
			_ = os.WriteFile(met, nil, 0o600) // the others need not wait too
			t.Fatal("no other package was tested for a minute")
		}
	}
}
`
	}
	if out, err := runIn(t, files, "-p=4"); err != nil || !strings.Contains(out, "modules=2 passed=6") {
		t.Errorf("%v\n%s", err, out)
	}
}

// alone is the text of a test that fails if another one of it runs at the same time. They all meet
// in the directory.
func alone(directory string) string {
	return `package probe

import (
	"os"
	"testing"
	"time"
)

func TestAlone(t *testing.T) {
	const here = "` + directory + `/alone"
	if err := os.Mkdir(here, 0o700); err != nil {
		t.Fatal(err)
	}
	time.Sleep(100 * time.Millisecond) // others would begin meanwhile
	if err := os.Remove(here); err != nil {
		t.Fatal(err)
	}
}
`
}

// On a busy machine packages are tested one after another.
func TestRun_TestsOnePackageAtATimeOnABusyMachine(t *testing.T) {
	t.Setenv(busyFlag, "yes")
	here, files := t.TempDir(), map[string]string{}
	for i := range 5 {
		files[fmt.Sprintf("p%d/p_test.go", i)] = alone(here)
	}
	if out, err := runIn(t, files, "-p=4"); err != nil || !strings.Contains(out, "passed=5") {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestRun_TestsOneHeavyPackageAtATime(t *testing.T) {
	t.Parallel()
	here, files := t.TempDir(), map[string]string{}
	for _, name := range heavy {
		files[name+"/p_test.go"] = alone(here)
	}
	if out, err := runIn(t, files, "-p=4"); err != nil || !strings.Contains(out, "passed=4") {
		t.Errorf("%v\n%s", err, out)
	}
}

// A heavy package does not wait for an idle machine: there may be none for long. Mostly the other
// package begins before it, since it is linked sooner.
func TestRun_BeginsAHeavyPackageOnABusyMachine(t *testing.T) {
	t.Setenv(busyFlag, "yes")
	begun := filepath.Join(t.TempDir(), "begun")
	files := map[string]string{
		"p/p_test.go": `package p

import (
	"os"
	"testing"
	"time"
)

func TestSeesTheOther(t *testing.T) {
	for range 3000 {
		if _, err := os.Stat("` + begun + `"); err == nil {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("the other one has not begun")
}
`,
		"relay/p_test.go": `package relay

import (
	_ "net/http"
	"os"
	"testing"
)

func TestBegins(t *testing.T) {
	if err := os.WriteFile("` + begun + `", nil, 0o600); err != nil {
		t.Fatal(err)
	}
}
`,
	}
	if out, err := runIn(t, files, "-p=4"); err != nil || !strings.Contains(out, "passed=2") {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestRun_BeginsWithTheLongestAndTestsEachOnce(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	files := map[string]string{"go.mod": "module example.com/probe\n\ngo 1.26\n"}
	for _, dir := range []string{"a", "relay"} {
		for name, text := range tests(passing) {
			files[filepath.Join(dir, name)] = text
		}
	}
	write(t, root, files)
	if got := packages(root); !slices.Equal(got, []string{"./relay", "./..."}) {
		t.Errorf("tests %q", got)
	}
	var out strings.Builder
	if err := run(t.Context(), root, nil, &out); err != nil || !strings.Contains(out.String(), "tests: modules=1 passed=2 failed=0") {
		t.Errorf("%v\n%s", err, &out)
	}
}
