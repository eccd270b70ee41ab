package main

import (
	"context"
	"database/sql"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/oncemill/oncemill/crucible/check"
	"github.com/oncemill/oncemill/crucible/history"
	"github.com/oncemill/oncemill/crucible/work"
	"github.com/oncemill/oncemill/dlq"
)

const (
	listSent = `select entry, tx, message_id, topic, key, seq, scheduled, mood, payload, metadata, at from app.sent order by entry`

	listEffects = `select entry, consumer, message_id, key, seq, attempt, payload, metadata, at from app.effects order by entry`

	listLetters = `select id, state, source, consumer, message_id, payload, maybe_delivered, acted_by from mill.dead_letters order by id`

	listLaneWrites = `select kind, lane, epoch, writer, at from app.lane_writes order by entry`

	listAnswered = `select key, count(*) from app.answered group by key`

	balances = `select (select sum(balance) from app.accounts), (select count(*) * 1000000 from app.accounts), (select sum(delta) from app.mirror)`
)

// collect reads everything that the run left.
func (c *crucible) collect(ctx context.Context) (in *check.Input, err error) {
	in = &check.Input{
		Consumers: map[string]string{work.TopicTransfers: work.RoleLedger, work.TopicReceipts: work.RoleReceipts},
		Lease:     c.lease, End: c.ended, Processes: map[string][]check.Usage{}, States: map[string]int{}, Resent: map[int][]time.Time{}, Settled: map[string][]time.Time{}, Unclean: c.unclean,
	}
	if in.Left, err = c.left(ctx); err != nil {
		return nil, err
	}
	if err := c.readTables(ctx, in); err != nil {
		return nil, err
	}
	if err := readHistories(c.dir, in); err != nil {
		return nil, err
	}
	if err := c.readLogs(in); err != nil {
		return nil, err
	}
	if c.site.replicated != nil {
		if in.Lossy, err = c.site.replicated.lossy(in.Faults); err != nil {
			return nil, err
		}
	}
	countStates(in)
	for moment, n := range c.hurt.deaths {
		in.States["died "+moment] = n
	}
	if !c.calm && c.cluster == "" && c.only == "" && c.rival == "" {
		in.Wanted = wantedStates
	}
	return in, nil
}

func (c *crucible) readTables(ctx context.Context, in *check.Input) error {
	var s check.Sent
	err := each(ctx, c.site.db, listSent, []any{
		&s.Entry, &s.Tx, &s.MessageID, &s.Topic, &s.Key, &s.Seq, &s.Scheduled, &s.Mood, &s.Sum.Payload, &s.Sum.Metadata, &s.At,
	}, func() { in.Sent = append(in.Sent, s) })
	if err != nil {
		return err
	}
	var e check.Effect
	err = each(ctx, c.site.db, listEffects, []any{
		&e.Entry, &e.Consumer, &e.MessageID, &e.Key, &e.Seq, &e.Attempt, &e.Sum.Payload, &e.Sum.Metadata, &e.At,
	}, func() { in.Effects = append(in.Effects, e) })
	if err != nil {
		return err
	}
	var l check.Letter
	var payload []byte
	err = each(ctx, c.site.db, listLetters, []any{
		&l.ID, &l.State, &l.Source, &l.Consumer, &l.MessageID, &payload, &l.MaybeDelivered, &l.ActedBy,
	}, func() {
		l.Payload = history.SumOfPayload(payload)
		in.Letters = append(in.Letters, l)
	})
	if err != nil {
		return err
	}
	if in.Listed, err = c.list(ctx); err != nil {
		return err
	}
	var w check.LaneWrite
	err = each(ctx, c.site.db, listLaneWrites, []any{&w.Kind, &w.Lane, &w.Epoch, &w.Writer, &w.At}, func() {
		in.LaneWrites = append(in.LaneWrites, w)
	})
	if err != nil {
		return err
	}
	var key string
	var times int
	in.Answered = map[string]int{}
	err = each(ctx, c.site.db, listAnswered, []any{&key, &times}, func() { in.Answered[key] = times })
	if err != nil {
		return err
	}
	return c.site.db.QueryRowContext(ctx, balances).Scan(&in.Balance.Accounts, &in.Balance.Opened, &in.Balance.Mirror)
}

