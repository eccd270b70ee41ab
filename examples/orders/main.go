package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/oncemill/oncemill/examples/internal/demo"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case errors.Is(err, demo.ErrBroken): // the last line has said it
		os.Exit(1)
	case err != nil:
		fmt.Fprintln(os.Stderr, "orders:", err)
		os.Exit(1)
	}
}

var commands = map[string]func(ctx context.Context, args []string) error{
	"migrate":   runMigrate,
	"inventory": runInventory,
	"relay":     runRelay,
	"api":       runAPI,
	"demo":      func(ctx context.Context, args []string) error { return runDemo(ctx, args, os.Stdout) },
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 || commands[args[0]] == nil {
		fmt.Fprintln(os.Stderr, "usage: orders migrate | inventory | relay | api | demo   (each knows -h)")
		return flag.ErrHelp
	}
	return commands[args[0]](ctx, args[1:])
}
