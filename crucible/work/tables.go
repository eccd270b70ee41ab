package work

import (
	"context"
	"encoding/json"

	"github.com/oncemill/oncemill"
)

// Tables creates the business tables. None has a constraint that would hide a second effect.
// The rows of sent and effects are written in the transactions of the messages and handlers:
// they are the truth that the checkers compare with.
const Tables = `
create schema app;
set search_path = app;

create table accounts (
	id      integer primary key,
	balance bigint  not null,
	seq     bigint  not null default 0, -- messages of the account's key so far
	audits  bigint  not null default 0  -- those of its key of the audit
);

create table mirror ( -- the ledger's copy: what has arrived
	id    integer primary key,
	delta bigint  not null
);

create table sent (
	entry      bigserial,
	tx         text        not null, -- or attempt of a handler
	message_id text        not null,
	topic      text        not null,
	key        text        not null,
	seq        bigint      not null,
	scheduled  boolean     not null,
	mood       text        not null,
	payload    text        not null, -- sums
	metadata   text        not null,
	at         timestamptz not null default clock_timestamp()
);

create table effects (
	entry      bigserial,
	consumer   text        not null,
	message_id text        not null,
	key        text        not null,
	seq        bigint      not null,
	attempt    text        not null,
	payload    text        not null,
	metadata   text        not null,
	at         timestamptz not null default clock_timestamp()
);
create index on effects (entry);

create table lane_writes ( -- what only the owner of a lane may write
	entry  bigserial,
	kind   text    not null,
	lane   integer not null,
	epoch  bigint  not null,
	writer text    not null,
	at     timestamptz not null default clock_timestamp()
);

create table healed (message_id text not null); -- poison that an operator has dealt with
create table answered (key text not null, nonce text not null);
create table canary (id integer primary key, beats bigint not null);
insert into canary values (1, 0);
`

// Witness makes the database write down who took a lane, and who wrote what for it. A trigger
// runs in the transaction of the write, which holds the lease if it is fenced: then the epoch
// that the trigger reads is the writer's own.
const Witness = `
create function app.witness_lease() returns trigger language plpgsql as $$
begin
	insert into app.lane_writes (kind, lane, epoch, writer)
	values (tg_argv[0], new.lane, new.epoch, current_setting('application_name'));
	return null;
end $$;

create function app.witness_write() returns trigger language plpgsql as $$
begin
	insert into app.lane_writes (kind, lane, epoch, writer)
	select tg_argv[0], l.lane, l.epoch, current_setting('application_name')
	from mill.relay_leases l
	where l.lane = new.lane;
	return null;
end $$;

create trigger witness_take after update on mill.relay_leases for each row
	when (new.epoch > old.epoch) execute function app.witness_lease('take');
create trigger witness_alone after update on mill.relay_leases for each row
	when (new.epoch = old.epoch and new.owner = old.owner and new.suspect is distinct from old.suspect)
	execute function app.witness_lease('a message alone in flight');
create trigger witness_parked after insert on mill.parked for each row execute function app.witness_write('a retrying message');
create trigger witness_attempt after update of attempts on mill.parked for each row execute function app.witness_write('an attempt');
create trigger witness_letter after insert on mill.dead_letters for each row
	when (new.source = 'relay') execute function app.witness_write('a dead letter');
`

const (
	lockAccounts = `select max(seq) filter (where id = $1), max(audits) filter (where id = $1)
	from (select * from accounts where id in ($1, $2) order by id for update) a`
	transfer = `update accounts set balance = balance + case id when $1 then -$3::bigint else $3 end,
	seq = seq + case id when $1 then 1 else 0 end,
	audits = audits + case id when $1 then $4::bigint else 0 end where id in ($1, $2)`
	insertSent = `insert into sent (tx, message_id, topic, key, seq, scheduled, mood, payload, metadata)
	select $1, r.* from json_to_recordset($2) as r (message_id text, topic text, key text, seq bigint, scheduled boolean,
		mood text, payload text, metadata text)`
	insertEffect = `insert into effects (consumer, message_id, key, seq, attempt, payload, metadata)
	values ($1, $2, $3, $4, $5, $6, $7)`
	lockMirror = `select id from mirror where id in ($1, $2) order by id for update`
	move       = `update mirror set delta = delta + case id when $1 then -$3::bigint else $3 end where id in ($1, $2)`
	isHealed   = `select exists (select from healed where message_id = $1)`
)

// sentRow is a row of the table sent, as insertSent reads it.
type sentRow struct {
	MessageID string `json:"message_id"`
	Topic     string `json:"topic"`
	Key       string `json:"key"`
	Seq       int64  `json:"seq"`
	Scheduled bool   `json:"scheduled"`
	Mood      string `json:"mood"`
	Payload   string `json:"payload"`
	Metadata  string `json:"metadata"`
}

// recordSent writes down, in the transaction of the messages, that they were sent.
func recordSent(ctx context.Context, tx oncemill.Tx, id string, rows ...sentRow) error {
	list, err := json.Marshal(rows)
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, insertSent, id, string(list))
	return err
}
