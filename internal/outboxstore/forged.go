package outboxstore

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
)

// forgedRow is a row with an id that the sequence cannot have given out.
type forgedRow struct {
	lane      int
	id        int64
	messageID string
}

func scanForged(rows *sql.Rows, err error) (forged []forgedRow, _ error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err tells
	for rows.Next() {
		var r forgedRow
		if err := rows.Scan(&r.lane, &r.id, &r.messageID); err != nil {
			return nil, err
		}
		forged = append(forged, r)
	}
	return forged, rows.Err()
}

// reportForged logs forged rows. They are delivered like all others, so delivery goes
// on.
func reportForged(ctx context.Context, log *slog.Logger, forged []forgedRow, err error) error {
	if err != nil {
		return fmt.Errorf("look for forged ids: %w", err)
	}
	for _, r := range forged {
		log.WarnContext(ctx, "row with a forged id ignored by the check of the sequence; somebody wrote an id of their choice",
			"lane", r.lane, "id", r.id, "message_id", Shorten(r.messageID))
	}
	return nil
}
