package sqlerr_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"testing"

	"github.com/lib/pq"
	"github.com/lib/pq/pqerror"

	"github.com/oncemill/oncemill/internal/sqlerr"
)

// An error with which the server ends a connection is not about the statement. For a
// COMMIT it means a rollback only if the server had not received the COMMIT.
func TestCommitUnknown_WhenTheServerEndsTheConnection(t *testing.T) {
	t.Parallel()
	for state, unknown := range map[string]bool{"25P03": false, "25P04": true, "57P01": true, "08006": true} {
		err := &pq.Error{Code: pqerror.Code(state)}
		if !sqlerr.Connection(err) || sqlerr.CommitUnknown(err) != unknown {
			t.Errorf("%s: connection %v, unknown %v", state, sqlerr.Connection(err), sqlerr.CommitUnknown(err))
		}
	}
	if err := (&pq.Error{Code: "23505"}); sqlerr.Connection(err) || sqlerr.CommitUnknown(err) {
		t.Error("a refused commit is taken for a lost one")
	}
}

// liteError is an error of SQLite.
type liteError int

func (e liteError) Error() string { return "sqlite" }
func (e liteError) Code() int     { return int(e) }

// A commit is known to have failed only if the server says so, or if nothing was sent. Above
// all, a connection that was lost says nothing.
func TestCommitUnknown_UnlessItIsKnown(t *testing.T) {
	t.Parallel()
	for unknown, errs := range map[bool][]error{
		true: {
			driver.ErrBadConn, sql.ErrConnDone, io.EOF, io.ErrUnexpectedEOF, net.ErrClosed, syscall.ECONNRESET, context.Canceled, context.DeadlineExceeded,
			&pq.Error{Code: "40003"}, liteError(10 /* I/O */), errors.New("anything else"),
		},
		false: {
			nil, sql.ErrTxDone, &pq.Error{Code: "40001"}, &pq.Error{Code: "40P01"}, &pq.Error{Code: "23503"},
			errors.New("pq: Could not complete operation in a failed transaction"), errors.New("commit unexpectedly resulted in rollback"),
			liteError(5), liteError(13), liteError(19 | 3<<8),
		},
	} {
		for _, err := range errs {
			if err != nil {
				err = fmt.Errorf("commit: %w", err)
			}
			if sqlerr.CommitUnknown(err) != unknown {
				t.Errorf("%v: unknown %t", err, !unknown)
			}
		}
	}
}
