package pgxtx

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// SendBatch is that of pgx.Tx. The whole batch has been executed when it returns; functions
// that are registered with its queries are called by Close. If one of its texts is refused,
// none is sent.
func (t *Tx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	results := &batchResults{batch: b}
	if b.Len() == 0 {
		return results
	}
	queries := make([]string, b.Len())
	plain := new(pgx.Batch) // without the functions, which are called by Close
	for i, q := range b.QueuedQueries {
		queries[i] = q.SQL
		plain.Queue(q.SQL, q.Arguments...)
	}
	results.unread, results.err = do(ctx, t, queries, func(ctx context.Context, conn *pgx.Conn) ([]*rows, error) {
		from := conn.SendBatch(ctx, plain)
		all := make([]*rows, 0, len(queries))
		for range queries {
			r, err := read(conn, allRows)(from.Query())
			if err != nil {
				_ = from.Close() // returns the same error
				return all, err
			}
			all = append(all, r)
		}
		return all, from.Close()
	})
	return results
}

// batchResults are the results of a batch that has been executed.
type batchResults struct {
	pgx.BatchResults // nil: methods that later versions of pgx add

	batch  *pgx.Batch
	unread []*rows // up to the query that failed
	next   int     // index of the next query
	closed bool
	err    error // of the query that failed; then of Close
}

func (b *batchResults) Exec() (pgconn.CommandTag, error) {
	r, err := b.take()
	return r.tag, err
}

func (b *batchResults) Query() (pgx.Rows, error) {
	r, err := b.take()
	return r, err
}

func (b *batchResults) QueryRow() pgx.Row {
	r, _ := b.take() // Scan returns the error
	return row{r}
}

// take returns the result of the next query. It is never nil.
func (b *batchResults) take() (*rows, error) {
	var err error
	switch {
	case b.closed:
		err = errors.New("pgxtx: the batch is closed")
	case len(b.unread) > 0:
		r := b.unread[0]
		b.unread = b.unread[1:]
		b.next++
		return r, nil
	case b.err != nil:
		b.next++
		err = b.err
	default:
		err = errors.New("pgxtx: the batch has no more results")
	}
	return &rows{err: err}, err
}

// Close calls the functions that are registered with the queries whose results were not
// taken, up to the first error.
func (b *batchResults) Close() error {
	var err error
	for err == nil && !b.closed && b.next < b.batch.Len() {
		if f := b.batch.QueuedQueries[b.next].Fn; f != nil {
			err = f(b)
		} else {
			_, err = b.Exec()
		}
	}
	b.closed = true
	if b.err == nil {
		b.err = err
	}
	return b.err
}

func (b *batchResults) Tx() pgx.Tx { return nil }
