package e2e

import (
	"bytes"
	"database/sql"
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/internal/testserver"
)

// setup is a way to reach PostgreSQL, in the words of internal/testserver.
type setup struct {
	name string
	env  []string
	skip []skips // tests that it makes no sense for

	pooler *testserver.Pooler // nil: straight to the server
}

// skips names tests of a suite.
type skips map[string][]string

// long runs more than CI has time for.
var long = testserver.Long()

const module = "github.com/oncemill/oncemill"

// TestSetups runs the suites, and the whole way, where PostgreSQL is reached in
// another way than by lib/pq straight to the server. The driver pgx is laid over
// internal/testserver, so that the library's module does not know of it.
func TestSetups(t *testing.T) {
	t.Parallel()
	server := testserver.PrivatePostgres(t, "max_connections=400")
	pooler := server.PgBouncer("server_idle_timeout=3", "default_pool_size=10", "min_pool_size=2", "server_round_robin=1", "stats_users=postgres")
	straight := []string{"ONCEMILL_TEST_POSTGRES=" + server.DSN()}
	behind := append(straight[:1:1], "ONCEMILL_TEST_PGBOUNCER="+pooler.DSN())
	pgx, one := "ONCEMILL_TEST_DRIVER=pgx", "ONCEMILL_TEST_MAX_OPEN_CONNS=1"
	setups := []setup{
		{"pgx", append([]string{pgx}, straight...), []skips{notPgx, notPgxAsItComes}, nil},
		{"PgBouncer_one_connection", append([]string{one}, behind...), []skips{notOne, notPooled, notAgain}, pooler},
	}
	if long {
		setups = append(setups, setup{"pgx_PgBouncer", append([]string{pgx}, behind...), []skips{notPgx, notPooled, notAgain}, pooler}, setup{"PgBouncer", behind, []skips{notPooled, notAgain}, pooler}, setup{"one_connection", append([]string{one}, straight...), []skips{notOne, notAgain}, nil})
	}
	binaries := build(t)
	mustExist(t, binaries)
	t.Run("suites", func(t *testing.T) {
		for _, s := range setups {
			t.Run(s.name, func(t *testing.T) {
				t.Parallel()
				self, err := filepath.Abs(os.Args[0])
				if err != nil {
					t.Fatal(err)
				}
				binaries, suites := maps.Clone(binaries), slices.Clone(suites)
				binaries["internal/e2e"] = self
				if long || s.pooler != nil { // in a short run, where a connection is kept for the least time
					suites = append(suites, suite{name: "internal/e2e", few: []string{"TestWholeWay"}})
				}
				for _, of := range suites {
					t.Run(of.name, func(t *testing.T) {
						t.Parallel()
						s.run(t, of, binaries[of.name])
					})
				}
			})
		}
	})
	crashes := pooler.Crashes()
	if n := transactionsOf(t, pooler.DSN()); n < 1000 && crashes == 0 { // a new one counts anew
		t.Errorf("%d transactions went through PgBouncer: the run says nothing", n)
	}
}

