package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// packages returns the packages of the module in dir, those with the largest tests
// first: what takes longest is not to begin last. go test begins in this order.
func packages(ctx context.Context, dir string) ([]string, error) {
	cmd := exec.CommandContext(ctx, "go", "list", "-e", "-f", `{{.ImportPath}} {{.Dir}}{{range .TestGoFiles}} {{.}}{{end}}{{range .XTestGoFiles}} {{.}}{{end}}`, "./...")
	cmd.Dir = dir
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	var paths []string
	sizes := map[string]int64{}
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		paths = append(paths, fields[0])
		for _, name := range fields[2:] {
			if info, err := os.Stat(filepath.Join(fields[1], name)); err == nil {
				sizes[fields[0]] += info.Size()
			}
		}
	}
	slices.SortStableFunc(paths, func(a, b string) int { return int(sizes[b] - sizes[a]) })
	return paths, nil
}
