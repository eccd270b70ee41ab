package inbox_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/testserver"
)

var errUndo = errors.New("undo")

// try has a handler send text, and reports whether it was refused, in which case
// it must not have been sent, and nothing else either from then on.
func (p *testDB) try(t *testing.T, in *inbox.Inbox, text string) (refused bool) {
	t.Helper()
	err := deliver(t, in, "a", func(msg *message.Message) ([]*message.Message, error) {
		p.tap.sent()
		err := handlerExec(msg, text)
		refused = errors.Is(err, oncemill.ErrTxOwned)
		sent := p.tap.sent()
		if refused == slices.Contains(sent, text) {
			t.Errorf("%q: refused %t, but sent %q", text, refused, sent)
		}
		if refused {
			tx, err := handlerTx(msg.Context())
			if err != nil {
				return nil, err
			}
			useLeaked(t, tx, oncemill.ErrTxOwned)
			return nil, nil // overlooked: the attempt fails all the same
		}
		return nil, errUndo
	})
	if refused {
		expectError(t, err, oncemill.ErrTxOwned)
	} else {
		expectError(t, err, errUndo)
	}
	return refused
}

func TestTx_RefusesTextThatEndsTheTransaction(t *testing.T) {
	common := []string{
		`commit`, `COMMIT;`, `Commit Work`, `commit transaction`, `end`, `End;`, `end transaction`, `rollback`, `ROLLBACK`, `rollback;`,
		`rollback work`, `rollback transaction`, `rollback -- to savepoint`, `rollback /* to */ ; select 'to'`,
		`begin`, `begin immediate`, `begin transaction`, `start transaction`,
		" \t\r\n\f commit", ";;; commit", `/* why */commit`, "-- why\ncommit", "--\n--\n/**/ commit", "\ufeffcommit",
		`select 1; commit`, `select ';'; commit`, `select ''';'; commit`, `select "a"";" ; rollback`, "select 1;\n-- ;\ncommit",
		`select 1 /* ' */; commit; --'`, `select 1 -- '` + "\n" + `; commit; --'`, `savepoint s; rollback`, `rollback to s; commit`,
	}
	perDialect := map[oncemill.Dialect][]string{
		oncemill.PostgreSQL: {
			`commit and chain`, `rollback and chain`, `abort`, `ABORT work`, `prepare transaction 'x'`, `PREPARE /**/ TRANSACTION 'x'`,
			`commit prepared 'x'`, `rollback prepared 'x'`, `/* /* nested */ */ commit`, "-- \rcommit",
			`select $$;$$; commit`, `select $a$ $$ ' $a$; commit`, `select a$b$; commit; select $b$`,
			// How these read depends on standard_conforming_strings.
			`select '\'; commit; --'`, `select E'\'; commit; --'`, `select '\''; commit; --'`, `select E'a''\''; commit; select '`,
			"select E'a'\n'\\''; commit; --'", `select U&'\0061'; commit`,
		},
		oncemill.SQLite: {
			"select `a'`; commit; --'", `select [a'] ; commit; --']`, `/* /* not nested */ commit`, `/**//*/*/ commit`, "-- \r\ncommit", `select '\'; commit; --'`,
		},
	}
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		for _, text := range append(common, perDialect[p.cfg.Dialect]...) {
			if !p.try(t, in, text) {
				t.Errorf("not refused: %q", text)
			}
		}
		p.expect(t, 0, 0, 0)
	})
}

func TestTx_SendsTextThatDoesNotEndTheTransaction(t *testing.T) {
	common := []string{
		``, `;`, `-- commit`, `/* commit */`, `/* ; commit */ select 1`, "-- ; commit\nselect 1", `select 1 /* open; commit`,
		`select ';commit'`, `select 'it''s; commit'`, `select 1 as ";commit"`, `select 1; select 2`, `select 1 as commit_time`,
		`select case when 1 = 1 then 2 end`, `savepoint a; rollback to a`, `savepoint a; rollback to savepoint a`, `savepoint a; release a`,
		`savepoint a; ROLLBACK /* x */ TRANSACTION -- y` + "\n" + `TO a`, `commits`, `beginning`, `"commit"`, `'commit'`, `(commit)`,
		`select ';commit`, `select ";commit`,
	}
	perDialect := map[oncemill.Dialect][]string{
		oncemill.PostgreSQL: {
			`select $$;commit$$`, `select $tag$ $$; commit; $x$ $tag$`, `do $$ begin perform 1; end $$`, `prepare p as select 1`,
			`select $tag$; commit`, `select $1$a$; commit`, `select 1$b$; commit; --$b$`, `savepoint a; rollback work to savepoint a`, `/* /* ; */ ; commit */ select 1`, `select 'a\b'`, `select E'\\'; select 2`,
		},
		oncemill.SQLite: {"select 1 as `;commit`", `select 1 as [;commit]`, `select '\'; select ';commit'`, `select 1 as [;commit`},
	}
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		for _, text := range append(common, perDialect[p.cfg.Dialect]...) {
			if p.try(t, in, text) {
				t.Errorf("refused: %q", text)
			}
		}
		p.expect(t, 0, 0, 0)
	})
}

