package main

import (
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/internal/testserver"
)

// board is what Grafana reads of a dashboard, as far as ours has it.
type board struct {
	ID            *int
	UID, Title    string
	SchemaVersion int
	Refresh       string
	Time          struct{ From, To string }
	Templating    struct{ List []variable }
	Annotations   struct {
		List []struct {
			Name, Expr string
			Datasource source
		}
	}
	Panels []panel
}

type source struct{ Type, UID string }

type variable struct {
	Name, Type string
	Query      any
	Datasource source
	Refresh    int
}

type panel struct {
	ID          int
	Type, Title string
	Datasource  source
	GridPos     struct{ X, Y, W, H int }
	Targets     []struct {
		RefID, Expr, LegendFormat string
		Datasource                source
	}
	FieldConfig struct{ Defaults struct{ Unit string } }
	Options     struct {
		ReduceOptions struct{ Calcs []string }
	}
	Panels []any
}

func (p *panel) overlaps(o *panel) bool {
	a, b := p.GridPos, o.GridPos
	return a.X < b.X+b.W && b.X < a.X+a.W && a.Y < b.Y+b.H && b.Y < a.Y+a.H
}

// What Grafana knows, as far as ours uses it or may.
var (
	panelKeys   = []string{"id", "type", "title", "description", "datasource", "gridPos", "targets", "fieldConfig", "options", "panels", "collapsed"}
	targetKeys  = []string{"refId", "expr", "legendFormat", "datasource"}
	panelTypes  = []string{"row", "stat", "timeseries"}
	units       = []string{"none", "short", "percent", "percentunit", "bytes", "decbytes", "s", "ms", "µs", "dtdurations", "ops", "reqps", "cps", "mps", "eps"}
	calcs       = []string{"lastNotNull", "last", "mean", "min", "max", "sum"}
	builtIn     = []string{"__rate_interval", "__interval", "__range"}
	ourSource   = source{"prometheus", "${datasource}"}
	referred    = regexp.MustCompile(`\$\{?(\w+)\}?`)
	inLegend    = regexp.MustCompile(`\{\{\s*(\w+)\s*\}\}`)
	grouping    = regexp.MustCompile(`\bby \(([^)]*)\)`)
	duration    = regexp.MustCompile(`^\d+[smhd]$`)
	relative    = regexp.MustCompile(`^now(-\d+[smhd])?$`)
	fromLabels  = regexp.MustCompile(`^label_values\((\w+), \w+\)$`)
	validUID    = regexp.MustCompile(`^[\w-]{1,40}$`)
	ofProcesses = []string{"instance", "job"} // labels of whatever is scraped
)

// Grafana itself is not at hand: this is what it would stumble over, or leave empty.
func TestDeploy_TheDashboardIsWellFormed(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../deploy/grafana.json")
	if err != nil {
		t.Fatal(err)
	}
	var d board
	var raw struct {
		Panels []map[string]json.RawMessage `json:"panels"`
	}
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &raw); err != nil {
		t.Fatal(err)
	}
	if d.ID != nil || !validUID.MatchString(d.UID) || d.Title == "" || d.SchemaVersion < 36 || !duration.MatchString(d.Refresh) || !relative.MatchString(d.Time.From) || !relative.MatchString(d.Time.To) {
		t.Errorf("the dashboard: %+v", d)
	}
	var queries []string
	names := d.checkVariables(t)
	for _, a := range d.Annotations.List {
		if a.Name == "" || a.Datasource != ourSource {
			t.Errorf("annotation %+v", a)
		}
		queries = append(queries, a.Expr)
	}
	ids := map[int]bool{}
	for i := range d.Panels {
		p := &d.Panels[i]
		if p.ID <= 0 || ids[p.ID] || p.Title == "" || !slices.Contains(panelTypes, p.Type) {
			t.Errorf("panel %d %q: of type %q, or its id is there twice", p.ID, p.Title, p.Type)
		}
		ids[p.ID] = true
		expectKeys(t, p.Title, raw.Panels[i], panelKeys)
		d.checkPlace(t, p)
		queries = append(queries, p.check(t, raw.Panels[i]["targets"])...)
	}
	for _, query := range queries {
		for _, name := range referred.FindAllStringSubmatch(query, -1) {
			if !slices.Contains(names, name[1]) && !slices.Contains(builtIn, name[1]) {
				t.Errorf("%s: nothing defines $%s", query, name[1])
			}
		}
	}
	if len(queries) < 25 {
		t.Errorf("only %d queries", len(queries))
	}
	expectQueries(t, queries)
}

// checkVariables returns the names of the variables.
func (d *board) checkVariables(t *testing.T) (names []string) {
	t.Helper()
	for i, v := range d.Templating.List {
		if v.Name == "" || slices.Contains(names, v.Name) {
			t.Errorf("variable %+v has no name of its own", v)
		}
		names = append(names, v.Name)
		if v.Type == "datasource" {
			if i != 0 || v.Name != "datasource" || v.Query != "prometheus" {
				t.Errorf("variable %+v: others refer to it", v)
			}
			continue
		}
		query, _ := v.Query.(map[string]any)
		asked, _ := query["query"].(string)
		if v.Type != "query" || v.Datasource != ourSource || query["refId"] == "" || v.Refresh == 0 || !fromLabels.MatchString(asked) {
			t.Errorf("variable %+v", v)
		}
	}
	return names
}

