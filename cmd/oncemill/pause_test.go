package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/steer"
)

func TestPauseCommand_PausesShowsWhoAndResumes(t *testing.T) {
	t.Parallel()
	_, run := shopOf(t)
	for _, args := range [][]string{{"pause"}, {"pause", "topic"}, {"pause", "queue", "x"}, {"pause", "topic", "orders"}, {"resume"}, {"release", "topic", "x"}, {"release", "lane", "3"}, {"retry"}, {"retry", "--all", "--key", "k"}, {"pause", "list", "x"}} {
		run(2, args...)
	}
	run(1, "pause", "lane", "99", "--reason", "x")
	if out := run(0, "pause", "topic", "orders", "--reason", "full", "--by", "ada"); !strings.Contains(out, "is paused") {
		t.Error(out)
	}
	if out := run(1, "pause", "topic", "orders", "--reason", "mine", "--by", "bob"); !strings.Contains(out, "paused already, by") || !strings.Contains(out, "ada") {
		t.Error(out)
	}
	run(0, "pause", "key", "\x1b[31mred", "--reason", "a\nb", "--by", "eve")
	for _, out := range []string{run(0, "pause", "list"), run(0, "status")} {
		for _, want := range []string{"orders", "ada", "full", "eve"} {
			if !strings.Contains(out, want) || strings.Contains(out, "\x1b") || strings.Contains(out, "a\nb") {
				t.Errorf("no %q, or not clean: %q", want, out)
			}
		}
	}
	var pauses []steer.Pause
	if err := json.Unmarshal([]byte(run(0, "pause", "list", "--json")), &pauses); err != nil || len(pauses) != 2 || pauses[1].By != "ada" || pauses[1].Since.IsZero() {
		t.Errorf("%+v, %v", pauses, err)
	}
	run(0, "resume", "topic", "orders", "--by", "bob")
	if out := run(1, "resume", "topic", "orders"); !strings.Contains(out, "is not paused") {
		t.Error(out)
	}
	run(0, "release", "lane", "3", "--reason", "x")
	run(0, "retry", "--topic", "orders")
	if out := run(0, "audit"); !strings.Contains(out, "topic.resume") || !strings.Contains(out, "lane.release") || !strings.Contains(out, "lane.retry") {
		t.Error(out)
	}
}
