package idempotency

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/keystore"
)

// AdminConfig configures an Admin. The zero value is right where the engines have neither
// Keys.Secret nor Responses.Encryption nor a Cache.
type AdminConfig struct {
	// Secret is that of KeyConfig. It is needed to find the keys of a [Scope].
	Secret oncemill.Secret

	// Encryption is that of ResponseConfig. Without it, engines that encrypt do not replay an
	// answer that Settle has stored: their clients get 503. Default: none.
	Encryption *Encryption

	// Retention is how long an answer that Settle stores is replayed. 1 s to 366 days.
	// Default: 24 h.
	Retention time.Duration

	// RefuseFor is that of ExpiryConfig, for such an answer. 0 to 366 days. Default: 0.
	RefuseFor time.Duration

	// Cache is that of ResponseConfig. Release and Erase remove records from it too; it must
	// implement [CacheRemover]. Default: none.
	Cache Cache
}

// CacheRemover is a [Cache] from which records can be removed before they expire.
type CacheRemover interface {
	// Remove removes the records of keys. An error means that some may still be there.
	Remove(ctx context.Context, ids []ID) error
}

// Admin is what operators do with the keys of a database. Each act needs the table of
// package audit (audit.Migrations), and writes its entry there in its own transaction. It
// holds no connection and no goroutine, and is safe for concurrent use.
type Admin struct {
	store  *SQLStore
	keys   *keystore.Operators
	cfg    AdminConfig
	codec  codec
	hash   hasher
	remove func(ctx context.Context, ids []ID) error
}

