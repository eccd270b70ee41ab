package amqpconn

import (
	"context"
	"net"
	"testing"
	"time"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
)

// A node that is silent for longer than a caller waits does not keep it from the next one.
func TestDialer_TriesTheNextAddressAfterTheTimeIsUp(t *testing.T) {
	t.Parallel()
	listen := func() net.Listener {
		l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		return l
	}
	silent, next := listen(), listen()
	uri := func(l net.Listener) string { return "amqp://" + l.Addr().String() + "/" }
	settings := Resolve(wamqp.ConnectionConfig{AmqpURI: uri(silent)}, Options{Addresses: []string{uri(next)}},
		func(field, value, problem string) { t.Fatal(field, value, problem) })
	dialer := settings.Dialer()
	reached := map[string]bool{}
	for tries := 0; len(reached) < 2 && tries < 100; tries++ { // on a slow machine the time may be up before there is a connection
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		_, _, err := dialer.Dial(ctx, func(raw net.Conn) (net.Conn, func()) {
			reached[raw.RemoteAddr().String()] = true
			return raw, func() { _ = raw.Close() }
		})
		if cancel(); err == nil {
			t.Fatal("a silent node was connected to")
		}
	}
	if len(reached) < 2 {
		t.Errorf("only %v was tried", reached)
	}
}
