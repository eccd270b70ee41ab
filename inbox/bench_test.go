package inbox_test

import (
	"strconv"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/testserver"
)

// BenchmarkInbox handles messages that are new, whose handler does nothing.
func BenchmarkInbox(b *testing.B) {
	for name, traceparent := range map[string]string{"no_trace": "", "unsampled": traceparent(1, "00"), "sampled": traceparent(1, "01")} {
		b.Run(name, func(b *testing.B) {
			db := testserver.SQLite(b)
			if err := oncemill.Migrate(b.Context(), db, oncemill.Config{}, inbox.Migrations); err != nil {
				b.Fatal(err)
			}
			s := newSpans()
			in, err := inbox.New(db, inbox.Config{Consumer: "stock", TracerProvider: s.provider, Propagator: s.propagator})
			if err != nil {
				b.Fatal(err)
			}
			handle := in.Middleware(func(*message.Message) ([]*message.Message, error) { return nil, nil })
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				msg := message.NewMessageWithContext(b.Context(), strconv.Itoa(i), nil)
				msg.Metadata.Set("name", "x")
				if traceparent != "" {
					msg.Metadata.Set("traceparent", traceparent)
				}
				if _, err := handle(msg); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
