package rabbitmq

import (
	"errors"
	"fmt"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// errCallTimeout is the reason for dropping a connection that does not answer a request.
var errCallTimeout = errors.New("no answer from the broker in time")

// call is a request to the link. Openings and declarations are answered to the lane. A lane that
// opens a channel names what it will need declared on the way.
type call struct {
	lane    *lane
	open    bool
	declare *route
	discard *channel
}

// reply answers a call of a lane.
type reply struct {
	link    *link
	channel *channel // opened, unless err
	route   *route   // declared, unless err
	err     error    // an unavailable outcome
}

// answer serves calls. Lanes that a worker has just taken, or whose connection was lost, all need a
// channel at once, and a busy broker answers late: one after the other, the last of 32 lanes
// would wait for 64 answers. So requests are made side by side.
func (l *link) answer() {
	for {
		select {
		case <-l.stop:
			return
		case <-l.calls.wake:
		}
		for _, c := range l.calls.take(nil) {
			switch {
			case c.open:
				if c.declare != nil {
					l.declare(c.declare.exchange, func(error) {}) // the lane asks again, and has the answer then
				}
				l.group.Go(func() {
					channel, err := l.openChannel(c.lane.running.settings.Window)
					c.lane.replies.put(reply{link: l, channel: channel, err: unavailable("open a channel", err)})
				})
			case c.declare != nil:
				l.declare(c.declare.exchange, func(err error) {
					c.lane.replies.put(reply{link: l, route: c.declare, err: unavailable("declare exchange", err)})
				})
			case c.discard != nil:
				l.discard(c.discard)
			}
		}
	}
}

func unavailable(act string, err error) error {
	if err == nil {
		return nil
	}
	return relay.Unavailable(fmt.Errorf("%s: %w", act, err))
}

func (l *link) openChannel(window int) (*channel, error) {
	var c *channel
	err := l.within(outbox.Lanes, func() error {
		ch, err := l.conn.Channel()
		if err != nil {
			return err
		}
		c = newChannel(l, ch, window)
		return ch.Confirm(false)
	})
	if errors.Is(err, amqp.ErrChannelMax) && (l.conn.Config.ChannelMax == 0 || l.conn.Config.ChannelMax >= minChannels) {
		l.net.abort() // discarded channels that were never closed take up all numbers
	}
	if err != nil {
		return nil, err
	}
	return c, nil
}

// discard closes a channel that was given up. The broker may never answer on it. Other
// channels are not affected: nobody waits, and the end of the connection ends the call. An
// error means that the channel is closed.
func (l *link) discard(c *channel) {
	l.group.Go(func() { _ = nopanic.Call(c.amqp.Close) })
}

// declarations is how many exchanges are declared at a time, each on a channel of its own: a
// declaration that is refused closes the channel.
const declarations = 4

// declare declares an exchange once per connection, and tells all who wait for it.
func (l *link) declare(exchange string, done func(error)) {
	if l.hasDeclared(exchange) {
		done(nil)
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	waiting, running := l.declaring[exchange]
	l.declaring[exchange] = append(waiting, done)
	if running {
		return
	}
	l.group.Go(func() {
		err := l.declareExchange(exchange)
		for _, done := range l.hasAnswered(exchange, err) {
			done(err)
		}
	})
}

// hasAnswered notes the answer to a declaration and returns who waits for it.
func (l *link) hasAnswered(exchange string, err error) []func(error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	waiting := l.declaring[exchange]
	delete(l.declaring, exchange)
	if err == nil {
		if len(l.declared) >= maxRoutes {
			clear(l.declared)
		}
		l.declared[exchange] = struct{}{}
	}
	return waiting
}

func (l *link) declareExchange(exchange string) error {
	control := <-l.controls
	topology := l.running.settings.topology
	err := l.within(declarations, func() (err error) {
		if control == nil || control.IsClosed() {
			if control, err = l.conn.Channel(); err != nil {
				return err
			}
		}
		return topology.TopologyBuilder.ExchangeDeclare(control, exchange, topology)
	})
	l.controls <- control
	if err != nil {
		return fmt.Errorf("%q: %w", exchange, err)
	}
	return nil
}

// hasDeclared is also true for the default exchange, which cannot be declared.
func (l *link) hasDeclared(exchange string) bool {
	if exchange == "" {
		return true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	_, ok := l.declared[exchange]
	return ok
}

// forgetDeclared is called when an exchange has turned out to be missing.
func (l *link) forgetDeclared() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.declared)
}

// within runs a request that the broker answers. amqp091-go waits for the answer without a
// limit. If it does not arrive within CallTimeout, the connection is dropped, which makes
// every request fail. A blocked broker reads no requests, so the wait goes on. It begins anew with
// each other request that is granted, if it may be one of so many that wait for each other: a slow
// broker opens the channels of all lanes one after the other, and a TopologyBuilder may declare one
// exchange at a time. What is refused would be asked for again and again, so it does not count.
func (l *link) within(waiting int, request func() error) error {
	limit, began := l.running.settings.CallTimeout, time.Now()
	answered := make(chan error, 1)
	go func() { answered <- nopanic.Call(request) }()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for {
		select {
		case err := <-answered:
			if err == nil {
				l.grantedAt.Store(time.Now().UnixNano())
			}
			return err
		case <-timer.C:
			if l.blocked.Load() {
				timer.Reset(limit)
				continue
			}
			moved := began
			if at := time.Unix(0, l.unblockedAt.Load()); at.After(moved) {
				moved = at
			}
			if at := time.Unix(0, l.grantedAt.Load()); at.After(moved) && time.Since(moved) < time.Duration(waiting)*limit {
				moved = at
			}
			if rest := limit - time.Since(moved); rest > 0 {
				timer.Reset(min(rest, limit))
				continue
			}
			l.net.abort()
			return errors.Join(errCallTimeout, <-answered)
		}
	}
}
