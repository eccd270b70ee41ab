package main

import (
	"fmt"
	"html"
	"strings"
)

// Sizes of the plot, in pixels.
const (
	plotWidth  = 860
	plotLeft   = 220 // where bars begin
	plotBars   = 420 // the longest bar
	barHeight  = 16
	panel      = 64 // height of a row
	plotMargin = 12
)

// plot draws the rows as SVG: two bars each, on a scale of their own, with the
// spread of the rounds as a line.
func plot(rows []result) string {
	var b strings.Builder
	height := len(rows)*panel + 2*plotMargin
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">`+"\n",
		plotWidth, height, plotWidth, height)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="#ffffff"/>`+"\n", plotWidth, height)
	for i, r := range rows {
		top := plotMargin + i*panel
		longest := max(r.Spread.Ours[1], r.Spread.Other[1])
		if longest <= 0 {
			longest = 1
		}
		scale := plotBars / longest
		text(&b, plotMargin, top+16, "#111111", "font-weight=\"bold\"", r.ID)
		text(&b, plotMargin, top+34, "#555555", "", r.goalText())
		bar(&b, top+4, scale, "#1f6feb", r.Ours, r.Spread.Ours, "ours "+human(r.Ours)+" "+r.Unit+", ratio "+human(r.Ratio))
		bar(&b, top+4+barHeight+6, scale, "#9aa4b2", r.Other, r.Spread.Other, "other "+human(r.Other)+" "+r.Unit)
	}
	b.WriteString("</svg>\n")
	return b.String()
}

func bar(b *strings.Builder, top int, scale float64, color string, value float64, extent [2]float64, label string) {
	fmt.Fprintf(b, `<rect x="%d" y="%d" width="%.1f" height="%d" fill="%s"/>`+"\n", plotLeft, top, max(value*scale, 1), barHeight, color)
	middle := top + barHeight/2
	fmt.Fprintf(b, `<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="#111111" stroke-width="2"/>`+"\n",
		plotLeft+extent[0]*scale, middle, plotLeft+extent[1]*scale, middle)
	text(b, plotLeft+int(extent[1]*scale)+8, top+barHeight-4, "#111111", "", label)
}

func text(b *strings.Builder, x, y int, color, attributes, content string) {
	fmt.Fprintf(b, `<text x="%d" y="%d" fill="%s" %s>%s</text>`+"\n", x, y, color, attributes, html.EscapeString(content))
}
