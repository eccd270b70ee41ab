package idempotency

import (
	"crypto/rand"
	"crypto/sha256"
)

// A token of a process with a unique name consists of the hash of the name, the number of
// the process, which is random, and a random rest. Other tokens are random.
const (
	nameEnd    = 6
	processEnd = 10
)

// process is the number of this process.
var process = func() (n [processEnd - nameEnd]byte) {
	rand.Read(n[:])
	return n
}()

func newToken(uniqueName string) (token [16]byte) {
	rand.Read(token[:])
	if uniqueName != "" {
		name := sha256.Sum256([]byte(uniqueName))
		copy(token[:nameEnd], name[:])
		copy(token[nameEnd:processEnd], process[:])
	}
	return token
}

// fromCrashed reports whether an owner is the process that had this unique name before.
func fromCrashed(owner Owner, uniqueName string) bool {
	if uniqueName == "" {
		return false
	}
	name := sha256.Sum256([]byte(uniqueName))
	return [nameEnd]byte(owner.Token[:nameEnd]) == [nameEnd]byte(name[:nameEnd]) &&
		[processEnd - nameEnd]byte(owner.Token[nameEnd:processEnd]) != process
}
