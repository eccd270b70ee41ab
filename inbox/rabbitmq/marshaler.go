package rabbitmq

import (
	"cmp"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"
)

// Marshaler implements watermill-amqp's Marshaler. The zero value reads and writes what
// the stock marshaler does.
type Marshaler struct {
	// Stock is the stock marshaler, which writes messages, and whose header holds the
	// Watermill UUID. Default: its zero value.
	Stock amqp.DefaultMarshaler
}

var _ amqp.Marshaler = Marshaler{}

// maxShortString is the largest AMQP message id in bytes.
const maxShortString = 255

// Marshal does what the stock marshaler does, and sets the AMQP message id to the
// Watermill UUID unless PostprocessPublishing has set another. An id of more than 255
// bytes does not fit there; it is only in the header.
func (m Marshaler) Marshal(msg *message.Message) (amqp091.Publishing, error) {
	publishing, err := m.Stock.Marshal(msg)
	if err != nil {
		return publishing, err
	}
	if publishing.MessageId == "" && len(msg.UUID) <= maxShortString {
		publishing.MessageId = msg.UUID
	}
	return publishing, nil
}

// Unmarshal never fails. The Watermill UUID is taken from the header of the stock
// marshaler, else from the AMQP message id. Every other header becomes metadata: a string
// unchanged, bytes unchanged if they are UTF-8 and otherwise in base64, a number in
// decimal, a time in RFC 3339 and UTC, a nil value as null, and tables and arrays as JSON
// with the same values in them.
func (m Marshaler) Unmarshal(delivery amqp091.Delivery) (*message.Message, error) {
	idHeader := cmp.Or(m.Stock.MessageUUIDHeaderKey, amqp.DefaultMessageUUIDHeaderKey)
	metadata := make(message.Metadata, len(delivery.Headers))
	var id string
	for name, value := range delivery.Headers {
		if name == idHeader {
			if value != nil {
				id = headerText(value)
			}
			continue
		}
		metadata[name] = headerText(value)
	}
	msg := message.NewMessage(cmp.Or(id, delivery.MessageId), delivery.Body)
	msg.Metadata = metadata
	return msg, nil
}
