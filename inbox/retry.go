package inbox

import (
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/oncemill/oncemill/internal/inboxstore"
)

// Retry configures how often and when a failing message is tried again. An attempt is a
// run of the handler that ended with an error of its own, or a panic. Failures that the
// message did not cause are no attempts and have no limit: a copy that is being handled
// elsewhere, a deadlock, a serialization failure, an outage of the database or of what the
// handler depends on, a shutdown.
type Retry struct {
	// Tries is the number of attempts within one delivery. Until the last one the message
	// keeps its place: no message of its key overtakes it. Default: 3. 1 to 100.
	Tries int

	// Backoff is the average time before the second attempt. It doubles with each. Default:
	// 50 ms. At most 1 min.
	Backoff time.Duration

	// Deliveries is the number of deliveries, of Tries attempts each, after which the
	// message becomes a dead letter. Without Config.DeadLetters it has no effect and
	// deliveries have no limit. Default: 5. 1 to 1,000.
	Deliveries int

	// Delay is the average time to the second delivery. It doubles with each, up to
	// DelayMax. Without Config.DeadLetters, or over a subscriber that cannot delay (see
	// Delivery), the subscriber decides. Default: 5 s.
	Delay time.Duration

	// DelayMax is the longest of these times. Default: 5 min, or Delay if that is
	// longer.
	DelayMax time.Duration

	// Unavailable is the number of deliveries that may end with an error marked by
	// Unavailable, while other messages are handled, before the message becomes a dead
	// letter. They are delayed like failed ones: by default for an hour and a quarter in
	// all. Without Config.DeadLetters it has no effect. Default: 20. 1 to 1,000.
	Unavailable int

	// Crashes is how often a message may crash its process before it becomes a dead letter.
	// Only deliveries that the broker has marked as redelivered are counted. From the second
	// on they count only if this inbox was handling no other message in the process.
	// Without Config.DeadLetters it has no effect. Default: 3. 1 to 100.
	Crashes int
}

func (r *Retry) resolve(bad func(field, value, problem string)) {
	count := func(field string, value *int, normal, most int) {
		if *value == 0 {
			*value = normal
		}
		if *value < 1 || *value > most {
			bad("Retry."+field, strconv.Itoa(*value), "must be 1 to "+strconv.Itoa(most)+", or 0 for "+strconv.Itoa(normal))
		}
	}
	wait := func(field string, value *time.Duration, normal, most time.Duration) {
		if *value == 0 {
			*value = normal
		}
		if *value < 0 || *value > most {
			bad("Retry."+field, value.String(), "must be positive and at most "+most.String()+", or 0 for "+normal.String())
		}
	}
	const day = 24 * time.Hour
	count("Tries", &r.Tries, 3, 100)
	wait("Backoff", &r.Backoff, 50*time.Millisecond, time.Minute)
	count("Deliveries", &r.Deliveries, 5, 1000)
	wait("Delay", &r.Delay, 5*time.Second, day)
	wait("DelayMax", &r.DelayMax, max(5*time.Minute, r.Delay), day)
	if r.DelayMax < r.Delay {
		bad("Retry.DelayMax", r.DelayMax.String(), "must not be below Delay")
	}
	count("Unavailable", &r.Unavailable, 20, 1000)
	count("Crashes", &r.Crashes, 3, 100)
}

// backoff returns the time before the next attempt of a delivery after n of them.
func (in *Inbox) backoff(n int) time.Duration {
	return in.jitter(double(in.cfg.Retry.Backoff, n-1, time.Minute))
}

// delay returns the time before the next delivery after n of them have failed.
func (in *Inbox) delay(n int) time.Duration {
	return in.jitter(double(in.cfg.Retry.Delay, n-1, in.cfg.Retry.DelayMax))
}

// again returns the time before the next delivery of a message whose last delivery failed
// with an error marked with p.
func (in *Inbox) again(p policy, rec inboxstore.Record) time.Duration {
	if p.unavailable {
		return in.delay(rec.Unavailable)
	}
	return max(p.after, in.delay(rec.Failures))
}

// double returns d * 2^times, at most most.
func double(d time.Duration, times int, most time.Duration) time.Duration {
	for range times {
		if d *= 2; d >= most {
			return most
		}
	}
	return d
}

// jitter spreads d evenly between a half and one and a half of it.
func jitter(d time.Duration) time.Duration { return d/2 + rand.N(d+1) }
