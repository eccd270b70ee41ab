package outboxstore

import "database/sql"

// Sequence describes the id sequence of the outbox.
type Sequence struct {
	Last    int64 // the last id given out
	Highest int64 // the highest id in use that is not forged
	Cache   int64 // ids that a session takes at a time

	ScheduledBehind bool // the sequence of scheduled messages is behind one of them
	Standby         bool // the server is one
	ReadOnly        bool // sessions write nothing by default
}

// scanForged reads rows with ids that the sequence cannot have given out.
func scanForged(rows *sql.Rows, err error) (forged []Ref, _ error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	for rows.Next() {
		var r Ref
		if err := rows.Scan(&r.Lane, &r.ID, &r.MessageID); err != nil {
			return nil, err
		}
		forged = append(forged, r)
	}
	return forged, rows.Err()
}
