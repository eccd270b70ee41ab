package dlq

import (
	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
)

// texts are the statements of a store, and how lists are passed to it.
type texts struct {
	get, states, replay, replayed, discard, forget, add, token, check string

	lists map[string][2]string // by the condition that an index serves: newest first, oldest first

	int64s  func([]int64) any
	strings func([]State) any
}

func newTexts(names database.Database) texts {
	t := texts{lists: map[string][2]string{}}
	drivers := map[string]string{
		"died_at": "", "fingerprint": " and fingerprint = $9", "consumer": " and consumer = $4 and consumer <> ''",
	}
	var list string
	var order [2]string
	if names.Dialect == oncemill.SQLite {
		t.get, t.states, t.forget, t.add = sqliteGet, sqliteStates, sqliteForget, sqliteAdd
		t.replay, t.replayed, t.discard = sqliteReplay, sqliteReplayed, sqliteDiscard
		t.int64s, t.strings = jsonList[int64], jsonList[State]
		list, order, drivers["state"] = sqliteList, [2]string{sqliteNewest, sqliteOldest}, sqliteOneState
		drivers["message_id"], drivers["key"], drivers["topic"] = " and message_id = $7", " and key = $6 and key <> ''", " and topic = $5"
	} else {
		t.get, t.states, t.forget, t.add = postgresGet, postgresStates, postgresForget, postgresAdd
		t.replay, t.replayed, t.discard = postgresReplay, postgresReplayed, postgresDiscard
		t.int64s, t.strings = arrayList[int64], arrayList[State]
		list, order, drivers["state"] = postgresList, [2]string{postgresNewest, postgresOldest}, postgresOneState
		// The indexes hold a prefix of long texts; the list itself compares the rest.
		drivers["message_id"] = " and left(message_id, 255) = left($7::text, 255)"
		drivers["key"] = " and left(key, 255) = left($6::text, 255) and key <> ''"
		drivers["topic"] = " and left(topic, 255) = left($5::text, 255)"
	}
	t.token, t.check = tokenOf, t.get+checkToken
	for _, text := range []*string{&t.get, &t.states, &t.replay, &t.replayed, &t.discard, &t.forget, &t.add, &t.token, &t.check} {
		*text = names.Expand(*text)
	}
	for name, driver := range drivers {
		t.lists[name] = [2]string{names.Expand(list + driver + order[0]), names.Expand(list + driver + order[1])}
	}
	return t
}
