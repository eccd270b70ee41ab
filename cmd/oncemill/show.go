package main

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill/status"
)

// shown is a message with its contents and its way.
type shown struct {
	ID          int64
	Lane        int
	Topic       string
	MessageID   string
	Key         string     `json:",omitempty"`
	WrittenAt   time.Time  // to the outbox
	ConfirmedAt *time.Time `json:",omitempty"` // by the broker
	Handled     []status.Handled
	Metadata    map[string]string
	Payload     []byte

	payload, metadata []byte
}

// show prints a message, with what the inbox of this database knows of it.
func (o *options) show(cmd *cobra.Command, m shown, asJSON bool) error {
	m.Payload, m.Metadata, m.Handled = m.payload, map[string]string{}, []status.Handled{}
	if len(m.metadata) > 0 {
		if err := json.Unmarshal(m.metadata, &m.Metadata); err != nil {
			cmd.PrintErrln("oncemill: the metadata is not a JSON object of strings, and left out")
		}
	}
	err := o.readStatus(cmd, func(ctx context.Context, reader *status.Reader) error {
		handled, err := reader.HandledBy(ctx, m.MessageID)
		m.Handled = append(m.Handled, handled...)
		return err
	})
	if err != nil { // a role may read the outbox and not the inbox
		cmd.PrintErrln("oncemill: it is not known who has handled it:", escapedLine(withoutPasswords(inFlags(err))))
	}
	if asJSON {
		return printJSON(cmd.OutOrStdout(), m, "  ")
	}
	return m.print(cmd.OutOrStdout())
}

func (m shown) print(out io.Writer) error {
	var text strings.Builder
	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	row := func(name, value string) { fmt.Fprintf(table, "%s\t%s\n", name, value) }
	row("id", fmt.Sprintf("%d, lane %d", m.ID, m.Lane))
	row("message", oneLine(m.MessageID))
	row("topic", oneLine(m.Topic))
	if m.Key != "" {
		row("key", oneLine(m.Key))
	}
	row("written", m.WrittenAt.UTC().Format(time.RFC3339Nano))
	confirmed := "not yet"
	if m.ConfirmedAt != nil {
		confirmed = m.ConfirmedAt.UTC().Format(time.RFC3339Nano)
	}
	row("confirmed", confirmed)
	for _, h := range m.Handled {
		what := "handled"
		if h.Dead {
			what = "given up"
		}
		row(what, h.At.UTC().Format(time.RFC3339Nano)+" by "+oneLine(h.Consumer))
	}
	if len(m.Handled) == 0 {
		row("handled", "by no consumer that this database knows")
	}
	for _, name := range slices.Sorted(maps.Keys(m.Metadata)) {
		row("  "+oneLine(name), oneLine(m.Metadata[name]))
	}
	row("payload", strconv.Itoa(len(m.Payload))+" bytes")
	if err := table.Flush(); err != nil {
		return err
	}
	if len(m.Payload) > 0 {
		text.WriteString("\n" + readable(m.Payload))
	}
	_, err := io.WriteString(out, text.String())
	return err
}

// readable returns a payload as lines for people: indented JSON, text, or hexadecimal.
func readable(payload []byte) string {
	var indented bytes.Buffer
	switch {
	case !utf8.Valid(payload) || bytes.IndexByte(payload, 0) >= 0:
		return hex.Dump(payload)
	case json.Indent(&indented, payload, "", "  ") == nil:
		payload = indented.Bytes()
	}
	return strings.TrimSuffix(escapedLine(string(payload)), "\n") + "\n"
}

// escapedLine is text that a terminal does not act on. Newlines stay.
func escapedLine(text string) string {
	return escaped(text, func(out *strings.Builder, r rune) {
		if r == '\t' {
			out.WriteRune(r)
			return
		}
		out.WriteString(strings.Trim(strconv.QuoteRuneToASCII(r), "'"))
	})
}
