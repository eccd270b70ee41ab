// Command oncemill creates and upgrades oncemill's tables, runs the relay, handles dead letters,
// and tests the promises on the user's own servers.
//
// Every flag can also be set by an environment variable, --amqp-url by ONCEMILL_AMQP_URL, and in a
// YAML file that --config names. A flag overrides its variable, which overrides the file.
//
// Exit codes: 0 success (for relay: stopped by a signal), 1 failure, 2 wrong usage.
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

var (
	password = regexp.MustCompile(`(?s)^([^\s:@]*):.*@`)

	// urlBegin finds where URLs certainly begin, anyBegin where they may.
	urlBegin = regexp.MustCompile(`(?:^|[\s"'(\[{<=,;])[A-Za-z][A-Za-z0-9+.-]*://`)
	anyBegin = regexp.MustCompile(`://`)
)

// withoutPasswords hides the passwords of all URLs in a text. An error may quote an argument
// that was given in the wrong place. A password may contain any character, so everything up
// to the last @ before the next URL is hidden. What looks like another URL may be part of
// the password, so each possible end counts.
func withoutPasswords(text string) string {
	return hidePasswords(hidePasswords(text, urlBegin), anyBegin)
}

func hidePasswords(text string, begin *regexp.Regexp) string {
	var out strings.Builder
	last := 0 // where the part begins that is not written yet
	found := begin.FindAllStringIndex(text, -1)
	for i, at := range found {
		out.WriteString(text[last:at[1]])
		last = len(text)
		if i+1 < len(found) {
			last = found[i+1][0]
		}
		out.WriteString(password.ReplaceAllString(text[at[1]:last], "$1:xxxxx@"))
	}
	out.WriteString(text[last:])
	return out.String()
}
