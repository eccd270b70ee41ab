package verify

import (
	"embed"
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/oncemill/oncemill/cmd/oncemill/internal/verify/check"
)

// Certificate is the result of a run. It has no passwords.
type Certificate struct {
	Verdict    string          `json:"verdict"` // passed or failed
	Date       time.Time       `json:"date"`
	Seconds    float64         `json:"seconds"`
	Version    string          `json:"version"`
	Run        []Setting       `json:"run"`
	PostgreSQL []Setting       `json:"postgresql"`
	RabbitMQ   []Setting       `json:"rabbitmq"`
	Promises   []check.Promise `json:"promises"`
	Figures    check.Figures   `json:"figures"`
	Faults     []Fault         `json:"faults"`
	Failures   int             `json:"failures"` // processes that ended by themselves, or could not stop cleanly
	Warnings   []string        `json:"warnings,omitempty"`
	Limits     []string        `json:"not_proved"`
	Logs       string          `json:"logs,omitempty"` // directory
}

const (
	passed = "passed"
	failed = "failed"
)

// limits are what no run proves.
var limits = []string{
	"The servers themselves were not stopped, crashed or cut off, and no failover took place. What a server loses then depends on its settings, which are listed above.",
	"Effects were rows of this database. Effects elsewhere (mail, payments) can happen twice.",
	"The load was as stated. A run shows no fault under this load and these faults; it cannot show that there is none.",
	"Delivery to the broker is at least once: duplicates on the wire are no fault. The consumer recognizes them.",
}

// Passed reports whether no promise was broken, and there was something to break.
func (c *Certificate) Passed() bool { return c.Verdict == passed }

// warn adds what the settings of the servers put at risk.
func (c *Certificate) warn() {
	for _, s := range c.PostgreSQL {
		switch s {
		case Setting{"synchronous_commit", "off"}:
			c.Warnings = append(c.Warnings, "synchronous_commit is off: a crash of PostgreSQL loses commits of the last moments, also of messages that were published.")
		case Setting{"fsync", "off"}:
			c.Warnings = append(c.Warnings, "fsync is off: a crash of PostgreSQL's machine can destroy the database.")
		case Setting{"full_page_writes", "off"}:
			c.Warnings = append(c.Warnings, "full_page_writes is off: a crash of PostgreSQL's machine can destroy the database, unless the file system prevents it.")
		}
	}
}

// judge fills in the result of a run.
func (c *Certificate) judge(h *check.History, r *run) {
	c.Promises, c.Figures = check.Judge(h)
	c.Faults = r.faults.list(r.customers.atOnce)
	for _, p := range r.processes {
		c.Failures += p.failures()
	}
	if c.Verdict = passed; len(c.broken()) > 0 || c.Figures.Messages == 0 {
		c.Verdict = failed
	}
}

// broken returns the names of the promises that were broken.
func (c *Certificate) broken() (names []string) {
	for _, p := range c.Promises {
		if len(p.Broken) > 0 {
			names = append(names, p.Name)
		}
	}
	return names
}

// Result is the last line of the text.
func (c *Certificate) Result() string {
	f, faults := c.Figures, 0
	for _, fault := range c.Faults {
		faults += fault.Injected
	}
	figures := fmt.Sprintf("requests=%d messages=%d effects=%d dead_letters=%d wire_duplicates=%d faults=%d seconds=%.1f",
		f.Requests, f.Messages, f.Effects, f.DeadLetters, f.WireDuplicates, faults, c.Seconds)
	switch broken := c.broken(); {
	case c.Passed():
		return "verify: passed " + figures
	case len(broken) == 0:
		return "verify: failed: no message was committed, so nothing was tested; " + figures
	default:
		return "verify: failed: broken: " + strings.Join(broken, ", ") + "; " + figures
	}
}

const shownFindings = 5 // of a promise; the JSON has all

// figures returns the figures as settings.
func (c *Certificate) figures() []Setting {
	f := c.Figures
	list := []Setting{{"requests", ""}, {"answers", ""}, {"requests that rolled back", ""}, {"messages committed", ""}, {"messages on the wire", ""}, {"of these, duplicates", ""}, {"of these, published by the run", ""}, {"effects", ""}, {"dead letters", ""}, {"processes that failed", ""}}
	for i, n := range []int{f.Requests, f.Answers, f.RolledBack, f.Messages, f.Copies, f.WireDuplicates, f.ByHand, f.Effects, f.DeadLetters, c.Failures} {
		list[i].Value = strconv.Itoa(n)
	}
	return list
}

// Text writes the certificate as text.
func (c *Certificate) Text(out io.Writer) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	section := func(title string, settings []Setting) {
		fmt.Fprintf(table, "\n%s\n", title)
		for _, s := range settings {
			fmt.Fprintf(table, "  %s\t%s\n", s.Name, s.Value)
		}
	}
	fmt.Fprintf(table, "Certificate of oncemill verify, %s\n", c.Date.Format(time.RFC3339))
	section("Run", append([]Setting{{"version", c.Version}}, c.Run...))
	section("PostgreSQL", c.PostgreSQL)
	section("RabbitMQ", c.RabbitMQ)
	section("Figures", c.figures())
	fmt.Fprintf(table, "\nFaults\n")
	for _, f := range c.Faults {
		fmt.Fprintf(table, "  %s\t%d\t%s\n", f.Kind, f.Injected, f.Skipped)
	}
	fmt.Fprintf(table, "\nPromises\tchecked\tbroken\n")
	for _, p := range c.Promises {
		fmt.Fprintf(table, "  %s\t%d\t%d\n", p.Name, p.Checked, len(p.Broken))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for _, p := range c.Promises {
		for i, finding := range p.Broken {
			if i == shownFindings {
				fmt.Fprintf(out, "  ... and %d more; --json writes all\n", len(p.Broken)-i)
				break
			}
			fmt.Fprintf(out, "  %s: %s\n", p.Name, finding)
		}
	}
	if len(c.Warnings) > 0 {
		fmt.Fprintf(out, "\nWarnings\n- %s\n", strings.Join(c.Warnings, "\n- "))
	}
	fmt.Fprintf(out, "\nNot proved\n- %s\n\n", strings.Join(c.Limits, "\n- "))
	if c.Logs != "" {
		fmt.Fprintf(out, "The logs of the processes are in %s.\n", c.Logs)
	}
	_, err := fmt.Fprintln(out, c.Result())
	return err
}

// JSON writes the certificate as JSON.
func (c *Certificate) JSON(out io.Writer) error {
	encoder := json.NewEncoder(out)
	encoder.SetIndent("", "  ")
	return encoder.Encode(c)
}

//go:embed certificate.html
var pages embed.FS

// HTML writes the certificate as one page that needs nothing else.
func (c *Certificate) HTML(out io.Writer) error {
	page, err := template.ParseFS(pages, "certificate.html")
	if err != nil {
		return err
	}
	return page.Execute(out, struct {
		*Certificate

		FigureList []Setting
	}{c, c.figures()})
}
