package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// site is a database with its workers, or a service with idempotency keys: one job of Prometheus.
type site struct {
	t       *testing.T
	job     string
	box     *outbox.Outbox
	workers []*exec.Cmd
	targets []string

	// fault makes the fault. Then must fire, and nothing else, except for may.
	fault     func(s *site)
	repeat    func() // while must has not fired
	must, may []string
}

// newSite starts workers on a database of their own, and lets them deliver a message.
func newSite(t *testing.T, s *site, postgres bool, workers int, flags ...string) *site {
	t.Helper()
	s.t = t
	uri := testserver.RabbitMQ(t)
	declareQueue(t, uri, "orders")
	var env []string
	var db *sql.DB
	var cfg oncemill.Config
	if postgres {
		pg := testserver.Postgres(t)
		db, cfg, env = pg.DB, pg.Config, []string{"ONCEMILL_DATABASE=" + pg.DSN, "ONCEMILL_SCHEMA=" + pg.Config.Schema}
	} else {
		path := filepath.Join(t.TempDir(), "shop.db")
		db, cfg, env = testserver.OpenSQLite(t, path), oncemill.Config{Dialect: oncemill.SQLite}, []string{"ONCEMILL_DATABASE=sqlite:" + path}
	}
	runner(t, env)(0, "migrate")
	var err error
	if s.box, err = outbox.New(db, outbox.Config{Database: cfg}); err != nil {
		t.Fatal(err)
	}
	for range workers {
		cmd, _ := command(t.Context(), env, append([]string{"relay", "--amqp-url", uri, "--topology", "queue", "--lease", "3s", "--log-format", "json", "--listen", "127.0.0.1:0"}, flags...)...)
		log := &sharedOutput{}
		cmd.Stderr = log
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Wait() }) // its context has ended
		var address string
		testserver.Eventually(t, s.job+" serves", func() (found bool) {
			_, rest, _ := strings.Cut(log.String(), `metrics","address":"`)
			address, _, found = strings.Cut(rest, `"`)
			return found
		})
		s.workers, s.targets = append(s.workers, cmd), append(s.targets, address)
	}
	s.publish("orders", 1)
	return s
}

func (s *site) publish(topic string, n int, and ...func(*message.Message)) {
	s.t.Helper()
	err := s.box.RunInTx(s.t.Context(), func(_ context.Context, tx *sql.Tx) error {
		for i := range n {
			m := message.NewMessage(fmt.Sprint(topic[:3], i, time.Now().UnixNano()), nil)
			for _, f := range and {
				f(m)
			}
			if err := s.box.Publisher(tx).Publish(topic, m); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		s.t.Fatal(err)
	}
}

// hold executes a statement and keeps its locks until the test ends.
func (s *site) hold(format string, tables ...string) {
	s.t.Helper()
	var quoted []any
	for _, table := range tables {
		quoted = append(quoted, database.Of(s.box.Config().Database).Table(table))
	}
	tx, err := s.box.DB().BeginTx(context.WithoutCancel(s.t.Context()), nil)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = tx.Rollback() })
	if _, err := tx.ExecContext(s.t.Context(), fmt.Sprintf(format, quoted...)); err != nil {
		s.t.Fatal(err)
	}
}

func (s *site) kill(i int) {
	s.t.Helper()
	if err := s.workers[i].Process.Kill(); err != nil {
		s.t.Fatal(err)
	}
}

// noCache never has an answer.
type noCache struct{}

func (noCache) Get(context.Context, idempotency.ID) (idempotency.Record, bool) {
	return idempotency.Record{}, false
}
func (noCache) Put(context.Context, idempotency.Record) {}

