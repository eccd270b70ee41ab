package rabbitmq

import (
	"log/slog"
	"time"
)

// Config holds what watermill-amqp's configuration has no word for. The zero
// value is right for most services.
type Config struct {
	// Addresses are further AMQP URIs of the same broker: of the other nodes of a
	// cluster. They are tried in turn, after amqp.Config.Connection.AmqpURI (which
	// may be empty then): the next one when an address cannot be reached, and when
	// a connection is lost. All must name the same virtual host. A node that
	// accepts connections and does not answer costs DialTimeout. Default: none.
	Addresses []string

	// AllowPlaintext permits an amqp:// URI whose host is not the loopback
	// interface. Credentials and payloads then cross the network readable.
	// Default: such a URI is a configuration error.
	AllowPlaintext bool

	// Window is the number of messages of one lane that may be in flight,
	// published and not yet confirmed, 1 to 10,000. Default: 256. A larger
	// window helps when few lanes are busy; it costs some 400 bytes of memory
	// for each lane and message, and as many repeats after a lost connection.
	// Channels that were replaced, at most two of a lane, keep as much again for up
	// to 5 minutes, with the messages whose confirms they still await.
	Window int

	// WriteBuffer is the number of bytes that may wait for the socket before
	// lanes stop publishing; each lane may exceed it by one message. At least
	// 4,096. Default: 1 MiB. A larger one only costs memory.
	WriteBuffer int

	// DialTimeout bounds connecting to one address: TCP, TLS and AMQP handshake
	// together.
	// Default: connection_timeout of the URI, else 10 s. A longer one delays the
	// next attempt when the broker's host is silent.
	DialTimeout time.Duration

	// CallTimeout bounds each request that the broker answers (opening a channel,
	// declaring an exchange). A connection that does not answer in time is dropped.
	// Default: 10 s. A longer one leaves messages unavailable for longer when a
	// connection has died without a word.
	CallTimeout time.Duration

	// ConfirmTimeout is how long a connection may make no progress, while the broker
	// does not block it: nothing of a message that waits is written to the socket,
	// or it is written and nothing is confirmed or nacked. Then the channel of the
	// oldest message is replaced by a new one, as a lost confirm would take a place
	// in the window for ever. A channel that stays behind others of its connection
	// is replaced after a sixth of it, or a quarter; see the package comment. It is
	// no deadline for outcomes: those end with the context given to Publish. Default:
	// 30 s. A shorter one may replace the channel of a queue that is merely slow,
	// which sends messages again. What sockets buffer, up to some 10 MB, counts as
	// written: on a link so slow that this takes longer, raise it.
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
