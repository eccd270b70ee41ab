// Package payload protects the payloads of messages on their way: it compresses
// and encrypts them, keeps large ones in a store of the user's with only a
// reference in the message (a claim check), and signs what travels. A [Codec] is
// given to outbox.Config.Payload, which encodes, and to inbox.Config.Payload,
// which hands the plain payload to the handlers.
//
//	codec, err := payload.New(payload.Config{
//		CompressFrom:      1024,
//		Encryption:        payload.Keys{Current: "2026-11", Secrets: map[string]payload.Secret{"2026-11": payload.NewSecret(key)}},
//		Signature:         payload.Keys{Current: "orders-1", Secrets: map[string]payload.Secret{"orders-1": payload.NewSecret(other)}},
//		RequireEncryption: true,
//		RequireSignature:  true,
//	})
//	...
//	box, err := outbox.New(db, outbox.Config{Payload: codec})
//	in, err := inbox.New(db, inbox.Config{Consumer: "stock", Outbox: box, Payload: codec})
//
// # Steps
//
// The steps are taken in this order, and undone in the opposite one:
//
//	compress   gzip, RFC 1952, if that makes the payload smaller
//	encrypt    AES-256-GCM, NIST SP 800-38D, with a random nonce in front
//	claim      the bytes go to the store, the message's payload is empty
//	sign       HMAC-SHA256, RFC 2104
//
// Ciphertext does not compress, so compression comes first; the store is not
// trusted with plain text, so it comes after encryption; and the signature covers
// what is on the wire, so a consumer checks it before it fetches, decrypts or
// decompresses anything of a stranger's.
//
// # On the wire
//
// Every step leaves its mark in the metadata, whose names begin with the reserved
// prefix oncemill_, so that a consumer undoes what was done, whatever the
// configuration of the producers is by now. Absent and empty are the same.
//
//	oncemill_encoding    the first three steps, as taken, separated by commas:
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
//	object       PLACE-SUM is the name of it in the store
//	MAC          HMAC-SHA256 of frame("oncemill/payload/signature/1", signature up to the
//	             last semicolon, ENCODING, id, topic, key, value of each NAME..., body)
//
// # What it guarantees
//
// An encrypted payload can be read only with its key, and only as the payload of
// the message that it was encrypted for: same id, topic and ordering key. A signed
// message is accepted only as it was signed. [Codec.Decode] with RequireEncryption
// or RequireSignature refuses what comes without; without them, whoever can write
// to the broker can strip everything off and send plain payloads of his own. What
// was compressed or stored never becomes larger than MaxSize.
//
// # What it does not
//
// Ids, topics, keys and the rest of the metadata travel readable, and are signed
// only where said (Config.SignedMetadata). The length of a payload shows, and with
// compression so does something of its content: where a stranger can put text
// beside a secret, into the same payload, do not compress what is encrypted. A
// whole message that a stranger sends once more is not noticed here; the inbox
// recognises its id for as long as it keeps ids, and after that only the removal of
// the signature's key ends the use of a recorded message. Whoever has a signature key can sign: it tells members of the system from
// strangers, not members from each other.
//
// # How long a key may be used
//
// Nonces are random, 96 bits, so after 2^32 encryptions with one key the chance
// that two were the same is about 2^-33, and NIST SP 800-38D, section 8.3, ends the
// use of the key there. Two payloads under one nonce would show their difference
// and let anyone forge ciphertexts. All producers count together, attempts of
// transactions that were rolled back too: at 1,000 messages a second the bound
// comes after 49 days, at 100 after 16 months. Rotate well before.
//
// To rotate, add the new key to Secrets everywhere, consumers first; then make it
// Current for the producers; remove the old one when nothing that it protects is
// wanted any more: not in the outbox, a queue, the history, a dead letter. A
// consumer that does not know a key yet fails with [ErrUnknownKey], which says
// nothing against the message.
package payload
