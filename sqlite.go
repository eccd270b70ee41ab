package oncemill

import (
	"fmt"
	"net/url"
	"time"
)

const busyTimeout = 10 * time.Second

// SQLiteDSN returns the data source name that oncemill's promises need on
// SQLite, for the driver modernc.org/sqlite (named "sqlite"):
//
//	db, err := sql.Open("sqlite", oncemill.SQLiteDSN("orders.db"))
//
// It sets a write-ahead log, so that readers do not wait for the writer;
// synchronous=FULL, so that a commit survives a power failure; foreign keys; a
// busy timeout of 10 s; and transactions that begin as writers, since one that
// began as a reader and then writes fails at once when another has written
// meanwhile.
func SQLiteDSN(path string) string {
	q := url.Values{
		"_txlock": {"immediate"},
		"_pragma": {fmt.Sprintf("busy_timeout(%d)", busyTimeout.Milliseconds()), "journal_mode(WAL)", "synchronous(FULL)", "foreign_keys(1)"},
	}
	return (&url.URL{Scheme: "file", Opaque: (&url.URL{Path: path}).EscapedPath(), RawQuery: q.Encode()}).String()
}
