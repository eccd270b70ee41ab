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

var index = regexp.MustCompile(`(?m)^(create|drop) (?:unique )?index \{\{(?:name:)?([a-z0-9_]+)\}\}[^;]*`)

// indexesOf returns the indexes that the migrations of sets leave behind, sorted by name.
func indexesOf(where database.Database, sets []oncemill.Migrations) ([]Index, error) {
	there := map[string]string{}
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
					there[name] = strings.Join(strings.Fields(where.Expand(found[0])), " ")
				} else {
					delete(there, name)
				}
			}
		}
	}
	var all []Index
	for _, name := range slices.Sorted(maps.Keys(there)) {
		all = append(all, Index{Name: name, Create: there[name]})
	}
	return all, nil
}

// namesOf returns the names of indexes.
func namesOf(all []Index) (names []string) {
	for _, i := range all {
		names = append(names, i.Name)
	}
	return names
}

// without returns the indexes whose names are not in some.
func without(all []Index, some []string) []Index {
	return slices.DeleteFunc(all, func(i Index) bool { return slices.Contains(some, i.Name) })
}
