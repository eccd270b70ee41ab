package stockpgx

import (
	"context"
)

const addOrder = `-- name: AddOrder :exec
insert into orders (id, item, quantity) values ($1, $2, $3)
`

// AddOrderParams are the arguments of AddOrder.
type AddOrderParams struct {
	ID       string
	Item     string
	Quantity int32
}

// AddOrder inserts an order.
func (q *Queries) AddOrder(ctx context.Context, arg AddOrderParams) error {
	_, err := q.db.Exec(ctx, addOrder, arg.ID, arg.Item, arg.Quantity)
	return err
}

const takeUnits = `-- name: TakeUnits :exec
update stock set units = units - $2 where item = $1
`

// TakeUnitsParams are the arguments of TakeUnits.
type TakeUnitsParams struct {
	Item     string
	Quantity int32
}

// TakeUnits takes units of an item from the stock.
func (q *Queries) TakeUnits(ctx context.Context, arg TakeUnitsParams) error {
	_, err := q.db.Exec(ctx, takeUnits, arg.Item, arg.Quantity)
	return err
}
