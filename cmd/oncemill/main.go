// Command oncemill keeps the tables of oncemill and runs the relay as a worker.
//
// Every flag can also be set by an environment variable: --amqp-url is
// ONCEMILL_AMQP_URL. A flag wins over its variable. Exit codes: 0 done (for
// relay: stopped by a signal), 1 failed, 2 used wrongly.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"strconv"
	"strings"
	"syscall"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
)

func main() {
	os.Exit(run(os.Args[1:]))
}

func run(args []string) int {
	// The first signal asks for a clean stop; after it the default action is
	// back, so that a second one ends the process at once.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)

	root := newRoot()
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	text := escaped(withoutPasswords(inFlags(err)), func(out *strings.Builder, r rune) { // it may quote what strangers wrote
		out.WriteString(strings.Trim(strconv.QuoteRuneToASCII(r), "'"))
	})
	fmt.Fprintln(os.Stderr, "oncemill:", strings.TrimPrefix(strings.ReplaceAll(text, "\noncemill: ", "\n"), "oncemill: "))
	if errors.Is(err, pq.ErrSSLNotSupported) {
		fmt.Fprintln(os.Stderr, "If the server is to be used without TLS, append ?sslmode=disable to the URL.")
	}
	var usage *usageError
	var value *oncemill.ConfigError
	if errors.As(err, &usage) || errors.As(err, &value) || errors.Is(err, dlq.ErrNoReason) {
		return 2
	}
	return 1
}

// ambiguous reports that the password of a URL may go on behind what looks like its end:
// the host that it is read to have would then be a part of the password.
func ambiguous(text string) bool {
	_, rest, _ := strings.Cut(text, "://")
	end := strings.IndexAny(rest+"/", "/?#")
	return strings.Count(rest[:end], "@") > 1 || strings.Contains(rest[end:], "@")
}

const howToEscape = `the URL has an "@" that may or may not end its password; write "@" as %40, "/" as %2F, "?" as %3F and "#" as %23 in it`

var password = regexp.MustCompile(`(?s)^([^\s:@]*):.*@`)

// withoutPasswords hides those of the URLs in a text, which may be arguments that were
// given in the wrong place. A password may hold anything, so all is hidden up to the last
// @ before the next URL.
func withoutPasswords(text string) string {
	const begin = "://"
	parts := strings.Split(text, begin)
	for i, part := range parts[1:] {
		parts[i+1] = password.ReplaceAllString(part, "$1:xxxxx@")
	}
	return strings.Join(parts, begin)
}
