// Package payload compresses, encrypts and signs the payloads of messages, and moves large
// payloads to a store of yours, with a reference in the message (a claim check). Set a
// [Codec] as outbox.Config.Payload, which encodes, and as inbox.Config.Payload, which decodes
// for the handlers.
//
//	codec, err := payload.New(payload.Config{
//		CompressFrom:      1024,
//		Encryption:        payload.Keys{Current: "2026-11", Secrets: map[string]oncemill.Secret{"2026-11": oncemill.NewSecret(key)}},
//		Signature:         payload.Keys{Current: "orders-1", Secrets: map[string]oncemill.Secret{"orders-1": oncemill.NewSecret(other)}},
//		RequireEncryption: true,
//		RequireSignature:  true,
//	})
//	...
//	box, err := outbox.New(db, outbox.Config{Payload: codec})
//	in, err := inbox.New(db, inbox.Config{Consumer: "stock", Outbox: box, Payload: codec})
//
// # Steps
//
// Encode applies the steps in this order, and Decode undoes them in reverse:
//
//	compress   gzip, RFC 1952, if that makes the payload smaller
//	encrypt    AES-256-GCM, NIST SP 800-38D, with a random nonce in front
//	claim      the bytes go to the store, the message's payload is empty
//	sign       HMAC-SHA256, RFC 2104
//
// Ciphertext does not compress, so compression is first. The store is not trusted with plain
// text, so it is after encryption. The signature covers the message on the wire, so a
// consumer checks it before it fetches, decrypts or decompresses untrusted data.
//
// # On the wire
//
// Every step is recorded in metadata with the reserved prefix oncemill_. So a consumer can
// undo the steps whatever the producers' current configuration. Absent and empty are the
// same.
//
//	oncemill_encoding    the first three steps that were applied, separated by commas:
//	                     gzip
//	                     aes-256-gcm:KEY
//	                     claim:PLACE-SUM:SIZE
//	oncemill_signature   hmac-sha256;KEY;NAME,NAME;MAC
//	oncemill_topic       the topic of the message, if encrypted, claimed or signed
//	oncemill_key         its ordering key, if it has one
//
// KEY is the id of a key, NAME a signed entry of the metadata. MAC and SUM are 32
// bytes, PLACE 16, in lower-case hexadecimal; SIZE is decimal.
//
// frame(a, b, ...) is the concatenation of its parts, each preceded by its length
// as 8 bytes, big-endian. Then, with id for the Watermill UUID:
//
//	ciphertext   nonce (12 bytes), encrypted bytes, tag (16 bytes), with the additional data
//	             frame("oncemill/payload/encryption/1", ENCODING up to this step, id, topic, key)
//	SUM          SHA-256 of the stored bytes
//	PLACE        the first 16 bytes of SHA-256 of
//	             frame("oncemill/payload/claim/1", id, topic, key)
//	object       PLACE-SUM is its name in the store
//	MAC          HMAC-SHA256 of frame("oncemill/payload/signature/1", signature up to the
//	             last semicolon, ENCODING, id, topic, key, value of each NAME..., body)
//
// # What it guarantees
//
// An encrypted payload can be read only with its key, and only as the payload of the message
// that it was encrypted for: same id, topic and ordering key. A signed message is accepted
// only unchanged. With RequireEncryption or RequireSignature, [Codec.Decode] refuses messages
// without it. Otherwise anybody who can write to the broker can remove both and send plain
// payloads. A compressed or stored payload never becomes larger than MaxSize.
//
// # What it does not
//
// Ids, topics, keys and other metadata are readable on the wire. The signature covers id,
// topic and key; other metadata only if Config.SignedMetadata names it.
//
// The length of a payload is visible. With compression it reveals something of the content:
// if attackers can put text beside a secret into the same payload, do not compress encrypted
// payloads.
//
// The codec does not detect a recorded message that is sent again. The inbox recognizes its
// id for as long as it keeps ids. After that, only removing the signature key helps.
//
// Everybody who has a signature key can sign. A signature distinguishes your services from
// others, not one of your services from another.
//
// # How long a key may be used
//
// Nonces are random, 96 bits. After 2^32 encryptions with one key the chance of a repeated
// nonce is about 2^-33, and NIST SP 800-38D, section 8.3, requires a new key. A repeated
// nonce reveals the difference of two payloads and lets anyone forge ciphertexts. All
// producers of a key count together, and so do attempts that were rolled back. At 1,000
// messages a second the limit is reached after 49 days, at 100 after 16 months. Rotate keys
// well before.
//
// To rotate, add the new key to Secrets everywhere, consumers first. Then make it Current for
// the producers. Remove the old key when no message that it protects is left in the outbox, a
// queue, the history or the dead letters. A consumer that does not know a key yet fails with
// [ErrUnknownKey], which is temporary: the message is not at fault.
package payload
