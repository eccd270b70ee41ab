package rabbitmq

import (
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/amqpconn"
	"github.com/oncemill/oncemill/outbox"
)

// minChannels is how many channels one connection needs: for each of the outbox's 32 lanes
// one channel and the retired ones, and those for declarations.
const minChannels = outbox.Lanes*(1+maxRetired) + declarations

// settings is the validated configuration, defaults filled in.
type settings struct {
	Config
	topology wamqp.Config
	encoder  encoder
	conn     amqpconn.Settings
}

// resolve returns all bad values of both configurations, joined.
func resolve(cfg wamqp.Config, opts Config) (*settings, error) {
	s := &settings{Config: opts, topology: cfg, encoder: newEncoder(cfg.Marshaler)}
	var errs []error
	bad := func(field, value, problem string) {
		errs = append(errs, &oncemill.ConfigError{Field: field, Value: value, Problem: problem})
	}
	s.resolveOptions(bad)
	s.resolveTopology(bad)
	s.conn = amqpconn.Resolve(cfg.Connection, amqpconn.Options{
		Name: "oncemill relay", Who: "the sink", MinChannels: minChannels,
		Addresses: opts.Addresses, AllowPlaintext: opts.AllowPlaintext, DialTimeout: opts.DialTimeout,
	}, bad)
	return s, errors.Join(errs...)
}

func (s *settings) resolveOptions(bad func(field, value, problem string)) {
	if s.Window == 0 {
		s.Window = defaultWindow
	}
	if s.Window < 1 || s.Window > maxWindow {
		bad("rabbitmq.Config.Window", strconv.Itoa(s.Window), "must be 1 to 10000 messages")
	}
	if s.WriteBuffer == 0 {
		s.WriteBuffer = defaultWriteBuffer
	}
	if s.WriteBuffer < minWriteBuffer {
		bad("rabbitmq.Config.WriteBuffer", strconv.Itoa(s.WriteBuffer), "must be at least 4096 bytes")
	}
	if s.CallTimeout == 0 {
		s.CallTimeout = defaultCallTimeout
	}
	if s.ConfirmTimeout == 0 {
		s.ConfirmTimeout = defaultConfirmTimeout
	}
	for field, timeout := range map[string]time.Duration{
		"rabbitmq.Config.CallTimeout":    s.CallTimeout,
		"rabbitmq.Config.ConfirmTimeout": s.ConfirmTimeout,
	} {
		if timeout < 0 {
			bad(field, timeout.String(), "must not be negative")
		}
	}
	if s.Logger == nil {
		s.Logger = slog.Default()
	}
}

func (s *settings) resolveTopology(bad func(field, value, problem string)) {
	t := &s.topology
	if t.Marshaler == nil {
		bad("amqp.Config.Marshaler", "nil", "is needed; the constructors of amqp.Config set it")
	}
	switch header := s.encoder.stockHeader; {
	case amqpconn.CheckShort(header) != "":
		bad("amqp.Config.Marshaler.MessageUUIDHeaderKey", fmt.Sprintf("%.40q", header), amqpconn.CheckShort(header))
	case header == idHeader, header == keyHeader:
		bad("amqp.Config.Marshaler.MessageUUIDHeaderKey", strconv.Quote(header), "is reserved: the sink sets this header; choose another")
	}
	if t.Exchange.GenerateName == nil {
		bad("amqp.Config.Exchange.GenerateName", "nil", "is needed; the constructors of amqp.Config set it")
	}
	if t.Publish.GenerateRoutingKey == nil {
		bad("amqp.Config.Publish.GenerateRoutingKey", "nil", "is needed; the constructors of amqp.Config set it")
	}
	if t.TopologyBuilder == nil {
		bad("amqp.Config.TopologyBuilder", "nil", "is needed; the constructors of amqp.Config set it")
	}
	if t.Publish.Transactional {
		bad("amqp.Config.Publish.Transactional", "true", "must be false: AMQP has no confirms in transactions")
	}
	if t.Publish.Immediate {
		bad("amqp.Config.Publish.Immediate", "true", "must be false: RabbitMQ closes the connection on it")
	}
	if err := amqpconn.CheckTable(t.Exchange.Arguments); err != nil {
		bad("amqp.Config.Exchange.Arguments", "(not shown)", err.Error())
	}
	// A declaration that nobody waits for would race with the publishing, which uses other
	// channels.
	t.Exchange.NoWait = false
}
