package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/text"
)

// Route sends the messages of some topics to a sink.
type Route struct {
	// Name is what operators call the sink of this route when they pause it (package steer,
	// oncemill pause sink). Several routes may have one name; they are paused together. At
	// most 255 bytes. Default: Topics.
	Name string

	// Topics is a pattern over the segments of a topic, which are separated by dots. A
	// segment matches itself, and * matches any one segment, empty or not. # is allowed
	// only at the end and matches zero or more remaining segments:
	//
	//	orders.created    this topic
	//	orders.*          orders.created, not orders and not orders.eu.created
	//	orders.#          orders and everything below it
	//	#                 every topic
	//
	// These are the patterns of AMQP's topic exchanges, with # at the end only.
	Topics string

	// Sink receives them. It may appear in several routes.
	Sink Sink
}

// Router is a sink that hands each message to the sink of the first route whose pattern
// matches its topic. A message that no route matches is refused; once you add a route,
// the next retry sends it. A last route # takes all others. To send one message to
// several places, configure the broker.
//
// The messages of a key keep their order across sinks while the relay has only one of
// them in flight at a time. If several are in flight, those to different sinks may
// overtake each other. If one of the sinks is [FromPublisher], a lane has at most four in
// flight.
type Router struct {
	routes []route
	sinks  []Sink
}

type route struct {
	segments []string // without the closing #
	rest     bool     // the pattern ends in #
	name     string
	sink     int // in Router.sinks
}

// NewRouter returns a router over routes, in their order. All mistakes are reported at
// once, each as an [*oncemill.ConfigError]: no route, a malformed pattern, a missing
// sink, or a pattern that an earlier one covers, so that its route would never be
// taken.
func NewRouter(routes ...Route) (*Router, error) {
	var errs []error
	r := &Router{}
	if len(routes) == 0 {
		errs = append(errs, &oncemill.ConfigError{Field: "relay.NewRouter routes", Value: "none", Problem: "at least one is needed"})
	}
	for i, given := range routes {
		bad := func(field, value, problem string) {
			errs = append(errs, &oncemill.ConfigError{Field: fmt.Sprintf("relay.NewRouter routes[%d].%s", i, field), Value: value, Problem: problem})
		}
		made, problem := parseRoute(given.Topics)
		made.name = cmp.Or(given.Name, given.Topics)
		if problem := text.Check(given.Name, maxSinkName); problem != "" {
			bad("Name", text.Quote(given.Name, 50), problem)
		}
		switch {
		case problem != "":
			bad("Topics", strconv.Quote(given.Topics), problem)
		default:
			for n, earlier := range r.routes {
				if earlier.covers(made) {
					bad("Topics", strconv.Quote(given.Topics), fmt.Sprintf("is never reached: routes[%d], %q, takes all of it", n, routes[n].Topics))
					break
				}
			}
		}
		switch {
		case given.Sink == nil:
			bad("Sink", "nil", "a sink is needed")
		case !reflect.TypeOf(given.Sink).Comparable():
			bad("Sink", fmt.Sprintf("%T", given.Sink), "its type must be comparable; use a pointer")
		default:
			made.sink = r.indexOf(given.Sink)
		}
		r.routes = append(r.routes, made)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return r, nil
}

// indexOf returns the index of s in sinks, and adds s if it is new.
func (r *Router) indexOf(s Sink) int {
	for i, known := range r.sinks {
		if known == s {
			return i
		}
	}
	r.sinks = append(r.sinks, s)
	return len(r.sinks) - 1
}

// Run runs each sink once, until ctx ends. If a sink fails, Run stops the others and
// returns its error.
func (r *Router) Run(ctx context.Context) error {
	group, running := errgroup.WithContext(ctx)
	for i, s := range r.sinks {
		group.Go(func() error {
			err := s.Run(running)
			if err == nil && running.Err() == nil {
				err = errors.New("its Run returned while it was needed")
			}
			if err != nil {
				return fmt.Errorf("sink %d of the router, %T: %w", i, s, err)
			}
			return nil
		})
	}
	return group.Wait()
}

// Publish hands each message to its sink, grouped by sink and in order.
func (r *Router) Publish(ctx context.Context, msgs []*Message, done func(*Message, error)) {
	shares := make([][]*Message, len(r.sinks))
	for from := 0; from < len(msgs); {
		sink := r.sinkOf(msgs[from].Topic)
		to := from + 1
		for to < len(msgs) && r.sinkOf(msgs[to].Topic) == sink {
			to++
		}
		switch run := msgs[from:to:to]; {
		case sink < 0:
			for _, m := range run {
				done(m, Refused(fmt.Errorf("no route for topic %q; add one to the router", m.Topic)))
			}
		case shares[sink] == nil:
			shares[sink] = run
		default:
			shares[sink] = append(shares[sink], run...)
		}
		from = to
	}
	for i, share := range shares {
		if len(share) > 0 {
			r.sinks[i].Publish(ctx, share, done)
		}
	}
}

// MaxInFlight returns the smallest bound of the sinks, since all messages in flight may
// belong to that one.
func (r *Router) MaxInFlight() int {
	least := math.MaxInt
	for _, s := range r.sinks {
		if s, ok := s.(interface{ MaxInFlight() int }); ok {
			least = min(least, s.MaxInFlight())
		}
	}
	return least
}

func (r *Router) mostOfLane() int {
	least := math.MaxInt
	for _, s := range r.sinks {
		if s, ok := s.(laneBound); ok {
			least = min(least, s.mostOfLane())
		}
	}
	return least
}

// Ready reports whether at least one sink reaches its broker, or cannot report it: a
// worker that reaches some of them is useful.
func (r *Router) Ready() bool {
	for _, s := range r.sinks {
		if s, ok := s.(interface{ Ready() bool }); !ok || s.Ready() {
			return true
		}
	}
	return false
}

// sinkOf returns the index of the sink for topic, or -1.
func (r *Router) sinkOf(topic string) int {
	for i := range r.routes {
		if r.routes[i].matches(topic) {
			return r.routes[i].sink
		}
	}
	return -1
}

// maxSinkName is the longest name that can be paused.
const maxSinkName = 255

// SinkOf returns the name of the route that a topic takes, empty for none.
func (r *Router) SinkOf(topic string) string {
	for i := range r.routes {
		if r.routes[i].matches(topic) {
			return r.routes[i].name
		}
	}
	return ""
}

func parseRoute(pattern string) (made route, problem string) {
	if pattern == "" {
		return route{}, "is empty; # matches every topic"
	}
	made.segments = strings.Split(pattern, ".")
	if last := len(made.segments) - 1; made.segments[last] == "#" {
		made.segments, made.rest = made.segments[:last], true
	}
	for _, segment := range made.segments {
		if segment != "*" && strings.ContainsAny(segment, "*#") {
			return route{}, "has * or # where they match nothing: * is a whole segment, # the whole last one"
		}
	}
	return made, ""
}

func (r *route) matches(topic string) bool {
	left, more := topic, true
	for _, segment := range r.segments {
		if !more {
			return false
		}
		var first string
		first, left, more = strings.Cut(left, ".")
		if segment != "*" && segment != first {
			return false
		}
	}
	return r.rest || !more
}

// covers reports whether r matches every topic that other matches.
func (r *route) covers(other route) bool {
	switch {
	case len(other.segments) < len(r.segments), !r.rest && (other.rest || len(other.segments) > len(r.segments)):
		return false
	}
	for i, segment := range r.segments {
		if segment != "*" && segment != other.segments[i] {
			return false
		}
	}
	return true
}
