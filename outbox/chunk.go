package outbox

import (
	"iter"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

// bytesPerInsert bounds the payload and metadata of one statement, since the driver and
// the server hold several copies of it. A single larger message gets a separate
// statement.
const bytesPerInsert = 8 << 20

// chunks splits rows into the rows of one statement each, in order: at most most rows,
// and at most bytesPerInsert.
func chunks[R any](rows []R, most int, row func(*R) *outboxstore.Row) iter.Seq[[]R] {
	return func(yield func([]R) bool) {
		begin, bytes := 0, 0
		for i := range rows {
			r := row(&rows[i])
			size := len(r.Payload) + len(r.Metadata)
			if i > begin && (i-begin == most || bytes+size > bytesPerInsert) {
				if !yield(rows[begin:i]) {
					return
				}
				begin, bytes = i, 0
			}
			bytes += size
		}
		if begin < len(rows) {
			yield(rows[begin:])
		}
	}
}
