package conformance

import (
	"context"
	"errors"
	"fmt"
)

// Hooks do what the suite cannot do over HTTP. Each returns when it has taken effect. Default:
// none; cases that need a missing hook are skipped.
type Hooks struct {
	// Kill ends the process behind the last URL, as kill -9 does. Start runs it again; the
	// suite waits until it answers.
	Kill, Start func(ctx context.Context) error

	// Freeze stops the process behind the last of several URLs, as SIGSTOP does. Thaw
	// continues it, as SIGCONT does.
	Freeze, Thaw func(ctx context.Context) error

	// Expire lets every stored answer expire, for example by an update of the store.
	Expire func(ctx context.Context) error

	// Purge removes what has expired, and nothing else.
	Purge func(ctx context.Context) error

	// Effects counts how often an Operation has taken effect for the values of one request.
	// With it the suite also notices an effect too many behind the right answer.
	Effects func(ctx context.Context, values Values) (int, error)
}

// check returns an error for hooks that target cannot use.
func (h Hooks) check(target Target) error {
	var errs []error
	if (h.Kill == nil) != (h.Start == nil) {
		errs = append(errs, errors.New("each of Kill and Start needs the other one"))
	}
	if (h.Freeze == nil) != (h.Thaw == nil) {
		errs = append(errs, errors.New("each of Freeze and Thaw needs the other one"))
	}
	if h.Freeze != nil && len(target.URLs) < 2 {
		errs = append(errs, errors.New("to Freeze a process takes two URLs: the first one gets the requests meanwhile"))
	}
	if h.Effects != nil && target.Operation == nil {
		errs = append(errs, errors.New("Effects needs an Operation: a probe counts by itself"))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("conformance: hooks: %w", err)
	}
	return nil
}

// hook calls a hook; an error fails the case.
func (x *session) hook(name string, call func(context.Context) error) {
	if err := call(x.ctx); err != nil {
		x.fail("hook %s: %v", name, err)
	}
}

// last is the number of the URL whose process hooks kill or stop.
func (x *session) last() int { return len(x.target.URLs) }

// killed calls test after the death of the last process. If there are others, it starts again
// after test, otherwise before.
func (x *session) killed(test func()) {
	x.hook("Kill", x.target.Hooks.Kill)
	if x.last() == 1 {
		x.restart()
		test()
		return
	}
	defer x.restart()
	test()
}

// restart starts the last process, and waits until it answers.
func (x *session) restart() {
	x.hook("Start", x.target.Hooks.Start)
	x.until("the process to start", func() bool {
		x.http.CloseIdleConnections() // they led to the dead process
		_, _, err := x.fetch(x.ctx, x.target.URLs[x.last()-1]+"/", nil)
		return err == nil
	})
}
