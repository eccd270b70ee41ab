package idempotency

import (
	"embed"
	"io/fs"

	"github.com/oncemill/oncemill"
)

//go:embed migrations
var migrationFiles embed.FS

// Migrations creates the tables idempotency and idempotency_body, the seal, and on
// PostgreSQL the functions that requests call.
var Migrations = oncemill.Migrations{Name: "idempotency", FS: sub(migrationFiles, "migrations")}

func sub(files fs.FS, dir string) fs.FS {
	f, err := fs.Sub(files, dir)
	if err != nil {
		panic(err) // only for a malformed constant path
	}
	return f
}
