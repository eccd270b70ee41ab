package main

import (
	"fmt"
	"io/fs"
	"math"
	"strings"
)

const (
	marker = "//snippet:"
	end    = marker + "end"
)

// excerpt returns the lines that ref names, without their common indentation
// and without markers.
func excerpt(sources fs.FS, ref reference) (string, error) {
	text, err := fs.ReadFile(sources, ref.path)
	if err != nil {
		return "", err
	}
	var lines []string
	inside, found := ref.name == "", ref.name == ""
	for line := range strings.Lines(string(text)) {
		switch trimmed := strings.TrimSpace(line); {
		case ref.name != "" && trimmed == marker+ref.name:
			inside, found = true, true
		case ref.name != "" && trimmed == end:
			inside = false
		case strings.HasPrefix(trimmed, marker):
		case inside:
			lines = append(lines, strings.TrimRight(line, "\n"))
		}
	}
	if !found {
		return "", fmt.Errorf("%s has no line %s%s", ref.path, marker, ref.name)
	}
	// The formatter wants a blank line between a marker and a declaration.
	blank := func(line string) bool { return strings.TrimSpace(line) == "" }
	for len(lines) > 0 && blank(lines[0]) {
		lines = lines[1:]
	}
	for len(lines) > 0 && blank(lines[len(lines)-1]) {
		lines = lines[:len(lines)-1]
	}
	return dedent(lines), nil
}

// dedent removes the indentation that all lines share.
func dedent(lines []string) string {
	common := math.MaxInt
	for _, line := range lines {
		if strings.TrimSpace(line) != "" {
			common = min(common, len(line)-len(strings.TrimLeft(line, "\t")))
		}
	}
	var out strings.Builder
	for _, line := range lines {
		if strings.TrimSpace(line) != "" {
			out.WriteString(line[common:])
		}
		out.WriteByte('\n')
	}
	return out.String()
}
