package text_test

import (
	"strings"
	"testing"

	"github.com/oncemill/oncemill/internal/text"
)

func TestCheck_NamesTheProblem(t *testing.T) {
	t.Parallel()
	for s, want := range map[string]string{"": "", "Zoë": "", "\x01": "", "12345": "at most 4", "a\x00": "NUL", "\xff": "UTF-8"} {
		if got := text.Check(s, 4); (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("%q: got %q", s, got)
		}
	}
}

func TestShorten_CutsAndCleans(t *testing.T) {
	t.Parallel()
	if got := text.Shorten(strings.Repeat("a", 63) + "ë" + "b"); got != strings.Repeat("a", 63)+"�…" {
		t.Errorf("got %q", got)
	}
}

func TestJSON_KeepsHTML(t *testing.T) {
	t.Parallel()
	if got, err := text.JSON(map[string]string{"a": "<&>"}); err != nil || string(got) != `{"a":"<&>"}` {
		t.Errorf("got %s, %v", got, err)
	}
}
