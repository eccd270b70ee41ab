package e2e

import (
	"bytes"
	"database/sql"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/internal/testserver"
)

// setup is a way to reach PostgreSQL, in the words of internal/testserver.
type setup struct {
	name string
	env  []string
	skip string // tests that it makes no sense for, and why

	pooler *testserver.Pooler // nil: straight to the server
}

// suite is a package whose tests touch the database.
type suite struct {
	name string
	few  string // what CI runs; ONCEMILL_LONG runs all
}

// long runs more than CI has time for.
var long = os.Getenv("ONCEMILL_LONG") != ""

const module = "github.com/oncemill/oncemill"

var suites = []suite{
	{".", `TestMigrate_(AppliesEachSet|TenProcesses)|TestFromPgx`},
	{"outbox", `TestPublish_(WhatIsRead|TopicsIDs|ManyMessages|NeedsNo|ReturnsWhat|Savepoints)|TestRunInTx_(ACommitThatWaits|WaitsForTheAnswer|ALostAnswer|RetriesASer|ManyAtOnce|AnOverlooked)|` +
		`TestRead_(ReturnsEach|LimitsThe|StopsA|PassesOver|FindsWhatCommits)|TestRemove_(Matches|KeepsThe|WithoutHistory)|TestRing_(Truncates|NeverDestroys)|` +
		`TestHistory_(DaysAre|RevokedRights)|TestPlans_TheLibrary|TestCheck_RefusesASequenceBehind|TestRepairSequence_Mends`},
	{"inbox", `TestInbox_(Copies|RunsA|FailedAttempt|WorksOnOne|ContextThatEndsRolls|WritesReturned)|TestPostgres_(LostAnswer|LostConnection|HandlerHas)|` +
		`TestTx_(Savepoints|Executes)|TestSeal_(CommitOf|IDs)|TestGroup_(SharesOne|PreparesWhat|OneBad)`},
	{"relay", `TestLeases|TestParking|TestRelay_(RepeatsNothing|WorksUnderAny|PublishesNothingAgainWhileDeletions|StopsWhileIts)|TestFromPublisher_DeliversToGoChannel`},
	{"idempotency", `TestConformance_InGroups|TestGroup_(SharesOne|OneBad)`},
	{"idempotency/storetest", `TestStore_OnPostgreSQL`},
}

// always are tests that have nothing to do with how PostgreSQL is reached, or that
// are about one way: a private server, settings of one session, a backlog of
// lib/pq's, a server that cuts the connections of one pool.
const always = `(?i)sqlite|TestPlans_Never|TestParkingPlans|TestRing_Loses|TestRemove_SparesNewRowsAfterACrash|TestRelay_KeepsItsPromises|TestRelay_Resumes|` +
	`TestRelay_LosesAndRepeatsNothingWhileItsConnections|TestEngine|TestWatermillSQL|TestFromPublisher_DeliversToStock`

// TestSetups runs the suites, and the whole way, where PostgreSQL is reached in
// another way than by lib/pq straight to the server. The driver pgx is laid over
// internal/testserver, so that the library's module does not know of it.
func TestSetups(t *testing.T) {
	server := testserver.PrivatePostgres(t, "max_connections=400")
	pooler := server.PgBouncer("server_idle_timeout=3", "default_pool_size=10", "min_pool_size=2", "server_round_robin=1", "stats_users=postgres")
	straight := []string{"ONCEMILL_TEST_POSTGRES=" + server.DSN()}
	behind := append(straight[:1:1], "ONCEMILL_TEST_PGBOUNCER="+pooler.DSN())
	pgx, one := "ONCEMILL_TEST_DRIVER=pgx", "ONCEMILL_TEST_MAX_OPEN_CONNS=1"
	// pgx does not ask the server to cancel a commit, and as it comes it keeps
	// statements prepared.
	const notPgx = `TestRunInTx_ACommitThatTheServerCancels|TestGroup_OpenRows|TestGroup_PreparesNothing`
	// These wait long, and are not about a pooler.
	const notAgain = `TestRelay_DeliversWhatever|TestRelay_DeliversBeside|TestRelay_StopsWhileIts|TestRelay_WorksUnderTheAdmin`
	// In these a handler or a store prepares statements, which a pooler does not allow.
	const notPooled = `TestStore_OnPostgreSQLPrepared|TestPublish_KeepsItsStatementPrepared|TestTx_IsRefusedAfterTheHandler|TestTx_ExecutesQueriesAndPrepared|TestGroup_PreparesNothing`
	const notPgxAsItComes = notPgx + `|TestPlans_TheLibraryPrepares`
	// These hold one transaction of a pool while they want another of it.
	const notOne = `TestTx_IsRefusedOnceItsContext|TestInbox_DifferentMessagesDoNotWait|TestPostgres_Copy|TestRelay_PublishesNothingAgainWhileRowsAreLocked|TestBrakes_ASuspectIsAlone|TestBrakes_TroubleOfOne`
	setups := []setup{
		{"pgx", append([]string{pgx}, straight...), notPgxAsItComes, nil},
		{"pgx_PgBouncer", append([]string{pgx}, behind...), notPgx + "|" + notPooled + "|" + notAgain, pooler},
		{"PgBouncer_one_connection", append([]string{one}, behind...), notOne + "|" + notPooled + "|" + notAgain, pooler},
	}
	if long {
		setups = append(setups, setup{"PgBouncer", behind, notPooled + "|" + notAgain, pooler}, setup{"one_connection", append([]string{one}, straight...), notOne + "|" + notAgain, nil})
	}
	binaries := build(t)
	t.Run("suites", func(t *testing.T) {
		for _, s := range setups {
			t.Run(s.name, func(t *testing.T) {
				t.Parallel()
				for _, of := range suites {
					s.run(t, of.name, binaries[of.name], of.few)
				}
				self, err := filepath.Abs(os.Args[0])
				if err != nil {
					t.Fatal(err)
				}
				s.run(t, "internal/e2e", self, "^TestWholeWay$")
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
	args := []string{"test", "-c", "-o", dir + string(filepath.Separator), "-modfile=" + modfile, "-mod=mod", "-overlay=" + write("overlay.json", overlay)}
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
func (s setup) run(t *testing.T, suite, binary, tests string) {
	t.Helper()
	skip := always + "|" + s.skip
	args := []string{"-test.v", "-test.timeout=30m", "-test.skip=" + skip + "|/(?i)^sqlite"} // with a slash: the last
	if !long || suite == "internal/e2e" {
		args = append(args, "-test.run="+tests)
	}
	before := s.crashes()
	cmd, out, err := s.start(t, suite, binary, args)
	if err != nil && s.crashes() > before {
		t.Logf("%s: PgBouncer has died; once more", suite)
		cmd, out, err = s.start(t, suite, binary, args)
	}
	switch n := len(passed.FindAll(out, -1)); {
	case err != nil:
		t.Errorf("%s: %v\n%s", suite, err, failures(out))
	case skipped.Match(out):
		t.Errorf("%s: %s", suite, skipped.Find(out))
	case n < strings.Count(tests, "Test"):
		t.Errorf("%s: %d tests ran", suite, n)
	default:
		t.Logf("%s: %d tests, %v of processor time", suite, n, cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime())
	}
}

func (s setup) start(t *testing.T, suite, binary string, args []string) (cmd *exec.Cmd, out []byte, err error) {
	t.Helper()
	cmd = exec.CommandContext(t.Context(), binary, args...)
	cmd.Dir = filepath.Join(rootDir(t), suite)
	cmd.Env = append(os.Environ(), s.env...)
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
