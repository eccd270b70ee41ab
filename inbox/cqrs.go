package inbox

import "github.com/ThreeDotsLabs/watermill/message"

// CQRSMarshaler has the methods of cqrs.CommandEventMarshaler, of Watermill.
type CQRSMarshaler interface {
	Marshal(v any) (*message.Message, error)
	Unmarshal(msg *message.Message, v any) error
	Name(v any) string
	NameFromMessage(msg *message.Message) string
}

// CQRS makes a payload that m cannot read a [Permanent] [*PayloadError], like that of
// [Handle]: it becomes a dead letter at once. Use it as the Marshaler of event and command
// processors:
//
//	cqrs.EventProcessorConfig{Marshaler: inbox.CQRS(cqrs.JSONMarshaler{}), ...}
func CQRS(m CQRSMarshaler) CQRSMarshaler { return cqrsMarshaler{m} }

type cqrsMarshaler struct{ CQRSMarshaler }

// Unmarshal reads the payload of msg into v, a pointer.
func (m cqrsMarshaler) Unmarshal(msg *message.Message, v any) error {
	if err := m.CQRSMarshaler.Unmarshal(msg, v); err != nil {
		return Permanent(&PayloadError{Type: m.Name(v), Err: err})
	}
	return nil
}
