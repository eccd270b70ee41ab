package check

// answers is C7: all answers to one key are the same, and it has one effect.
func (c *index) answers() Result {
	r := Result{Checker: "C7", Promise: "idempotent answers"}
	first := map[string]Answer{}
	for _, a := range c.Answers {
		c.counts.Answers++
		switch {
		case a.Status == 0:
			c.counts.Stalls++
			r.found("key %s: no answer within a minute", a.Key)
		case a.Other:
			if a.Status < 400 && !c.lostAnswer(a) {
				r.found("key %s: another request was answered with %d", a.Key, a.Status)
			}
		case a.Status >= 400:
			r.found("key %s: answered with %d", a.Key, a.Status)
		case first[a.Key].Status == 0:
			first[a.Key] = a
		case (first[a.Key].Status != a.Status || first[a.Key].Sum != a.Sum) && !c.lostAnswer(first[a.Key]):
			r.found("key %s: two different answers", a.Key)
		}
	}
	for key, n := range c.Answered {
		if n > 1 {
			c.counts.DoubleEffects += n - 1
			r.found("key %s: its request has taken effect %d times", key, n)
		}
	}
	for key, a := range first {
		if c.Answered[key] == 0 && !c.lostAnswer(a) {
			c.counts.Lost++
			r.found("key %s: answered, but without effect", key)
		}
	}
	return r
}