// NewAdmin returns the Admin of a store. It does no I/O. All bad values are reported at
// once, each as an [*oncemill.ConfigError].
func NewAdmin(store *SQLStore, cfg AdminConfig) (*Admin, error) {
	var errs []error
	bad := func(field, value, problem string) {
		errs = append(errs, &oncemill.ConfigError{Field: "idempotency." + field, Value: value, Problem: problem})
	}
	if store == nil {
		bad("NewAdmin store", "nil", "a SQLStore is needed")
	}
	v := &values{}
	v.duration("Retention", &cfg.Retention, 24*time.Hour, time.Second, year)
	if len(v.errs) > 0 {
		bad("AdminConfig.Retention", cfg.Retention.String(), "must be 1s to "+year.String()+", or 0 for 24h")
	}
	if cfg.RefuseFor < 0 || cfg.RefuseFor > year {
		bad("AdminConfig.RefuseFor", cfg.RefuseFor.String(), "must be 0 to "+year.String())
	}
	a := &Admin{store: store, cfg: cfg, hash: newHasher(cfg.Secret), remove: func(context.Context, []ID) error { return nil }}
	if cfg.Cache != nil {
		remover, ok := cfg.Cache.(CacheRemover)
		if !ok {
			bad("AdminConfig.Cache", fmt.Sprintf("%T", cfg.Cache), "must implement CacheRemover, or its records stay until they expire")
		} else {
			a.remove = remover.Remove
		}
	}
	var err error
	if a.codec, err = newCodec(0, cfg.Encryption); err != nil {
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	a.keys = keystore.OpenOperators(store.db, store.where)
	return a, nil
}

// Act is who acts on a key, and why. Both are written into the audit.
type Act struct {
	By     string // who; required
	Reason string // why; required
}

func (a Act) check() error {
	switch {
	case strings.TrimSpace(a.By) == "":
		return ErrNoActor
	case strings.TrimSpace(a.Reason) == "":
		return ErrNoReason
	}
	return nil
}

// Phase is the state of a key as operators see it.
type Phase string

const (
	// PhaseRunning means that an owner runs the request: its lease has not ended.
	PhaseRunning Phase = "running"
	// PhaseInterrupted means that the owner died, was late, or failed without a known
	// effect. For [Engine.Middleware] the outcome is unknown; with [Engine.TxMiddleware]
	// there was no effect, and the request runs when it is sent again.
	PhaseInterrupted Phase = "interrupted"
	// PhaseCompleted means that retries get the stored answer.
	PhaseCompleted Phase = "completed"
	// PhaseNotReplayable means that it ran once, and its answer is not stored.
	PhaseNotReplayable Phase = "not_replayable"
	// PhaseExpired means that its retention has ended.
	PhaseExpired Phase = "expired"
)

// phases are all of them, in the order of a key's life.
var phases = []struct {
	phase Phase
	bit   keystore.Phase
}{
	{PhaseRunning, keystore.PhaseRunning},
	{PhaseInterrupted, keystore.PhaseInterrupted},
	{PhaseCompleted, keystore.PhaseCompleted},
	{PhaseNotReplayable, keystore.PhaseNotReplayable},
	{PhaseExpired, keystore.PhaseExpired},
}

// Key is a key as it is stored. Neither the key nor its scope can be derived from it.
type Key struct {
	ID       ID
	Caller   Caller
	Endpoint string // method and route, or "command " and its name; may be a stranger's text
	Phase    Phase
	Status   int   // of the stored answer; 0 if there is none
	Size     int64 // of the stored answer, in bytes

	Location      string // empty also where it is encrypted with an unknown key
	ResourceID    string // likewise
	CorrelationID string // a stranger's text
	TraceID       string

	CreatedAt   time.Time
	CompletedAt time.Time     // zero until then
	LeaseLeft   time.Duration // of a key that has not ended
	ExpiresIn   time.Duration // until it may run again, or is refused

	seen   keystore.Seen
	record keystore.Record
}

// Find returns the key whose hash begins with these hexadecimal digits, an even number from
// 12 to 64, as in logs, or that has this token of a status URL. Errors: [ErrKeyNotFound],
// [ErrKeyAmbiguous].
func (a *Admin) Find(ctx context.Context, hash string) (Key, error) {
	var prefix []byte
	if id, ok := parseToken(hash); ok {
		prefix = id[:]
	} else if prefix, ok = parsePrefix(hash); !ok {
		return Key{}, fmt.Errorf("%w: give 12 to 64 hexadecimal digits of its hash, an even number, or its token", ErrKeyNotFound)
	}
	found, err := within(ctx, a.store, func(ctx context.Context) ([]keystore.Summary, error) { return a.keys.Prefixed(ctx, prefix, 2) })
	switch {
	case err != nil:
		return Key{}, fmt.Errorf("idempotency: find key: %w", err)
	case len(found) == 0:
		return Key{}, ErrKeyNotFound
	case len(found) > 1:
		return Key{}, ErrKeyAmbiguous
	}
	return a.keysOf(found)[0], nil
}

func parsePrefix(hash string) ([]byte, bool) {
	prefix, err := hex.DecodeString(hash)
	return prefix, err == nil && len(prefix) >= 6 && len(prefix) <= len(ID{})
}

// keysOf returns what operators see of records.
func (a *Admin) keysOf(found []keystore.Summary) []Key {
	keys := make([]Key, len(found))
	for i := range found {
		s := &found[i]
		r := recordOf(s.Record)
		of := r.binding()
		keys[i] = Key{
			ID: r.ID, Caller: r.Caller, Endpoint: r.Endpoint, Status: r.Status, Size: s.Size,
			Location: a.revealed(of, "location", r.Location), ResourceID: a.revealed(of, "resource id", r.ResourceID),
			CorrelationID: r.CorrelationID, TraceID: r.TraceID, CreatedAt: r.CreatedAt, CompletedAt: r.CompletedAt,
			LeaseLeft: r.LeaseLeft, ExpiresIn: r.ExpiresIn,
			seen: keystore.Seen{ID: s.ID, Owner: s.Owner, State: s.State}, record: s.Record,
		}
		for _, p := range phases {
			if p.bit == s.Phase() {
				keys[i].Phase = p.phase
			}
		}
	}
	return keys
}

// revealed returns a text that is encrypted if responses are.
func (a *Admin) revealed(of binding, label, stored string) string {
	if a.codec.ciphers == nil && strings.HasPrefix(stored, sealedText) {
		return ""
	}
	return a.codec.decodeText(of, label, stored)
}

// Answer returns the stored answer of a completed key, which may hold what its client may
// see and others may not. Errors: [ErrKeyNotFound], [ErrNotStored], [ErrDecode].
func (a *Admin) Answer(ctx context.Context, key Key) (Answer, error) {
	record, found, err := a.store.Find(ctx, key.ID)
	switch {
	case err != nil:
		return Answer{}, fmt.Errorf("idempotency: %w", err)
	case !found:
		return Answer{}, ErrKeyNotFound
	case record.State != StateCompleted:
		return Answer{}, ErrNotStored
	}
	plain, err := a.codec.decode(record.binding(), record.Response)
	if err != nil {
		return Answer{}, err
	}
	if isCommand(record.Endpoint) {
		return Answer{Body: plain}, nil
	}
	res, err := unmarshalResponse(plain)
	if err != nil {
		return Answer{}, err
	}
	return res.answer(), nil
}

// Settle stores the answer of an interrupted key, as it was returned by List or Find: all
// retries get it. found has the status, header and body; for an effect that did not and
// will not happen, an error such as 422, see [Failed]. The key of a command gets the
// result, as encoding/json encodes it, in Body. With found.RunAgain, Settle is Release.
//
// Nothing was changed with an error of [ErrNotUnknown], if the key has ended or was released,
// [ErrKeyRunning], [ErrKeyChanged], a [*RecoveryError], [ErrNoActor], [ErrNoReason], or
// [ErrNoAudit]. Of several concurrent acts one is done. A late owner
// of the key can no longer complete it: in a transaction its effects are rolled back, and
// elsewhere its client gets the settled answer.
func (a *Admin) Settle(ctx context.Context, key Key, found Recovery, act Act) error {
	if err := act.check(); err != nil {
		return err
	}
	if found.RunAgain {
		return a.Release(ctx, key, act)
	}
	if found.Status == 0 && !isCommand(key.Endpoint) {
		return &RecoveryError{"Status", "must be 200 to 599"}
	}
	if key.Phase != PhaseInterrupted {
		return a.refused(ctx, key, true)
	}
	c, err := a.completion(key, found)
	if err != nil {
		return err
	}
	details := fmt.Sprintf("%s: status %d, %d bytes of body", key.Endpoint, found.Status, len(found.Body))
	done, err := within(ctx, a.store, func(ctx context.Context) (bool, error) {
		return a.keys.Settle(ctx, key.seen, newAdminToken(), c.asKey(), keystore.Act{By: act.By, Reason: act.Reason, Details: details})
	})
	switch {
	case err != nil:
		return fmt.Errorf("idempotency: settle key: %w", err)
	case !done:
		return a.refused(ctx, key, true)
	}
	return nil
}

func newAdminToken() (token [16]byte) {
	rand.Read(token[:])
	return token
}

// completion encodes the answer of an operator, as an engine with the default limits does.
func (a *Admin) completion(key Key, found Recovery) (Completion, error) {
	cfg := Config{Retention: a.cfg.Retention, Expiry: ExpiryConfig{RefuseFor: a.cfg.RefuseFor}, Responses: ResponseConfig{MaxSize: mostResponse, LargeAbove: 64 << 10}}
	in := intent{core: &core{cfg: cfg, codec: a.codec}}
	in.claim = Claim{ID: key.ID, Caller: key.Caller, Fingerprint: key.record.Fingerprint, Endpoint: key.Endpoint}
	if isCommand(key.Endpoint) && found.Status == 0 {
		found.Status = http.StatusOK // commands have none; check wants one
	}
	if err := in.fits(found); err != nil {
		return Completion{}, err
	}
	return in.foundOut(found)
}

// Release deletes the record of a key that is not running, as it was returned by List or
// Find. The next request with the key runs the handler again. If the effect has happened,
// and is not in a transaction of this package, it happens twice: settle such a key. The
// errors are those of Settle, without ErrNotUnknown.
//
// Engines with a Cache replay a completed key until it expires there, unless
// AdminConfig.Cache is set.
func (a *Admin) Release(ctx context.Context, key Key, act Act) error {
	if err := act.check(); err != nil {
		return err
	}
	if key.Phase == PhaseRunning {
		return a.refused(ctx, key, false)
	}
	ids := []ID{key.ID}
	if err := a.remove(ctx, ids); err != nil { // first, so that a failure changes nothing
		return fmt.Errorf("idempotency: release key: remove it from the cache: %w", err)
	}
	done, err := within(ctx, a.store, func(ctx context.Context) (bool, error) {
		return a.keys.Release(ctx, key.seen, keystore.Act{By: act.By, Reason: act.Reason, Details: key.Endpoint + ": was " + string(key.Phase)})
	})
	switch {
	case err != nil:
		return fmt.Errorf("idempotency: release key: %w", err)
	case !done:
		return a.refused(ctx, key, false)
	}
	if err := a.remove(ctx, ids); err != nil { // a replay may have put it there meanwhile
		return fmt.Errorf("idempotency: key released, but not removed from the cache: %w", err)
	}
	return nil
}

// refused returns why a key was left alone.
func (a *Admin) refused(ctx context.Context, key Key, settling bool) error {
	now, err := a.Find(ctx, hex.EncodeToString(key.ID[:]))
	switch {
	case errors.Is(err, ErrKeyNotFound) && settling:
		return fmt.Errorf("%w: it was released or purged", ErrNotUnknown)
	case err != nil:
		return err
	case now.Phase == PhaseRunning:
		return ErrKeyRunning
	case settling && now.Phase != PhaseInterrupted:
		return fmt.Errorf("%w: it is %s", ErrNotUnknown, now.Phase)
	}
	return ErrKeyChanged
}

// CallerOf returns the hash of the tenant and principal of a scope, by which keys can be
// listed.
func (a *Admin) CallerOf(scope Scope) Caller { return hashCaller(a.hash, scope) }