// checkPlace checks that a panel is within the 24 columns, and upon another one: Grafana moves up
// what is not.
func (d *board) checkPlace(t *testing.T, p *panel) {
	t.Helper()
	g := p.GridPos
	if g.X < 0 || g.Y < 0 || g.W < 1 || g.H < 1 || g.X+g.W > 24 || p.Type == "row" && (g.X != 0 || g.W != 24 || g.H != 1 || len(p.Panels) > 0) {
		t.Errorf("%q is at %+v", p.Title, g)
	}
	rests := g.Y == 0
	for i := range d.Panels {
		o := &d.Panels[i]
		if o != p && p.overlaps(o) {
			t.Errorf("%q and %q overlap", p.Title, o.Title)
		}
		above := *p
		above.GridPos.Y--
		rests = rests || o != p && above.overlaps(o)
	}
	if !rests {
		t.Errorf("nothing is above %q", p.Title)
	}
}

// check checks what a panel shows, and returns its queries.
func (p *panel) check(t *testing.T, targets json.RawMessage) (queries []string) {
	t.Helper()
	if p.Type == "row" {
		return nil
	}
	if p.Datasource != ourSource || len(p.Targets) == 0 || !slices.Contains(units, p.FieldConfig.Defaults.Unit) {
		t.Errorf("%q: %+v", p.Title, p)
	}
	if reduced := p.Options.ReduceOptions.Calcs; p.Type == "stat" && (len(reduced) != 1 || !slices.Contains(calcs, reduced[0])) {
		t.Errorf("%q is reduced by %q", p.Title, reduced)
	}
	var raw []map[string]json.RawMessage
	if err := json.Unmarshal(targets, &raw); err != nil {
		t.Fatal(err)
	}
	refs := map[string]bool{}
	for i, of := range p.Targets {
		expectKeys(t, p.Title, raw[i], targetKeys)
		if of.RefID == "" || refs[of.RefID] || of.Expr == "" || of.Datasource != p.Datasource {
			t.Errorf("%q: target %+v", p.Title, of)
		}
		refs[of.RefID] = true
		labels := slices.Clone(ofProcesses)
		if groups := grouping.FindStringSubmatch(of.Expr); groups != nil {
			labels = strings.Split(groups[1], ", ") // the outermost comes first
		}
		shown := inLegend.FindAllStringSubmatch(of.LegendFormat, -1)
		if len(shown) == 0 {
			t.Errorf("%q: the legend %q tells nothing apart", p.Title, of.LegendFormat)
		}
		for _, label := range shown {
			if !slices.Contains(labels, label[1]) {
				t.Errorf("%q: the legend has %s, and %s does not", p.Title, label[1], of.Expr)
			}
		}
		queries = append(queries, of.Expr)
	}
	return queries
}

func expectKeys(t *testing.T, of string, found map[string]json.RawMessage, known []string) {
	t.Helper()
	for key := range found {
		if !slices.Contains(known, key) {
			t.Errorf("%q has %q", of, key)
		}
	}
}

// expectQueries asks a Prometheus whether it understands them. It does not start with a rule that it
// does not understand.
func expectQueries(t *testing.T, queries []string) {
	t.Helper()
	config := filepath.Join(t.TempDir(), "prometheus.yml")
	if err := os.WriteFile(config, []byte("rule_files: [rules.yml]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	rules, err := filepath.Abs("../../deploy/oncemill.rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	api := prometheusAPI{t, testserver.PrivatePrometheus(t, config, rules).URL()}
	testserver.Eventually(t, "Prometheus answers", func() bool { return len(api.query("vector(1)")) == 1 })
	for _, query := range queries {
		api.query(strings.NewReplacer("$__rate_interval", "1m", "$job", "a|b", "$services", ".*").Replace(query))
	}
}

// That they have values is for TestDeploy_EachAlertFiresForItsFaultAlone.
func TestDeploy_MetricsAreThoseOfTheSource(t *testing.T) {
	t.Parallel()
	inSource := map[string]bool{}
	named := regexp.MustCompile(`"((?:oncemill|idempotency)\.[a-z._]+)"`)
	err := filepath.WalkDir("../..", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, name := range named.FindAllStringSubmatch(string(text), -1) {
			inSource[strings.ReplaceAll(name[1], ".", "_")] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	suffix := regexp.MustCompile(`(_seconds)?(_total|_bucket)?$`) // Prometheus has the unit and the kind, too
	names := deployedMetrics(t)
	for _, name := range names {
		if !strings.HasPrefix(name, "process_") && !inSource[name] && !inSource[suffix.ReplaceAllString(name, "")] {
			t.Errorf("the source has no metric %s", name)
		}
	}
	if len(names) < 20 {
		t.Errorf("only %q", names)
	}
}

// deployedMetrics returns the names of the metrics of the rules and the dashboard.
func deployedMetrics(t *testing.T) []string {
	t.Helper()
	var names []string
	for _, file := range []string{"oncemill.rules.yml", "grafana.json"} {
		text, err := os.ReadFile(filepath.Join("../../deploy", file))
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, regexp.MustCompile(`\b(?:oncemill|idempotency|process)_[a-z_]*[a-z]\b`).FindAllString(string(text), -1)...)
	}
	slices.Sort(names)
	return slices.Compact(names)
}
