package main

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/oncemill/oncemill/internal/database"

	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

const commandEnv = "ONCEMILL_TEST_RUN_COMMAND"

// TestMain lets the test binary run as the command, for tests that need a process.
func TestMain(m *testing.M) {
	if os.Getenv(commandEnv) != "" {
		os.Exit(run(os.Args[1:]))
	}
	os.Exit(testserver.Main(m))
}

// command returns the command as a process, with a clean environment.
func command(ctx context.Context, env []string, args ...string) (*exec.Cmd, *bytes.Buffer) {
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	cmd.Env = append([]string{commandEnv + "=1", "PATH=" + os.Getenv("PATH"), "TMPDIR=" + os.TempDir()}, env...)
	if options, ok := os.LookupEnv("GORACE"); ok { // the race detector's: how long a process waits at its end
		cmd.Env = append(cmd.Env, "GORACE="+options)
	}
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	return cmd, &output
}

// runner returns a function that runs the command, and returns its output if its exit code is as
// expected.
func runner(t *testing.T, env []string) func(code int, args ...string) string {
	return func(code int, args ...string) string {
		t.Helper()
		cmd, output := command(t.Context(), env, args...)
		_ = cmd.Run() // the exit code tells
		if got := cmd.ProcessState.ExitCode(); got != code {
			t.Fatalf("%v: exit code %d, want %d; output: %s", args, got, code, output)
		}
		return output.String()
	}
}

