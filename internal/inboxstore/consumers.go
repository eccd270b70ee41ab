package inboxstore

import (
	"context"
	"slices"
)

// consumersPage is how many consumers a statement returns at most.
const consumersPage = 1000

// Consumers implements [Store].
func (s *store) Consumers(ctx context.Context) ([]string, error) {
	var all []string
	for _, query := range []string{s.text.Consumers, s.text.FailingConsumers} {
		last := "" // before every consumer
		for {
			page, err := s.names(ctx, query, last, consumersPage)
			if err != nil {
				return nil, err
			}
			all = append(all, page...)
			if len(page) < consumersPage {
				break
			}
			last = page[len(page)-1]
		}
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

func (s *store) names(ctx context.Context, query string, args ...any) (all []string, err error) {
	rows, err := s.db.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			return nil, err
		}
		all = append(all, name)
	}
	return all, rows.Err()
}
