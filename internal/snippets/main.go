// Command snippets checks that the Go code in documents compiles: every fenced block of Go
// must be an excerpt of a source file of this repository, named in a comment above it:
//
//	<!-- excerpt: examples/readme/main.go#serve -->
//
// In the file the excerpt is between the lines "//snippet:serve" and "//snippet:end". Without
// a name it is the whole file.
//
//	go run ./internal/snippets [-write] README.md docs/*.md
//
// -write copies the excerpts into the documents instead of comparing them. Paths of sources
// are relative to the working directory.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
)

func main() {
	write := flag.Bool("write", false, "update the documents")
	flag.Parse()
	if err := run(os.DirFS("."), flag.Args(), *write); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run checks or writes the documents and returns all problems.
func run(sources fs.FS, documents []string, write bool) error {
	var errs []error
	for _, path := range documents {
		have, err := os.ReadFile(path)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		want, err := render(string(have), func(ref reference) (string, error) { return excerpt(sources, ref) })
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("%s: %w", path, err))
		case bytes.Equal(have, []byte(want)):
		case write:
			errs = append(errs, os.WriteFile(path, []byte(want), 0o644))
		default:
			errs = append(errs, fmt.Errorf("%s:%d: differs from the excerpt; run: make fmt", path, firstDifference(string(have), want)))
		}
	}
	return errors.Join(errs...)
}