func TestCommand_ExitsWithTwoOnWrongUsage(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	lite, absent := "sqlite:"+filepath.Join(dir, "x.db"), "sqlite:"+filepath.Join(dir, "absent.db")
	if err := os.WriteFile(filepath.Join(dir, "x.db"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	const secret = "hunter2"
	for name, c := range map[string]struct {
		env  []string
		args []string
		want string
	}{
		"unknown command":     {args: []string{"bogus"}, want: "bogus"},
		"mistyped command":    {args: []string{"dlqq"}, want: "did you mean dlq?"},
		"mistyped second":     {args: []string{"migrate", "statsu"}, want: "did you mean status?"},
		"unknown shell":       {args: []string{"completion", "bogus"}, want: "bogus"},
		"unknown help":        {args: []string{"help", "bogus"}, want: "bogus"},
		"mistyped help":       {args: []string{"help", "dlq", "shwo"}, want: "did you mean show?"},
		"status of no file":   {args: []string{"migrate", "status", "--database", absent}, want: "no file"},
		"letters of no file":  {args: []string{"dlq", "--database", absent}, want: "no file"},
		"relay of no file":    {args: []string{"relay", "--amqp-url", "amqp://localhost", "--database", absent}, want: "no file"},
		"two ends":            {args: []string{"migrate", "--database", "postgres://a:p@" + secret + "/x@localhost/x"}, want: "%40"},
		"unknown flag":        {args: []string{"migrate", "--bogus"}, want: "--bogus"},
		"argument":            {args: []string{"migrate", "bogus"}, want: "bogus"},
		"no database":         {args: []string{"migrate"}, want: "ONCEMILL_DATABASE"},
		"unknown database":    {args: []string{"migrate", "--database", "mysql://root:" + secret + "@localhost/x"}, want: "--database"},
		"unparsable":          {args: []string{"migrate", "--database", "postgres://a:" + secret + "@local host:x/y"}, want: "--database"},
		"in memory":           {args: []string{"migrate", "--database", "sqlite::memory:"}, want: "name a file"},
		"bad schema":          {args: []string{"migrate", "--database", lite, "--schema", "x"}, want: "--schema"},
		"bad prefix":          {args: []string{"migrate", "--database", lite, "--prefix", "X-"}, want: "--prefix"},
		"bad variable":        {env: []string{"ONCEMILL_WINDOW=" + secret}, args: []string{"relay", "--database", lite}, want: "ONCEMILL_WINDOW"},
		"no broker":           {args: []string{"relay", "--database", lite}, want: "ONCEMILL_AMQP_URL"},
		"bad broker":          {args: []string{"relay", "--database", lite, "--amqp-url", "http://a:" + secret + "@localhost"}, want: "--amqp-url"},
		"bad second broker":   {args: []string{"relay", "--database", lite, "--amqp-url", "amqp://localhost", "--amqp-url", "http://a:" + secret + "@localhost"}, want: "further --amqp-url [0]"},
		"bad broker in a row": {env: []string{"ONCEMILL_AMQP_URL=amqp://localhost http://a:" + secret + "@localhost"}, args: []string{"relay", "--database", lite}, want: "further --amqp-url [0]"},
		"no shards":           {args: []string{"move-shards", "--amqp-url", "amqp://localhost", "--topic", "orders", "--consumer", "stock"}, want: "--count"},
		"no consumer":         {args: []string{"move-shards", "--amqp-url", "amqp://localhost", "--topic", "orders", "--previous", "1", "--count", "2"}, want: "--consumer"},
		"the same shards":     {args: []string{"move-shards", "--amqp-url", "amqp://localhost", "--topic", "orders", "--consumer", "stock", "--previous", "2", "--count", "2"}, want: "--previous 2"},
		"plaintext":           {args: []string{"relay", "--database", lite, "--amqp-url", "amqp://a:" + secret + "@example.com"}, want: "--amqp-allow-plaintext"},
		"bad topology":        {args: []string{"relay", "--database", lite, "--amqp-url", "amqp://localhost", "--topology", "x"}, want: "--topology"},
		"notify on SQLite":    {args: []string{"relay", "--database", lite, "--amqp-url", "amqp://localhost", "--notify"}, want: "only PostgreSQL has NOTIFY"},
		"bad address":         {args: []string{"relay", "--database", lite, "--amqp-url", "amqp://localhost", "--listen", "nowhere"}, want: "--listen"},
		"bad lease":           {args: []string{"relay", "--database", lite, "--amqp-url", "amqp://localhost", "--lease", "1ms"}, want: "--lease"},
		"several bad at once": {args: []string{"relay", "--database", lite, "--amqp-url", "amqp://localhost", "--window", "-1", "--lease", "1ms"}, want: "--window"},
		"short history":       {args: []string{"relay", "--database", lite, "--amqp-url", "amqp://localhost", "--history", "30m"}, want: "--history"},
		"no letter":           {args: []string{"dlq", "show", "--database", lite}, want: "oncemill dlq"},
		"body without path":   {args: []string{"conformance", "--url", "http://127.0.0.1:9", "--body", "x"}, want: "--path"},
		"tenant without path": {args: []string{"conformance", "--url", "http://127.0.0.1:9", "--tenant", "X-Tenant: b"}, want: "--path"},
		"header without name": {args: []string{"conformance", "--url", "http://127.0.0.1:9", "--path", "/", "--user", "bob"}, want: "--user"},
		"two paths of one":    {args: []string{"conformance", "--url", "http://127.0.0.1:9", "--path", "/", "--tenant", "/a", "--tenant", "/b"}, want: "one path"},
		"kill without start":  {args: []string{"conformance", "--url", "http://127.0.0.1:9", "--kill-command", "true"}, want: "--start-command"},
		"thaw without freeze": {args: []string{"conformance", "--url", "http://127.0.0.1:9", "--thaw-command", "true"}, want: "--freeze-command"},
		"freeze of only one":  {args: []string{"conformance", "--url", "http://127.0.0.1:9", "--thaw-command", "true", "--freeze-command", "true"}, want: "two URLs"},
		"effects of a probe":  {args: []string{"conformance", "--url", "http://127.0.0.1:9", "--effects-command", "echo 1"}, want: "--path"},
		"no patience":         {args: []string{"conformance", "--url", "http://127.0.0.1:9", "--patience", "0s"}, want: "--patience"},
		"no such case":        {args: []string{"conformance", "--url", "http://127.0.0.1:9", "--run", "x y z"}, want: "--run"},
		"verify on SQLite":    {args: []string{"verify", "--database", lite, "--amqp-url", "amqp://localhost"}, want: "needs PostgreSQL"},
		"verify elsewhere":    {args: []string{"verify", "--database", "postgres://localhost/x", "--amqp-url", "amqp://localhost", "--name", "public"}, want: "--name"},
		"verify with no time": {args: []string{"verify", "--database", "postgres://localhost/x", "--amqp-url", "amqp://localhost", "--time", "1s"}, want: "--time"},
		"verify in the clear": {args: []string{"verify", "--database", "postgres://localhost/x", "--amqp-url", "amqp://a:" + secret + "@example.com"}, want: "--amqp-allow-plaintext"},
		"pprof nowhere":       {args: []string{"relay", "--database", lite, "--amqp-url", "amqp://localhost", "--pprof"}, want: "require --listen"},
		"lag backwards":       {args: []string{"relay", "--database", lite, "--amqp-url", "amqp://localhost", "--listen", "127.0.0.1:0", "--ready-lag", "-1s"}, want: "--ready-lag"},
		"metrics nowhere":     {env: []string{"OTEL_METRICS_EXPORTER=prometheus"}, args: []string{"relay", "--database", lite, "--amqp-url", "amqp://localhost"}, want: "requires --listen"},
		"OTLP over gRPC":      {env: []string{"OTEL_EXPORTER_OTLP_PROTOCOL=grpc", "OTEL_TRACES_EXPORTER=otlp"}, args: []string{"relay", "--database", lite, "--amqp-url", "amqp://localhost"}, want: "only http/protobuf"},
		"bad log level":       {args: []string{"relay", "--database", lite, "--log-level", "x"}, want: "--log-level"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd, output := command(t.Context(), c.env, c.args...)
			_ = cmd.Run() // the exit code tells
			if code := cmd.ProcessState.ExitCode(); code != 2 {
				t.Errorf("exit code %d, want 2; output: %s", code, output)
			}
			if !strings.Contains(output.String(), c.want) {
				t.Errorf("output does not name %s: %s", c.want, output)
			}
			if strings.Contains(output.String(), secret) {
				t.Errorf("output shows a secret: %s", output)
			}
			if strings.Count(output.String(), "oncemill: ") != 1 {
				t.Errorf("the command names itself more than once: %s", output)
			}
			if _, err := os.Stat(filepath.Join(dir, "absent.db")); err == nil {
				t.Error("a file was made")
			}
		})
	}
}

func TestCommand_PrintsItsVersion(t *testing.T) {
	t.Parallel()
	cmd, output := command(t.Context(), []string{"ONCEMILL_VERSION=x"}, "--version")
	if err := cmd.Run(); err != nil || !strings.HasPrefix(output.String(), "oncemill ") || !strings.Contains(output.String(), runtime.Version()) {
		t.Errorf("%v: %s", err, output)
	}
}

func TestCommand_MigratesAndPrintsTheStatus(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	for name, database := range map[string]string{
		"sqlite":     "sqlite:" + filepath.Join(t.TempDir(), "shop.db"),
		"postgresql": pg.DSN,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			env := []string{"ONCEMILL_DATABASE=" + database}
			if name == "postgresql" {
				env = append(env, "ONCEMILL_SCHEMA="+pg.Config.Schema)
			}
			expect := func(code int, want string, args ...string) {
				t.Helper()
				cmd, output := command(t.Context(), env, args...)
				_ = cmd.Run() // the exit code tells
				if got := cmd.ProcessState.ExitCode(); got != code || !strings.Contains(output.String(), want) {
					t.Errorf("%v: exit code %d, want %d and %q; output: %s", args, got, code, want, output)
				}
			}
			if name == "sqlite" {
				expect(2, "no file", "migrate", "status")
			} else {
				expect(1, "run oncemill migrate", "migrate", "status")
			}
			expect(0, "LATEST", "migrate")
			expect(0, "LATEST", "migrate")
			expect(0, `"Set":"relay"`, "migrate", "status", "--json")
			expect(0, "the next id is above", "repair-sequence")
		})
	}
}

