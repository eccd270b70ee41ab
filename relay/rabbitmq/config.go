package rabbitmq

import (
	"log/slog"
	"time"
)

// Config holds the settings that watermill-amqp's configuration does not have. The zero
// value is right for most services.
type Config struct {
	// Addresses are further AMQP URIs of the same broker, for example of other nodes of a
	// cluster. They are tried in turn, after amqp.Config.Connection.AmqpURI (which may then
	// be empty): the next one when an address cannot be reached, and when a connection is
	// lost. All must name the same virtual host. A node that accepts connections but does
	// not answer costs DialTimeout. Default: none.
	Addresses []string

	// AllowPlaintext permits an amqp:// URI whose host is not the loopback interface.
	// Credentials and payloads then cross the network unencrypted. Default: such a URI is a
	// configuration error.
	AllowPlaintext bool

	// Window is the number of messages of one lane that may be in flight, published and not
	// yet confirmed, 1 to 10,000. Default: 256. A larger window helps when few lanes are
	// busy. It costs some 400 bytes of memory for each lane and message, and as many
	// repeated messages after a lost connection. Replaced channels, at most two per lane,
	// keep as much again for up to 5 minutes, with the messages whose confirms they still
	// await.
	Window int

	// WriteBuffer is the number of bytes that may wait for the socket before lanes stop
	// publishing; each lane may exceed it by one message. At least 4,096. Default: 1 MiB. A
	// larger one only costs memory.
	WriteBuffer int

	// DialTimeout bounds connecting to one address: TCP, TLS and AMQP handshake together.
	// Default: connection_timeout of the URI, else 10 s. A longer one delays the next
	// attempt when the broker's host is silent.
	DialTimeout time.Duration

	// CallTimeout bounds each request that the broker answers (opening a channel, declaring
	// an exchange); while a slow one grants others, the time begins anew with each. A connection
	// that does not answer in time is dropped. Default: 10 s. A longer one leaves messages
	// unavailable for longer when a connection has died silently.
	CallTimeout time.Duration

	// ConfirmTimeout is how long a connection that the broker does not block may make no
	// progress: no part of a waiting message is written to the socket, or messages are
	// written and none is confirmed or nacked. Then the channel of the oldest message is
	// replaced by a new one, since a lost confirm would occupy a place in the window
	// forever. A channel that falls behind others of its connection is replaced after a
	// sixth of it, or a quarter; see the package comment. It is not a deadline for outcomes:
	// those end with the context given to Publish. Default: 30 s. A shorter one may replace
	// the channel of a queue that is merely slow, which sends messages again. Bytes in
	// socket buffers, up to some 10 MB, count as written: raise it on a link so slow that
	// sending them takes longer.
	ConfirmTimeout time.Duration

	// Logger receives events: connections made and lost, blocked brokers, replaced channels.
	// Default: slog.Default().
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
