package outboxstore

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"slices"
	"strconv"
)

const (
	// Of fewer rows of a partition, a separate statement does not pay. (In a table of a
	// few pages the planner prefers to scan them.)
	leastByCTID = 64
	mostByCTID  = 1 << 16
)

// ByCTID returns a group for each partition of the ring.
func (s *postgres) ByCTID(rows []Ref) (groups [][]Ref, rest []Ref) {
	if len(rows) < leastByCTID {
		return nil, rows
	}
	var counts [Partitions]int
	for i := range rows {
		counts[PartitionOf(rows[i].ID)]++
	}
	var parts [Partitions][]Ref
	for i, n := range counts {
		parts[i] = make([]Ref, 0, n)
	}
	for _, r := range rows {
		if r.CTID == (CTID{}) {
			rest = append(rest, r)
			continue
		}
		i := PartitionOf(r.ID)
		parts[i] = append(parts[i], r)
	}
	for _, part := range parts {
		if len(part) < leastByCTID || len(part) > mostByCTID {
			rest = append(rest, part...)
		} else {
			groups = append(groups, part)
		}
	}
	return groups, rest
}

func (s *postgres) RemoveAt(ctx context.Context, group []Ref, move bool) (bool, error) {
	i := PartitionOf(group[0].ID)
	removed, err := s.removeWith(ctx, textOf(move, s.q.MoveAt[i], s.q.DeleteAt[i]), ctidArgs(group)...)
	return removed == len(group), err
}

// ctidArgs returns the ctids of rows, in their order, and the digest of the
// identities in the same order.
func ctidArgs(rows []Ref) []any {
	const usualID = 36
	ctids := make([]byte, 0, len(rows)*len(`"(123456,12)",`))
	identities := make([]byte, 0, len(rows)*(usualID+2+8+8))
	for i, at := range byCTID(rows) {
		r := &rows[at]
		head := `,"(`
		if i == 0 {
			head = `{"(`
		}
		ctids = strconv.AppendUint(append(ctids, head...), uint64(r.CTID.block), 10)
		ctids = strconv.AppendUint(append(ctids, ','), uint64(r.CTID.item), 10)
		ctids = append(ctids, `)"`...)
		identities = append(identities, r.MessageID...)
		identities = binary.BigEndian.AppendUint16(identities, uint16(r.Lane))
		identities = binary.BigEndian.AppendUint64(identities, uint64(r.ID))
		identities = binary.BigEndian.AppendUint64(identities, uint64(r.CreatedAt.UnixMicro()-postgresEpoch))
	}
	digest := sha256.Sum256(identities)
	return []any{string(append(ctids, '}')), digest[:]}
}

// byCTID returns the indices of rows, of which there are at most mostByCTID, sorted by
// ctid. Sorting numbers is several times as fast as sorting rows.
func byCTID(rows []Ref) []uint16 {
	keys := make([]uint64, len(rows))
	for i, r := range rows {
		keys[i] = uint64(r.CTID.block)<<32 | uint64(r.CTID.item)<<16 | uint64(i)
	}
	slices.Sort(keys)
	order := make([]uint16, len(rows))
	for i, key := range keys {
		order[i] = uint16(key)
	}
	return order
}
