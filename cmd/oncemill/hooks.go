package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"time"

	"github.com/spf13/pflag"

	"github.com/oncemill/oncemill/idempotency/conformance"
)

// hookCommands are commands of a shell for what the conformance suite cannot do over HTTP.
type hookCommands struct{ kill, start, freeze, thaw, expire, purge, effects string }

func (h *hookCommands) register(flags *pflag.FlagSet) {
	flags.StringVar(&h.kill, "kill-command", "", "kills the process behind the last URL, as kill -9 does")
	flags.StringVar(&h.start, "start-command", "", "starts that process again, in the background")
	flags.StringVar(&h.freeze, "freeze-command", "", "stops the process behind the last of several URLs, as kill -STOP does")
	flags.StringVar(&h.thaw, "thaw-command", "", "continues that process, as kill -CONT does")
	flags.StringVar(&h.expire, "expire-command", "", "lets all stored answers expire")
	flags.StringVar(&h.purge, "purge-command", "", "removes expired answers")
	flags.StringVar(&h.effects, "effects-command", "", "prints how often the operation has had its effect for CONFORMANCE_UNIQUE, _UUID or _NUMBER")
}

// hooks returns the commands as hooks for target.
func (h *hookCommands) hooks(target conformance.Target) (hooks conformance.Hooks, err error) {
	switch {
	case (h.kill == "") != (h.start == ""):
		return hooks, &usageError{errors.New("--kill-command and --start-command require each other")}
	case (h.freeze == "") != (h.thaw == ""):
		return hooks, &usageError{errors.New("--freeze-command and --thaw-command require each other")}
	case h.freeze != "" && len(target.URLs) < 2:
		return hooks, &usageError{errors.New("--freeze-command requires two URLs")}
	case h.effects != "" && target.Operation == nil:
		return hooks, &usageError{errors.New("--effects-command requires --path")}
	}
	url := "CONFORMANCE_URL=" + target.URLs[len(target.URLs)-1]
	run := func(command string) func(context.Context) error {
		if command == "" {
			return nil
		}
		return func(ctx context.Context) error { return shell(ctx, command, url).Run() }
	}
	hooks.Kill, hooks.Start = run(h.kill), run(h.start)
	hooks.Freeze, hooks.Thaw = run(h.freeze), run(h.thaw)
	hooks.Expire, hooks.Purge = run(h.expire), run(h.purge)
	if h.effects != "" {
		hooks.Effects = func(ctx context.Context, v conformance.Values) (int, error) {
			cmd := shell(ctx, h.effects, url,
				"CONFORMANCE_UNIQUE="+v.Unique, "CONFORMANCE_UUID="+v.UUID, "CONFORMANCE_NUMBER="+strconv.FormatInt(v.Number, 10))
			cmd.WaitDelay = time.Second // for a child that keeps the output open
			out, err := cmd.Output()
			if err != nil {
				return 0, err
			}
			n, err := strconv.Atoi(string(bytes.TrimSpace(out)))
			if err != nil {
				return 0, fmt.Errorf("the output %.80q is not a number", out)
			}
			return n, nil
		}
	}
	return hooks, nil
}

// shell returns a command. What it leaves in the background may keep standard error, which
// nobody reads to its end.
func shell(ctx context.Context, command string, env ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", command) //nolint:gosec // the operator's own
	cmd.Env, cmd.Stderr = append(os.Environ(), env...), os.Stderr
	return cmd
}
