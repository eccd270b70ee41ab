package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/oncemill/oncemill/crucible/check"
)

// outcome is crucible.json.
type outcome struct {
	Seed     uint64         `json:"seed"`
	Commit   string         `json:"commit,omitempty"`
	Seconds  float64        `json:"seconds"`
	Passed   bool           `json:"passed"`
	Valid    bool           `json:"valid"` // all rare states were reached
	Faults   map[string]int `json:"faults"`
	States   map[string]int `json:"states"`
	Counts   check.Counts   `json:"counts"`
	Checkers []check.Result `json:"checkers"`
	Recovery recovery       `json:"recovery"`
}

const findingsShown = 5 // of each checker

func (c *crucible) report(counts check.Counts, results []check.Result, in *check.Input) error {
	out := outcome{
		Seed: c.seed, Commit: commitHash(), Seconds: time.Since(c.began).Seconds(), Passed: true, Valid: true,
		Faults: c.hurt.count, States: in.States, Counts: counts, Checkers: results, Recovery: recoveries(in),
	}
	faults := 0
	say("\n  faults injected")
	for _, kind := range slices.Sorted(maps.Keys(c.hurt.count)) {
		say("    %-32s %4d", kind, c.hurt.count[kind])
		faults += c.hurt.count[kind]
	}
	say("  rare states")
	for _, state := range slices.Sorted(maps.Keys(in.States)) {
		say("    %-32s %4d", state, in.States[state])
	}
	n := counts
	say("  figures")
	for _, line := range []struct {
		name  string
		value any
	}{
		{"transactions", n.Transactions},
		{"  rolled back", n.RolledBack},
		{"  unknown or killed", n.Unknown},
		{"messages committed", n.Messages},
		{"copies on the wire", n.Copies},
		{"effects", n.Effects},
		{"answers to idempotent requests", n.Answers},
		{"dead letters", n.DeadLetters},
		{"  replayed", n.Replayed},
		{"  discarded", n.Discarded},
		{"wire duplicates, all explained", n.WireDuplicates - n.Unexplained},
		{"LOST", n.Lost},
		{"GHOSTS", n.Ghosts},
		{"DOUBLE EFFECTS", n.DoubleEffects},
		{"REORDERED", n.Reordered},
		{"DEAD AND DELIVERED", n.DeadAndDelivered},
		{"DAMAGED", n.Damaged},
		{"UNEXPLAINED DUPLICATES", n.Unexplained},
		{"STALLS", n.Stalls},
		{"recovery to the next confirm, p50", out.Recovery.ConfirmP50},
		{"recovery to the next confirm, max", out.Recovery.ConfirmMax},
		{"recovery to the next effect, p50", out.Recovery.EffectP50},
		{"recovery to the next effect, max", out.Recovery.EffectMax},
	} {
		say("    %-34s %8v", line.name, line.value)
	}
	if c.cluster == clusterAsync {
		say("    lost by PostgreSQL, as a whole: %+v", n.LostByServer)
	}
	if c.cluster != "" {
		out.Recovery.list()
	}
	say("  checkers")
	for i, r := range results {
		state := "holds"
		if len(r.Findings) > 0 {
			state = fmt.Sprintf("BROKEN, %d findings", len(r.Findings))
			if r.Checker == "C12" {
				out.Valid = false
			} else {
				out.Passed = false
			}
		}
		say("    %-4s %-24s %s %s", r.Checker, r.Promise, state, r.Note)
		for _, f := range r.Findings[:min(findingsShown, len(r.Findings))] {
			say("           %s", f)
		}
		out.Checkers[i].Findings = r.Findings[:min(100, len(r.Findings))]
	}
	content, err := json.MarshalIndent(out, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(c.out, append(content, '\n'), 0o644); err != nil {
		return err
	}
	switch {
	case c.rival != "":
		say("crucible: %s with %d faults: messages=%d lost=%d ghosts=%d double_effects=%d reordered=%d stalls=%d, seed %d",
			c.rival, faults, n.Messages, n.Lost, n.Ghosts, n.DoubleEffects, n.Reordered, n.Stalls, c.seed)
		return nil
	case !out.Passed:
		return fmt.Errorf("%w (seed %d, %d faults)", errBroken, c.seed, faults)
	case !out.Valid:
		return fmt.Errorf("the run is invalid: it did not reach all rare states (seed %d, %d faults); run longer", c.seed, faults)
	}
	say("crucible: passed with %d faults and %d messages, seed %d", faults, n.Messages, c.seed)
	return nil
}

// commitHash returns the commit of the working copy, or nothing.
func commitHash() string {
	out, err := exec.Command("git", "rev-parse", "--short", "HEAD").Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}
