package doctorstore

import (
	"slices"
	"testing"
	"testing/fstest"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/names"
)

func TestIndexes_AreThoseThatTheLastMigrationLeaves(t *testing.T) {
	t.Parallel()
	step := func(text string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(text)} }
	got, err := indexesOf(database.Database{Dialect: oncemill.SQLite, Names: names.Names{Prefix: "shop_"}}, []oncemill.Migrations{{Name: "a", FS: fstest.MapFS{
		"sqlite/0001_a.up.sql":     step("create index {{name:one}} on {{t}} (a);\ncreate unique index {{name:two}} on {{t}} (b);"),
		"sqlite/0002_b.up.sql":     step("drop index {{name:one}};\ndrop index {{two}};\ncreate index {{name:two}}\n\ton {{t}} (b, c);"),
		"sqlite/0002_b.down.sql":   step("create index {{name:three}} on {{t}} (c);"),
		"postgresql/0001_a.up.sql": step("create index {{name:four}} on {{t}} (d);"),
	}}})
	if err != nil || !slices.Equal(got, []Index{{"shop_two", `create index "shop_two" on "shop_t" (b, c)`}}) {
		t.Errorf("%v, %v", got, err)
	}
}
