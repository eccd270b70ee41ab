package database

import "database/sql"

// Affected returns how many rows a statement has changed.
func Affected(result sql.Result, err error) (int64, error) {
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}
