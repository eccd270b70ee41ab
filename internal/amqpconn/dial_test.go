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
	for range 2 {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		_, _, err := dialer.Dial(ctx, func(raw net.Conn) (net.Conn, func()) { return raw, func() { _ = raw.Close() } })
		if cancel(); err == nil {
			t.Fatal("a silent node was connected to")
		}
	}
	_ = next.(*net.TCPListener).SetDeadline(time.Now().Add(time.Second))
	conn, err := next.Accept()
	if err != nil {
		t.Fatalf("the next address was not tried: %v", err)
	}
	_ = conn.Close()
}
