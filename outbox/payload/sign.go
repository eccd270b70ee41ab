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
type signer struct{ secret []byte }

func newSigner(secret []byte) (*signer, error) {
	return &signer{secret: slices.Clone(secret)}, nil
}

// mac returns the code of msg in hexadecimal. head is the signature up to it,
// which names the algorithm, the key and the metadata that are covered.
func (s *signer) mac(head string, names []string, b binding, msg *message.Message) string {
	h := hmac.New(sha256.New, s.secret)
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

// verify refuses a message whose signature is wrong, or missing if there has to
// be one. Without keys it cannot tell.
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
		return detailed(ErrSignature, "it is none of %s", signatureStep)
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
	// Compared as text, so that no second way to write it is taken.
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
