package main

import (
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
)

// modules returns the directories under root that contain a module with tests: all except
// tools and test data.
func modules(root string) ([]string, error) {
	var dirs []string
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && path != root {
			switch name := entry.Name(); {
			case strings.HasPrefix(name, "."), name == "testdata", path == filepath.Join(root, "tools"):
				return filepath.SkipDir
			}
		}
		if entry.Name() == "go.mod" {
			dirs = append(dirs, filepath.Dir(path))
		}
		return nil
	})
	slices.Sort(dirs)
	return dirs, err
}
