-- compatible: 2
-- What an operator asks about a worker: where it runs, which program it is, why it
-- cannot work (empty: it can), and when its last heartbeat was (null: an older library's).
alter table {{relay_workers}} add column host text not null default '';
alter table {{relay_workers}} add column version text not null default '';
alter table {{relay_workers}} add column problem text not null default '';
alter table {{relay_workers}} add column seen_at integer;
