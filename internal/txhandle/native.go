package txhandle

import (
	"context"

	"github.com/oncemill/oncemill/internal/boundtx"
)

// Of returns the handle that tx is, or embeds.
func Of(tx any) (*Handle, bool) {
	embedding, ok := tx.(interface{ handle() *Handle })
	if !ok {
		return nil, false
	}
	return embedding.handle(), true
}

func (h *Handle) handle() *Handle { return h }

// Driver runs f, which is about to execute queries, with the connection of h as the driver
// made it, for adapters to the driver's own interface. It refuses what ExecContext refuses,
// and bounds f in the same way. f must not keep the connection, and read what it queries
// before it returns. On SQLite the connection is nil. An error of f that is
// [oncemill.ErrTxOwned] closes the handle. Without queries, f must execute nothing.
func Driver[T any](ctx context.Context, h *Handle, queries []string, f func(ctx context.Context, conn any) (T, error)) (T, error) {
	var v T
	err := h.admit(queries...)
	if err == nil {
		v, err = boundtx.Native(ctx, h.own, f)
		err = h.judge(ctx, err)
	}
	return v, err
}
