// Package statements loads SQL statements from embedded files.
//
// A folder holds the statements of one database in files that end in .sql. Each
// statement has a name, and a comment that says which index serves it and why it is
// safe beside concurrent transactions:
//
//	-- name: claim
//	-- Served by the primary key (consumer, message_id). Waits for a transaction that
//	-- holds the same id.
//	insert into {{inbox}} (consumer, message_id) values ($1, $2) on conflict do nothing
//
// [Load] fills the statements of a folder into a struct, one field each, with the names
// of the tables in place of {{inbox}} (see names.Names.Expand). What several databases have
// in common is a struct that is embedded in theirs.
package statements

import (
	"fmt"
	"io/fs"
	"path"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"github.com/oncemill/oncemill/internal/names"
)

// Statement is a statement of a file.
type Statement struct {
	Name    string
	Comment string // without the dashes
	Text    string // with {{table}} for the names
}

var header = regexp.MustCompile(`(?m)^-- name: ([a-z0-9_]+)\n`)

// Read returns the statements of a folder, in the order of files and lines. It panics
// on a malformed file: the files are a part of the program.
func Read(files fs.FS, folder string) (all []Statement) {
	matches, err := fs.Glob(files, path.Join(folder, "*.sql"))
	if err != nil || len(matches) == 0 {
		panic(fmt.Sprintf("statements: no files in %s (%v)", folder, err))
	}
	slices.Sort(matches)
	for _, file := range matches {
		content, err := fs.ReadFile(files, file)
		if err != nil {
			panic(fmt.Sprintf("statements: %v", err))
		}
		all = append(all, parse(file, string(content))...)
	}
	for i, s := range all {
		if slices.ContainsFunc(all[:i], func(other Statement) bool { return other.Name == s.Name }) {
			panic(fmt.Sprintf("statements: %s: %s occurs twice", folder, s.Name))
		}
	}
	return all
}

func parse(file, content string) (all []Statement) {
	starts := header.FindAllStringSubmatchIndex(content, -1)
	for i, at := range starts {
		end := len(content)
		if i+1 < len(starts) {
			end = starts[i+1][0]
		}
		s := Statement{Name: content[at[2]:at[3]]}
		lines := strings.Split(strings.TrimSpace(content[at[1]:end]), "\n")
		for len(lines) > 0 && strings.HasPrefix(lines[0], "--") {
			s.Comment += strings.TrimSpace(strings.TrimPrefix(lines[0], "--")) + "\n"
			lines = lines[1:]
		}
		s.Text = strings.TrimSuffix(strings.Join(lines, "\n"), ";")
		if s.Comment == "" || s.Text == "" {
			panic(fmt.Sprintf("statements: %s: %s lacks its comment or its text", file, s.Name))
		}
		all = append(all, s)
	}
	return all
}

// Load fills each string field of the struct that into points to, and of the structs
// embedded in it, with the statement of its name in the folder: field ClaimGroup with
// statement claim_group. It panics if a field has no statement or a statement has no field.
func Load(into any, files fs.FS, folder string, tables names.Names) {
	texts := map[string]string{}
	for _, s := range Read(files, folder) {
		texts[s.Name] = tables.Expand(s.Text)
	}
	fill(reflect.ValueOf(into).Elem(), texts, folder)
	for name := range texts {
		panic(fmt.Sprintf("statements: %T has no field for statement %s of %s", into, name, folder))
	}
}

// fill moves texts into the fields.
func fill(fields reflect.Value, texts map[string]string, folder string) {
	for i := range fields.NumField() {
		field := fields.Type().Field(i)
		if field.Anonymous {
			fill(fields.Field(i), texts, folder)
			continue
		}
		name := snake(field.Name)
		text, ok := texts[name]
		if !ok {
			panic(fmt.Sprintf("statements: %s has no statement %s", folder, name))
		}
		fields.Field(i).SetString(text)
		delete(texts, name)
	}
}

// snake turns ClaimGroup into claim_group.
func snake(name string) string {
	var b strings.Builder
	before := rune('_')
	for i, r := range name {
		if i > 0 && unicode.IsUpper(r) && !unicode.IsUpper(before) {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(r))
		before = r
	}
	return b.String()
}

// Migrations returns the folder migrations of files, for oncemill.Migrations.FS. It
// panics if there is none.
func Migrations(files fs.FS) fs.FS {
	folder, err := fs.Sub(files, "migrations")
	if err != nil {
		panic(fmt.Sprintf("statements: %v", err))
	}
	return folder
}