// newService serves requests with keys, and its metrics. A request to /slow does not end before
// the test.
func newService(t *testing.T, s *site) (sent *site, send func(key, path, body string)) {
	t.Helper()
	db := testserver.SQLite(t)
	if err := oncemill.Migrate(t.Context(), db, oncemill.Config{}, idempotency.Migrations); err != nil {
		t.Fatal(err)
	}
	registry := prometheus.NewRegistry()
	reader, err := otelprometheus.New(otelprometheus.WithRegisterer(registry), otelprometheus.WithoutScopeInfo())
	if err != nil {
		t.Fatal(err)
	}
	store, err := idempotency.NewSQLStore(db, idempotency.StoreConfig{})
	if err != nil {
		t.Fatal(err)
	}
	engine, err := idempotency.New(store, idempotency.Config{
		Scope: idempotency.SingleTenant(), Logger: slog.New(slog.DiscardHandler), Responses: idempotency.ResponseConfig{Cache: noCache{}},
		Telemetry: idempotency.TelemetryConfig{MeterProvider: sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))},
	})
	if err != nil {
		t.Fatal(err)
	}
	handler := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			<-t.Context().Done()
		}
		w.WriteHeader(http.StatusCreated)
	}))
	metrics := httptest.NewServer(promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	t.Cleanup(metrics.Close)
	s.t, s.targets = t, []string{strings.TrimPrefix(metrics.URL, "http://")}
	send = func(key, path, body string) {
		request := httptest.NewRequest(http.MethodPost, path, strings.NewReader(body))
		request.Header.Set("Idempotency-Key", `"`+key+`"`)
		handler.ServeHTTP(httptest.NewRecorder(), request)
	}
	for i := range 5 {
		send(fmt.Sprintf("usual-%012d", i), "/", "{}")
	}
	return s, send
}

// sites returns a site for each fault, and one without. In a short run a fault that brings several
// alerts about stands for those that bring one of them.
func sites(t *testing.T) []*site {
	missing := func(n int) func(*site) { return func(s *site) { s.publish("no-such-queue", n) } }
	refused := func(and ...func(*message.Message)) func(*site) {
		long := func(m *message.Message) { m.Metadata.Set(strings.Repeat("x", 300), "") } // AMQP has no room for the name
		return func(s *site) { s.publish("orders", 1, append(and, long)...) }
	}
	key := func(m *message.Message) { outbox.SetKey(m, "customer") }
	in2s := func(m *message.Message) { outbox.SetDeliverAfter(m, 2*time.Second) }
	const pg, lite = true, false
	all := []*site{
		newSite(t, &site{job: "oncemill-healthy", fault: func(s *site) { s.publish("orders", 3, in2s); s.publish("orders", 3) }}, lite, 1),
		newSite(t, &site{job: "oncemill-none", must: []string{"NoWorker", "ScrapeMissing"}, fault: func(s *site) { s.kill(0) }}, lite, 1),
		newSite(t, &site{job: "oncemill-one-of-two", must: []string{"ScrapeMissing"}, may: []string{"UnownedLanes", "BacklogMetricsMissing"}, fault: func(s *site) { s.kill(1) }}, lite, 2),
		newSite(t, &site{job: "oncemill-deep", must: []string{"BacklogDeep", "MessagesOld"}, may: []string{"RetryingLong"}, fault: missing(20)}, lite, 1),
		newSite(t, &site{job: "oncemill-retrying", must: []string{"RetryingGrowing", "RetryingLong"}, fault: refused()}, lite, 1, "--retry-initial", "1h"),
		newSite(t, &site{job: "oncemill-held", must: []string{"HeldKeys", "DeadLettersGrowing", "DeadLettersOpen"}, fault: refused(key)}, lite, 1, "--max-attempts", "1", "--hold-key"),
		newSite(t, &site{job: "oncemill-late", must: []string{"ScheduledLate"}, fault: func(s *site) {
			s.publish("orders", 1, in2s)
			s.hold("select seq from %s for update", "scheduled")
		}}, pg, 1),
		newSite(t, &site{job: "oncemill-unowned", must: []string{"UnownedLanes"}, fault: func(s *site) {
			s.hold("select lane from %s where lane < 4 for update", "relay_leases")
		}}, pg, 1),
		newSite(t, &site{job: "oncemill-unmeasured", must: []string{"BacklogMetricsMissing"}, fault: func(s *site) { s.hold("lock table %s", "dead_letters") }}, pg, 1),
		newSite(t, &site{job: "oncemill-old", must: []string{"MessagesOld"}, fault: missing(1)}, lite, 1),
		newSite(t, &site{job: "oncemill-dead", must: []string{"DeadLettersGrowing", "DeadLettersOpen"}, fault: refused()}, lite, 1, "--max-attempts", "1"),
	}
	for _, of := range []struct {
		must, path string
		body       func(i int) string
	}{
		{"KeysReused", "/", func(i int) string { return fmt.Sprint(i) }},
		{"KeysInProgress", "/slow", func(int) string { return "{}" }},
		{"ReplaysMissCache", "/", func(int) string { return "{}" }},
	} {
		s, send := newService(t, &site{job: "shop-" + of.must, must: []string{of.must}})
		const key = "the-same-key-again"
		s.fault = func(*site) {
			if of.path != "/slow" {
				send(key, of.path, of.body(0))
				return
			}
			go send(key, of.path, of.body(0)) // ends with the test
		}
		i := 0
		s.repeat = func() { i++; send(key, of.path, of.body(i)) }
		all = append(all, s)
	}
	return all
}

// faster returns the rules with short times and low thresholds.
func faster(t *testing.T, rules string) string {
	t.Helper()
	// On a busy machine a scrape may fail, a worker may lose its lanes for a moment, and it reads
	// its gauges again after 20 s at most.
	for name, d := range map[string]string{"NoWorker": "4s", "ScrapeMissing": "4s", "BacklogMetricsMissing": "22s", "UnownedLanes": "22s"} {
		rules = regexp.MustCompile(`(alert: Oncemill`+name+`\n.*\n +for:) \S+`).ReplaceAllString(rules, "$1 "+d)
	}
	rules = regexp.MustCompile(`for: \d+[mhd]\b`).ReplaceAllString(rules, "for: 1s")
	for _, change := range [][2]string{
		{"offset 10m", "offset 8s"},
		{"[15m]", "[15s]"},
		{"(oncemill_outbox_depth) > 10000", "(oncemill_outbox_depth) > 5"},
		{"(oncemill_outbox_oldest_age_seconds) > 300", "(oncemill_outbox_oldest_age_seconds) > 6"},
		{"(oncemill_scheduled_late_seconds) > 60", "(oncemill_scheduled_late_seconds) > 2"},
	} {
		if !strings.Contains(rules, change[0]) {
			t.Fatalf("the rules do not have %s", change[0])
		}
		rules = strings.ReplaceAll(rules, change[0], change[1])
	}
	return rules
}

