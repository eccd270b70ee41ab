package idempotency

// At has hook called at the named points of every request.
func (e *Engine) At(hook func(point string)) { e.at = hook }
