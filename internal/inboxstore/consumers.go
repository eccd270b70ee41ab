package inboxstore

import (
	"context"
	"slices"
)

// Consumers implements [Store].
func (s *store) Consumers(ctx context.Context) ([]string, error) {
	var all []string
	for _, query := range []string{s.text.Consumers, s.text.FailingConsumers} {
		found, err := s.names(ctx, query)
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

func (s *store) names(ctx context.Context, query string) (all []string, err error) {
	rows, err := s.db.QueryContext(ctx, query)
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
