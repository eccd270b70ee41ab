package main

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// sample is a row of two sides, compared by their second values.
func sample(id, name string, g goal, ours, other []float64) result {
	sides := []side{{name: "ours", n: 100}, {name: name, n: 50}}
	measured := make([][]values, 2)
	for i := range ours {
		measured[0] = append(measured[0], values{-1, ours[i]})
		measured[1] = append(measured[1], values{-1, other[i]})
	}
	return row{id, "ours & co", figure{0, 1}, figure{1, 1}, "msg/s", g}.compare(sides, measured)
}

func sampleReport() report {
	return report{
		Machine:  machine{CPU: "some <CPU>", Cores: 2, Memory: "1024 kB", OS: "linux/amd64", Kernel: "6.1"},
		Versions: map[string]string{"go": "go1.26", "postgresql": "15.1"},
		Settings: map[string]string{"fsync": "on"},
		Rows: []result{
			sample("relay-rabbitmq", "raw <amqp>", atLeast(0.95), []float64{19_000, 20_000, 10_000}, []float64{20_000, 20_000, 20_000}),
			sample("relay-wal", "loop", atMost(0.1), []float64{62, 64}, []float64{1000, 1000}),
		},
	}
}

func TestCompare_TakesMediansSpreadAndGoal(t *testing.T) {
	ours, other := []float64{30, 10, 20}, []float64{20, 20, 10}
	r := sample("row", "theirs", atLeast(1.5), ours, other)
	if r.Ours != 20 || r.Other != 20 || r.Ratio != 1.5 || r.Repetitions != 3 || !r.Reached || r.Against != "theirs" || r.Messages != [2]int{100, 50} {
		t.Errorf("result %+v", r)
	}
	if r.Spread.Ours != [2]float64{10, 30} || r.Spread.Other != [2]float64{10, 20} || r.Spread.Ratio != [2]float64{0.5, 2} {
		t.Errorf("spread %+v", r.Spread)
	}
	for _, c := range []struct {
		goal    goal
		reached bool
	}{
		{atLeast(1.51), false}, {atMost(1.5), true}, {atMost(1.4), false}, {oursAtMost(20), true}, {oursAtMost(19), false},
	} {
		if got := sample("row", "", c.goal, ours, other); got.Reached != c.reached {
			t.Errorf("%s, want reached %v", got.goalText(), c.reached)
		}
	}
}

func TestMedian_TakesTheMiddle(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   float64
	}{
		{[]float64{7}, 7},
		{[]float64{9, 1}, 5},
		{[]float64{9, 1, 4}, 4},
		{[]float64{4, 3, 1, 2}, 2.5},
		{[]float64{5, 4, 1, 2, 3}, 3},
	} {
		before := slices.Clone(c.values)
		if got := median(c.values); got != c.want {
			t.Errorf("median(%v) = %v, want %v", c.values, got, c.want)
		}
		if !slices.Equal(before, c.values) {
			t.Errorf("median changed its argument to %v", c.values)
		}
	}
}

func TestRatios_PairTheRounds(t *testing.T) {
	got := ratios([]float64{10, 30}, []float64{20, 10})
	if want := []float64{0.5, 3}; !slices.Equal(got, want) {
		t.Errorf("ratios = %v, want %v", got, want)
	}
}

func TestReport_HasTheShapeThatProgramsRead(t *testing.T) {
	file := filepath.Join(t.TempDir(), "bench.json")
	if err := sampleReport().write(io.Discard, file, ""); err != nil {
		t.Fatal(err)
	}
	encoded, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Machine  map[string]any
		Versions map[string]string
		Rows     []map[string]any
	}
	if err := json.Unmarshal(encoded, &got); err != nil {
		t.Fatal(err)
	}
	if got.Machine["cores"] != 2.0 || got.Versions["go"] != "go1.26" || len(got.Rows) != 2 {
		t.Fatalf("read back %+v", got)
	}
	row := got.Rows[0]
	for field, want := range map[string]any{
		"id": "relay-rabbitmq", "ours": 19_000.0, "other": 20_000.0, "ratio": 0.95, "goal": 0.95, "unit": "msg/s", "repetitions": 3.0, "reached": true, "goal_is": ">=",
	} {
		if row[field] != want {
			t.Errorf("%s = %v, want %v", field, row[field], want)
		}
	}
	if _, ok := row["spread"].(map[string]any)["ours"]; !ok {
		t.Errorf("spread is %v", row["spread"])
	}
}

func TestReport_WritesTableAndPlot(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "docs", "bench")
	if err := sampleReport().write(io.Discard, "", dir); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"README.md": "| relay-wal ", "bench.svg": "</svg>"} {
		content, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || !strings.Contains(string(content), want) {
			t.Errorf("%s lacks %q: %v\n%s", name, want, err, content)
		}
	}
}

func TestTable_AlignsItsColumns(t *testing.T) {
	table := sampleReport().table()
	lines := strings.Split(table, "\n")
	for _, line := range lines[1:4] {
		if len(line) != len(lines[0]) {
			t.Errorf("a line of the table is %d wide, the first one %d:\n%s", len(line), len(lines[0]), table)
		}
	}
	for _, want := range []string{"19,000 msg/s", ">= 0.95: reached", "raw <amqp>", "fsync on", "postgresql 15.1", "some <CPU>"} {
		if !strings.Contains(table, want) {
			t.Errorf("the table lacks %q:\n%s", want, table)
		}
	}
}

func TestPlot_IsWellFormed(t *testing.T) {
	drawn := plot(sampleReport().Rows)
	decoder := xml.NewDecoder(strings.NewReader(drawn))
	bars := 0
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, drawn)
		}
		if start, ok := token.(xml.StartElement); ok && start.Name.Local == "rect" {
			bars++
		}
	}
	if bars != 1+2*2 {
		t.Errorf("%d rectangles, want a background and two bars for each of two rows", bars)
	}
}

func TestHuman_KeepsWhatMatters(t *testing.T) {
	for value, want := range map[float64]string{
		0.945: "0.94", 9.87: "9.87", 62.34: "62.3", 784.4: "784", 1000: "1,000", 20_416.7: "20,417", 1_234_567: "1,234,567", -1234: "-1,234",
	} {
		if got := human(value); got != want {
			t.Errorf("human(%v) = %q, want %q", value, got, want)
		}
	}
}
