package stockpgx

import (
	"context"
)

// iteratorForAddReservations implements pgx.CopyFromSource.
type iteratorForAddReservations struct {
	rows                 []AddReservationsParams
	skippedFirstNextCall bool
}

func (r *iteratorForAddReservations) Next() bool {
	if len(r.rows) == 0 {
		return false
	}
	if !r.skippedFirstNextCall {
		r.skippedFirstNextCall = true
		return true
	}
	r.rows = r.rows[1:]
	return len(r.rows) > 0
}

func (r iteratorForAddReservations) Values() ([]interface{}, error) {
	return []interface{}{
		r.rows[0].OrderID,
		r.rows[0].Item,
		r.rows[0].Quantity,
	}, nil
}

func (r iteratorForAddReservations) Err() error {
	return nil
}

// AddReservationsParams is a row of AddReservations.
type AddReservationsParams struct {
	OrderID  string
	Item     string
	Quantity int32
}

// AddReservations inserts reservations.
func (q *Queries) AddReservations(ctx context.Context, arg []AddReservationsParams) (int64, error) {
	return q.db.CopyFrom(ctx, []string{"reservations"}, []string{"order_id", "item", "quantity"}, &iteratorForAddReservations{rows: arg})
}