func TestRelayCommand_DeliversAndStopsCleanlyOnSIGTERM(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	uri := testserver.RabbitMQ(t)
	env := []string{"ONCEMILL_DATABASE=" + pg.DSN, "ONCEMILL_SCHEMA=" + pg.Config.Schema}
	if cmd, output := command(t.Context(), env, "migrate"); cmd.Run() != nil {
		t.Fatalf("migrate: %s", output)
	}
	box, err := outbox.New(pg.DB, outbox.Config{Database: pg.Config})
	if err != nil {
		t.Fatal(err)
	}
	conn, err := amqp.Dial(uri)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close() //nolint:errcheck // the virtual host goes with the test
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ch.QueueDeclare("orders", true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}

	const messages = 300
	away, err := url.Parse(uri)
	if err != nil {
		t.Fatal(err)
	}
	away.Host = "127.0.0.1:1" // a node that is down
	cmd, output := command(t.Context(), env, "relay", "--amqp-url", away.String(), "--amqp-url", uri, "--topology", "queue", "--log-format", "json", "--notify", "--listen", "127.0.0.1:0")
	log := &sharedOutput{}
	cmd.Stderr = log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for i := range messages {
		err := box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
			return box.Publisher(tx).Publish("orders", message.NewMessage(fmt.Sprint("m", i), []byte("x")))
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	left := func() (n int) {
		if err := pg.DB.QueryRowContext(t.Context(), "select count(*) from "+database.Of(box.Config().Database).Table("outbox")).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	testserver.Eventually(t, "all messages are relayed", func() bool { return left() == 0 })
	expectEndpoint(t, log)
	var kept int
	if err := pg.DB.QueryRowContext(t.Context(), "select count(*) from "+database.Of(box.Config().Database).Table("outbox_history")).Scan(&kept); err != nil {
		t.Fatal(err)
	}
	if kept != messages {
		t.Errorf("%d messages in the history, want %d: from the first on", kept, messages)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v; output: %s%s", err, output, log)
	}
	q, err := ch.QueueDeclarePassive("orders", true, false, false, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	if q.Messages != messages {
		t.Errorf("%d messages in the queue, want %d", q.Messages, messages)
	}
	var owned int
	err = pg.DB.QueryRowContext(t.Context(), "select count(*) from "+database.Of(box.Config().Database).Table("relay_leases")+" where owner <> ''").Scan(&owned)
	if err != nil || owned != 0 {
		t.Errorf("%d leases are still owned (%v)", owned, err)
	}
	if !strings.Contains(log.String(), "relay stopped") {
		t.Errorf("does not tell that it stopped: %s", log)
	}
}

// sharedOutput can be read while a process writes to it.
type sharedOutput struct {
	mu   sync.Mutex // guards text
	text bytes.Buffer
}

func (o *sharedOutput) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *sharedOutput) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// expectEndpoint looks at what a working relay serves.
func expectEndpoint(t *testing.T, log *sharedOutput) {
	t.Helper()
	_, rest, _ := strings.Cut(log.String(), `"msg":"serving health, status and metrics","address":"`)
	address, _, found := strings.Cut(rest, `"`)
	if !found {
		t.Fatalf("no address in %s", log)
	}
	get := func(path string) (code int, body string) {
		t.Helper()
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close() //nolint:errcheck // it is read to its end
		text, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		return response.StatusCode, string(text)
	}
	for _, path := range []string{"/healthz", "/readyz"} {
		if code, body := get(path); code != http.StatusOK || body != "ok\n" {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
	if code, body := get("/metrics"); code != http.StatusOK || !strings.Contains(body, `oncemill_relay_outcomes_total{outcome="confirmed"} 300`) || !strings.Contains(body, `service_name="oncemill"`) {
		t.Errorf("/metrics: %d %s", code, body)
	}
	if code, _ := get("/debug/pprof/"); code != http.StatusNotFound {
		t.Errorf("profiles are served without --pprof: %d", code)
	}
	if code, body := get("/status"); code != http.StatusOK || !strings.Contains(body, `"Workers":[{`) {
		t.Errorf("/status: %d %s", code, body)
	}
}
