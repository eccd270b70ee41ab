package rabbitmq_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"log/slog"
	"math/big"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

func TestSink_IsUnavailableWhileNotRunning(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	declareQueue(t, dialAMQP(t, uri), "orders", nil)
	sink, err := rabbitmq.New(queues(uri), rabbitmq.Config{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // it can run again
		o := publish(t, sink, maxWait, batch(0, 1, 3, "orders"))
		for m := range o.all {
			if err := o.of(m); !errors.Is(err, rabbitmq.ErrNotRunning) {
				t.Fatalf("not running: %v", err)
			}
		}
		if sink.Ready() {
			t.Error("ready, and not running")
		}
		ctx, cancel := context.WithCancel(t.Context())
		var group sync.WaitGroup
		group.Go(func() {
			if err := sink.Run(ctx); err != nil {
				t.Errorf("Run: %v", err)
			}
		})
		awaitReady(t, sink, true)
		if err := sink.Run(ctx); !errors.Is(err, rabbitmq.ErrRunning) {
			t.Errorf("second Run: %v", err)
		}
		deliver(t, sink, batch(0, 1, 3, "orders"))
		sink.Publish(t.Context(), nil, func(*relay.Message, error) { t.Error("an outcome of nothing") })
		cancel()
		group.Wait()
	}
}

func TestSink_GivesBackEverythingWhenItStops(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	declareQueue(t, dialAMQP(t, uri), "orders", nil)
	p, proxied := testserver.ProxyAMQP(t, uri)
	sink, stop := startStoppable(t, queues(proxied), rabbitmq.Config{Window: 5})
	awaitReady(t, sink, true)
	deliver(t, sink, batch(0, 1, 5, "orders"))
	p.DropAcks.Store(true)
	o := newOutcomes(t)
	for lane := range 3 {
		sink.Publish(t.Context(), batch(lane, 10, 20, "orders"), o.done) // in flight and pending
	}
	admin := dialAMQP(t, uri)
	eventually(t, "what there is room for is in flight", func() bool {
		q, err := admin.QueueDeclarePassive("orders", true, false, false, false, nil)
		if err != nil {
			t.Fatal(err)
		}
		return q.Messages == 5+3*5
	})
	stop()
	if _, _, unavailable := o.kinds(); unavailable != 60 {
		t.Errorf("%d of 60 unavailable when Run returned", unavailable)
	}
}

func TestSink_AnswersByTheDeadlineWithoutABroker(t *testing.T) {
	t.Parallel()
	silent := testserver.Listen(t) // takes connections and says nothing
	t.Cleanup(func() { _ = silent.Close() })
	closed := testserver.Listen(t)
	_ = closed.Close()
	for name, listener := range map[string]net.Listener{"silent": silent, "closed": closed} {
		t.Run(name, func(t *testing.T) {
			sink, stop := startStoppable(t, queues("amqp://guest:guest@"+listener.Addr().String()), rabbitmq.Config{})
			begin := time.Now()
			o := publish(t, sink, 200*time.Millisecond, batch(0, 1, 3, "orders"))
			if _, _, unavailable := o.kinds(); unavailable != 3 || time.Since(begin) > 5*time.Second {
				t.Errorf("%d of 3 unavailable after %v", unavailable, time.Since(begin))
			}
			ended, cancel := context.WithCancel(t.Context())
			cancel()
			o = newOutcomes(t)
			sink.Publish(ended, batch(0, 1, 3, "orders"), o.done)
			o.await(3)
			begin = time.Now()
			stop()
			if took := time.Since(begin); took > 5*time.Second {
				t.Errorf("Run returned after %v", took)
			}
		})
	}
}

func TestSink_GivesUpAHandshakeThatTakesTooLong(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	p, proxied := testserver.ProxyAMQP(t, uri)
	p.Frozen.Store(true)
	sink, _ := startStoppable(t, queues(proxied), rabbitmq.Config{DialTimeout: 100 * time.Millisecond})
	eventually(t, "a third attempt", func() bool { return p.Dials.Load() >= 3 })
	p.Frozen.Store(false)
	awaitReady(t, sink, true)
}

// Addresses are tried in turn, and a connection that is lost goes on with the next.
// One that takes connections and is silent costs DialTimeout.
func TestSink_TriesTheNextAddress(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	declareQueue(t, dialAMQP(t, uri), "orders", nil)
	_, vhost, _ := strings.Cut(strings.TrimPrefix(uri, "amqp://"), "/")
	silent, closed := testserver.Listen(t), testserver.Listen(t)
	t.Cleanup(func() { _ = silent.Close() })
	_ = closed.Close()
	at := func(l net.Listener) string { return "amqp://guest:guest@" + l.Addr().String() + "/" + vhost }
	first, firstURI := testserver.ProxyAMQP(t, uri)
	second, secondURI := testserver.ProxyAMQP(t, uri)
	var log lockedBuffer
	sink := start(t, queues(at(closed)), rabbitmq.Config{
		Addresses:   []string{at(silent), firstURI, secondURI},
		DialTimeout: 5 * time.Second,
		Logger:      slog.New(slog.NewTextHandler(&log, nil)),
	})
	used := func(f, s int32) {
		t.Helper()
		eventually(t, "another connection", func() bool {
			return first.Dials.Load() == f && second.Dials.Load() == s && sink.Ready()
		})
	}
	id := 1
	next := func() []*relay.Message { id += 10; return batch(0, id, 10, "orders") }
	used(1, 0)
	deliver(t, sink, next())
	first.Cut()
	used(1, 1)
	deliver(t, sink, next())
	second.Cut()
	used(2, 1)
	deliver(t, sink, next())
	var where []string
	for line := range strings.Lines(log.String()) {
		if _, rest, ok := strings.Cut(line, "connected\" uri="); ok {
			where = append(where, strings.Fields(rest)[0])
		}
	}
	shown := func(uri string) string { return strings.Replace(uri, "guest:guest", "guest", 1) }
	if want := []string{shown(firstURI), shown(secondURI), shown(firstURI)}; !slices.Equal(where, want) {
		t.Errorf("connected to %q in the log, want %q", where, want)
	}
	if strings.Contains(log.String(), "guest:guest") {
		t.Errorf("the password is in the log: %s", log.String())
	}
}

func TestSink_NeverSaysThePassword(t *testing.T) {
	t.Parallel()
	const password = "s3cr3t-word"
	uri := strings.Replace(testserver.RabbitMQ(t), "guest:guest", "guest:"+password, 1)
	var log lockedBuffer
	logger := slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	sink, stop := startStoppable(t, queues(uri), rabbitmq.Config{Logger: logger})
	eventually(t, "the failed login in the log", func() bool { return strings.Contains(log.String(), "cannot be reached") })
	o := publish(t, sink, maxWait, batch(0, 1, 1, "orders"))
	stop()
	for m := range o.all {
		if err := o.of(m); err == nil || strings.Contains(err.Error(), password) {
			t.Errorf("outcome: %v", err)
		}
	}
	if text := log.String(); strings.Contains(text, password) || !strings.Contains(text, "amqp://guest@") {
		t.Errorf("log: %s", text)
	}
}

type lockedBuffer struct {
	mu     sync.Mutex
	buffer bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.String()
}

func TestSink_SpeaksTLS(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	admin := dialAMQP(t, uri)
	declareQueue(t, admin, "orders", nil)
	certificate, roots := selfSigned(t, "127.0.0.1")
	p, proxied := testserver.ProxyAMQPOn(t, uri, tls.NewListener(testserver.Listen(t), &tls.Config{Certificates: []tls.Certificate{certificate}}))
	proxied = strings.Replace(proxied, "amqp://", "amqps://", 1)

	cfg := queues(proxied)
	cfg.Connection.TLSConfig = &tls.Config{RootCAs: roots}
	sink := start(t, cfg, rabbitmq.Config{})
	deliver(t, sink, batch(0, 1, 500, "orders"))
	p.Cut()
	deliver(t, sink, batch(0, 501, 500, "orders"))
	if cfg.Connection.TLSConfig.ServerName != "" {
		t.Error("the sink changed the TLS configuration")
	}

	cfg.Connection.TLSConfig = nil
	cfg.Connection.AmqpConfig = &amqp.Config{TLSClientConfig: &tls.Config{}}
	distrustful, _ := startStoppable(t, cfg, rabbitmq.Config{})
	eventually(t, "the handshake to be refused", func() bool {
		o := publish(t, distrustful, time.Second, batch(0, 1, 1, "orders"))
		for m := range o.all {
			var unknown x509.UnknownAuthorityError
			return errors.As(o.of(m), &unknown)
		}
		return false
	})
}

// Each address has the name that its certificate is checked for.
func TestSink_ChecksTheCertificateOfEachAddress(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	declareQueue(t, dialAMQP(t, uri), "orders", nil)
	pool := x509.NewCertPool()
	through := func(name string) (*testserver.AMQPProxy, string) {
		certificate, _ := selfSigned(t, name)
		parsed, err := x509.ParseCertificate(certificate.Certificate[0])
		if err != nil {
			t.Fatal(err)
		}
		pool.AddCert(parsed)
		p, at := testserver.ProxyAMQPOn(t, uri, tls.NewListener(testserver.Listen(t), &tls.Config{Certificates: []tls.Certificate{certificate}}))
		return p, strings.NewReplacer("amqp://", "amqps://", "127.0.0.1", name).Replace(at)
	}
	first, firstURI := through("127.0.0.1")
	second, secondURI := through("localhost")
	cfg := queues(firstURI)
	cfg.Connection.TLSConfig = &tls.Config{RootCAs: pool}
	sink := start(t, cfg, rabbitmq.Config{Addresses: []string{secondURI}})
	deliver(t, sink, batch(0, 1, 10, "orders"))
	first.Cut()
	eventually(t, "the second address is used", func() bool { return second.Dials.Load() > 0 && sink.Ready() })
	deliver(t, sink, batch(0, 11, 10, "orders"))
	if f, s := first.Dials.Load(), second.Dials.Load(); f != 1 || s != 1 {
		t.Errorf("%d and %d connections", f, s)
	}
}

func selfSigned(t *testing.T, name string) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		Subject:      pkix.Name{CommonName: "oncemill " + name},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(time.Hour),
		IsCA:         true, BasicConstraintsValid: true,
	}
	if ip := net.ParseIP(name); ip != nil {
		template.IPAddresses = []net.IP{ip}
	} else {
		template.DNSNames = []string{name}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(parsed)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, roots
}
