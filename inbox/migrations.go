package inbox

import (
	"embed"
	"io/fs"

	"github.com/oncemill/oncemill"
)

//go:embed migrations
var migrationFiles embed.FS

// Migrations creates the tables inbox, with its seal, inbox_failures, inbox_sequences and
// inbox_refused.
var Migrations = oncemill.Migrations{Name: "inbox", FS: sub(migrationFiles, "migrations")}

func sub(files fs.FS, dir string) fs.FS {
	f, err := fs.Sub(files, dir)
	if err != nil {
		panic(err) // only for a malformed constant path
	}
	return f
}
