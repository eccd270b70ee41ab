package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/idempotency"
)

// mostKeyFile bounds what is read of a file.
const mostKeyFile = 64 << 20

// readKeyFile reads a file, or standard input if its name is -, unless the command is
// interrupted.
func readKeyFile(cmd *cobra.Command, flag, path string) ([]byte, error) {
	from, done, err := openInput(cmd.Context(), cmd.InOrStdin(), path)
	if err != nil {
		return nil, fmt.Errorf("--%s: %w", flag, err)
	}
	defer done()
	content, err := io.ReadAll(io.LimitReader(from, mostKeyFile+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("--%s: %w", flag, err)
	case len(content) > mostKeyFile:
		return nil, &usageError{fmt.Errorf("--%s: %s has more than %d bytes", flag, path, mostKeyFile)}
	}
	return content, nil
}

func newSettleKey(opts *options) *cobra.Command {
	var act dlq.Act
	var secrets keySecrets
	var status int
	var headers []string
	var body string
	var failed bool
	var retention, refuseFor time.Duration
	cmd := &cobra.Command{
		Use:   "settle HASH",
		Short: "Store the answer of a key whose outcome is unknown; a reason is required",
		Long: `Store the answer of a key whose outcome is unknown, once you have found out what happened.
All retries get it, for --retention; later the key runs again, or is first refused for
--refuse-for. Give --status, --header and --body as the handler would have answered; or
--failed if the effect did not happen and is not to happen with this key: retries get 422
settled-failed. If the request is to run again, release the key.

The key of a command (idempotency.Do) gets its result from --body, as encoding/json
encodes it, without --status. A command has no answer for --failed: release it. HASH is as
for show.`,
		Args: wrongUse(oneKey),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := reasonGiven(cmd, act); err != nil {
				return err
			}
			found, err := answerOf(cmd, failed, status, headers, body)
			if err != nil {
				return err
			}
			cfg, err := secrets.config(cmd)
			if err != nil {
				return err
			}
			cfg.Retention, cfg.RefuseFor = retention, refuseFor
			return opts.withKeys(cmd, cfg, func(admin *idempotency.Admin) error {
				key, err := admin.Find(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				if err := admin.Settle(cmd.Context(), key, found, idempotency.Act(act)); err != nil {
					return err
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s is settled\n", key.ID)
				return err
			})
		},
	}
	flags := cmd.Flags()
	flags.IntVar(&status, "status", 0, "status of the answer, 200 to 599")
	flags.StringArrayVar(&headers, "header", nil, `header of the answer, such as "Location: /orders/7"; may be repeated`)
	flags.StringVar(&body, "body", "", "file with the body of the answer, or with the result of a command")
	flags.BoolVar(&failed, "failed", false, "the effect did not happen, and is not to happen with this key")
	flags.DurationVar(&retention, "retention", 24*time.Hour, "how long retries get the answer")
	flags.DurationVar(&refuseFor, "refuse-for", 0, "how long a retry then gets 410, as with Config.Expiry.RefuseFor, before the key runs again")
	secrets.registerEncryption(cmd)
	actFlags(cmd, &act, "why (required)")
	return cmd
}

// answerOf returns the answer that the flags describe.
func answerOf(cmd *cobra.Command, failed bool, status int, headers []string, body string) (found idempotency.Recovery, err error) {
	if failed {
		if status != 0 || len(headers) > 0 || body != "" {
			return found, &usageError{errors.New("--failed has its own answer; leave --status, --header and --body away")}
		}
		return idempotency.Failed(), nil
	}
	if status == 0 && body == "" {
		return found, &usageError{errors.New("give --status, or --failed, or the result of a command as --body")}
	}
	found = idempotency.Recovery{Status: status, Header: http.Header{}}
	for _, line := range headers {
		name, value, ok := strings.Cut(line, ":")
		if !ok {
			return found, &usageError{fmt.Errorf("--header %q: must be a name, a colon and a value", line)}
		}
		found.Header.Add(strings.TrimSpace(name), strings.TrimSpace(value))
	}
	if body != "" {
		if found.Body, err = readKeyFile(cmd, "body", body); err != nil {
			return found, err
		}
	}
	return found, nil
}

func newReleaseKey(opts *options) *cobra.Command {
	var act dlq.Act
	var yes bool
	cmd := &cobra.Command{
		Use:   "release HASH",
		Short: "Let the request of a key run again; a reason is required",
		Long: `Delete the record of a key that is not running: the next request with the key runs the
handler again. If the effect has happened outside the handler's transaction, or if the key
is completed, it happens twice. The command asks you to type "run again"; --yes answers
that for scripts. HASH is as for show.

Services with Responses.Cache replay a completed key until it expires there.`,
		Args: wrongUse(oneKey),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := reasonGiven(cmd, act); err != nil {
				return err
			}
			return opts.withKeys(cmd, idempotency.AdminConfig{}, func(admin *idempotency.Admin) error {
				key, err := admin.Find(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				if !yes {
					warning := fmt.Sprintf("%s (%s) is %s. The next request with it runs the handler again; if its effect has happened, it may happen twice.", key.ID, oneLine(key.Endpoint), key.Phase)
					if err := confirmed(cmd, warning, "run again"); err != nil {
						return err
					}
				}
				if err := admin.Release(cmd.Context(), key, idempotency.Act(act)); err != nil {
					return err
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s is released\n", key.ID)
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask")
	actFlags(cmd, &act, "why (required)")
	return cmd
}

// confirmed asks the operator to type words. Anything else changes nothing.
func confirmed(cmd *cobra.Command, warning, words string) error {
	fmt.Fprintf(cmd.ErrOrStderr(), "%s\nType %q to do it: ", warning, words)
	from, done, err := openInput(cmd.Context(), cmd.InOrStdin(), "-")
	if err != nil {
		return err
	}
	defer done()
	line, err := bufio.NewReader(io.LimitReader(from, 1024)).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("read the confirmation: %w", err)
	}
	if strings.TrimSpace(line) != words {
		return errors.New("not confirmed; nothing was done")
	}
	return nil
}

func newEraseKeys(opts *options) *cobra.Command {
	var act dlq.Act
	var scope scopeFlags
	var secrets keySecrets
	var yes bool
	cmd := &cobra.Command{
		Use:   "erase",
		Short: "Erase everything that is stored for a caller's keys; a reason is required",
		Long: `Erase all keys and answers of a caller: of --tenant and --principal as Config.Scope returns
them, or of the hash in --caller. A retry with an erased key runs again, so withdraw the
caller's credentials first. Keys that are running are left, and counted: repeat the command
then. The audit gets the numbers, and nothing of the caller. If nothing is stored of the
caller the exit code is 1: with another --secret-file than the engines have, nobody is found.

Services with Responses.Cache replay erased keys until they expire there.`,
		Example: `  oncemill keys erase --tenant acme --principal 4711 --reason "request 2026-117"`,
		Args:    wrongUse(noCommand),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := reasonGiven(cmd, act); err != nil {
				return err
			}
			cfg, err := secrets.config(cmd)
			if err != nil {
				return err
			}
			return opts.withKeys(cmd, cfg, func(admin *idempotency.Admin) error {
				caller, err := scope.of(admin)
				if err != nil {
					return err
				}
				if caller == nil {
					return &usageError{errors.New("give --caller, or --tenant and --principal")}
				}
				if !yes {
					if err := confirmed(cmd, "All keys and answers of the caller are erased. A retry with one of them runs again.", "erase"); err != nil {
						return err
					}
				}
				done, err := admin.Erase(cmd.Context(), *caller, idempotency.Act(act))
				fmt.Fprintf(cmd.OutOrStdout(), "%d keys erased, %d left\n", done.Keys, done.Left)
				switch {
				case err != nil:
				case done.Left > 0:
					err = errors.New("keys were running or being changed; erase again when they have ended")
				case done.Keys == 0:
					err = errors.New("nothing is stored of this caller; check --tenant and --principal, and that --secret-file has Keys.Secret of the engines, or take --caller from oncemill keys list")
				}
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask")
	scope.register(cmd)
	secrets.registerSecret(cmd)
	actFlags(cmd, &act, "why (required); do not write personal data here")
	return cmd
}
