package recipes

import (
	"encoding/json"
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"
)

// Tables are the tables of the shop.
const Tables = `
create table orders (id text primary key, item text not null, quantity int not null);
create table reservations (order_id text not null, item text not null, quantity int not null);
create table stock (item text primary key, units int not null check (units >= 0))`

// Order is a row of the table orders, and the payload of its message.
type Order struct {
	ID       string `json:"id"`
	Item     string `json:"item"`
	Quantity int32  `json:"quantity"`
}

// Reservation is a row of the table reservations.
type Reservation struct {
	OrderID  string
	Item     string
	Quantity int32
}

// newMessage returns the message of an order, which has the order's id.
func newMessage(order Order) (*message.Message, error) {
	payload, err := json.Marshal(order)
	if err != nil {
		return nil, fmt.Errorf("encode order: %w", err)
	}
	return message.NewMessage(order.ID, payload), nil
}
