package doctor

import "time"

// SetClock replaces the clock of this process.
func (d *Doctor) SetClock(now func() time.Time) { d.now = now }
