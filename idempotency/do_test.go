package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/testserver"
)

type closed struct {
	Month string
	Total int
}

// onEachStore runs test on stores that pass the suite of package storetest: in memory, and in one
// of the databases, or in a long run in both.
func onEachStore(t *testing.T, test func(t *testing.T, store idempotency.Store)) {
	t.Helper()
	onStores(t, testserver.OneOf(t, "postgresql", "sqlite"), test)
}

func onStores(t *testing.T, databases []string, test func(t *testing.T, store idempotency.Store)) {
	t.Helper()
	t.Parallel()
	for _, name := range databases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, testDBs[name](t).store)
		})
	}
	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		test(t, &idempotency.MemoryStore{})
	})
}

func TestDo_RunsOnceAndReplaysTheResult(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		engine := newEngine(t, store, nil)
		var runs atomic.Int64
		run := func(payload any) (idempotency.Result[closed], error) {
			return idempotency.Do(t.Context(), engine, idempotency.Command{Name: "close", Key: "2026-10", Payload: payload}, func(context.Context) (closed, error) {
				return closed{"2026-10", int(runs.Add(1))}, nil
			})
		}
		first, err := run("a")
		if err != nil || first.Replayed || first.Value.Total != 1 {
			t.Errorf("%+v %v", first, err)
		}
		again, err := run("a")
		if err != nil || !again.Replayed || again.Value != first.Value {
			t.Errorf("%+v %v", again, err)
		}
		if _, err := run("b"); !errors.Is(err, idempotency.ErrKeyReused) {
			t.Errorf("another payload: %v", err)
		}
		if _, err := idempotency.Do(t.Context(), engine, idempotency.Command{Name: "close"}, func(context.Context) (int, error) { return 0, nil }); err == nil {
			t.Error("no key is accepted")
		}
	})
}

func TestDo_FailedRunsMayRunAgain(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		engine := newEngine(t, store, func(c *idempotency.Config) { c.Failures.Failed = idempotency.FailedRelease })
		failure := errors.New("no")
		cmd := idempotency.Command{Name: "close", Key: "a"}
		if _, err := idempotency.Do(t.Context(), engine, cmd, func(context.Context) (int, error) { return 0, failure }); !errors.Is(err, failure) {
			t.Error(err)
		}
		var panicked *oncemill.PanicError
		if _, err := idempotency.Do(t.Context(), engine, cmd, func(context.Context) (int, error) { panic(failure) }); !errors.As(err, &panicked) || !errors.Is(err, failure) {
			t.Error(err)
		}
		if r, err := idempotency.Do(t.Context(), engine, cmd, func(context.Context) (int, error) { return 7, nil }); err != nil || r.Value != 7 || r.Replayed {
			t.Errorf("%+v %v", r, err)
		}
	})
}

// A scheduled job that two processes run at once.
func TestDo_TwoAtOnceRunOnce(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		var group sync.WaitGroup
		for range 10 {
			engine := p.engine(t, func(c *idempotency.Config) { c.Answers.InProgress = idempotency.InProgressWait })
			group.Go(func() {
				r, err := idempotency.Do(t.Context(), engine, idempotency.Command{Name: "job", Key: "2026-11-21"}, func(ctx context.Context) (int, error) {
					tx, ok := idempotency.TxFromContext(ctx)
					if !ok {
						return 0, errors.New("no transaction")
					}
					_, err := tx.ExecContext(ctx, `insert into effects (name) values ('job')`)
					return 5, err
				})
				if err != nil || r.Value != 5 {
					t.Errorf("%+v %v", r, err)
				}
			})
		}
		group.Wait()
		if n := p.count(t, `select count(*) from effects`); n != 1 {
			t.Errorf("%d effects", n)
		}
	})
}

func TestDo_ResultsThatAreTooLargeAreNotRunAgain(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		engine := newEngine(t, store, func(c *idempotency.Config) { c.Responses.MaxSize = 100 })
		run := func() (idempotency.Result[string], error) {
			return idempotency.Do(t.Context(), engine, idempotency.Command{Name: "a", Key: "a"}, func(context.Context) (string, error) {
				return strings.Repeat("x", 200), nil
			})
		}
		if r, err := run(); err != nil || len(r.Value) != 200 {
			t.Errorf("%+v %v", r, err)
		}
		if _, err := run(); !errors.Is(err, idempotency.ErrNotStored) {
			t.Error(err)
		}
	})
}

