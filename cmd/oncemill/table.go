package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// table is a table for people. On a terminal its columns are cut so that a row fits a line.
type table struct {
	rows [][]string // the first one is the head
}

func newTable(head ...string) *table { return &table{rows: [][]string{head}} }

// row adds a row. Texts are made safe for a terminal.
func (t *table) row(cells ...any) {
	row := make([]string, len(cells))
	for i, cell := range cells {
		if at, ok := cell.(time.Time); ok {
			cell = at.UTC().Format(time.RFC3339)
		}
		row[i] = oneLine(fmt.Sprint(cell))
	}
	t.rows = append(t.rows, row)
}

func (t *table) print(w io.Writer) error {
	_, err := io.WriteString(w, t.text(columnsOf(w)))
	return err
}

const (
	tableGap = 2  // between columns
	leastCut = 10 // no column is cut to fewer characters while another is wider

	leastOfAll = 4
)

// text returns the table for a terminal of so many columns; 0 means any.
func (t *table) text(terminal int) string {
	widths := make([]int, len(t.rows[0]))
	for _, row := range t.rows {
		for i, cell := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	fit(widths, terminal)
	var out strings.Builder
	for _, row := range t.rows {
		line := ""
		for i, cell := range row {
			if utf8.RuneCountInString(cell) > widths[i] {
				cell = string([]rune(cell)[:widths[i]-1]) + "…"
			}
			line += cell + strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell)+tableGap)
		}
		out.WriteString(strings.TrimRight(line, " ") + "\n")
	}
	return out.String()
}

// fit cuts the widest columns until a row fits: at first none below leastCut, then, on a narrow
// terminal, none below leastOfAll.
func fit(widths []int, terminal int) {
	total := tableGap * (len(widths) - 1)
	for _, width := range widths {
		total += width
	}
	for _, least := range []int{leastCut, leastOfAll} {
		for ; terminal > 0 && total > terminal; total-- {
			widest := slices.Index(widths, slices.Max(widths))
			if widths[widest] <= least {
				break
			}
			widths[widest]--
		}
	}
}
