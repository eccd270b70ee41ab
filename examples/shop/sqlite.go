package shop

// SQLite has one writer at a time, which answers every question about
// concurrency that postgres.go has to answer one by one.
var sqlite = statements{
	createTables: `
create table if not exists customers (
    customer text    primary key,
    orders   integer not null
) strict;
create table if not exists orders (
    order_id    text    primary key,
    customer    text    not null,
    placed_at   text    not null,
    total_cents integer not null,
    note        text    not null
) strict;
create table if not exists order_items (
    order_id    text    not null references orders,
    line        integer not null,
    sku         text    not null,
    quantity    integer not null,
    price_cents integer not null,
    primary key (order_id, line)
) strict;
create table if not exists stock (
    sku         text    primary key,
    name        text    not null,
    price_cents integer not null,
    quantity    integer not null
) strict;
create table if not exists ledger (
    entry      integer primary key autoincrement,
    message_id text    not null,
    order_id   text    not null,
    customer   text    not null,
    number     integer not null,
    units      integer not null,
    booked_at  text    not null default (strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))
) strict;`,

	addProduct: `
insert into stock (sku, name, price_cents, quantity)
values (?1, ?2, ?3, ?4)
on conflict (sku) do nothing`,

	insertOrder: `
insert into orders (order_id, customer, placed_at, total_cents, note)
values (?1, ?2, ?3, ?4, ?5)
on conflict (order_id) do nothing`,

	insertItems: `
insert into order_items (order_id, line, sku, quantity, price_cents)
select ?1, key + 1, value ->> 'sku', value ->> 'quantity', value ->> 'price_cents'
from json_each(?2)`,

	nextNumber: `
insert into customers (customer, orders)
values (?1, 1)
on conflict (customer) do update set orders = orders + 1
returning orders`,

	takeStock: `
update stock
set quantity = stock.quantity - taken.quantity
from (
    select value ->> 'sku' as sku, sum(value ->> 'quantity') as quantity
    from json_each(?1)
    group by 1
) as taken
where stock.sku = taken.sku`,

	appendLedger: `
insert into ledger (message_id, order_id, customer, number, units)
values (?1, ?2, ?3, ?4, ?5)`,
}
