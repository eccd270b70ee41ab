package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"strings"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/outbox"
)

func newEdit(opts *options) *cobra.Command {
	var act dlq.Act
	var payload string
	var set, unset []string
	cmd := &cobra.Command{
		Use:   "edit ID",
		Short: "Deliver the message of a consumer's dead letter again with other content",
		Long: `Deliver the message of a consumer's dead letter again with another payload, other
metadata, or both, under the same message id. The dead letter keeps the message as it was;
show prints the edit beside it. A reason is required.

What a relay could not publish, and messages that are encoded or signed, cannot be edited:
discard them and publish a new message.`,
		Example: `  oncemill dlq show 17 | jq -r .Payload | base64 -d > order.json
  oncemill dlq edit 17 --payload order.json --set currency=USD --reason "wrong currency"`,
		Args: wrongUse(oneLetter),
		RunE: func(cmd *cobra.Command, args []string) error {
			ids, err := letterIDs(args)
			if err != nil {
				return err
			}
			if err := reasonGiven(cmd, act); err != nil {
				return err
			}
			if err := noneEmpty(cmd, "payload"); err != nil {
				return err
			}
			if payload == "" && len(set)+len(unset) == 0 {
				return &usageError{errors.New("nothing is changed; give --payload, --set or --unset")}
			}
			var edit dlq.Edit
			if payload != "" {
				if edit.Payload, err = readPayload(cmd.Context(), cmd.InOrStdin(), payload); err != nil {
					return err
				}
			}
			return opts.withLetters(cmd, func(letters *dlq.Store) error {
				if len(set)+len(unset) > 0 {
					letter, err := letters.Get(cmd.Context(), ids[0])
					if err != nil {
						return err
					}
					if edit.Metadata, err = changed(letter.Metadata, set, unset); err != nil {
						return err
					}
				}
				if err := letters.ReplayEdited(cmd.Context(), ids[0], edit, act); err != nil {
					return err
				}
				_, err := fmt.Fprintln(cmd.OutOrStdout(), "the edited message will be delivered")
				return err
			})
		},
	}
	cmd.Flags().StringVar(&payload, "payload", "", "file with the new payload; - is standard input (default: the payload stays)")
	cmd.Flags().StringArrayVar(&set, "set", nil, "metadata to set, as name=value; may be repeated")
	cmd.Flags().StringArrayVar(&unset, "unset", nil, "metadata to remove, by its name; may be repeated")
	actFlags(cmd, &act, "why (required)")
	return cmd
}

// mostPayload is one byte more than ReplayEdited accepts.
const mostPayload = 16<<20 + 1

func readPayload(ctx context.Context, stdin io.Reader, name string) ([]byte, error) {
	from, done, err := openInput(ctx, stdin, name)
	if err != nil {
		return nil, fmt.Errorf("--payload: %w", err)
	}
	defer done()
	payload, err := io.ReadAll(io.LimitReader(from, mostPayload))
	if err != nil {
		return nil, fmt.Errorf("read payload: %w", err)
	}
	return payload, nil
}

// changed returns metadata with changes from flags.
func changed(metadata message.Metadata, set, unset []string) (message.Metadata, error) {
	edited := message.Metadata{}
	maps.Copy(edited, metadata)
	for _, name := range unset {
		if _, ok := edited[name]; !ok {
			return nil, fmt.Errorf("--unset %s: the message has no such metadata", oneLine(name))
		}
		if strings.HasPrefix(strings.ToLower(name), outbox.ReservedMetadata) {
			return nil, fmt.Errorf("--unset %s: names that begin with %s are reserved, and stay", oneLine(name), outbox.ReservedMetadata)
		}
		delete(edited, name)
	}
	for _, pair := range set {
		name, value, ok := strings.Cut(pair, "=")
		if !ok || name == "" {
			return nil, &usageError{fmt.Errorf("--set %s: must be name=value", oneLine(pair))}
		}
		edited[name] = value
	}
	return edited, nil
}
