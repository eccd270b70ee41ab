package text_test

import (
	"strings"
	"testing"
	"unicode/utf8"

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

// A column takes 4 KiB and the mark, whatever the text is made of.
func TestClean_IsBoundedWhateverTheText(t *testing.T) {
	t.Parallel()
	const limit = 4 << 10
	for name, s := range map[string]string{
		"NUL": strings.Repeat("\x00", limit), "invalid": strings.Repeat("a\xff", limit), "long": strings.Repeat("ë", limit), "split": "a" + strings.Repeat("ë", limit/2),
	} {
		got := text.Clean(s)
		if len(got) > limit+len("\uFFFD…") || len(got) < limit-2 || !utf8.ValidString(got) || strings.Contains(got, "\x00") || !strings.HasSuffix(got, "…") {
			t.Errorf("%s: %d bytes, %.20q", name, len(got), got)
		}
	}
	if got := text.Clean("a\x00b\xff"); got != "a\uFFFDb\uFFFD" {
		t.Errorf("%q", got)
	}
}

func TestJSON_KeepsHTML(t *testing.T) {
	t.Parallel()
	if got, err := text.JSON(map[string]string{"a": "<&>"}); err != nil || string(got) != `{"a":"<&>"}` {
		t.Errorf("got %s, %v", got, err)
	}
}
