package rabbitmq

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/internal/amqpconn"
	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/relay"
)

const (
	idHeader  = "oncemill_id"  // "lane/id"
	keyHeader = "oncemill_key" // the ordering key

	createdHeader = "oncemill-created-at" // outbox.CreatedAtMetadata
)

// encoder turns messages of the relay into AMQP publishings. All lanes use it
// concurrently.
type encoder struct {
	marshaler wamqp.Marshaler

	// stockHeader is the header of the message id if the marshaler is watermill-amqp's
	// default one without a post-processor. Then its table is built here, with the same
	// headers, directly and without an intermediate Watermill message.
	stockHeader string
}

func newEncoder(m wamqp.Marshaler) encoder {
	e := encoder{marshaler: m}
	if d, ok := m.(wamqp.DefaultMarshaler); ok && d.PostprocessPublishing == nil {
		e.stockHeader = d.MessageUUIDHeaderKey
		if e.stockHeader == "" {
			e.stockHeader = wamqp.DefaultMessageUUIDHeaderKey
		}
	}
	return e
}

// encode returns the publishing of m. An error means that this message can never be
// published. encode finds here what would make amqp091-go or the broker close the whole
// connection: bad short strings, and properties that do not fit into one frame.
func (e *encoder) encode(m *relay.Message, frameMax int) (amqp.Publishing, error) {
	p, size, err := e.marshal(m)
	if err != nil {
		return p, err
	}
	p.Headers[idHeader] = rowID(m)
	if m.Key != "" {
		p.Headers[keyHeader] = m.Key
	}
	p.MessageId = m.MessageID
	p.Type = m.Topic
	p.Timestamp = m.CreatedAt
	p.DeliveryMode = amqp.Persistent
	if problem := amqpconn.CheckShort(p.MessageId); problem != "" {
		return p, &PropertyError{"message-id", problem}
	}
	if problem := amqpconn.CheckShort(p.Type); problem != "" {
		return p, &PropertyError{"type", problem}
	}
	size += overhead + len(p.MessageId) + len(p.Type) + len(m.Key)
	if at, ok := p.Headers[createdHeader].(string); ok && frameMax > 0 && size > frameMax {
		delete(p.Headers, createdHeader) // no message is refused for it
		size -= 1 + len(createdHeader) + 5 + len(at)
	}
	if frameMax > 0 && size > frameMax {
		return p, &PropertyError{"headers", fmt.Sprintf("properties take %d bytes, more than the connection's frame of %d", size, frameMax)}
	}
	return p, nil
}

// overhead is the size, rounded up, of the parts of a content header that are not counted:
// the frame (8), its fixed part (14), properties of fixed size (10), the lengths of
// message-id and type (2), the headers oncemill_id (17 and its value of at most 41) and
// oncemill_key (18 without its value).
const overhead = 8 + 14 + 10 + 2 + 17 + 41 + 18

// marshal returns the marshaler's publishing of m, with a header table of its own, and the
// encoded size of its properties.
func (e *encoder) marshal(m *relay.Message) (p amqp.Publishing, size int, err error) {
	if e.stockHeader == "" {
		return e.marshalForeign(m)
	}
	p.Body = m.Payload
	p.Headers = make(amqp.Table, len(m.Metadata)+4)
	size = 4
	for k, v := range m.Metadata {
		if problem := amqpconn.CheckShort(k); problem != "" {
			return p, 0, &PropertyError{"headers", amqpconn.NameError(k, problem).Error()}
		}
		if addsRoutes(k) {
			return p, 0, noRoutes(k)
		}
		p.Headers[k] = v
		size += 1 + len(k) + 5 + len(v)
	}
	if !m.CreatedAt.IsZero() {
		at := m.CreatedAt.UTC().Format(time.RFC3339Nano)
		p.Headers[createdHeader] = at
		size += 1 + len(createdHeader) + 5 + len(at)
	}
	p.Headers[e.stockHeader] = m.MessageID
	return p, size + 1 + len(e.stockHeader) + 5 + len(m.MessageID), nil
}

// apart calls a function of the configuration, which ends neither the process nor the lane.
func apart(f func() error) error {
	return <-nopanic.Apart(func() error { return nopanic.Call(f) })
}

func (e *encoder) marshalForeign(m *relay.Message) (p amqp.Publishing, size int, err error) {
	err = apart(func() (err error) {
		p, err = e.marshaler.Marshal(m.Watermill())
		return err
	})
	if err != nil {
		return p, 0, fmt.Errorf("marshal: %w", err)
	}
	if err := p.Headers.Validate(); err != nil {
		return p, 0, &PropertyError{"headers", err.Error()}
	}
	for k, v := range p.Headers {
		if _, isArray := v.([]any); addsRoutes(k) && !isArray {
			return p, 0, noRoutes(k)
		}
	}
	if size, err = amqpconn.TableSize(p.Headers); err != nil {
		return p, 0, &PropertyError{"headers", err.Error()}
	}
	for _, s := range [...]struct{ name, value string }{
		{"content-type", p.ContentType},
		{"content-encoding", p.ContentEncoding},
		{"correlation-id", p.CorrelationId},
		{"reply-to", p.ReplyTo},
		{"expiration", p.Expiration},
		{"user-id", p.UserId},
		{"app-id", p.AppId},
	} {
		if problem := amqpconn.CheckShort(s.value); problem != "" {
			return p, 0, &PropertyError{s.name, problem}
		}
		size += 1 + len(s.value)
	}
	// Copied, since a custom marshaler may share its table between messages.
	headers := make(amqp.Table, len(p.Headers)+2)
	for k, v := range p.Headers {
		headers[k] = v
	}
	p.Headers = headers
	return p, size, nil
}

// addsRoutes reports whether RabbitMQ reads a header as an array of further routing keys;
// it closes the channel if the header is anything else. Metadata of that name is not
// converted to an array of one, which would send the message where nobody intended.
func addsRoutes(header string) bool { return header == "CC" || header == "BCC" }

func noRoutes(header string) error {
	return &PropertyError{"headers", header + " must be an array: RabbitMQ reads it as routing keys; rename the metadata"}
}

func rowID(m *relay.Message) string {
	b := make([]byte, 0, 24)
	b = strconv.AppendInt(b, int64(m.Lane), 10)
	b = append(b, '/')
	b = strconv.AppendInt(b, m.ID, 10)
	return string(b)
}

// parseRowID parses the output of rowID.
func parseRowID(header any) (lane int, id int64, ok bool) {
	text, _ := header.(string)
	before, after, found := strings.Cut(text, "/")
	if !found {
		return 0, 0, false
	}
	lane, err := strconv.Atoi(before)
	if err != nil {
		return 0, 0, false
	}
	id, err = strconv.ParseInt(after, 10, 64)
	return lane, id, err == nil
}
