package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// mutant is a text to replace in one file of the library, so that it has a bug.
type mutant struct {
	name     string
	harm     string // what users would suffer
	pkg      string // package of the test, relative to the root, for example ./inbox
	test     string // the test that has to fail; may name a subtest
	file     string // where the bug is planted
	from, to string
}

const plantedDir = "internal/mutants/planted"

// load reads the bugs whose name matches, in the order of packages and names, and fails if
// one no longer fits its file.
func load(root string, only *regexp.Regexp) ([]mutant, error) {
	paths, err := filepath.Glob(filepath.Join(root, plantedDir, "*.bug"))
	if err != nil {
		return nil, err
	}
	var bugs []mutant
	var errs []error
	for _, path := range paths {
		name := strings.TrimSuffix(filepath.Base(path), ".bug")
		if !only.MatchString(name) {
			continue
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		b, err := parse(name, string(text))
		if err == nil {
			_, err = b.planted(root)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s/%s.bug: %w", plantedDir, name, err))
			continue
		}
		bugs = append(bugs, b)
	}
	if len(bugs) == 0 && len(errs) == 0 {
		return nil, fmt.Errorf("no bug in %s matches %q", plantedDir, only)
	}
	slices.SortFunc(bugs, func(a, b mutant) int { return cmp.Or(cmp.Compare(a.pkg, b.pkg), cmp.Compare(a.name, b.name)) })
	return bugs, errors.Join(errs...)
}

// parse reads a bug:
//
//	harm: 201 with no effect
//	test: ./idempotency TestTxMiddleware_ALostAnswerOfTheCommitIsLookedUp
//	file: idempotency/transaction.go
//	-- from --
//	lines of the file, whole
//	-- to --
//	lines in their place
func parse(name, text string) (mutant, error) {
	b := mutant{name: name}
	head, body, ok := strings.Cut(text, "-- from --\n")
	from, to, ok2 := strings.Cut(body, "-- to --\n")
	if !ok || !ok2 {
		return b, errors.New(`needs the lines "-- from --" and "-- to --"`)
	}
	b.from, b.to = from, to
	for line := range strings.Lines(head) {
		field, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		switch field {
		case "harm":
			b.harm = value
		case "test":
			b.pkg, b.test, _ = strings.Cut(value, " ")
		case "file":
			b.file = value
		default:
			return b, fmt.Errorf("unknown field %q: there are harm, test and file", field)
		}
	}
	switch {
	case b.harm == "" || b.file == "":
		return b, errors.New("needs the fields harm and file")
	case !strings.HasPrefix(b.pkg, "./") || !strings.HasPrefix(b.test, "Test"):
		return b, errors.New(`needs the field test, as in "test: ./inbox TestName"`)
	case b.from == "" || b.from == b.to:
		return b, errors.New("changes nothing")
	}
	return b, nil
}

// planted returns the file with the bug.
func (b mutant) planted(root string) ([]byte, error) {
	text, err := os.ReadFile(filepath.Join(root, b.file))
	if err != nil {
		return nil, err
	}
	if n := bytes.Count(text, []byte(b.from)); n != 1 {
		return nil, fmt.Errorf("the text to replace is %d times in %s, not once", n, b.file)
	}
	return bytes.Replace(text, []byte(b.from), []byte(b.to), 1), nil
}
