package relay_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/relay"
)

// What an order costs: messages of few and of many keys to a sink whose confirms
// take a millisecond.
//
//	go test ./relay -run '^$' -bench Orders -benchtime 5000x
func BenchmarkRelay_Orders(b *testing.B) {
	for _, keys := range []int{1, 100, 10_000} {
		for name, order := range map[string]relay.Order{
			"per key": relay.OrderPerKey, "pipelined": relay.OrderPerKeyPipelined, "none": relay.OrderNone,
		} {
			b.Run(fmt.Sprint(name, ", keys: ", keys), func(b *testing.B) {
				p := onPostgres(b)
				box := p.box(b)
				for i := 0; i < b.N; i += 1000 {
					var msgs []*message.Message
					for n := i; n < min(b.N, i+1000); n++ {
						msgs = append(msgs, keyed(fmt.Sprint("key", n%keys), n/keys, 1)...)
					}
					commit(b, box, msgs...)
				}
				b.ResetTimer()
				start(b, box, batchSink{}, relay.Config{Order: order})
				p.awaitNothingOwed(b)
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
			})
		}
	}
}

// batchSink confirms each batch after a millisecond.
type batchSink struct{}

func (batchSink) Run(ctx context.Context) error { <-ctx.Done(); return nil }

func (batchSink) Publish(_ context.Context, msgs []*relay.Message, done func(*relay.Message, error)) {
	time.AfterFunc(time.Millisecond, func() {
		for _, m := range msgs {
			done(m, nil)
		}
	})
}
