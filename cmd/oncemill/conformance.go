package main

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill/idempotency/conformance"
)

type conformanceOptions struct {
	urls           []string
	headers        []string
	keyHeader      string
	replayedHeader string
	optional       bool
	patience       time.Duration
	run            string
	operation      operationOptions
	hooks          hookCommands
}

// operationOptions describe a real operation.
type operationOptions struct {
	path, method, body, contentType string
	other, otherMethod              string
	otherPaths, tenant, user        []string
}

func newConformance() *cobra.Command {
	var o conformanceOptions
	cmd := &cobra.Command{
		Use:   "conformance",
		Short: "Test how an HTTP service treats Idempotency-Key, from outside",
		Long: `Test how an HTTP service treats Idempotency-Key. If the service serves the
conformance probe (see oncemill probe and package idempotency/conformance), all
cases run. With --path, which names a real operation, those cases run that need
no probe. The operation is executed hundreds of times: use a test system.

In --path, --header and the files of --body and --other, {{unique}}, {{uuid}} and
{{number}} stand for values that copies of a request share and other requests do
not. Use one where the operation needs another id each time.

Some cases need help from the service's side. The commands that give it run in
/bin/sh with the last --url in CONFORMANCE_URL. A case that is skipped names what
it needs.

Exit code 1 if a case fails.`,
		Example: `  oncemill conformance --url http://127.0.0.1:8080
  oncemill conformance --url http://127.0.0.1:8080 --path /orders --body order.json --other other.json \
    --tenant 'X-Tenant: b' --user 'Authorization: Bearer b' --other-path '/orders?express=1' \
    --kill-command 'kill -9 $(cat shop.pid)' --start-command './shop & echo $! > shop.pid' \
    --effects-command './count-orders "$CONFORMANCE_UNIQUE"'`,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.test(cmd) },
	}
	flags := cmd.Flags()
	flags.StringArrayVar(&o.urls, "url", nil, "URL of the service; repeat it for several processes that share a store (required)")
	flags.StringArrayVar(&o.headers, "header", nil, `header of every request, "Name: value"; may be repeated`)
	flags.StringVar(&o.keyHeader, "key-header", "Idempotency-Key", "name of the key's header")
	flags.StringVar(&o.replayedHeader, "replayed-header", "Idempotency-Replayed", "name of the header that marks replays")
	flags.BoolVar(&o.optional, "optional-key", false, "the service accepts requests without a key")
	flags.DurationVar(&o.patience, "patience", 2*time.Minute, "how long to wait for an answer or for a key in progress; longer than a lease")
	flags.StringVar(&o.run, "run", "", "run only cases whose name contains this")
	flags.StringVar(&o.operation.path, "path", "", "path of a real operation, with its query, for a service without a probe")
	flags.StringVar(&o.operation.method, "method", http.MethodPost, "method of the operation")
	flags.StringVar(&o.operation.body, "body", "", "file with the body of a valid request")
	flags.StringVar(&o.operation.contentType, "content-type", "application/json", "content type of the bodies")
	flags.StringVar(&o.operation.other, "other", "", "file with the body of another valid request")
	flags.StringArrayVar(&o.operation.otherPaths, "other-path", nil, "another path or query at which the body is valid; may be repeated")
	flags.StringVar(&o.operation.otherMethod, "other-method", "", "another method that the path takes")
	flags.StringArrayVar(&o.operation.tenant, "tenant", nil, `what names another tenant: "Name: value" or a path with its query; may be repeated`)
	flags.StringArrayVar(&o.operation.user, "user", nil, "what names another user, in the same form")
	o.hooks.register(flags)
	return cmd
}

func (o *conformanceOptions) target() (target conformance.Target, err error) {
	if len(o.urls) == 0 {
		return target, &usageError{errors.New("--url is required")}
	}
	for _, u := range o.urls {
		target.URLs = append(target.URLs, strings.TrimRight(u, "/"))
	}
	if o.patience <= 0 {
		return target, &usageError{errors.New("--patience must be positive")}
	}
	target.KeyHeader, target.ReplayedHeader, target.OptionalKey, target.Patience = o.keyHeader, o.replayedHeader, o.optional, o.patience
	if target.Header, err = headers("--header", o.headers); err != nil {
		return target, err
	}
	if target.Operation, err = o.operation.operation(); err != nil {
		return target, err
	}
	target.Hooks, err = o.hooks.hooks(target)
	return target, err
}

