package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"reflect"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// printJSON prints JSON that is safe for terminals. JSON itself escapes only ASCII's
// control characters.
func printJSON(w io.Writer, v any, indent string) error {
	if list := reflect.ValueOf(v); list.Kind() == reflect.Slice && list.IsNil() {
		v = []any{}
	}
	var encoded strings.Builder
	encoder := json.NewEncoder(&encoded)
	encoder.SetIndent("", indent)
	if err := encoder.Encode(v); err != nil {
		return err
	}
	_, err := io.WriteString(w, escaped(encoded.String(), func(out *strings.Builder, r rune) {
		for _, unit := range utf16.Encode([]rune{r}) {
			fmt.Fprintf(out, `\u%04x`, unit)
		}
	}))
	return err
}

// escaped returns text with every character that a terminal may act on, except newlines,
// replaced by escape.
func escaped(text string, escape func(out *strings.Builder, r rune)) string {
	var out strings.Builder
	for _, r := range text {
		if r == '\n' || unicode.IsGraphic(r) {
			out.WriteRune(r)
		} else {
			escape(&out, r)
		}
	}
	return out.String()
}

// oneLine makes text from untrusted senders safe for a table and a terminal.
func oneLine(s string) string {
	quoted := strconv.QuoteToGraphic(s)
	quoted = strings.ReplaceAll(quoted[1:len(quoted)-1], `\"`, `"`)
	const most = 80
	if runes := []rune(quoted); len(runes) > most {
		return string(runes[:most-1]) + "…"
	}
	return quoted
}

// wrapped breaks a line between words so that it fits a terminal; 0 columns means any. The lines
// after the first are indented. What has no space is not broken: it may have to be copied.
func wrapped(line string, columns int, indent string) string {
	if columns == 0 || utf8.RuneCountInString(line) <= columns {
		return line
	}
	var out strings.Builder
	width := 0
	for i, word := range strings.Split(line, " ") {
		n := utf8.RuneCountInString(word)
		switch {
		case i == 0:
		case width+1+n > columns && width > len(indent):
			out.WriteString("\n" + indent)
			width = len(indent)
		default:
			out.WriteByte(' ')
			width++
		}
		out.WriteString(word)
		width += n
	}
	return out.String()
}

// columnsOf returns the number of columns if w is a terminal, otherwise 0.
func columnsOf(w io.Writer) int {
	if file, ok := w.(*os.File); ok {
		return terminalWidth(file)
	}
	return 0
}
