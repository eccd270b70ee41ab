package main

import (
	"context"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/status"
)

func newKeys(opts *options) *cobra.Command {
	keys := newKeyList(opts, "keys")
	keys.AddCommand(newKeyList(opts, "list"), newShowKey(opts), newSettleKey(opts), newReleaseKey(opts), newEraseKeys(opts))
	return keys
}

// keySecrets are the flags for what engines are configured with.
type keySecrets struct {
	secretFile, encryptionKey string
}

func (k *keySecrets) registerEncryption(cmd *cobra.Command) {
	cmd.Flags().StringVar(&k.encryptionKey, "encryption-key", "", "ID=FILE: id of the key of Responses.Encryption, and a file with its 16, 24 or 32 bytes; needed where engines encrypt")
}

func (k *keySecrets) registerSecret(cmd *cobra.Command) {
	cmd.Flags().StringVar(&k.secretFile, "secret-file", "", "file with the bytes of Keys.Secret; needed with --tenant or --principal where engines have it")
}

// config returns the AdminConfig that the flags describe.
func (k *keySecrets) config(cmd *cobra.Command) (cfg idempotency.AdminConfig, err error) {
	if k.secretFile != "" {
		content, err := readKeyFile(cmd, "secret-file", k.secretFile)
		if err != nil {
			return cfg, err
		}
		cfg.Secret = oncemill.NewSecret(content)
	}
	if k.encryptionKey == "" {
		return cfg, nil
	}
	id, path, ok := strings.Cut(k.encryptionKey, "=")
	if !ok || id == "" || path == "" {
		return cfg, &usageError{errors.New("--encryption-key: must be ID=FILE")}
	}
	content, err := readKeyFile(cmd, "encryption-key", path)
	if err != nil {
		return cfg, err
	}
	cfg.Encryption = &idempotency.Encryption{Current: id, Keys: map[string]oncemill.Secret{id: oncemill.NewSecret(content)}, AcceptPlain: true}
	return cfg, nil
}

// readKeys opens the database and its idempotency keys for what only reads, with a time limit.
func (o *options) readKeys(cmd *cobra.Command, cfg idempotency.AdminConfig, fn func(context.Context, *idempotency.Admin) error) error {
	return o.reading(cmd, func(ctx context.Context, db *sql.DB, where oncemill.Config) error {
		admin, err := openKeys(ctx, db, where, cfg, idempotency.Migrations)
		if err != nil {
			return err
		}
		return fn(ctx, admin)
	})
}

// withKeys opens the database, its idempotency keys and the audit.
func (o *options) withKeys(cmd *cobra.Command, cfg idempotency.AdminConfig, fn func(*idempotency.Admin) error) error {
	return acting(o, cmd, o.database.with, func(ctx context.Context, db *sql.DB, where oncemill.Config) (*idempotency.Admin, error) {
		return openKeys(ctx, db, where, cfg, idempotency.Migrations, audit.Migrations)
	}, fn)
}

func openKeys(ctx context.Context, db *sql.DB, where oncemill.Config, cfg idempotency.AdminConfig, sets ...oncemill.Migrations) (*idempotency.Admin, error) {
	if err := oncemill.CheckMigrated(ctx, db, where, sets...); err != nil {
		return nil, err
	}
	store, err := idempotency.NewSQLStore(db, idempotency.StoreConfig{Database: where})
	if err != nil {
		return nil, err
	}
	return idempotency.NewAdmin(store, cfg)
}

// scopeFlags are the flags that select a caller.
type scopeFlags struct {
	caller, tenant, principal string
}

func (s *scopeFlags) register(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&s.caller, "caller", "", "only keys of the caller with this hash, as listed")
	flags.StringVar(&s.tenant, "tenant", "", "only keys of the scope with this tenant, and --principal")
	flags.StringVar(&s.principal, "principal", "", "only keys of the scope with this principal, and --tenant")
}

