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
// of the tables in place of {{inbox}} (see names.Names.Expand). Statements that several
// databases share are fields of an embedded struct.
//
// A statement for several numbered tables is written once, with # for the number. Its field
// is an array of strings:
//
//	-- name: truncate_# for 0 to 3
//	-- It has no plan.
//	truncate {{outbox_#}}
//
// With a plain name, # is the number of a table that is created at run time. The field
// is a func(number string) string. An insert of one row, which ends with its values,
// becomes one of several rows with [ForRows].
//
// A list that is read in either order is written once, with the name of its reverse. What
// differs is marked; in the reverse {{<}} is > and {{desc}} is asc:
//
//	-- name: newest, reversed oldest
//	-- By the index on created, from either end.
//	select id from {{orders}} where created {{<}} $1 order by created {{desc}} limit $2
package statements

import (
	"fmt"
	"io/fs"
	"path"
	"reflect"
	"regexp"
	"slices"
	"strconv"
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

var header = regexp.MustCompile(`(?m)^-- name: ([a-z0-9_]+)(?:_# for 0 to ([1-9])|, reversed ([a-z0-9_]+))?\n`)

var (
	forward = strings.NewReplacer("{{<}}", "<", "{{desc}}", "desc")
	reverse = strings.NewReplacer("{{<}}", ">", "{{desc}}", "asc")
)

// Read returns the statements of a folder, in the order of files and lines. It panics
// on a malformed file, since the files are part of the program.
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
			panic(fmt.Sprintf("statements: %s: %s has no comment or no text", file, s.Name))
		}
		switch {
		case at[4] >= 0:
			last, _ := strconv.Atoi(content[at[4]:at[5]]) // one digit
			for n := range last + 1 {
				number := strconv.Itoa(n)
				all = append(all, Statement{s.Name + "_" + number, s.Comment, strings.ReplaceAll(s.Text, "#", number)})
			}
		case at[6] >= 0:
			all = append(all,
				Statement{s.Name, s.Comment, forward.Replace(s.Text)},
				Statement{content[at[6]:at[7]], s.Comment, reverse.Replace(s.Text)})
		default:
			all = append(all, s)
		}
	}
	return all
}

// Load fills each field of the struct that into points to, and of the structs embedded in
// it, with the statement of its name in the folder: field ClaimGroup with statement
// claim_group. It panics if a field has no statement or a statement has no field.
func Load(into any, files fs.FS, folder string, tables names.Names) {
	l := loader{folder: folder, texts: map[string]string{}, tables: tables}
	for _, s := range Read(files, folder) {
		l.texts[s.Name] = s.Text
	}
	l.fill(reflect.ValueOf(into).Elem())
	for name := range l.texts {
		panic(fmt.Sprintf("statements: %T has no field for statement %s of %s", into, name, folder))
	}
}

type loader struct {
	folder string
	texts  map[string]string // statements without a field so far
	tables names.Names
}

func (l loader) fill(fields reflect.Value) {
	for i := range fields.NumField() {
		field, name := fields.Field(i), snake(fields.Type().Field(i).Name)
		switch {
		case fields.Type().Field(i).Anonymous:
			l.fill(field)
		case field.Kind() == reflect.Array:
			for n := range field.Len() {
				field.Index(n).SetString(l.tables.Expand(l.take(fmt.Sprintf("%s_%d", name, n))))
			}
		case field.Kind() == reflect.Func:
			text := l.take(name)
			field.Set(reflect.ValueOf(func(number string) string { return l.tables.Expand(numbered(text, number)) }))
		default:
			field.SetString(l.tables.Expand(l.take(name)))
		}
	}
}

// take returns the text of a statement and removes it from texts.
func (l loader) take(name string) string {
	text, ok := l.texts[name]
	if !ok {
		panic(fmt.Sprintf("statements: %s has no statement %s", l.folder, name))
	}
	delete(l.texts, name)
	return text
}

// numbered panics if number is not digits only, since it becomes part of the statement.
func numbered(text, number string) string {
	if strings.Trim(number, "0123456789") != "" || number == "" {
		panic(fmt.Sprintf("statements: %q is not the number of a table", number))
	}
	return strings.ReplaceAll(text, "#", number)
}

// ForRows returns an insert of one row as one of n rows. Its text ends with "values" and
// the row, whose parameters are $1, $2 and so on, once each.
func ForRows(text string, n int) string {
	const values = "values "
	at := strings.LastIndex(text, values) + len(values)
	pieces := strings.Split(text[at:], "$")
	for i, piece := range pieces[1:] {
		pieces[i+1] = strings.TrimLeft(piece, "0123456789")
	}
	var b strings.Builder
	b.Grow(at + n*(len(text)-at+2*len(pieces)))
	b.WriteString(text[:at])
	for row := range n {
		if row > 0 {
			b.WriteString(", ")
		}
		b.WriteString(pieces[0])
		for i, piece := range pieces[1:] {
			b.WriteByte('$')
			b.WriteString(strconv.Itoa(row*(len(pieces)-1) + i + 1))
			b.WriteString(piece)
		}
	}
	return b.String()
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
