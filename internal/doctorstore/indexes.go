package doctorstore

import (
	"io/fs"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
)

var index = regexp.MustCompile(`(?m)^(create|drop) (?:unique )?index \{\{(?:name:)?([a-z0-9_]+)\}\}`)

// indexesOf returns the indexes that the migrations of sets leave behind, by their names in the
// database.
func indexesOf(where database.Database, sets []oncemill.Migrations) ([]string, error) {
	there := map[string]bool{}
	for _, set := range sets {
		steps, err := fs.Glob(set.FS, where.Dialect.String()+"/*.up.sql")
		if err != nil {
			return nil, err
		}
		slices.Sort(steps)
		for _, step := range steps {
			text, err := fs.ReadFile(set.FS, step)
			if err != nil {
				return nil, err
			}
			for _, found := range index.FindAllStringSubmatch(string(text), -1) {
				if name := strings.Trim(where.Name(found[2]), `"`); found[1] == "create" {
					there[name] = true
				} else {
					delete(there, name)
				}
			}
		}
	}
	return slices.Sorted(maps.Keys(there)), nil
}

// without returns what of all is not in some.
func without(all, some []string) []string {
	return slices.DeleteFunc(all, func(name string) bool { return slices.Contains(some, name) })
}