// of returns the selected caller, or nil.
func (s *scopeFlags) of(admin *idempotency.Admin) (*idempotency.Caller, error) {
	byScope := s.tenant != "" || s.principal != ""
	switch {
	case s.caller != "" && byScope:
		return nil, &usageError{errors.New("give --caller, or --tenant and --principal")}
	case byScope:
		caller := admin.CallerOf(idempotency.Scope{Tenant: s.tenant, Principal: s.principal})
		return &caller, nil
	case s.caller == "":
		return nil, nil
	}
	raw, err := hex.DecodeString(s.caller)
	if err != nil || len(raw) != len(idempotency.Caller{}) {
		return nil, &usageError{fmt.Errorf("--caller %q: must be 32 hexadecimal digits", s.caller)}
	}
	caller := idempotency.Caller(raw)
	return &caller, nil
}

// newKeyList returns a command that lists keys: "keys" and "keys list".
func newKeyList(opts *options, use string) *cobra.Command {
	var filter idempotency.Filter
	var scope scopeFlags
	var secrets keySecrets
	var states []string
	var since, until, after string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   use,
		Short: "List idempotency keys: by default those that have begun and not ended",
		Long: `List idempotency keys: by default those that have begun and not ended, the oldest first.
Keys and scopes are stored as hashes, and shown as such; logs have the first 12 digits.

  running         an owner runs the request
  interrupted     the owner died, was late or failed. With Middleware the outcome is
                  unknown: find it out, then settle the key. With TxMiddleware there was
                  no effect, and the request runs when it is sent again.
  completed       retries get the stored answer
  not_replayable  it ran once; its answer is not stored
  expired         its retention has ended

The first two are found by an index. For the others the table is read, 100,000 keys in a
call; the last line of the list shows how to go on.

Keys that wait for nobody are not listed as conflicts: how often copies were refused is in
the metrics idempotency.in_progress_conflicts_total and mismatched_hash_conflicts_total,
by endpoint.`,
		Example: `  oncemill keys --state interrupted --until 1h
  oncemill keys list --route "POST /orders" --state completed --json
  oncemill keys show 5b1cf7e09a21
  oncemill keys settle 5b1cf7e09a21 --status 201 --header "Location: /orders/7" --reason "provider has charge 88"
  oncemill keys release 5b1cf7e09a21 --reason "provider has no charge"`,
		Args: wrongUse(noCommand),
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, state := range states {
				filter.Phases = append(filter.Phases, idempotency.Phase(strings.TrimSpace(state)))
			}
			var err error
			if filter.Since, filter.Until, err = span(since, until, time.Now()); err != nil {
				return err
			}
			if after != "" {
				raw, err := hex.DecodeString(after)
				if err != nil || len(raw) != len(filter.After) {
					return &usageError{fmt.Errorf("--after %q: must be 64 hexadecimal digits, as the list before shows", after)}
				}
				filter.After = idempotency.ID(raw)
			}
			cfg, err := secrets.config(cmd)
			if err != nil {
				return err
			}
			return opts.readKeys(cmd, cfg, func(ctx context.Context, admin *idempotency.Admin) error {
				if filter.Caller, err = scope.of(admin); err != nil {
					return err
				}
				page, err := admin.List(ctx, filter)
				if err != nil {
					return err
				}
				return printKeys(cmd.OutOrStdout(), page, asJSON)
			})
		},
	}
	flags := cmd.Flags()
	flags.StringSliceVar(&states, "state", []string{string(idempotency.PhaseRunning), string(idempotency.PhaseInterrupted)}, "only these states: running, interrupted, completed, not_replayable, expired")
	flags.StringVar(&filter.Endpoint, "route", "", `only keys of this method and route, such as "POST /orders", or "command " and a name`)
	scope.register(cmd)
	secrets.registerSecret(cmd)
	flags.StringVar(&since, "since", "", "only what was claimed at or after a time such as 2006-01-02T15:04:05Z, or within a duration such as 30m")
	flags.StringVar(&until, "until", "", "only what was claimed before a time, or longer ago than a duration")
	flags.IntVar(&filter.Limit, "limit", 100, "maximum number of keys to list, at most 1000")
	flags.StringVar(&after, "after", "", "list what follows this hash, as the list before shows")
	flags.BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func printKeys(w io.Writer, page idempotency.Page, asJSON bool) error {
	next := ""
	if page.More {
		next = hex.EncodeToString(page.Next[:])
	}
	if asJSON {
		all := make([]shownKey, len(page.Keys))
		for i := range page.Keys {
			all[i] = shownOf(page.Keys[i])
		}
		return printJSON(w, struct {
			Keys []shownKey
			Next string `json:",omitempty"` // for --after
			Cut  bool   `json:",omitempty"`
		}{all, next, page.Cut}, "")
	}
	table := newTable("KEY", "STATE", "CLAIMED", "ENDS IN", "ROUTE", "STATUS", "SIZE", "CALLER", "TRACE")
	for _, k := range page.Keys {
		left := k.ExpiresIn
		if k.Phase == idempotency.PhaseRunning {
			left = k.LeaseLeft
		}
		table.row(k.ID, k.Phase, k.CreatedAt, left.Round(time.Second), k.Endpoint, k.Status, k.Size, hex.EncodeToString(k.Caller[:]), k.TraceID)
	}
	if err := table.print(w); err != nil {
		return err
	}
	var err error
	switch {
	case page.Cut:
		_, err = fmt.Fprintln(w, "There are more: raise --limit, or select by --caller, --route, --since or --until")
	case page.More:
		_, err = fmt.Fprintf(w, "There may be more: --after %s\n", next)
	}
	return err
}

