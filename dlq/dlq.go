package dlq

import (
	"embed"
	"io/fs"

	"github.com/oncemill/oncemill"
)

//go:embed migrations
var migrationFiles embed.FS

// Migrations makes the table dead_letters.
var Migrations = oncemill.Migrations{Name: "dlq", FS: migrationsFS()}

func migrationsFS() fs.FS {
	files, err := fs.Sub(migrationFiles, "migrations")
	if err != nil {
		panic(err) // only for a malformed constant path
	}
	return files
}
