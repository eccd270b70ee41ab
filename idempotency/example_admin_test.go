package idempotency_test

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/oncemill/oncemill/idempotency"
)

// Settle the charges whose outcome has been unknown for more than ten minutes, after asking
// the provider about each.
func ExampleAdmin_Settle() {
	settle := func(ctx context.Context, store *idempotency.SQLStore, ask func(key idempotency.Key) (charge string, err error)) error {
		admin, err := idempotency.NewAdmin(store, idempotency.AdminConfig{})
		if err != nil {
			return err
		}
		page, err := admin.List(ctx, idempotency.Filter{
			Phases: []idempotency.Phase{idempotency.PhaseInterrupted}, Endpoint: "POST /charges", Until: time.Now().Add(-10 * time.Minute),
		})
		if err != nil {
			return err
		}
		for _, key := range page.Keys {
			charge, err := ask(key)
			if err != nil {
				return err
			}
			act := idempotency.Act{By: "charges-job", Reason: "the provider has " + charge}
			if charge == "" { // nothing was charged: the customer's retry may do it
				act.Reason = "the provider has no charge"
				err = admin.Release(ctx, key, act)
			} else {
				found := idempotency.Recovery{Status: http.StatusCreated, Header: http.Header{"Location": {"/charges/" + charge}}}
				err = admin.Settle(ctx, key, found, act)
			}
			if err != nil {
				fmt.Println(key.ID, err) // somebody else has settled it, or its owner has ended
			}
		}
		return nil
	}
	_ = settle
}
