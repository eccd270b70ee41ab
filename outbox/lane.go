package outbox

import "github.com/oncemill/oncemill/internal/outboxstore"

// Lanes is the number of lanes that the messages are spread over. It is part of the
// stored format: all producers and relays use the same number, and the table refuses a
// row outside it.
const Lanes = outboxstore.Lanes

// Lane returns the lane of a message: the 64-bit FNV-1a hash of its ordering key, or of
// its id if it has no key, modulo [Lanes]. It is part of the stored format, so that
// programs in other languages can write rows too.
func Lane(key, messageID string) int {
	const (
		offset = 14695981039346656037
		prime  = 1099511628211
	)
	s := key
	if s == "" {
		s = messageID
	}
	h := uint64(offset)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * prime
	}
	return int(h % Lanes)
}
