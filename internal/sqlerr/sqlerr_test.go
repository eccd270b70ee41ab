package sqlerr_test

import (
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
