package oncemill_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Every test that docs/attacks.md names is there, and those that .ci/skips-short names.
func TestAttacks_NameTestsThatExist(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile(filepath.Join("docs", "attacks.md"))
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile("`([a-z0-9/]+)\\.(Test[A-Za-z0-9_]+)`").FindAllStringSubmatch(string(page), -1)
	if len(named) < 100 {
		t.Fatalf("%d names found", len(named))
	}
	list, err := os.ReadFile(filepath.Join(".ci", "skips-short"))
	if err != nil {
		t.Fatal(err)
	}
	skipped := regexp.MustCompile(`(?:github\.com/oncemill/oncemill/)?([a-z0-9/]+)\.(Test\w+)`).FindAllStringSubmatch(string(list), -1)
	if len(skipped) < 10 {
		t.Fatalf("%d skipped tests found", len(skipped))
	}
	named = append(named, skipped...)
	sources := map[string]string{}
	for _, name := range named {
		dir := name[1]
		if dir == "oncemill" {
			dir = "."
		}
		if _, read := sources[dir]; !read {
			for _, pattern := range []string{dir, filepath.Join("internal", dir), filepath.Join("cmd", dir)} {
				files, err := filepath.Glob(filepath.Join(pattern, "*_test.go"))
				if err != nil {
					t.Fatal(err)
				}
				for _, file := range files {
					source, err := os.ReadFile(file) //nolint:gosec // of this repository
					if err != nil {
						t.Fatal(err)
					}
					sources[dir] += string(source)
				}
			}
		}
		if !strings.Contains(sources[dir], "\nfunc "+name[2]+"(") {
			t.Errorf("there is no %s.%s", name[1], name[2])
		}
	}
}
