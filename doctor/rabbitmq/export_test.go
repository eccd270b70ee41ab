package rabbitmq

import "time"

// SetLimit shortens the time that checks may take.
func (d *Doctor) SetLimit(limit time.Duration) { d.limit = limit }
