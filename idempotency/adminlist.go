package idempotency

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/keystore"
)

// Filter selects keys. Empty fields match everything.
type Filter struct {
	// Phases are those to list. Default: running and interrupted, which an index finds. The
	// others, and all with After, are looked for in the table, a part in each page; see Page.
	Phases []Phase

	Caller   *Caller // see Admin.CallerOf
	Endpoint string  // all of it, such as "POST /orders"

	Since time.Time // claimed at or after; zero: any
	Until time.Time // claimed before; zero: any

	Limit int // Default: 100. At most 1000.
	After ID  // where the page begins: Page.Next of the one before
}

// Page is a part of a list.
type Page struct {
	Keys []Key

	// More means that there may be more keys: List them with Filter.After = Next. A page may
	// have fewer keys than the limit, or none, because a call looks at no more than 100,000
	// keys.
	More bool
	Next ID

	// Cut means that there are more running or interrupted keys, where only these are listed:
	// the page has the oldest, of at most 20,000 that were looked at, and there is no next
	// one. Select fewer, for example by Caller, or list another phase with them, in pages.
	Cut bool
}

const (
	defaultKeys = 100
	mostKeys    = 1000

	// adminLook is how many keys one call looks at, adminSlice how many a statement does, and
	// adminOpen how many that have not ended.
	adminLook  = 100_000
	adminSlice = 2000
	adminOpen  = 20_000
)

// List lists keys. A bad filter is an [*oncemill.ConfigError].
func (a *Admin) List(ctx context.Context, f Filter) (Page, error) {
	filter, open, err := f.resolve()
	if err != nil {
		return Page{}, err
	}
	if open {
		return a.open(ctx, filter)
	}
	var page Page
	from := f.After[:]
	if f.After == (ID{}) {
		from = nil
	}
	for looked := 0; ; looked += adminSlice {
		if looked >= adminLook {
			page.More = true
			copy(page.Next[:], from)
			return page, nil
		}
		filter.Limit = f.limit() - len(page.Keys)
		part, err := a.between(ctx, from, filter)
		if err != nil {
			return page, err
		}
		page.Keys = append(page.Keys, a.keysOf(part.found)...)
		if len(page.Keys) == f.limit() {
			page.More, page.Next = true, page.Keys[len(page.Keys)-1].ID
			return page, nil
		}
		if from = part.end; !part.more {
			return page, nil
		}
	}
}

func (f *Filter) limit() int {
	if f.Limit == 0 {
		return defaultKeys
	}
	return f.Limit
}

// resolve returns the filter of the store. open means that an index finds what it selects.
func (f *Filter) resolve() (filter keystore.Filter, open bool, err error) {
	if f.Limit < 0 || f.Limit > mostKeys {
		return filter, false, &oncemill.ConfigError{Field: "idempotency.Filter.Limit", Value: strconv.Itoa(f.Limit), Problem: "must be 1 to " + strconv.Itoa(mostKeys) + ", or 0 for " + strconv.Itoa(defaultKeys)}
	}
	filter = keystore.Filter{Endpoint: f.Endpoint, Since: f.Since, Until: f.Until, Limit: f.limit()}
	if f.Caller != nil {
		caller := [16]byte(*f.Caller)
		filter.Caller = &caller
	}
	wanted := f.Phases
	if len(wanted) == 0 {
		wanted = []Phase{PhaseRunning, PhaseInterrupted}
	}
	for _, phase := range wanted {
		bit := bitOf(phase)
		if bit == 0 {
			return filter, false, &oncemill.ConfigError{Field: "idempotency.Filter.Phases", Value: strconv.Quote(string(phase)), Problem: "must be running, interrupted, completed, not_replayable or expired"}
		}
		filter.Phases |= bit
	}
	return filter, f.After == ID{} && filter.Phases&^(keystore.PhaseRunning|keystore.PhaseInterrupted) == 0, nil
}

func bitOf(phase Phase) keystore.Phase {
	for _, p := range phases {
		if p.phase == phase {
			return p.bit
		}
	}
	return 0
}

func (a *Admin) open(ctx context.Context, f keystore.Filter) (page Page, err error) {
	page, err = within(ctx, a.store, func(ctx context.Context) (p Page, err error) {
		most := f.Limit
		f.Limit++
		found, err := a.keys.Open(ctx, adminOpen, f)
		if err != nil {
			return p, err
		}
		p.Keys = a.keysOf(found[:min(len(found), most)])
		if len(found) > most {
			p.Cut = true
			return p, nil
		}
		p.Cut, err = a.keys.MoreOpen(ctx, adminOpen, f.Caller)
		return p, err
	})
	if err != nil {
		return Page{}, fmt.Errorf("idempotency: list keys: %w", err)
	}
	return page, nil
}

// part is a slice of the table.
type part struct {
	found []keystore.Summary
	end   []byte
	more  bool // there are slices after it
}

func (a *Admin) between(ctx context.Context, from []byte, f keystore.Filter) (part, error) {
	p, err := within(ctx, a.store, func(ctx context.Context) (p part, err error) {
		if p.end, p.more, err = a.keys.Slice(ctx, from, adminSlice); err == nil {
			p.found, err = a.keys.Between(ctx, from, p.end, f)
		}
		return p, err
	})
	if err != nil {
		return part{}, fmt.Errorf("idempotency: list keys: %w", err)
	}
	return p, nil
}