// A real Prometheus scrapes real workers. Each rule fires for its fault, and no other rule does.
func TestDeploy_EachAlertFiresForItsFaultAlone(t *testing.T) {
	testserver.NeedsLong(t)
	t.Parallel()
	text, err := os.ReadFile("../../deploy/oncemill.rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	all := sites(t)
	covered := map[string]bool{}
	config := "global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}\nrule_files: [rules.yml]\nscrape_configs:\n"
	for _, s := range all {
		config += fmt.Sprintf("  - {job_name: %s, static_configs: [{targets: ['%s']}]}\n", s.job, strings.Join(s.targets, "', '"))
		for _, name := range s.must {
			covered[name] = true
		}
	}
	for _, name := range regexp.MustCompile(`alert: Oncemill(\w+)`).FindAllStringSubmatch(string(text), -1) {
		if !covered[name[1]] {
			t.Errorf("no fault is made for %s", name[1])
		}
	}
	dir := t.TempDir()
	write := func(name, content string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	api := prometheusAPI{t, testserver.PrivatePrometheus(t, write("prometheus.yml", config), write("rules.yml", faster(t, string(text)))).URL()}
	if out, err := exec.CommandContext(t.Context(), "promtool", "check", "rules", "../../deploy/oncemill.rules.yml").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}

	// Without a fault, all metrics are there, and nothing fires.
	worked := len(all) - 3
	testserver.Eventually(t, "the gauges of all jobs have been there for a while", func() bool {
		testserver.Pause(t.Context(), 200*time.Millisecond)
		return len(api.query("count by (job) (oncemill_outbox_depth offset 8s)")) == worked && len(api.query("count by (job) (oncemill_outbox_depth)")) == worked
	})
	if early := api.query(`max_over_time(ALERTS{alertstate="firing"}[5s])`); len(early) > 0 {
		t.Fatalf("fires without a fault: %v", early)
	}

	for _, s := range all {
		s.fault(s)
	}
	fired := map[string]bool{} // "job alert"
	due := func() (due []string) {
		for _, s := range all {
			for _, name := range s.must {
				if !fired[s.job+" "+name] {
					due = append(due, s.job+" "+name)
				}
			}
		}
		return due
	}
	testserver.EventuallyMoving(t, "all alerts have fired that must", func() bool {
		testserver.Pause(t.Context(), 200*time.Millisecond)
		for _, s := range all {
			if s.repeat != nil {
				s.repeat()
			}
		}
		for _, alert := range api.query(`ALERTS{alertstate="firing"}`) {
			fired[alert["job"]+" "+strings.TrimPrefix(alert["alertname"], "Oncemill")] = true
		}
		return len(due()) == 0
	}, func() string { return strings.Join(due(), ", ") })
	for _, s := range all {
		for _, name := range slices.Concat(s.must, s.may) {
			delete(fired, s.job+" "+name)
		}
	}
	if len(fired) > 0 {
		t.Errorf("fired for faults of others: %v", slices.Sorted(maps.Keys(fired)))
	}
	expectMetrics(t, api)
}

// expectMetrics checks that what rules and dashboard name is there.
func expectMetrics(t *testing.T, api prometheusAPI) {
	t.Helper()
	names := deployedMetrics(t)
	absent := func() (absent []string) {
		there := api.names()
		for _, name := range names {
			if !slices.Contains(there, name) {
				absent = append(absent, name)
			}
		}
		return absent
	}
	testserver.EventuallyMoving(t, "all metrics of rules and dashboard exist", func() bool {
		testserver.Pause(t.Context(), 200*time.Millisecond)
		return len(absent()) == 0
	}, func() string { return strings.Join(absent(), ", ") })
}

type prometheusAPI struct {
	t   *testing.T
	url string
}

// query returns the labels of the series of an instant query.
func (p prometheusAPI) query(text string) (series []map[string]string) {
	p.t.Helper()
	var answer struct {
		Result []struct{ Metric map[string]string }
	}
	p.get("query?query="+url.QueryEscape(text), &answer)
	for _, r := range answer.Result {
		series = append(series, r.Metric)
	}
	return series
}

func (p prometheusAPI) names() (names []string) {
	p.t.Helper()
	p.get("label/__name__/values", &names)
	return names
}

// get decodes the data of an answer. There is none while Prometheus starts.
func (p prometheusAPI) get(path string, data any) {
	p.t.Helper()
	request, err := http.NewRequestWithContext(p.t.Context(), http.MethodGet, p.url+"/api/v1/"+path, nil)
	if err != nil {
		p.t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		p.t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	var answer struct{ Data json.RawMessage }
	switch {
	case response.StatusCode == http.StatusServiceUnavailable:
	case err != nil || response.StatusCode != http.StatusOK:
		p.t.Fatalf("%s: %d %s, %v", path, response.StatusCode, body, err)
	default:
		if err = json.Unmarshal(body, &answer); err == nil {
			err = json.Unmarshal(answer.Data, data)
		}
		if err != nil {
			p.t.Fatalf("%s: %s: %v", path, body, err)
		}
	}
}