// Changes of a failed attempt to its message are visible neither to the next one nor to the
// router.
func TestWatermill_EachAttemptHasACopyOfTheMessage(t *testing.T) {
	t.Parallel()
	p := losing(t)
	runs := 0
	handler := p.engine(t, nil).Watermill("stock", nil)(func(msg *message.Message) ([]*message.Message, error) {
		runs++
		if string(msg.Payload) != "payload" || msg.Metadata.Get("tries") != "" || msg.UUID != "1" {
			t.Errorf("attempt %d gets %q, %v", runs, msg.Payload, msg.Metadata)
		}
		msg.Metadata.Set("tries", "1")
		copy(msg.Payload, "changed")
		tx, _ := idempotency.TxFromContext(msg.Context())
		if runs == 1 {
			_, err := tx.ExecContext(msg.Context(), `select lose(1, 1)`)
			return nil, err
		}
		return []*message.Message{msg}, nil
	})
	msg := message.NewMessageWithContext(t.Context(), "1", []byte("payload"))
	produced, err := handler(msg)
	if err != nil || runs != 2 || len(produced) != 1 || string(produced[0].Payload) != "changed" || produced[0].Metadata.Get("tries") != "1" {
		t.Errorf("%v after %d runs: %v", err, runs, produced)
	}
	if string(msg.Payload) != "payload" || len(msg.Metadata) != 0 || msg.Context() != t.Context() {
		t.Errorf("left: %q, %v", msg.Payload, msg.Metadata)
	}
}

func TestWatermill_ReturnsTheSameMessagesForEveryCopy(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		runs := 0
		handler := newEngine(t, store, nil).Watermill("stock", nil)(func(msg *message.Message) ([]*message.Message, error) {
			runs++
			out := message.NewMessage(idempotency.DeriveUUID(msg.Context(), "reserved"), []byte(fmt.Sprint(runs)))
			out.Metadata.Set("a", "b")
			binary := message.NewMessage("\xff", []byte{0xff})
			binary.Metadata.Set("\xfe", "\xfd")
			return []*message.Message{out, binary}, nil
		})
		send := func(payload string) ([]*message.Message, error) {
			return handler(message.NewMessageWithContext(t.Context(), "1", []byte(payload)))
		}
		first, err := send("x")
		if err != nil || len(first) != 2 || first[1].UUID != "\xff" || first[1].Metadata.Get("\xfe") != "\xfd" {
			t.Fatalf("%v %v", first, err)
		}
		again, err := send("x")
		if err != nil || len(again) != 2 || !again[0].Equals(first[0]) || !again[1].Equals(first[1]) || runs != 1 {
			t.Errorf("%d runs, %v %v", runs, again, err)
		}
		if _, err := send("y"); !errors.Is(err, idempotency.ErrKeyReused) {
			t.Error(err)
		}
	})
}

// The commands that were refused are counted as requests are.
func TestDo_CountsWhatItRefuses(t *testing.T) {
	t.Parallel()
	reader := metric.NewManualReader()
	engine := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) {
		c.Telemetry.MeterProvider = metric.NewMeterProvider(metric.WithReader(reader))
	})
	run := func(payload string, fn func(context.Context) (int, error)) error {
		_, err := idempotency.Do(t.Context(), engine, idempotency.Command{Name: "pay", Key: "1", Payload: payload}, fn)
		return err
	}
	err := run("a", func(context.Context) (int, error) {
		if err := run("a", nil); !errors.Is(err, idempotency.ErrInProgress) {
			t.Errorf("a copy: %v", err)
		}
		if err := run("b", nil); !errors.Is(err, idempotency.ErrKeyReused) {
			t.Errorf("another command: %v", err)
		}
		return 0, errors.New("maybe paid")
	})
	if !errors.Is(err, idempotency.ErrOutcomeUnknown) {
		t.Errorf("the command: %v", err)
	}
	if err := run("a", nil); !errors.Is(err, idempotency.ErrOutcomeUnknown) {
		t.Errorf("a copy: %v", err)
	}
	counted := counters(t, reader)
	for name, want := range map[string]int64{"received": 4, "started": 1, "in_progress_conflicts": 1, "mismatched_hash_conflicts": 1, "outcome_unknown": 2} {
		if got := counted["idempotency."+name+"_total"]; got != want {
			t.Errorf("%s: %d, want %d", name, got, want)
		}
	}
}

// counters returns the sums of all counters.
func counters(t *testing.T, reader metric.Reader) map[string]int64 {
	t.Helper()
	var all metricdata.ResourceMetrics
	if err := reader.Collect(t.Context(), &all); err != nil {
		t.Fatal(err)
	}
	sums := map[string]int64{}
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			if sum, ok := m.Data.(metricdata.Sum[int64]); ok {
				for _, point := range sum.DataPoints {
					sums[m.Name] += point.Value
				}
			}
		}
	}
	return sums
}
