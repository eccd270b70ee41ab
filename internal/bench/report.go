package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// report is bench.json.
type report struct {
	Machine  machine           `json:"machine"`
	Versions map[string]string `json:"versions"`
	Settings []string          `json:"settings"`
	Rows     []result          `json:"rows"`
}

// result is one row: ours against another way to do the same.
type result struct {
	ID    string  `json:"id"`
	Ours  float64 `json:"ours"`  // median
	Other float64 `json:"other"` // median
	// Ratio is the median of the rounds' ratios of ours to the other.
	Ratio float64 `json:"ratio"`
	// Goal is what GoalOf has to reach: at least Goal if GoalIs is ">=", at
	// most if it is "<=".
	Goal        float64 `json:"goal"`
	GoalOf      string  `json:"goal_of"` // "ratio" or "ours"
	GoalIs      string  `json:"goal_is"`
	Reached     bool    `json:"reached"`
	Unit        string  `json:"unit"`
	Repetitions int     `json:"repetitions"`
	Spread      spread  `json:"spread"`
	What        string  `json:"what"`
	Against     string  `json:"against"`
}

// spread holds the least and the greatest value of the rounds.
type spread struct {
	Ours  [2]float64 `json:"ours"`
	Other [2]float64 `json:"other"`
	Ratio [2]float64 `json:"ratio"`
}

// goal is what a row has to reach.
type goal struct {
	of, is string
	value  float64
}

func ratioAtLeast(value float64) goal { return goal{"ratio", ">=", value} }
func ratioAtMost(value float64) goal  { return goal{"ratio", "<=", value} }
func oursAtMost(value float64) goal   { return goal{"ours", "<=", value} }

// compare makes a result of the values of two sides. What ids, what and against
// say is up to the row.
func compare(id, what, against, unit string, g goal, ours, other []float64) result {
	byRound := ratios(ours, other)
	r := result{
		ID: id, What: what, Against: against, Unit: unit,
		Ours: median(ours), Other: median(other), Ratio: median(byRound),
		Goal: g.value, GoalOf: g.of, GoalIs: g.is,
		Repetitions: len(ours),
		Spread:      spread{Ours: extent(ours), Other: extent(other), Ratio: extent(byRound)},
	}
	value := r.Ratio
	if g.of == "ours" {
		value = r.Ours
	}
	r.Reached = value >= g.value
	if g.is == "<=" {
		r.Reached = value <= g.value
	}
	return r
}

func extent(values []float64) [2]float64 {
	return [2]float64{slices.Min(values), slices.Max(values)}
}

// goalText is "ratio >= 0.95: yes".
func (r result) goalText() string {
	verdict := "not reached"
	if r.Reached {
		verdict = "reached"
	}
	return fmt.Sprintf("%s %s %s: %s", r.GoalOf, r.GoalIs, strconv.FormatFloat(r.Goal, 'g', -1, 64), verdict)
}

// table writes the report for people, as Markdown.
func (r report) table(w io.Writer) error {
	rows := [][]string{{"row", "ours", "other", "ratio", "goal", "ours from..to", "other from..to", "rounds"}}
	for _, res := range r.Rows {
		rows = append(rows, []string{
			res.ID, human(res.Ours) + " " + res.Unit, human(res.Other) + " " + res.Unit, human(res.Ratio), res.goalText(),
			human(res.Spread.Ours[0]) + ".." + human(res.Spread.Ours[1]),
			human(res.Spread.Other[0]) + ".." + human(res.Spread.Other[1]),
			strconv.Itoa(res.Repetitions),
		})
	}
	var b strings.Builder
	b.WriteString(alignTable(rows))
	b.WriteString("\nMedians; the ratio is the median of the ratios of the rounds.\n\n")
	for _, res := range r.Rows {
		fmt.Fprintf(&b, "- %s: %s, against %s\n", res.ID, res.What, res.Against)
	}
	fmt.Fprintf(&b, "\nMachine: %s. ", r.Machine)
	names := make([]string, 0, len(r.Versions))
	for name, version := range r.Versions {
		names = append(names, name+" "+version)
	}
	slices.Sort(names)
	fmt.Fprintf(&b, "Versions: %s.\n\n", strings.Join(names, ", "))
	for _, s := range r.Settings {
		fmt.Fprintf(&b, "- %s\n", s)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// alignTable lays rows out as a Markdown table that also reads well as it is.
func alignTable(rows [][]string) string {
	widths := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, cell := range row {
			widths[i] = max(widths[i], len(cell))
		}
	}
	var b strings.Builder
	for n, row := range rows {
		for i, cell := range row {
			fmt.Fprintf(&b, "| %-*s ", widths[i], cell)
		}
		b.WriteString("|\n")
		if n == 0 {
			for _, width := range widths {
				b.WriteString("|" + strings.Repeat("-", width+2))
			}
			b.WriteString("|\n")
		}
	}
	return b.String()
}

// human writes a value with three digits that matter, thousands apart.
func human(v float64) string {
	switch abs := math.Abs(v); {
	case abs >= 1000:
		digits := strconv.FormatFloat(v, 'f', 0, 64)
		var b strings.Builder
		for i, d := range digits {
			if i > 0 && (len(digits)-i)%3 == 0 && digits[i-1] != '-' {
				b.WriteByte(',')
			}
			b.WriteRune(d)
		}
		return b.String()
	case abs >= 100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case abs >= 10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return strconv.FormatFloat(v, 'f', 2, 64)
}

// writeJSON writes the report for programs.
func (r report) writeJSON(file string) error {
	encoded, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(encoded, '\n'), 0o644)
}

// writeDocs writes the table and the plot into dir.
func (r report) writeDocs(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	var table strings.Builder
	table.WriteString("# Measured by `make bench`\n\n![ours against the other ways](bench.svg)\n\n")
	if err := r.table(&table); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "README.md"), []byte(table.String()), 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "bench.svg"), []byte(plot(r.Rows)), 0o644)
}
