package dlqstore_test

import (
	"testing"

	"github.com/oncemill/oncemill/internal/dlqstore"
)

func TestFingerprint_IsTheSameForAlikeFailures(t *testing.T) {
	t.Parallel()
	one := dlqstore.Fingerprint("relay", "refused", `message "a-b" of 1048577 bytes is too large (0xc000123)`, "a-b")
	if two := dlqstore.Fingerprint("relay", "refused", `message "c-d" of 2000000 bytes is too large (0xc000456)`, "c-d"); one != two || len(one) != 16 {
		t.Errorf("fingerprints %s and %s", one, two)
	}
	short := dlqstore.Fingerprint("relay", "refused", `message a is a bad one`, "a")
	if other := dlqstore.Fingerprint("relay", "refused", `message é is é bad one`, "é"); short != other {
		t.Errorf("an id of one letter changes the fingerprint: %s and %s", short, other)
	}
	for id, text := range map[string]string{"bad": `message bad is bad bad one`, "aa": `message aaa is aaa bad one`} {
		if short == dlqstore.Fingerprint("relay", "refused", text, id) {
			t.Errorf("%s twice", short)
		}
	}
	for _, other := range []string{
		dlqstore.Fingerprint("stock", "refused", `message "a-b" of 1048577 bytes is too large (0xc000123)`, "a-b"),
		dlqstore.Fingerprint("relay", "crashed", `message "a-b" of 1048577 bytes is too large (0xc000123)`, "a-b"),
		dlqstore.Fingerprint("relay", "refused", `message "a-b" of 1048577 bytes is too small (0xc000123)`, "a-b"),
		dlqstore.Fingerprint("relay", "refused", ``),
	} {
		if one == other {
			t.Errorf("%s twice", one)
		}
	}
}
