package pgxtx

import (
	"github.com/jackc/pgx/v5"

	"github.com/oncemill/oncemill/internal/nopanic"
)

// source is what CopyFrom reads. pgx reads it in a goroutine of its own, where a panic
// would end the process.
type source struct {
	pgx.CopyFromSource
	panicked error
}

func (s *source) Next() (more bool) {
	s.call(func() error { more = s.CopyFromSource.Next(); return nil })
	return more
}

func (s *source) Values() (values []any, err error) {
	s.call(func() error { values, err = s.CopyFromSource.Values(); return nil })
	if s.panicked != nil {
		return nil, s.panicked
	}
	return values, err
}

func (s *source) Err() (err error) {
	s.call(func() error { err = s.CopyFromSource.Err(); return nil })
	if s.panicked != nil {
		return s.panicked
	}
	return err
}

func (s *source) call(f func() error) {
	if err := nopanic.Call(f); err != nil {
		s.panicked = err
	}
}
