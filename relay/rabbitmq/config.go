package rabbitmq

import (
	"log/slog"
	"time"
)

// Config holds what watermill-amqp's configuration has no word for. The zero
// value is right for most services.
type Config struct {
	// AllowPlaintext permits an amqp:// URI whose host is not the loopback
	// interface. Credentials and payloads then cross the network readable.
	// Default: such a URI is a configuration error.
	AllowPlaintext bool

	// Window is the number of messages of one lane that may be in flight,
	// published and not yet confirmed, 1 to 10,000. Default: 256. A larger
	// window helps when few lanes are busy; it costs some 300 bytes of memory
	// for each lane and message, and as many repeats after a lost connection.
	Window int

	// WriteBuffer is the number of bytes that may wait for the socket before
	// lanes stop publishing; each lane may exceed it by one message. At least
	// 4,096. Default: 1 MiB. A larger one only costs memory.
	WriteBuffer int

	// DialTimeout bounds connecting: TCP, TLS and AMQP handshake together.
	// Default: connection_timeout of the URI, else 10 s. A longer one delays the
	// next attempt when the broker's host is silent.
	DialTimeout time.Duration

	// CallTimeout bounds each request that the broker answers (opening and
	// closing a channel, declaring an exchange). A connection that does not
	// answer in time is dropped. Default: 10 s. A longer one leaves messages
	// unavailable for longer when a connection has died without a word.
	CallTimeout time.Duration

	// ConfirmTimeout is how long a message may wait for its confirm, while the
	// broker is not blocked, before its channel is replaced by a new one, as a
	// lost confirm would take a place in the window for ever. It is no deadline
	// for outcomes: those end with the context given to Publish. Default: 30 s.
	// A shorter one may replace the channel of a queue that is merely slow.
	ConfirmTimeout time.Duration

	// Logger receives connections made and lost, blocked brokers, replaced
	// channels. Default: slog.Default().
	Logger *slog.Logger
}

const (
	defaultWindow         = 256
	maxWindow             = 10_000
	defaultWriteBuffer    = 1 << 20
	minWriteBuffer        = 4096
	defaultCallTimeout    = 10 * time.Second
	defaultConfirmTimeout = 30 * time.Second
)