func TestTx_RefusesToPrepareAndToQueryTextThatEndsTheTransaction(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		for name, send := range map[string]func(oncemill.Tx, *message.Message) error{
			"prepare": func(tx oncemill.Tx, msg *message.Message) error {
				_, err := tx.PrepareContext(msg.Context(), `commit`) //nolint:sqlclosecheck // refused
				return err
			},
			"query": func(tx oncemill.Tx, msg *message.Message) error {
				_, err := tx.QueryContext(msg.Context(), `commit`) //nolint:rowserrcheck,sqlclosecheck // refused
				return err
			},
			"query row": func(tx oncemill.Tx, msg *message.Message) error {
				return tx.QueryRowContext(msg.Context(), `commit`).Scan(new(int))
			},
		} {
			err := deliver(t, in, name, func(msg *message.Message) ([]*message.Message, error) {
				tx, err := handlerTx(msg.Context())
				if err != nil {
					return nil, err
				}
				p.tap.sent()
				expectError(t, send(tx, msg), oncemill.ErrTxOwned)
				p.expectSent(t)
				return nil, addEffect(msg)
			})
			expectError(t, err, oncemill.ErrTxOwned)
		}
		p.expect(t, 0, 0, 0)
	})
}

// Random texts, of which it is known by their construction whether they end the
// transaction, are refused if and only if they do; and the database agrees about
// those that it is sent.
func TestTx_RefusesExactlyTheTextThatEndsTheTransaction(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		seed := rand.Uint64()
		random := rand.New(rand.NewPCG(seed, 0)) //nolint:gosec // reproducible
		ending, harmless, texts := 0, 0, testserver.Rounds(300, 600)
		for range texts {
			text, ends := randomText(random, p.cfg.Dialect)
			if ends {
				if ending++; !p.try(t, in, text) {
					t.Errorf("not refused: %q", text)
				}
			} else {
				harmless++
				p.expectOpenAfter(t, in, text)
			}
			if t.Failed() {
				t.Fatalf("seed %d", seed)
			}
		}
		if ending < texts/12 || harmless < texts/12 {
			t.Errorf("%d ending, %d harmless", ending, harmless)
		}
		p.expect(t, 0, 0, 0)
	})
}

// expectOpenAfter has a handler send a valid text that does not end the
// transaction, and looks whether what was written before can be undone.
func (p *testDB) expectOpenAfter(t *testing.T, in *inbox.Inbox, text string) {
	t.Helper()
	err := deliver(t, in, "a", func(msg *message.Message) ([]*message.Message, error) {
		if err := errors.Join(addEffect(msg), handlerExec(msg, text)); err != nil {
			t.Errorf("%q: %v", text, err)
		}
		return nil, errUndo
	})
	expectError(t, err, errUndo)
	if n := p.count(t, `select count(*) from effects`); n != 0 {
		t.Errorf("%q ended the transaction", text)
	}
}

// randomText joins selects of constants, quoted in any way, with comments in
// between and with statements of transactions.
func randomText(r *rand.Rand, dialect oncemill.Dialect) (text string, ends bool) {
	pick := func(of ...string) string { return of[r.IntN(len(of))] }
	tricky := func() string {
		var b strings.Builder
		for range r.IntN(6) {
			b.WriteString(pick(`;`, `; commit`, `'`, `"`, "`", `]`, `$$`, `$a$`, `--`, "\n", `/*`, `*/`, `rollback`, ` `, `x`))
		}
		return b.String()
	}
	comment := func() string {
		switch r.IntN(3) {
		case 0:
			return "--" + strings.ReplaceAll(tricky(), "\n", " ") + "\n"
		case 1:
			inner := strings.NewReplacer("/*", "", "*/", "", "*", "", "/", "").Replace(tricky())
			if dialect == oncemill.PostgreSQL && r.IntN(2) == 0 {
				inner += "/* " + strings.NewReplacer("*", "", "/", "").Replace(tricky()) + " */" + strings.NewReplacer("*", "", "/", "").Replace(tricky())
			}
			return "/* " + inner + " */"
		}
		return pick(" ", "\n", "\t")
	}
	quote := func() string {
		content := tricky()
		switch n := r.IntN(4); {
		case n == 0 && dialect == oncemill.PostgreSQL:
			return "$b$" + content + "$b$"
		case n == 1:
			return `1 as "x` + strings.ReplaceAll(content, `"`, `""`) + `"`
		case n == 2 && dialect == oncemill.SQLite:
			return "1 as `x" + strings.ReplaceAll(content, "`", "``") + "`"
		case n == 3 && dialect == oncemill.SQLite:
			return "1 as [x" + strings.ReplaceAll(content, "]", "") + "]"
		}
		return "'" + strings.ReplaceAll(content, "'", "''") + "'"
	}
	var b strings.Builder
	for i := range 1 + r.IntN(4) {
		if i > 0 {
			b.WriteString(comment() + ";" + comment())
		}
		switch {
		case r.IntN(8) == 0:
			ends = true
			b.WriteString(pick("commit", "COMMIT", "rollback", "end", "begin", "rollback"+comment()+"work"))
			if dialect == oncemill.SQLite {
				b.WriteString("--\n")
			}
		case r.IntN(8) == 0:
			fmt.Fprintf(&b, "savepoint s%d;%srollback %sto%s s%d", i, comment(), comment(), comment(), i)
		default:
			b.WriteString("select" + comment() + " " + quote())
		}
	}
	return b.String(), ends
}
