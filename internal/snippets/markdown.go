package main

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// reference names an excerpt.
type reference struct {
	path string
	name string // empty for the whole file
}

var excerptComment = regexp.MustCompile(`^<!-- excerpt: ([^#\s]+)(?:#([\w-]+))? -->$`)

// render returns the document with each fenced block of Go replaced by the
// excerpt that the comment above it names.
func render(document string, find func(reference) (string, error)) (string, error) {
	var out strings.Builder
	var ref *reference
	var fence string // what ends the block that is being replaced
	number := 0
	for line := range strings.Lines(document) {
		number++
		text := strings.TrimSpace(line)
		switch {
		case fence != "":
			if text == fence {
				fence = ""
				out.WriteString(line)
			}
			continue
		case excerptComment.MatchString(text):
			groups := excerptComment.FindStringSubmatch(text)
			ref = &reference{path: groups[1], name: groups[2]}
		case isGoFence(text):
			if ref == nil {
				return "", fmt.Errorf("line %d: Go code that is not an excerpt", number)
			}
			code, err := find(*ref)
			if err != nil {
				return "", fmt.Errorf("line %d: %w", number, err)
			}
			out.WriteString(line + code)
			ref, fence = nil, strings.TrimRight(text, "go")
			continue
		case text != "":
			if ref != nil {
				return "", fmt.Errorf("line %d: an excerpt comment must stand directly above its block", number)
			}
		}
		out.WriteString(line)
	}
	if fence != "" {
		return "", errors.New("a block of Go does not end")
	}
	return out.String(), nil
}

func isGoFence(text string) bool {
	return strings.HasPrefix(text, "```") && strings.TrimLeft(text, "`") == "go"
}

// firstDifference returns the number of the first line in which a and b differ.
func firstDifference(a, b string) int {
	theirs := strings.Split(b, "\n")
	for i, line := range strings.Split(a, "\n") {
		if i >= len(theirs) || line != theirs[i] {
			return i + 1
		}
	}
	return 1
}