// shownKey is a key as JSON: the fields of [idempotency.Key], with hashes in hexadecimal.
type shownKey struct {
	ID            string
	Caller        string
	Endpoint      string
	Phase         idempotency.Phase
	Status        int `json:",omitempty"`
	Size          int64
	Location      string `json:",omitempty"`
	ResourceID    string `json:",omitempty"`
	CorrelationID string `json:",omitempty"`
	TraceID       string `json:",omitempty"`
	CreatedAt     time.Time
	CompletedAt   time.Time  `json:",omitzero"`
	LeaseLeft     status.Age `json:",omitzero"`
	ExpiresIn     status.Age
	Answer        *shownAnswer `json:",omitempty"`
}

// shownAnswer is a stored answer as JSON. Its body is in base64.
type shownAnswer struct {
	Header map[string][]string `json:",omitempty"`
	Body   []byte
}

func shownOf(k idempotency.Key) shownKey {
	s := shownKey{
		ID: hex.EncodeToString(k.ID[:]), Caller: hex.EncodeToString(k.Caller[:]), Endpoint: k.Endpoint, Phase: k.Phase, Status: k.Status, Size: k.Size,
		Location: k.Location, ResourceID: k.ResourceID, CorrelationID: k.CorrelationID, TraceID: k.TraceID,
		CreatedAt: k.CreatedAt, CompletedAt: k.CompletedAt, ExpiresIn: status.Age(k.ExpiresIn),
	}
	if k.Phase == idempotency.PhaseRunning {
		s.LeaseLeft = status.Age(k.LeaseLeft)
	}
	return s
}

func oneKey(_ *cobra.Command, args []string) error {
	if len(args) != 1 {
		return errors.New("give the hash of one key, or its first 12 digits; oncemill keys lists them")
	}
	return nil
}

func newShowKey(opts *options) *cobra.Command {
	var secrets keySecrets
	var answer bool
	cmd := &cobra.Command{
		Use:   "show HASH",
		Short: "Show an idempotency key as JSON; with --answer also its stored answer",
		Long: `Show an idempotency key as JSON. HASH is its hash, at least the first 12 digits, or its
token in a status URL. With --answer the stored answer is shown too: the headers, and the
body in base64. It may hold what only the client may see.`,
		Args: wrongUse(oneKey),
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg, err := secrets.config(cmd)
			if err != nil {
				return err
			}
			return opts.readKeys(cmd, cfg, func(ctx context.Context, admin *idempotency.Admin) error {
				key, err := admin.Find(ctx, args[0])
				if err != nil {
					return err
				}
				out := shownOf(key)
				if answer {
					stored, err := admin.Answer(ctx, key)
					if err != nil {
						return err
					}
					out.Answer = &shownAnswer{Header: stored.Header, Body: stored.Body}
				}
				return printJSON(cmd.OutOrStdout(), out, "  ")
			})
		},
	}
	cmd.Flags().BoolVar(&answer, "answer", false, "show the stored answer, too")
	secrets.registerEncryption(cmd)
	return cmd
}
