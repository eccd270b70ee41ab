package main

import (
	"os"
	"strings"
)

// skips holds the tests that may be skipped, as "package.TestName".
type skips map[string]bool

func readSkips(path string) (skips, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	allowed := skips{}
	for line := range strings.Lines(string(text)) {
		name, _, _ := strings.Cut(line, "#")
		if name = strings.TrimSpace(name); name != "" {
			allowed[name] = true
		}
	}
	return allowed, nil
}
