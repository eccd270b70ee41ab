package testserver

import (
	"database/sql"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/lib/pq"
)

// Plans are the plans that PostgreSQL used for the statements of one connection, reported by
// auto_explain.
type Plans struct {
	t testing.TB

	mu   sync.Mutex
	text []string
}

// Plan is the plan of one execution.
type Plan struct {
	Statement string
	Text      string  // JSON
	Rows      float64 // rows read from tables
	Faults    []string
}

// WithPlans returns a DSN whose sessions tell the plans of their statements as notices. Settings are
// more of auto_explain's.
func WithPlans(t testing.TB, dsn string, settings ...string) string {
	t.Helper()
	options := "-c session_preload_libraries=auto_explain -c client_min_messages=notice"
	for _, setting := range append([]string{"log_min_duration=0", "log_level=notice", "log_format=json", "log_analyze=on", "log_timing=off"}, settings...) {
		options += " -c auto_explain." + setting
	}
	return withParams(t, dsn, "options="+options)
}

// Explained returns a pool of one connection, and the plans of its statements. Settings are more of
// auto_explain's.
func Explained(t testing.TB, dsn string, settings ...string) (*sql.DB, *Plans) {
	t.Helper()
	connector, err := pq.NewConnector(WithPlans(t, withParams(t, dsn, "binary_parameters=yes"), settings...))
	if err != nil {
		t.Fatalf("testserver: %v", err)
	}
	p := &Plans{t: t}
	db := sql.OpenDB(pq.ConnectorWithNoticeHandler(connector, p.add))
	db.SetMaxOpenConns(1)
	t.Cleanup(func() { db.Close() }) //nolint:errcheck // nothing depends on it
	return db, p
}

func (p *Plans) add(notice *pq.Error) {
	if _, plan, ok := strings.Cut(notice.Message, "plan:\n"); ok {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.text = append(p.text, plan)
	}
}

// Take returns the plans since the last call. A fault is a scan of a whole table,
// or code compiled for one execution (JIT).
func (p *Plans) Take() []Plan {
	p.t.Helper()
	p.mu.Lock()
	texts := p.text
	p.text = nil
	p.mu.Unlock()
	plans := make([]Plan, len(texts))
	for i, text := range texts {
		var tree map[string]any
		if err := json.Unmarshal([]byte(text), &tree); err != nil {
			p.t.Fatalf("testserver: %v in %s", err, text)
		}
		plans[i] = Plan{Statement: fmt.Sprint(tree["Query Text"]), Text: text}
		plans[i].walk(tree)
	}
	return plans
}

func (p *Plan) walk(node any) {
	switch node := node.(type) {
	case []any:
		for _, n := range node {
			p.walk(n)
		}
	case map[string]any:
		kind, _ := node["Node Type"].(string)
		table, _ := node["Relation Name"].(string)
		if strings.HasSuffix(kind, "Scan") && table != "" {
			loops, _ := node["Actual Loops"].(float64)
			actual, _ := node["Actual Rows"].(float64)
			removed, _ := node["Rows Removed by Filter"].(float64)
			p.Rows += loops * (actual + removed)
			if kind == "Seq Scan" && loops > 0 {
				p.Faults = append(p.Faults, kind+" of "+table)
			}
		}
		if _, compiled := node["JIT"]; compiled {
			p.Faults = append(p.Faults, "JIT")
		}
		for _, n := range node {
			p.walk(n)
		}
	}
}
