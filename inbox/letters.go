package inbox

import (
	"context"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
)

// LettersOf returns the dead letters of store for Config.DeadLetters. The store's table
// must be in the inbox's database.
func LettersOf(store *dlq.Store) DeadLetters { return letters{store} }

type letters struct{ store *dlq.Store }

func (l letters) Add(ctx context.Context, tx oncemill.Tx, letter *Letter) error {
	attempts := make([]dlq.Attempt, len(letter.Errors))
	for i, f := range letter.Errors {
		attempts[i] = dlq.Attempt{At: f.At, Class: string(ReasonFailed), Error: f.Error}
	}
	return l.store.Add(ctx, tx, &dlq.Letter{
		Consumer:  letter.Consumer,
		Topic:     letter.Topic,
		MessageID: letter.MessageID,
		Key:       letter.Key,
		Payload:   letter.Payload,
		Metadata:  letter.Metadata,
		CreatedAt: letter.CreatedAt,
		Reason:    string(letter.Reason),
		Error:     letter.Error,
		Stack:     letter.Stack,
		Tries:     letter.Attempts,
		Attempts:  attempts,
	})
}
