package dlqstore

import (
	"context"
	"database/sql"
	"slices"
	"strconv"
	"time"

	"github.com/oncemill/oncemill/internal/auditstore"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/text"
)

// The acts, as they are in the audit.
const (
	actReplay       = "dead_letter.replay"
	actReplayEdited = "dead_letter.replay_edited"
	actDiscard      = "dead_letter.discard"
	actRestore      = "dead_letter.restore"
	actNote         = "dead_letter.note"
	actImport       = "dead_letter.import"
)

func (s *store) Replay(ctx context.Context, ids []int64, by, reason string) ([]int64, error) {
	return s.act(ctx, auditstore.Act{Action: actReplay, By: by, Reason: reason}, s.text.Replay, s.ids(ids), text.Clean(by), text.Clean(reason))
}

func (s *store) Discard(ctx context.Context, ids []int64, by, reason string) ([]int64, error) {
	return s.act(ctx, auditstore.Act{Action: actDiscard, By: by, Reason: reason}, s.text.Discard, s.ids(ids), text.Clean(by), text.Clean(reason))
}

func (s *store) Restore(ctx context.Context, ids []int64, by, reason string) ([]int64, error) {
	return s.act(ctx, auditstore.Act{Action: actRestore, By: by, Reason: reason}, s.text.Restore, s.ids(ids), text.Clean(by), text.Clean(reason))
}

func (s *store) ReplayEdited(ctx context.Context, id int64, edit Edit) (accepted bool, err error) {
	metadata, err := encodeMetadata(edit.Metadata)
	if err != nil {
		return false, err
	}
	did, err := s.act(ctx, auditstore.Act{Action: actReplayEdited, By: edit.By, Reason: edit.Reason}, s.text.ReplayEdited,
		s.ids([]int64{id}), text.Clean(edit.By), text.Clean(edit.Reason), notNull(edit.Payload), metadata)
	return len(did) == 1, err
}

func (s *store) AddNote(ctx context.Context, id int64, by, note string) (added bool, err error) {
	did, err := s.act(ctx, auditstore.Act{Action: actNote, By: by, Reason: note}, s.text.AddNote, s.ids([]int64{id}), text.Clean(by), text.Clean(note))
	if sqlerr.State(err) == "23503" { // purged meanwhile
		return false, nil
	}
	return len(did) == 1, err
}

// act runs a statement that returns the ids of the dead letters that it has changed, and
// writes the entries of the audit in the same transaction.
func (s *store) act(ctx context.Context, act auditstore.Act, query string, args ...any) (accepted []int64, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		accepted, act.Subjects = nil, nil
		err := each(ctx, tx, func(rows *sql.Rows) error {
			var id int64
			err := rows.Scan(&id)
			accepted, act.Subjects = append(accepted, id), append(act.Subjects, "dead_letter "+strconv.FormatInt(id, 10))
			return err
		}, query, args...)
		if err != nil || len(accepted) == 0 {
			return err
		}
		return s.audit.Record(ctx, tx, act)
	})
	if err != nil {
		return nil, err
	}
	return accepted, nil
}

func (s *store) Notes(ctx context.Context, id int64, most int) (notes []Note, err error) {
	err = each(ctx, s.db, func(rows *sql.Rows) error {
		var n Note
		var at int64
		err := rows.Scan(&n.ID, &at, &n.By, &n.Text)
		n.At = time.UnixMicro(at).UTC()
		notes = append(notes, n)
		return err
	}, s.text.Notes, id, most)
	slices.Reverse(notes)
	return notes, err
}