// headers parses headers, the values of a flag.
func headers(flag string, values []string) (http.Header, error) {
	parsed := http.Header{}
	for _, h := range values {
		name, value, ok := strings.Cut(h, ":")
		if !ok {
			return nil, &usageError{errors.New(flag + `: must be "Name: value"`)}
		}
		parsed.Add(strings.TrimSpace(name), strings.TrimSpace(value))
	}
	return parsed, nil
}

// operation returns nil without a path.
func (o *operationOptions) operation() (*conformance.Operation, error) {
	if o.path == "" {
		if o.body+o.other+o.otherMethod != "" || len(o.otherPaths)+len(o.tenant)+len(o.user) > 0 {
			return nil, &usageError{errors.New("--body, --other, --other-path, --other-method, --tenant and --user require --path")}
		}
		return nil, nil
	}
	op := &conformance.Operation{Path: o.path, Method: o.method, ContentType: o.contentType, OtherPaths: o.otherPaths, OtherMethod: o.otherMethod}
	var bodyErr, otherErr, tenantErr, userErr error
	op.Body, bodyErr = content(o.body)
	op.Other, otherErr = content(o.other)
	op.Tenant, tenantErr = caller("--tenant", o.tenant)
	op.User, userErr = caller("--user", o.user)
	return op, errors.Join(bodyErr, otherErr, tenantErr, userErr)
}

// content reads a file, if one is named.
func content(file string) ([]byte, error) {
	if file == "" {
		return nil, nil
	}
	text, err := os.ReadFile(file) //nolint:gosec // the operator names it
	if err != nil {
		return nil, &usageError{err}
	}
	return text, nil
}

// caller parses what names a caller, the values of a flag.
func caller(flag string, values []string) (*conformance.Caller, error) {
	if len(values) == 0 {
		return nil, nil
	}
	var c conformance.Caller
	isPath := func(value string) bool { return strings.HasPrefix(value, "/") }
	for _, value := range values {
		if isPath(value) {
			if c.Path != "" {
				return nil, &usageError{errors.New(flag + ": a caller has one path")}
			}
			c.Path = value
		}
	}
	var err error
	c.Header, err = headers(flag, slices.DeleteFunc(slices.Clone(values), isPath))
	return &c, err
}

func (o *conformanceOptions) test(cmd *cobra.Command) error {
	target, err := o.target()
	if err != nil {
		return err
	}
	chosen := slices.DeleteFunc(conformance.Cases(), func(c conformance.Case) bool { return !strings.Contains(c.Name, o.run) })
	if len(chosen) == 0 {
		return &usageError{fmt.Errorf("--run %q: no case name contains it", o.run)}
	}
	ctx := cmd.Context()
	suite, err := conformance.New(ctx, target)
	if err != nil {
		return err
	}
	defer suite.Close()
	var passed, failed, skipped int
	out := cmd.OutOrStdout()
	for _, c := range chosen {
		switch result := suite.Run(ctx, c); {
		case ctx.Err() != nil:
			return ctx.Err()
		case result.Skipped != "":
			skipped++
			fmt.Fprintf(out, "skip  %s: %s\n", result.Name, result.Skipped)
		case result.Err != nil:
			failed++
			fmt.Fprintf(out, "FAIL  %s: %v\n", result.Name, result.Err)
		default:
			passed++
			fmt.Fprintf(out, "ok    %s (%s)\n", result.Name, result.Took.Round(time.Millisecond))
		}
	}
	fmt.Fprintf(out, "%d passed, %d failed, %d skipped\n", passed, failed, skipped)
	if failed > 0 {
		return fmt.Errorf("cases failed: %d", failed)
	}
	return nil
}
