package txhandle

import (
	"testing"

	"github.com/oncemill/oncemill"
)

func TestFilter_FindsWhatReachesOthers(t *testing.T) {
	t.Parallel()
	for dialect, texts := range map[oncemill.Dialect]map[string]bool{
		oncemill.PostgreSQL: {
			`set local app.tenant = 'a'`: true, `SET role app`: true, `reset role`: true, `RESET ALL`: true, `discard plans`: true,
			`set session authorization app`: true, `select 1; reset app.tenant`: true, `/* */ set local search_path to a`: true,
			`-- why` + "\n" + `reset role`: true, `select SET_CONFIG('app.tenant', 'a', true)`: true, `select '\'; reset role; --'`: true,
			`set constraints a deferred`: false, `update t set a = 1`: false, `select 'a; reset role'`: false, `-- reset role`: false,
			`select $$; reset role$$`: false, `select reset from t`: false,
			`create temp table seen (id int)`: true, `CREATE  TEMPORARY table if not exists seen (id int)`: true, `create local temp table a (b int)`: true,
			`create /* */ global temporary view a as select 1`: true, `select 1; create temp sequence a`: true,
			`select id into temp seen from t`: true, `select id INTO
			local temporary table seen from t`: true, `insert into pg_temp.seen values (1)`: true,
			`create or replace temp view a as select 1`: true, `with a as (select 1) select * into temp b from a`: true,
			`select 1; select 2 into temporary b`: true, `İ; select 1 into temp b`: true,
			`insert into temp values (1)`: false, `insert into temp.readings select 1`: false, `update temp set a = 1`: false,
			`create or replace function temp() returns int language sql as $$ select 1 $$`: false,
			`create table temperatures (id int)`:                                           false, `insert into temperatures values (1)`: false, `select temp from t`: false,
		},
		oncemill.SQLite: {
			`pragma foreign_keys = off`: true, `select 1; PRAGMA defer_foreign_keys = on`: true,
			`update t set a = 1`: false, `select 'a; pragma b'`: false, `select set_config from t`: false,
			`create temp table seen (id int)`: true, `create table temp.seen (id int)`: true, `insert into TEMP.seen values (1)`: true,
			`create table if not exists "temp".seen (id int)`: true, `select * from [temp].seen`: true, `update temp . seen set id = 1`: true,
			`select temp.v from readings temp`: false, `insert into temperatures values (1)`: false,
			`create table seen (id int)`: false,
		},
	} {
		for text, want := range texts {
			if got := reachesOthers(dialect, text); got != want {
				t.Errorf("%s, %q: %t", dialect, text, got)
			}
		}
	}
}