// build makes the suites' binaries. They are of the build list of this module,
// with the sums of the library's for what only its tests need.
func build(t *testing.T) map[string]string {
	t.Helper()
	dir, root := t.TempDir(), rootDir(t)
	write := func(name string, content []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	read := func(path ...string) []byte {
		content, err := os.ReadFile(filepath.Join(append([]string{root}, path...)...))
		if err != nil {
			t.Fatal(err)
		}
		return content
	}
	modfile := write("e2e.mod", read("internal", "e2e", "go.mod"))
	write("e2e.sum", append(read("internal", "e2e", "go.sum"), read("go.sum")...))
	driver := write("pgx.go", []byte("package testserver\n\nimport _ \"github.com/jackc/pgx/v5/stdlib\"\n"))
	overlay, err := json.Marshal(map[string]map[string]string{
		"Replace": {filepath.Join(root, "internal", "testserver", "overlaid_pgx.go"): driver},
	})
	if err != nil {
		t.Fatal(err)
	}
	// Without what a debugger needs, and vetted elsewhere.
	args := []string{"test", "-c", "-vet=off", "-ldflags=-s -w", "-o", dir + string(filepath.Separator), "-modfile=" + modfile, "-mod=mod", "-overlay=" + write("overlay.json", overlay)}
	binaries := map[string]string{}
	for _, s := range suites {
		path := module
		if s.name != "." {
			path += "/" + s.name
		}
		args = append(args, path)
		binaries[s.name] = filepath.Join(dir, path[strings.LastIndex(path, "/")+1:]+".test")
	}
	if out, err := exec.CommandContext(t.Context(), "go", args...).CombinedOutput(); err != nil {
		t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return binaries
}

func rootDir(t *testing.T) string {
	t.Helper()
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Dir(filepath.Dir(here))
}

var (
	passed  = regexp.MustCompile(`(?m)^--- PASS: `)
	skipped = regexp.MustCompile(`(?m)^ *--- SKIP: .*`)
)

// run runs tests of a suite in the set-up, again if the pooler has died of itself.
func (s setup) run(t *testing.T, of suite, binary string) {
	t.Helper()
	never := slices.Clone(of.never)
	for _, tests := range s.skip {
		never = append(never, tests[of.name]...)
	}
	// With a slash: subtests.
	args := []string{"-test.v", "-test.timeout=30m", "-test.skip=" + exactly(never) + "|/(?i)^sqlite"}
	least := 1
	if !long || of.name == "internal/e2e" {
		few := of.few
		if s.pooler != nil && of.pooled != nil {
			few = of.pooled
		}
		few = slices.DeleteFunc(slices.Clone(few), func(name string) bool { return slices.Contains(never, name) })
		least = len(few)
		args = append(args, "-test.run="+exactly(few))
	}
	before := s.crashes()
	cmd, out, err := s.start(t, of.name, binary, args)
	// PgBouncer 1.18 may take a client for another one that canceled a statement before, and close it, or die
	// (https://github.com/pgbouncer/pgbouncer/issues/801).
	if err != nil && (s.crashes() > before || bytes.Contains(out, []byte("successfully sent cancel request"))) {
		t.Logf("%s: PgBouncer has died, or closed a client instead of another; once more", of.name)
		cmd, out, err = s.start(t, of.name, binary, args)
	}
	switch n := len(passed.FindAll(out, -1)); {
	case err != nil:
		t.Errorf("%s: %v\n%s", of.name, err, failures(out))
	case skipped.Match(out):
		t.Errorf("%s: %s", of.name, skipped.Find(out))
	case n < least:
		t.Errorf("%s: %d of %d tests ran", of.name, n, least)
	default:
		t.Logf("%s: %d tests, %v of processor time", of.name, n, cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime())
	}
}

// exactly returns a pattern of the names; of none, one that matches nothing.
func exactly(names []string) string {
	if len(names) == 0 {
		return "^$"
	}
	return "^(" + strings.Join(names, "|") + ")$"
}

// mustExist fails if a test that the lists name is not in its suite, so that one that was
// renamed or removed is noticed.
func mustExist(t *testing.T, binaries map[string]string) {
	t.Helper()
	known := map[string]bool{}
	for _, of := range suites {
		known[of.name] = true
		out, err := exec.CommandContext(t.Context(), binaries[of.name], "-test.list=.").Output()
		if err != nil {
			t.Fatalf("list the tests of %s: %v", of.name, err)
		}
		there := strings.Fields(string(out))
		named := slices.Concat(of.few, of.pooled, of.never)
		for _, tests := range everySkip {
			named = append(named, tests[of.name]...)
		}
		for _, name := range named {
			if !slices.Contains(there, name) {
				t.Errorf("%s has no test %s", of.name, name)
			}
		}
	}
	for _, tests := range everySkip {
		for name := range tests {
			if !known[name] {
				t.Errorf("tests of %q are skipped, which is no suite", name)
			}
		}
	}
	if t.Failed() {
		t.FailNow()
	}
}

func (s setup) start(t *testing.T, suite, binary string, args []string) (cmd *exec.Cmd, out []byte, err error) {
	t.Helper()
	cmd = exec.CommandContext(t.Context(), binary, args...)
	cmd.Dir = filepath.Join(rootDir(t), suite)
	cmd.Env = append(append(os.Environ(), "ONCEMILL_TEST_FIRST_CELL=1"), s.env...) // the defaults
	out, err = cmd.CombinedOutput()
	return cmd, out, err
}

func (s setup) crashes() int {
	if s.pooler == nil {
		return 0
	}
	return s.pooler.Crashes()
}

// failures returns the end of an output, without the lines of what passed.
func failures(out []byte) []byte {
	var kept [][]byte
	for line := range bytes.Lines(out) {
		if trimmed := bytes.TrimSpace(line); !bytes.HasPrefix(trimmed, []byte("=== ")) && !bytes.HasPrefix(trimmed, []byte("--- PASS")) {
			kept = append(kept, line)
		}
	}
	return bytes.Join(kept[max(0, len(kept)-200):], nil)
}

// transactionsOf asks a PgBouncer how many transactions went through it.
func transactionsOf(t *testing.T, pooler string) (n int) {
	t.Helper()
	db, err := sql.Open("postgres", strings.Replace(pooler, "/postgres?", "/pgbouncer?", 1))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	rows, err := db.QueryContext(t.Context(), "show totals")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var name string
		var value int
		if err := rows.Scan(&name, &value); err != nil {
			t.Fatal(err)
		}
		if name == "total_xact_count" {
			n = value
		}
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return n
}
