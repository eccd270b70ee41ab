package payload

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strings"

	"github.com/ThreeDotsLabs/watermill/message"
)

const signatureStep = "hmac-sha256"

// signer holds a key behind a pointer, which printers do not follow.
type signer struct{ key []byte }

func newSigner(key []byte) (*signer, error) {
	return &signer{key: slices.Clone(key)}, nil
}

// mac returns the MAC of msg in hexadecimal. head is the part of the signature before it: the
// algorithm, the key's id and the names of the covered metadata.
func (s *signer) mac(head string, names []string, b binding, msg *message.Message) string {
	h := hmac.New(sha256.New, s.key)
	h.Write(frame("oncemill/payload/signature/1", head, msg.Metadata.Get(EncodingMetadata), b.id, b.topic, b.key))
	for _, name := range names {
		writeFramed(h, []byte(msg.Metadata.Get(name)))
	}
	writeFramed(h, msg.Payload)
	return hex.EncodeToString(h.Sum(nil))
}

// sign returns the signature of an encoded message.
func (c *Codec) sign(b binding, msg *message.Message) string {
	id := c.signature.current
	head := signatureStep + ";" + id + ";" + strings.Join(c.signedMetadata, ",")
	return head + ";" + c.signature.keys[id].mac(head, c.signedMetadata, b, msg)
}

// verify refuses a message whose signature is wrong, or missing if one is required. Without
// keys it accepts every signature.
func (c *Codec) verify(b binding, msg *message.Message) error {
	text := msg.Metadata.Get(SignatureMetadata)
	switch {
	case text == "" && c.requireSignature:
		return ErrUnsigned
	case text == "" || len(c.signature.keys) == 0:
		return nil
	}
	fields := strings.Split(text, ";")
	if len(fields) != 4 || fields[0] != signatureStep {
		return detailed(ErrSignature, "it is not of the form %s", signatureStep)
	}
	head, _ := strings.CutSuffix(text, ";"+fields[3])
	var names []string
	if fields[2] != "" {
		names = strings.Split(fields[2], ",")
	}
	key, err := c.signature.find(fields[1])
	if err != nil {
		return err
	}
	// Compared as text, so that only one spelling is accepted.
	if !hmac.Equal([]byte(fields[3]), []byte(key.mac(head, names, b, msg))) {
		return detailed(ErrSignature, "key %q", fields[1])
	}
	if !c.requireSignature {
		return nil
	}
	for _, name := range c.signedMetadata {
		if !slices.Contains(names, name) {
			return detailed(ErrSignature, "it does not cover %q of the metadata", name)
		}
	}
	return nil
}