// list counts the dead letters that package dlq lists, by state. The command shows the same.
func (c *crucible) list(ctx context.Context) (listed map[string]int, err error) {
	letters, err := dlq.New(c.site.db, dlq.Config{Database: work.Database})
	if err != nil {
		return nil, err
	}
	listed = map[string]int{}
	for filter := (dlq.Filter{Limit: 100}); ; {
		page, err := letters.List(ctx, filter)
		if err != nil || len(page) == 0 {
			return listed, err
		}
		for _, l := range page {
			listed[string(l.State)]++
			filter.After = l.Cursor()
		}
	}
}

// each scans every row into columns and calls row.
func each(ctx context.Context, db *sql.DB, query string, columns []any, row func()) error {
	rows, err := db.QueryContext(ctx, query)
	if err != nil {
		return fmt.Errorf("%s: %w", query, err)
	}
	defer rows.Close() //nolint:errcheck // rows.Err below reports what went wrong
	for rows.Next() {
		if err := rows.Scan(columns...); err != nil {
			return fmt.Errorf("%s: %w", query, err)
		}
		row()
	}
	return rows.Err()
}

func readHistories(dir string, in *check.Input) error {
	txs := map[string]int{}
	return history.Read(dir, func(r history.Record) {
		switch r.Event {
		case history.EventBegin:
			txs[r.Tx] = len(in.Txs)
			in.Txs = append(in.Txs, check.Tx{ID: r.Tx, Messages: r.Messages})
		case history.EventEnd:
			tx := &in.Txs[txs[r.Tx]]
			tx.Outcome, tx.Ended = r.Outcome, r.At
			if r.Outcome == history.Unknown {
				in.States["unknown commit"]++
			}
		case history.EventWire:
			in.Wire = append(in.Wire, check.Copy{Copy: *r.Copy, At: r.At})
		case history.EventFault:
			in.Faults = append(in.Faults, check.Fault{
				Window: check.Window{From: r.Fault.Since, To: r.At}, Kind: r.Fault.Kind, Target: r.Fault.Target, Injected: r.Fault.Injected,
			})
		case history.EventSlow:
			in.Slow = append(in.Slow, check.Fault{
				Window: check.Window{From: r.Fault.Since, To: r.At}, Kind: r.Fault.Kind, Target: r.Fault.Target,
			})
		case history.EventResources:
			in.Processes[r.Process] = append(in.Processes[r.Process], check.Usage{Resources: *r.Resources, At: r.At})
		case history.EventAnswer:
			r.Answer.At = r.At
			in.Answers = append(in.Answers, *r.Answer)
		case history.EventState:
			in.States[r.State]++
		}
	})
}

// countStates counts the rare states that the record itself shows.
func countStates(in *check.Input) {
	seen := map[string]int{}
	highest := map[string]int64{}
	for _, w := range in.Wire {
		if seen[w.MessageID]++; seen[w.MessageID] > 1 {
			if !w.Redelivered { // to the recorder
				in.States["message sent twice"]++
			}
			continue
		}
		lane, id, _ := strings.Cut(w.Row, "/")
		row, err := strconv.ParseInt(id, 10, 64)
		if err != nil {
			continue
		}
		if row < highest[lane] && w.Key == "" {
			in.States["late row"]++
		}
		highest[lane] = max(highest[lane], row)
	}
	for _, l := range in.Letters {
		if l.Source == "relay" {
			in.States["dead letter of a relay"]++
		}
		switch {
		case l.Source == "consumer" && l.State == "replayed":
			in.States["dead letter replayed"]++
		case l.State == "discarded":
			in.States["dead letter discarded"]++
		}
	}
}
