package pgxtx

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// allRows makes read keep every row.
const allRows = math.MaxInt

// rows are the rows of a query that have been read. They use nothing of the connection,
// whose type map is not safe for concurrent use.
type rows struct {
	pgx.Rows // nil: methods that later versions of pgx add

	types  *pgtype.Map
	fields []pgconn.FieldDescription
	unread [][][]byte
	values [][]byte // of the current row
	tag    pgconn.CommandTag
	closed bool
	err    error

	plans []pgtype.ScanPlan // of the types of the last Scan
	kinds []reflect.Type
}

// read returns a function that reads what a query returns, and keeps the first rows.
func read(conn *pgx.Conn, most int) func(pgx.Rows, error) (*rows, error) {
	return func(from pgx.Rows, err error) (*rows, error) {
		defer from.Close()
		if err != nil {
			return nil, err
		}
		r := new(rows)
		for from.Next() {
			if len(r.unread) < most {
				r.unread = append(r.unread, cloneRow(from.RawValues()))
			}
		}
		if err := from.Err(); err != nil {
			return nil, err
		}
		r.tag, r.fields, r.types = from.CommandTag(), slices.Clone(from.FieldDescriptions()), cloneTypes(conn.TypeMap())
		return r, nil
	}
}

func cloneRow(values [][]byte) [][]byte {
	size := 0
	for _, v := range values {
		size += len(v)
	}
	buffer, row := make([]byte, 0, size), make([][]byte, len(values))
	for i, v := range values {
		if v == nil {
			continue
		}
		start := len(buffer)
		buffer = append(buffer, v...)
		row[i] = buffer[start:len(buffer):len(buffer)]
	}
	return row
}

func cloneTypes(m *pgtype.Map) *pgtype.Map {
	types := m.Copy()
	types.TryWrapEncodePlanFuncs = slices.Clone(m.TryWrapEncodePlanFuncs)
	types.TryWrapScanPlanFuncs = slices.Clone(m.TryWrapScanPlanFuncs)
	return types
}

func (r *rows) Close()                        { r.closed, r.unread, r.values = true, nil, nil }
func (r *rows) Err() error                    { return r.err }
func (r *rows) CommandTag() pgconn.CommandTag { return r.tag }
func (r *rows) RawValues() [][]byte           { return r.values }
func (r *rows) Conn() *pgx.Conn               { return nil }
func (r *rows) TypeMap() *pgtype.Map          { return r.types }

func (r *rows) FieldDescriptions() []pgconn.FieldDescription { return r.fields }

func (r *rows) Next() bool {
	if len(r.unread) == 0 {
		r.Close()
		return false
	}
	r.values, r.unread = r.unread[0], r.unread[1:]
	return true
}

// fail closes the rows with err.
func (r *rows) fail(err error) error {
	r.err = err
	r.Close()
	return err
}

func (r *rows) Scan(dest ...any) error {
	if r.values == nil {
		return errors.Join(r.err, errors.New("pgxtx: Scan without a row"))
	}
	if len(dest) == 1 {
		if whole, ok := dest[0].(pgx.RowScanner); ok {
			if err := whole.ScanRow(r); err != nil {
				return r.fail(err)
			}
			return nil
		}
	}
	if len(dest) != len(r.fields) {
		return r.fail(fmt.Errorf("pgxtx: the row has %d values, Scan has %d destinations", len(r.fields), len(dest)))
	}
	if r.plans == nil {
		r.plans, r.kinds = make([]pgtype.ScanPlan, len(dest)), make([]reflect.Type, len(dest))
	}
	for i, d := range dest {
		if d == nil {
			continue
		}
		field := &r.fields[i]
		if kind := reflect.TypeOf(d); r.kinds[i] != kind {
			r.plans[i], r.kinds[i] = r.types.PlanScan(field.DataTypeOID, field.Format, d), kind
		}
		if err := r.plans[i].Scan(r.values[i], d); err != nil {
			return r.fail(pgx.ScanArgError{ColumnIndex: i, FieldName: field.Name, Err: err})
		}
	}
	return nil
}

func (r *rows) Values() ([]any, error) {
	if r.values == nil {
		return nil, errors.Join(r.err, errors.New("pgxtx: Values without a row"))
	}
	decoded := make([]any, len(r.fields))
	for i := range r.fields {
		var err error
		if decoded[i], err = r.decode(&r.fields[i], r.values[i]); err != nil {
			return nil, r.fail(err)
		}
	}
	return decoded, nil
}

func (r *rows) decode(field *pgconn.FieldDescription, value []byte) (any, error) {
	if value == nil {
		return nil, nil
	}
	if known, ok := r.types.TypeForOID(field.DataTypeOID); ok {
		return known.Codec.DecodeValue(r.types, field.DataTypeOID, field.Format, value)
	}
	if field.Format == pgx.TextFormatCode {
		return string(value), nil
	}
	return value, nil
}

// row is the first of rows.
type row struct{ rows *rows }

func (r row) Scan(dest ...any) error {
	defer r.rows.Close()
	if !r.rows.Next() {
		if r.rows.err != nil {
			return r.rows.err
		}
		return pgx.ErrNoRows
	}
	return r.rows.Scan(dest...)
}
