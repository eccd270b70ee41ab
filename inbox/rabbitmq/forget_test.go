package rabbitmq

import (
	"errors"
	"fmt"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"
)

// A shard that is lost while it has a slot for its next message leaves it to the others.
func TestShard_GivesItsSlotBackWhenItIsLost(t *testing.T) {
	t.Parallel()
	s := &subscription{shard: &shard{slots: make(chan struct{}, 2), holds: true}}
	s.shard.slots <- struct{}{}
	s.forget(&session{})
	if len(s.shard.slots) != 0 || s.shard.holds {
		t.Errorf("%d slots are taken", len(s.shard.slots))
	}
}

// Silence, or the end of the connection, is the same for all shards.
func TestIsAnswer_SilenceIsNone(t *testing.T) {
	t.Parallel()
	refused := &amqp.Error{Code: amqp.NotFound, Reason: "NOT_FOUND - no queue"}
	for err, want := range map[error]bool{
		error(refused): true, amqp.ErrClosed: false, errors.Join(errCallTimeout, amqp.ErrClosed): false, errors.New("dial"): false,
	} {
		if got := isAnswer(fmt.Errorf("open: %w", err)); got != want {
			t.Errorf("%v: %t", err, got)
		}
	}
	if !isAnswer(nil) {
		t.Error("a shard that was opened has answered")
	}
}
