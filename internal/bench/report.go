package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

// report is bench.json.
type report struct {
	Machine  machine           `json:"machine"`
	Versions map[string]string `json:"versions"`
	Settings map[string]string `json:"settings"` // of PostgreSQL
	Rows     []result          `json:"rows"`
}

// result is one row: ours against another way to do the same.
type result struct {
	ID    string  `json:"id"`
	Ours  float64 `json:"ours"`  // median
	Other float64 `json:"other"` // median
	// Ratio is the median of the rounds' ratios of ours to the other.
	Ratio float64 `json:"ratio"`
	// Goal is what the ratio has to be: at least Goal if GoalIs is ">=", at most if it is
	// "<="; or, if it is "ours <=", what Ours may be at most.
	Goal        float64 `json:"goal"`
	GoalIs      string  `json:"goal_is"`
	Reached     bool    `json:"reached"`
	Unit        string  `json:"unit"`
	Repetitions int     `json:"repetitions"`
	Messages    [2]int  `json:"messages"` // of a run of ours, and of the other
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

// goal is what the ratio of a row has to reach, or its own value.
type goal struct {
	is    string
	value float64
}

const (
	isAtLeast    = ">="
	isAtMost     = "<="
	oursIsAtMost = "ours <="
)

func atLeast(ratio float64) goal    { return goal{isAtLeast, ratio} }
func atMost(ratio float64) goal     { return goal{isAtMost, ratio} }
func oursAtMost(value float64) goal { return goal{oursIsAtMost, value} }

func (g goal) reachedBy(ours, ratio float64) bool {
	switch g.is {
	case oursIsAtMost:
		return ours <= g.value
	case isAtMost:
		return ratio <= g.value
	}
	return ratio >= g.value
}

// compare makes the result of a row of what its sides have measured, by round.
func (r row) compare(sides []side, measured [][]values) result {
	ours, other := r.ours.of(measured), r.other.of(measured)
	byRound := ratios(ours, other)
	res := result{
		ID: r.id, What: r.what, Against: sides[r.other.side].name, Unit: r.unit,
		Ours: median(ours), Other: median(other), Ratio: median(byRound),
		Goal: r.goal.value, GoalIs: r.goal.is,
		Repetitions: len(ours),
		Messages:    [2]int{sides[r.ours.side].n, sides[r.other.side].n},
		Spread:      spread{Ours: extent(ours), Other: extent(other), Ratio: extent(byRound)},
	}
	res.Reached = r.goal.reachedBy(res.Ours, res.Ratio)
	return res
}

func (f figure) of(measured [][]values) (byRound []float64) {
	for _, v := range measured[f.side] {
		byRound = append(byRound, v[f.value])
	}
	return byRound
}

// median of values, of which there is at least one.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	middle := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[middle]
	}
	return (sorted[middle-1] + sorted[middle]) / 2
}

// ratios of the rounds: what happened to the machine in a round happened to both sides.
func ratios(ours, other []float64) []float64 {
	out := make([]float64, len(ours))
	for i := range ours {
		out[i] = ours[i] / other[i]
	}
	return out
}

func extent(values []float64) [2]float64 {
	return [2]float64{slices.Min(values), slices.Max(values)}
}

// goalText is ">= 0.95: reached".
func (r result) goalText() string {
	said := "not reached"
	if r.Reached {
		said = "reached"
	}
	return fmt.Sprintf("%s %s: %s", r.GoalIs, strconv.FormatFloat(r.Goal, 'g', -1, 64), said)
}

// table writes the report for people, as Markdown.
func (r report) table() string {
	var b strings.Builder
	columns := tabwriter.NewWriter(&b, 0, 0, 1, ' ', 0) // so that the table reads well as it is
	const line = "| %s\t| %s\t| %s\t| %s\t| %s\t| %s\t| %s\t| %s\t| %s\t|\n"
	fmt.Fprintf(columns, line, "row", "ours", "other", "ratio", "goal", "ratio from..to", "ours from..to", "other from..to", "rounds")
	fmt.Fprint(columns, strings.ReplaceAll(line, "%s", "---"))
	between := func(e [2]float64) string { return human(e[0]) + ".." + human(e[1]) }
	for _, res := range r.Rows {
		fmt.Fprintf(columns, line, res.ID, human(res.Ours)+" "+res.Unit, human(res.Other)+" "+res.Unit, human(res.Ratio), res.goalText(),
			between(res.Spread.Ratio), between(res.Spread.Ours), between(res.Spread.Other), strconv.Itoa(res.Repetitions))
	}
	_ = columns.Flush() // to memory
	b.WriteString("\nMedians of the rounds; the ratio is the median of the ratios of the rounds, and goals are of it, " +
		"unless they say \"ours\".\n" +
		"[How the figures are made](method.md).\n\n")
	for _, res := range r.Rows {
		fmt.Fprintf(&b, "- %s: %s; against %s\n", res.ID, res.What, res.Against)
	}
	fmt.Fprintf(&b, "\nMachine: %s.\n\nVersions: %s.\n\nPostgreSQL: %s; otherwise its defaults.\n", r.Machine, listed(r.Versions), listed(r.Settings))
	return b.String()
}

func listed(named map[string]string) string {
	var list []string
	for _, name := range slices.Sorted(maps.Keys(named)) {
		list = append(list, name+" "+named[name])
	}
	return strings.Join(list, ", ")
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

// write prints the table, and writes the files that are named: JSON for programs, and a
// directory with the table and the plot.
func (r report) write(to io.Writer, file, docs string) error {
	table := r.table()
	if _, err := io.WriteString(to, table); err != nil {
		return err
	}
	files := map[string]string{}
	if file != "" {
		encoded, err := json.MarshalIndent(r, "", "  ")
		if err != nil {
			return err
		}
		files[file] = string(encoded) + "\n"
	}
	if docs != "" {
		if err := os.MkdirAll(docs, 0o755); err != nil {
			return err
		}
		files[filepath.Join(docs, "README.md")] = "# Measured by `make bench`\n\n![ours against the other ways](bench.svg)\n\n" + table
		files[filepath.Join(docs, "bench.svg")] = plot(r.Rows)
	}
	for name, content := range files {
		if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
			return err
		}
	}
	return nil
}
