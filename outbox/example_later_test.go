package outbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"golang.org/x/sync/errgroup"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// A reminder goes out in a day, unless the bill is paid before.
func ExampleOutbox_CancelScheduled() {
	ctx := context.Background()
	box, remove := openExample(ctx)
	defer remove()

	bill := func() error {
		//snippet:schedule
		return box.RunInTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
			reminder := message.NewMessage("reminder-of-bill-7", []byte(`{"bill":7}`))
			outbox.SetKey(reminder, "bill-7")
			outbox.SetDeliverAfter(reminder, 24*time.Hour) // or SetDeliverAt
			return box.Publish(ctx, tx, "reminders", reminder)
		})
		//snippet:end
	}
	pay := func() (wasThere bool, err error) {
		//snippet:cancel
		err = box.RunInTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
			wasThere, err = box.CancelScheduled(ctx, tx, "reminder-of-bill-7")
			return err // false: it is on its way
		})
		//snippet:end
		return wasThere, err
	}
	if err := bill(); err != nil {
		log.Fatal(err)
	}
	fmt.Println(pay())
	fmt.Println(pay())
	// Output:
	// true <nil>
	// false <nil>
}

// What a topic's consumers were sent since yesterday is sent again.
func ExampleHistory_Resend() {
	ctx := context.Background()
	box, remove := openExample(ctx)
	defer remove()

	resend := func(lost time.Time) (sent int, err error) {
		//snippet:resend
		what := outbox.HistoryFilter{Topic: "orders", From: lost, Limit: 10_000}
		owed, err := box.History().Count(ctx, what) // changes nothing
		if err != nil || owed > what.Limit {
			return 0, fmt.Errorf("%d messages: %w", owed, err)
		}
		sent, err = box.History().Resend(ctx, what)
		//snippet:end
		return sent, err
	}
	fmt.Println(resend(time.Now().Add(-24 * time.Hour)))
	// Output:
	// 0 <nil>
}

// Delivered messages go to an archive before they are removed.
func ExampleConfig_archive() {
	store := func(context.Context, outbox.HistoryRow) error { return nil }
	//snippet:archive
	cfg := outbox.Config{
		History: 72 * time.Hour,
		Archive: func(ctx context.Context, rows []outbox.HistoryRow) error {
			for _, row := range rows {
				if err := store(ctx, row); err != nil { // by row.ID and row.RelayedAt: it may be a repetition
					return err // they are kept, and come again
				}
			}
			return nil
		},
	}
	//snippet:end
	fmt.Println(cfg.History)
	// Output: 72h0m0s
}

// A service tells relays of other processes of its commits, and a worker listens.
func ExampleNotifier() {
	//snippet:notify
	service := func(ctx context.Context, box *outbox.Outbox, serve func(context.Context) error) error {
		notifier, err := outbox.NewNotifier(box)
		if err != nil {
			return err
		}
		group, ctx := errgroup.WithContext(ctx)
		group.Go(func() error { return notifier.Run(ctx) })
		group.Go(func() error { return serve(ctx) })
		return group.Wait()
	}
	worker := func(ctx context.Context, box *outbox.Outbox, deliver *relay.Relay, dsn string) error {
		listener, err := outbox.NewListener(box, dsn)
		if err != nil {
			return err
		}
		group, ctx := errgroup.WithContext(ctx)
		group.Go(func() error { return listener.Run(ctx) })
		group.Go(func() error { return deliver.Run(ctx) })
		return group.Wait()
	}
	//snippet:end
	_, _ = service, worker
}
