package shop

var postgres = statements{
	createTables: `
create table if not exists customers (
    customer text   primary key,
    orders   bigint not null
);
create table if not exists orders (
    order_id    text        primary key,
    customer    text        not null,
    placed_at   timestamptz not null,
    total_cents bigint      not null,
    note        text        not null
);
create table if not exists order_items (
    order_id    text   not null references orders,
    line        bigint not null,
    sku         text   not null,
    quantity    bigint not null,
    price_cents bigint not null,
    primary key (order_id, line)
);
create table if not exists stock (
    sku         text   primary key,
    name        text   not null,
    price_cents bigint not null,
    quantity    bigint not null
);
create table if not exists ledger (
    entry      bigint      generated always as identity primary key,
    message_id text        not null,
    order_id   text        not null,
    customer   text        not null,
    number     bigint      not null,
    units      bigint      not null,
    booked_at  timestamptz not null default clock_timestamp()
);`,

	addProduct: `
insert into stock (sku, name, price_cents, quantity)
values ($1, $2, $3, $4)
on conflict (sku) do nothing`,

	// Primary key orders(order_id). Of two concurrent requests with one id the
	// second waits here for the first to commit or roll back.
	insertOrder: `
insert into orders (order_id, customer, placed_at, total_cents, note)
values ($1, $2, $3, $4, $5)
on conflict (order_id) do nothing`,

	insertItems: `
insert into order_items (order_id, line, sku, quantity, price_cents)
select $1, line, item->>'sku', (item->>'quantity')::bigint, (item->>'price_cents')::bigint
from jsonb_array_elements($2::jsonb) with ordinality as items (item, line)`,

	// Primary key customers(customer). The row lock that this takes until the
	// commit puts the orders of one customer in an order; the message that is
	// published after it goes out in the same.
	nextNumber: `
insert into customers (customer, orders)
values ($1, 1)
on conflict (customer) do update set orders = customers.orders + 1
returning orders`,

	// Primary key stock(sku). A handler in parallel could lock the rows in
	// another order; it would be a deadlock error for one of them and a
	// redelivery, not a wrong stock.
	takeStock: `
update stock
set quantity = stock.quantity - taken.quantity
from (
    select item->>'sku' as sku, sum((item->>'quantity')::bigint) as quantity
    from jsonb_array_elements($1::jsonb) as items (item)
    group by 1
) as taken
where stock.sku = taken.sku`,

	appendLedger: `
insert into ledger (message_id, order_id, customer, number, units)
values ($1, $2, $3, $4, $5)`,
}
