package rabbitmq

import (
	"errors"
	"strings"
	"testing"
	"time"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/relay"
)

// A header of ours refuses no message that fits without it.
func TestEncoder_LeavesTheTimeOfTheInsertOutWhereItDoesNotFit(t *testing.T) {
	t.Parallel()
	for name, marshaler := range map[string]wamqp.Marshaler{
		"stock": wamqp.DefaultMarshaler{}, "foreign": wamqp.CorrelatingMarshaler{},
	} {
		e := newEncoder(marshaler)
		const frame = 4096
		created := time.Date(2026, 11, 21, 10, 11, 12, 345_678_000, time.UTC)
		// largest returns how much metadata fits.
		largest := func(created time.Time, check func(headers map[string]any)) (n int) {
			for n = 1; ; n++ {
				m := &relay.Message{ID: 1, Topic: "orders", MessageID: "a", CreatedAt: created, Metadata: message.Metadata{"big": strings.Repeat("v", n)}}
				p, err := e.encode(m, frame)
				if bad := (*PropertyError)(nil); errors.As(err, &bad) {
					return n - 1
				} else if err != nil {
					t.Fatal(err)
				}
				check(p.Headers)
			}
		}
		with, without := 0, 0
		most := largest(created, func(headers map[string]any) {
			if headers[createdHeader] == "2026-11-21T10:11:12.345678Z" {
				with++
			} else {
				without++
			}
		})
		if bare := largest(time.Time{}, func(map[string]any) {}); most != bare || with == 0 || without == 0 || with+without != most || most < frame/2 {
			t.Errorf("%s: %d bytes of metadata fit, %d without the header; it was sent %d times, left out %d times", name, most, bare, with, without)
		}
	}
}
