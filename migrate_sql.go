package oncemill

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// MigrationSQL returns what [Migrate] would do as a script, for somebody to review and run with psql
// or with the shell of SQLite. from is the status of the database, by [MigrationStatus]; a set that
// it does not hold has version 0, so nil is an empty database. cfg.Dialect is required, since there
// is no database to detect it from. MigrationSQL returns "" if there is nothing to do.
//
// The script is one transaction, and records the versions: afterwards Migrate and [CheckMigrated]
// find nothing to do. It takes the lock of Migrate. If the database does not have the versions of
// from, it fails and changes nothing. Its first line, which only the two shells know, ends them at
// the first error.
//
// On PostgreSQL the role that runs it owns the tables.
//
// It returns a [*SchemaError] for tables that this library cannot work with, since they are too new.
func MigrationSQL(cfg Config, from []Status, sets ...Migrations) (string, error) {
	if cfg.Dialect == DialectAuto {
		return "", &ConfigError{Field: "oncemill.Config.Dialect", Value: cfg.Dialect.String(), Problem: "must be given: there is no database to detect it from"}
	}
	to, err := cfg.resolve(nil)
	if err != nil {
		return "", err
	}
	loaded, err := to.load(sets)
	if err != nil {
		return "", err
	}
	s := script{resolved: to}
	for _, set := range loaded {
		have := Status{Set: set.name}
		if i := slices.IndexFunc(from, func(f Status) bool { return f.Set == set.name }); i >= 0 {
			have = from[i]
		}
		if have.Latest = len(set.steps); have.tooNew() {
			return "", have.schemaError()
		}
		if have.Version < have.Latest {
			s.due = append(s.due, dueSet{set, have})
		}
	}
	if len(s.due) == 0 {
		return "", nil
	}
	return s.text(), nil
}

// dueSet is a set with steps to do.
type dueSet struct {
	set
	have Status
}

// scriptSQL is what a dialect needs in a script, besides what Migrate executes.
type scriptSQL struct {
	shell  string   // ends the shell at the first error
	before []string // the transaction

	guard []string // fails unless the sets have the versions EXPECTED, a list of pairs
}

// script writes a migration as SQL.
type script struct {
	resolved
	due []dueSet
	out strings.Builder
}

func (s *script) text() string {
	of := dialectSQL[s.dialect]
	s.line(of.script.shell)
	for _, d := range s.due {
		s.line(fmt.Sprintf("-- %s: from version %d to %d", d.name, d.have.Version, d.have.Latest))
	}
	s.statements(of.script.before...)
	s.line("")
	wait := strconv.FormatInt(mostLockWait.Milliseconds(), 10)
	for _, text := range of.begin {
		s.statements(strings.ReplaceAll(text, "WAIT", wait))
	}
	s.statements(of.prepare...)
	s.line("")
	var expected []string
	for _, d := range s.due {
		expected = append(expected, fmt.Sprintf("(%s, %d)", quote(d.name), d.have.Version))
	}
	for _, text := range of.script.guard {
		s.statements(strings.ReplaceAll(text, "EXPECTED", strings.Join(expected, ", ")))
	}
	if slices.ContainsFunc(s.due, func(d dueSet) bool { return d.have.outdated }) {
		s.statements(addCompatible)
	}
	for _, d := range s.due {
		for i := d.have.Version; i < len(d.steps); i++ {
			s.step(d.name, i+1, d.steps[i])
		}
	}
	s.line("")
	s.statements("commit")
	return s.out.String()
}

func (s *script) step(set string, number int, step step) {
	s.line(fmt.Sprintf("\n-- %s %d: %s", set, number, step.name))
	up := strings.TrimSpace(s.Expand(step.up))
	if s.line(up); !strings.HasSuffix(up, ";") { // or the last line is a comment
		s.line(";")
	}
	s.statements(strings.NewReplacer(
		"$1", quote(set), "$2", strconv.Itoa(number), "$3", quote(step.name), "$4", strconv.Itoa(step.compatible),
	).Replace(insertVersion))
}

func (s *script) statements(texts ...string) {
	for _, text := range texts {
		s.line(s.Expand(text) + ";")
	}
}

func (s *script) line(text string) { s.out.WriteString(text + "\n") }

// quote returns a text as a literal of SQL.
func quote(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }
