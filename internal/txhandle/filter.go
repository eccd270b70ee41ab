package txhandle

import (
	"regexp"
	"strings"

	"github.com/oncemill/oncemill"
)

// endsTransaction reports whether one of the statements in text begins or ends a
// transaction. It reads words, not grammar. If a statement gets past it, the seal makes the
// database refuse the commit.
func endsTransaction(dialect oncemill.Dialect, text string) bool {
	l := newLexer(dialect, text)
	for l.at < len(l.text) {
		switch l.word() {
		case "begin", "start", "commit", "end", "abort":
			return true
		case "rollback":
			if !l.toSavepoint() {
				return true
			}
		case "prepare":
			if l.word() == "transaction" {
				return true
			}
		}
		l.skipStatement()
		if l.hides() {
			return true
		}
	}
	return false
}

// reachesOthers reports whether one of the statements in text affects later ones of the
// transaction other than by what it writes to tables: it changes settings (the role, the
// search path, the tenant of row-level security), or uses temporary tables, whose rows last as
// long as the transaction. Like endsTransaction it reads words only.
func reachesOthers(dialect oncemill.Dialect, text string) bool {
	lower := strings.ToLower(text)
	temporary := strings.Contains(lower, "temp")
	if (temporary || strings.Contains(lower, "set_config")) && reachesAnywhere[dialect].MatchString(lower) {
		return true
	}
	l := newLexer(dialect, text)
	for l.at < len(l.text) {
		start, first := l.at, l.word()
		switch first {
		case "set":
			if l.word() != "constraints" {
				return true
			}
		case "reset", "discard", "pragma":
			return true
		case "create":
			word := l.word()
			if word == "or" { // replace
				l.word()
				word = l.word()
			}
			if word == "local" || word == "global" {
				word = l.word()
			}
			if isTemporary(word) {
				return true
			}
		}
		l.skipStatement()
		reads := first == "select" || first == "with"
		if l.hides() || temporary && reads && intoTemporary.MatchString(strings.ToLower(text[start:l.at])) {
			return true
		}
	}
	return false
}

// reachesAnywhere finds what may be anywhere in a statement: a function that changes a
// setting, the schema of temporary tables.
var reachesAnywhere = map[oncemill.Dialect]*regexp.Regexp{
	oncemill.PostgreSQL: regexp.MustCompile(`set_config|pg_temp`),
	oncemill.SQLite:     regexp.MustCompile("\\b(into|from|join|update|exists|table|view|index|trigger)\\s+[\"'`\\[]?temp[\"'`\\]]?\\s*\\."),
}

// intoTemporary finds a select that makes a temporary table.
var intoTemporary = regexp.MustCompile(`\binto\s+((local|global)\s+)?temp(orary)?\b`)

func isTemporary(word string) bool { return word == "temp" || word == "temporary" }

func newLexer(dialect oncemill.Dialect, text string) lexer {
	return lexer{
		text:     text,
		postgres: dialect == oncemill.PostgreSQL,
		// The kind of a string and standard_conforming_strings decide what a backslash in it
		// means, and therefore where the string ends.
		blunt: dialect == oncemill.PostgreSQL && strings.Contains(text, `\`),
	}
}

// lexer finds the first words of statements: at the start of the text, and after each
// semicolon outside of strings, quoted names and comments.
type lexer struct {
	text     string
	at       int
	postgres bool // else SQLite
	blunt    bool // every semicolon counts, also in strings and comments
}

// hides reports whether what looks like a comment follows but may be part of a string. The
// server would then execute statements that the lexer takes for a comment.
func (l *lexer) hides() bool {
	if !l.blunt {
		return false
	}
	rest := strings.TrimLeft(l.text[l.at:], " \t\n\v\f\r")
	return strings.HasPrefix(rest, "--") || strings.HasPrefix(rest, "/*")
}

// toSavepoint reports whether rollback is followed by: [work | transaction] to ...
func (l *lexer) toSavepoint() bool {
	next := l.word()
	if next == "work" || next == "transaction" {
		next = l.word()
	}
	return next == "to"
}

// word skips blanks and comments and returns the next word in lower case, or "" if none
// follows.
func (l *lexer) word() string {
	l.skipBlanks()
	start := l.at
	l.skipWord()
	return strings.ToLower(l.text[start:l.at])
}

func (l *lexer) skipBlanks() {
	const byteOrderMark = "\ufeff" // a blank to SQLite
	for l.at < len(l.text) {
		switch {
		case strings.IndexByte(" \t\n\v\f\r", l.text[l.at]) >= 0:
			l.at++
		case l.sees(byteOrderMark):
			l.at += len(byteOrderMark)
		case l.sees("--"), l.sees("/*"):
			l.skipComment()
		default:
			return
		}
	}
}

// skipStatement moves past the next semicolon.
func (l *lexer) skipStatement() {
	for l.at < len(l.text) {
		switch c := l.text[l.at]; {
		case c == ';':
			l.at++
			return
		case l.blunt:
			l.at++
		case c == '\'', c == '"', c == '`' && !l.postgres:
			// A doubled quote is an escaped one. Here it ends one string and starts
			// the next, with the same result.
			l.at++
			l.skipPast(string(c))
		case c == '[' && !l.postgres:
			l.skipPast("]")
		case l.sees("--"), l.sees("/*"):
			l.skipComment()
		case c == '$' && l.postgres:
			l.skipDollarQuoted()
		case isDigit(c): // begins no word, and a $ may follow
			l.at++
		case isWord(c):
			l.skipWord()
		default:
			l.at++
		}
	}
}

func (l *lexer) skipComment() {
	if l.sees("--") {
		lineEnds := "\n"
		if l.postgres {
			lineEnds = "\r\n"
		}
		if end := strings.IndexAny(l.text[l.at:], lineEnds); end >= 0 {
			l.at += end
		} else {
			l.at = len(l.text)
		}
		return
	}
	for depth := 0; l.at < len(l.text); {
		switch {
		case l.sees("*/"):
			l.at += 2
			if depth--; depth == 0 {
				return
			}
		case l.sees("/*") && (depth == 0 || l.postgres): // PostgreSQL's nest
			l.at += 2
			depth++
		default:
			l.at++
		}
	}
}

// skipDollarQuoted moves past $tag$ ... $tag$, or past the $ of a parameter.
func (l *lexer) skipDollarQuoted() {
	l.at++
	size := strings.IndexByte(l.text[l.at:], '$')
	if size < 0 {
		return
	}
	name := l.text[l.at : l.at+size]
	for i := range len(name) {
		if !isWord(name[i]) || i == 0 && isDigit(name[i]) {
			return
		}
	}
	l.at += size + 1
	l.skipPast("$" + name + "$")
}

func (l *lexer) skipWord() {
	for l.at < len(l.text) && isWord(l.text[l.at]) {
		l.at++
	}
}

// skipPast moves past the next mark, or to the end if there is none.
func (l *lexer) skipPast(mark string) {
	if i := strings.Index(l.text[l.at:], mark); i >= 0 {
		l.at += i + len(mark)
		return
	}
	l.at = len(l.text)
}

func (l *lexer) sees(s string) bool { return strings.HasPrefix(l.text[l.at:], s) }

func isWord(c byte) bool {
	return c == '_' || c == '$' || c >= 0x80 || isDigit(c) || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' }
