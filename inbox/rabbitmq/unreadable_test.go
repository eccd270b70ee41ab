package rabbitmq_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/testserver"
)

// A message that amqp091-go would close the connection for goes to Malformed with its
// payload, like any other that cannot be read, and delays nobody.
func TestSubscriber_HeadersThatAMQPCannotReadAreMalformed(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	certified := httptest.NewTLSServer(nil) // has a certificate for this host
	defer certified.Close()
	roots := x509.NewCertPool()
	roots.AddCert(certified.Certificate())
	_, overTLS := testserver.ProxyAMQPOn(t, uri, tls.NewListener(testserver.Listen(t), &tls.Config{Certificates: certified.TLS.Certificates}))
	overTLS = strings.Replace(overTLS, "amqp://", "amqps://", 1)
	for name, at := range map[string]string{"plain": uri, "TLS": overTLS} {
		t.Run(name, func(t *testing.T) {
			var refused atomic.Int32
			bodies := make(chan string, 10)
			cfg := queues(at, 10)
			if name == "TLS" {
				cfg.Connection.TLSConfig = &tls.Config{RootCAs: roots}
			}
			a := newAdmin(t, uri)
			queue := "orders " + name
			a.declare(queue, nil)
			deep, wide := amqp091.Table{"v": true}, amqp091.Table{}
			for range 40 {
				deep = amqp091.Table{"n": deep}
			}
			for i := range 9000 {
				wide[fmt.Sprint(i)] = nil
			}
			a.publish(queue, publishing("before", ""),
				amqp091.Publishing{MessageId: "deep", Headers: deep, Body: []byte("deep")},
				amqp091.Publishing{MessageId: "wide", Headers: wide, Body: []byte("wide")},
				publishing("after", ""))
			s := subscriber(t, cfg, rabbitmq.Config{Malformed: func(_ context.Context, msg *message.Message, reason error) error {
				refused.Add(1)
				bodies <- string(msg.Payload) + " " + msg.UUID
				return nil
			}})
			out := subscribe(t, s, queue)
			for _, want := range []string{"before", "after"} {
				msg := next(t, out)
				if msg.UUID != want {
					t.Errorf("got %q, want %q", msg.UUID, want)
				}
				msg.Ack()
			}
			got := map[string]bool{<-bodies: true, <-bodies: true}
			if !got["deep deep"] || !got["wide wide"] {
				t.Errorf("refused %v", got)
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			if n, _ := a.left(queue); n != 0 || refused.Load() != 2 {
				t.Errorf("%d are left in the queue, %d were refused", n, refused.Load())
			}
		})
	}
}
