-- compatible: 3
-- SQLite stores a value of any type in any column. A row whose id is a blob was never
-- found again to be deleted, and one whose lane has a fraction was in no lane.
update {{outbox}}
set lane = cast(lane as integer),
	topic = cast(topic as text),
	message_id = cast(message_id as text),
	key = cast(key as text)
where typeof(lane) <> 'integer' or typeof(topic) <> 'text' or typeof(message_id) <> 'text' or typeof(key) <> 'text';

update {{scheduled}}
set lane = cast(lane as integer),
	topic = cast(topic as text),
	message_id = cast(message_id as text),
	key = cast(key as text)
where typeof(lane) <> 'integer' or typeof(topic) <> 'text' or typeof(message_id) <> 'text' or typeof(key) <> 'text';

create trigger {{name:outbox_types}}
after insert on {{outbox}}
when not (
	typeof(new.lane) = 'integer'
	and typeof(new.topic) = 'text'
	and typeof(new.message_id) = 'text'
	and typeof(new.key) = 'text'
)
begin
	select raise(abort, 'oncemill: in a row of the outbox, lane must be an integer, and topic, message_id and key must be text, not blobs');
end;

create trigger {{name:scheduled_types}}
after insert on {{scheduled}}
when not (
	typeof(new.lane) = 'integer'
	and typeof(new.topic) = 'text'
	and typeof(new.message_id) = 'text'
	and typeof(new.key) = 'text'
)
begin
	select raise(abort, 'oncemill: in a scheduled row, lane must be an integer, and topic, message_id and key must be text, not blobs');
end;
