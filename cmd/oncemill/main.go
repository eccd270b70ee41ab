// Command oncemill creates and upgrades oncemill's tables, runs the relay, and handles dead
// letters.
//
// Every flag can also be set by an environment variable: --amqp-url is ONCEMILL_AMQP_URL. A
// flag overrides its variable. Exit codes: 0 success (for relay: stopped by a signal),
// 1 failure, 2 wrong usage.
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
)

func main() {
	os.Exit(run(os.Args[1:]))
}

func run(args []string) int {
	// The first signal requests a clean stop. Then the default action is restored, so
	// that a second one ends the process at once.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)

	root := newRoot()
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	text := escaped(withoutPasswords(inFlags(err)), func(out *strings.Builder, r rune) { // it may quote untrusted text
		out.WriteString(strings.Trim(strconv.QuoteRuneToASCII(r), "'"))
	})
	fmt.Fprintln(os.Stderr, "oncemill:", strings.TrimPrefix(strings.ReplaceAll(text, "\noncemill: ", "\n"), "oncemill: "))
	if errors.Is(err, pq.ErrSSLNotSupported) {
		fmt.Fprintln(os.Stderr, "If the server is to be used without TLS, append ?sslmode=disable to the URL.")
	}
	var usage *usageError
	var value *oncemill.ConfigError
	if errors.As(err, &usage) || errors.As(err, &value) {
		return 2
	}
	return 1
}

// ambiguous reports whether the end of a URL's password is unclear. A part of the password
// could then be taken for the host, and shown.
func ambiguous(text string) bool {
	_, rest, _ := strings.Cut(text, "://")
	end := strings.IndexAny(rest+"/", "/?#")
	return strings.Count(rest[:end], "@") > 1 || strings.Contains(rest[end:], "@")
}

const howToEscape = `it is not clear which "@" ends the password in the URL; in the password, write "@" as %40, "/" as %2F, "?" as %3F and "#" as %23`

var password = regexp.MustCompile(`(?s)^([^\s:@]*):.*@`)

// withoutPasswords hides the passwords of all URLs in a text. An error may quote an argument
// that was given in the wrong place. A password may contain any character, so everything up
// to the last @ before the next URL is hidden.
func withoutPasswords(text string) string {
	const begin = "://"
	parts := strings.Split(text, begin)
	for i, part := range parts[1:] {
		parts[i+1] = password.ReplaceAllString(part, "$1:xxxxx@")
	}
	return strings.Join(parts, begin)
}
