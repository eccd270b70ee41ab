"""Writes golden.json: messages encoded as the comment of package payload says, by
code that shares nothing with the package. Needs the package "cryptography".

    python3 golden.py > golden.json
"""

import base64, gzip, hashlib, hmac, json
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

ENCRYPTION = ("enc-1", bytes(range(32)))
SIGNATURE = ("sig.A_2", bytes(range(100, 148)))
NONCE = bytes(range(200, 212))


def frame(*parts):
    return b"".join(len(p).to_bytes(8, "big") + p for p in parts)


def encode(name, mid, topic, key, metadata, body, steps, names=()):
    plain, done, objects = body, [], {}
    metadata = dict(metadata)
    to = [s.encode() for s in (mid, topic, key)]
    if "gzip" in steps:
        body = gzip.compress(body, mtime=0)
        done.append("gzip")
    if "encrypt" in steps:
        done.append("aes-256-gcm:" + ENCRYPTION[0])
        additional = frame(b"oncemill/payload/encryption/1", ",".join(done).encode(), *to)
        body = NONCE + AESGCM(ENCRYPTION[1]).encrypt(NONCE, body, additional)
    if "claim" in steps:
        place = hashlib.sha256(frame(b"oncemill/payload/claim/1", *to)).hexdigest()[:32]
        reference = place + "-" + hashlib.sha256(body).hexdigest()
        objects[reference] = base64.b64encode(body).decode()
        done.append("claim:%s:%d" % (reference, len(body)))
        body = b""
    wire = dict(metadata)
    if done:
        wire["oncemill_encoding"] = ",".join(done)
    if set(steps) - {"gzip"}:
        wire["oncemill_topic"] = topic
        if key:
            wire["oncemill_key"] = metadata["oncemill_key"] = key
    if "sign" in steps:
        head = "hmac-sha256;%s;%s" % (SIGNATURE[0], ",".join(names))
        parts = [b"oncemill/payload/signature/1", head.encode(), ",".join(done).encode(), *to]
        parts += [metadata.get(n, "").encode() for n in names] + [body]
        wire["oncemill_signature"] = head + ";" + hmac.new(SIGNATURE[1], frame(*parts), hashlib.sha256).hexdigest()
    return {
        "name": name, "id": mid, "topic": topic, "key": key, "metadata": metadata, "wire": wire, "objects": objects,
        "payload": base64.b64encode(plain).decode(), "body": base64.b64encode(body).decode(),
        "signed_metadata": list(names), "steps": list(steps),
    }


tea = b'{"item":"tea","pieces":3,"note":"tea, tea, tea, tea and more tea"}'
print(json.dumps([
    encode("compressed", "order-1", "orders", "", {}, tea, ["gzip"]),
    encode("encrypted", "order-2", "orders", "customer-7", {"name": "OrderPlaced"}, tea, ["encrypt"]),
    encode("encrypted nothing", "order-3", "orders", "", {}, b"", ["encrypt"]),
    encode("claimed", "order-4", "orders", "Zoë", {}, tea, ["claim"]),
    encode("signed", "order-5", "größe/eu", "k", {}, bytes(range(256)), ["sign"]),
    encode("signed nothing", "order-6", "orders", "", {"a": "b"}, b"", ["sign"]),
    encode("signed with metadata", "order-7", "orders", "k", {"name": "OrderPlaced", "x": "y"}, tea, ["sign"], ["name", "absent"]),
    encode("claimed and signed", "order-8", "orders", "k", {"name": "OrderPlaced"}, tea, ["claim", "sign"], ["name"]),
    encode("everything", "order-9", "orders", "k", {"name": "OrderPlaced"}, tea * 9, ["gzip", "encrypt", "claim", "sign"], ["name"]),
], indent=1, ensure_ascii=False))
