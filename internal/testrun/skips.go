package main

import (
	"os"
	"path"
	"strings"
)

// skips holds the tests that may be skipped, as "package.TestName". A name that ends in "/*"
// means all subtests of a test, whose names a suite may generate.
type skips map[string]bool

func (s skips) allow(name string) bool {
	return s[name] || s[path.Dir(name)+"/*"]
}

func readSkips(files string) (skips, error) {
	allowed := skips{}
	for file := range strings.SplitSeq(files, ",") {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(string(text)) {
			name, _, _ := strings.Cut(line, "#")
			if name = strings.TrimSpace(name); name != "" {
				allowed[name] = true
			}
		}
	}
	return allowed, nil
}
