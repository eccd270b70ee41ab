package rabbitmq_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/testserver"

	"github.com/oncemill/oncemill/internal/database"
)

// Messages behind one of their sequence that never comes are handled in their order when
// they have waited for it, and none becomes a dead letter.
func TestSubscriber_ASequenceGoesOnWithoutOneThatDoesNotCome(t *testing.T) {
	t.Parallel()
	for wait := 5 * time.Second; ; wait *= 2 { // what is overdue by more than that is not waited for
		dead := sequenceWithoutItsSecond(t, wait)
		if dead == 0 {
			return
		}
		if wait > time.Minute { // it is not the machine that is slow
			t.Fatalf("%d dead letters", dead)
		}
	}
}

// sequenceWithoutItsSecond returns how many of its messages become dead letters.
func sequenceWithoutItsSecond(t *testing.T, gapWait time.Duration) (dead int) {
	t.Helper()
	uri := testserver.RabbitMQ(t)
	pg, letters := withLetters(t)
	in, err := inbox.New(pg.DB, inbox.Config{
		Consumer: "stock", Database: pg.Config, DeadLetters: letters, Logger: quiet,
		GapWait: gapWait,
		Sequence: func(msg *message.Message) (int64, bool) {
			n, err := strconv.ParseInt(msg.UUID, 10, 64)
			return n, err == nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	a := newAdmin(t, uri)
	a.declare("orders", nil)
	const last = 100
	all := []amqp091.Publishing{publishing("1", "k")}
	for n := 3; n <= last; n++ {
		all = append(all, publishing(fmt.Sprint(n), "k"))
	}
	a.publish("orders", all...)
	router := message.NewDefaultRouter(watermill.NopLogger{})
	var handled atomic.Int64
	router.AddConsumerHandler("reserve", "orders", subscriber(t, queues(uri, 200), rabbitmq.Config{}), func(msg *message.Message) error {
		if n, err := strconv.ParseInt(msg.UUID, 10, 64); err != nil || n <= handled.Swap(n) {
			t.Errorf("%s came too late", msg.UUID)
		}
		return nil
	}).AddMiddleware(in.Middleware)
	ended := make(chan error, 1)
	go func() { ended <- router.Run(context.WithoutCancel(t.Context())) }()
	settled := func() (n int) {
		if err := pg.DB.QueryRowContext(t.Context(), database.Of(pg.Config).Expand(`select count(*) from {{inbox}}`)).Scan(&n); err != nil {
			t.Error(err)
		}
		return n
	}
	testserver.EventuallyMoving(t, "all have been dealt with", func() bool { return settled() >= last-1 }, settled)
	if err := errors.Join(router.Close(), <-ended); err != nil {
		t.Error(err)
	}
	if err := pg.DB.QueryRowContext(t.Context(), database.Of(pg.Config).Expand(`select count(*) from {{dead_letters}}`)).Scan(&dead); err != nil {
		t.Error(err)
	}
	return dead
}
