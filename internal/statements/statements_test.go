package statements_test

import (
	"strings"
	"testing"
	"testing/fstest"

	"github.com/oncemill/oncemill/internal/names"
	"github.com/oncemill/oncemill/internal/statements"
)

const two = `-- name: claim_id
-- By primary key.
insert into {{inbox}} values ($1);

-- name: find
-- By primary key. Second line.
select * -- of all
from {{inbox}}
`

func folder(content string) fstest.MapFS {
	return fstest.MapFS{"sqlite/a.sql": {Data: []byte(content)}}
}

func TestLoad_FillsInTheNames(t *testing.T) {
	t.Parallel()
	var q struct{ ClaimID, Find string }
	statements.Load(&q, folder(two), "sqlite", names.Names{Prefix: "p_"})
	if q.ClaimID != `insert into "p_inbox" values ($1)` || q.Find != "select * -- of all\nfrom \"p_inbox\"" {
		t.Errorf("got %+v", q)
	}
	all := statements.Read(folder(two), "sqlite")
	if len(all) != 2 || all[1].Comment != "By primary key. Second line.\n" {
		t.Errorf("got %+v", all)
	}
}

// shared is embedded, as what several databases have in common.
type shared struct{ Find string }

func TestLoad_FillsEmbeddedStructs(t *testing.T) {
	t.Parallel()
	var q struct {
		shared
		ClaimID string
	}
	statements.Load(&q, folder(two), "sqlite", names.Names{})
	if q.ClaimID == "" || q.Find == "" {
		t.Errorf("got %+v", q)
	}
}

func TestLoad_RefusesWhatDoesNotMatch(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		content string
		into    any
		want    string
	}{
		"a field without statement": {two, &struct{ ClaimID, Find, Lost string }{}, "no statement lost"},
		"a statement without field": {two, &struct{ Find string }{}, "no field for statement claim_id"},
		"a name twice":              {two + two, &struct{ ClaimID, Find string }{}, "occurs twice"},
		"no comment":                {"-- name: find\nselect 1", &struct{ Find string }{}, "has no comment"},
		"no text":                   {"-- name: find\n-- By key.\n", &struct{ Find string }{}, "has no comment or no text"},
		"no file":                   {"", &struct{ Find string }{}, "no files"},
	} {
		files := folder(c.content)
		if c.content == "" {
			files = nil
		}
		func() {
			defer func() {
				if text, _ := recover().(string); !strings.Contains(text, c.want) {
					t.Errorf("%s: got %q", name, text)
				}
			}()
			statements.Load(c.into, files, "sqlite", names.Names{})
		}()
	}
}

func TestLoad_NumbersTables(t *testing.T) {
	t.Parallel()
	const numbered = `-- name: clear_# for 0 to 1
-- No plan.
truncate {{outbox_#}};

-- name: drop_day
-- No plan.
drop table {{history_#}}
`
	var q struct {
		Clear   [2]string
		DropDay func(number string) string
	}
	statements.Load(&q, folder(numbered), "sqlite", names.Names{Prefix: "p_"})
	if q.Clear != [2]string{`truncate "p_outbox_0"`, `truncate "p_outbox_1"`} || q.DropDay("20260102") != `drop table "p_history_20260102"` {
		t.Errorf("got %+v, %s", q, q.DropDay("20260102"))
	}
	defer func() {
		if recover() == nil {
			t.Error("a table was named by more than digits")
		}
	}()
	q.DropDay(`0"; drop table x`)
}

func TestLoad_ReversesAList(t *testing.T) {
	t.Parallel()
	const list = `-- name: newest, reversed oldest
-- By primary key.
select id from {{inbox}} where id {{<}} $1 order by id {{desc}}
`
	var q struct{ Newest, Oldest string }
	statements.Load(&q, folder(list), "sqlite", names.Names{Prefix: "p_"})
	if q.Newest != `select id from "p_inbox" where id < $1 order by id desc` || q.Oldest != `select id from "p_inbox" where id > $1 order by id asc` {
		t.Errorf("got %+v", q)
	}
}

func TestForRows_NumbersTheParameters(t *testing.T) {
	t.Parallel()
	const one = "insert into t (a, b)\nvalues ($1, now() + $2::bigint)"
	if got := statements.ForRows(one, 1); got != one {
		t.Errorf("got %s", got)
	}
	if got := statements.ForRows(one, 3); got != "insert into t (a, b)\nvalues ($1, now() + $2::bigint), ($3, now() + $4::bigint), ($5, now() + $6::bigint)" {
		t.Errorf("got %s", got)
	}
}
