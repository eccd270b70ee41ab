package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/oncemill/oncemill/inbox/rabbitmq"
)

// amqpOptions are the flags of commands that connect to RabbitMQ.
type amqpOptions struct {
	urls           []string
	allowPlaintext bool
}

func (o *amqpOptions) register(flags *pflag.FlagSet) {
	flags.StringArrayVar(&o.urls, "amqp-url", nil, "amqp:// or amqps:// URL of RabbitMQ (required); repeat it for the other nodes of a cluster, or separate URLs with spaces")
	flags.BoolVar(&o.allowPlaintext, "amqp-allow-plaintext", false, "allow amqp:// to hosts that are not loopback")
}

// split returns the URLs. None contains a space, and the variable can hold several only in
// this way.
func (o *amqpOptions) split() ([]string, error) {
	urls := strings.Fields(strings.Join(o.urls, " "))
	if len(urls) == 0 {
		return nil, &usageError{errors.New("--amqp-url or ONCEMILL_AMQP_URL is required")}
	}
	if slices.ContainsFunc(urls, ambiguous) {
		return nil, &usageError{errors.New("--amqp-url: " + howToEscape)}
	}
	return urls, nil
}

func newMoveShards(opts *options) *cobra.Command {
	var o amqpOptions
	var topic, consumer string
	var shards rabbitmq.Shards
	cmd := &cobra.Command{
		Use:   "move-shards",
		Short: "Change the number of a consumer's shards on RabbitMQ",
		Long: `Lead the messages of a topic to another number of shards, while producers and
consumers continue. Call it when all processes of the consumer run with the new
count, and with --previous as Shards.Previous. They finish the previous shards, remove
them, and then begin with the new ones. If the command fails, call it again.

The queues are those of inbox/rabbitmq.Queue. For others, call MoveShards.`,
		Example: `  oncemill move-shards --amqp-url amqp://localhost --topic orders --consumer stock --previous 8 --count 16`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			urls, err := o.split()
			if err != nil {
				return err
			}
			if topic == "" || consumer == "" {
				return &usageError{errors.New("--topic and --consumer are required")}
			}
			if shards.Count == 0 || shards.Previous == 0 {
				return &usageError{errors.New("--previous and --count are required")}
			}
			log, err := opts.logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			queue := amqp.NewDurablePubSubConfig(urls[0], amqp.GenerateQueueNameTopicNameWithSuffix(consumer))
			queue.Consume.Qos.PrefetchCount = 2 // it consumes nothing; this is the least that is valid
			operator, err := rabbitmq.New(queue, rabbitmq.Config{Addresses: urls[1:], AllowPlaintext: o.allowPlaintext, Shards: shards, Logger: log})
			if err != nil {
				return &usageError{err}
			}
			if err := errors.Join(operator.MoveShards(cmd.Context(), topic), operator.Close()); err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "messages of %s go to %d shards; consumers finish the previous %d\n", topic, shards.Count, shards.Previous)
			return err
		},
	}
	flags := cmd.Flags()
	o.register(flags)
	flags.StringVar(&topic, "topic", "", "the topic (required)")
	flags.StringVar(&consumer, "consumer", "", "name of the consumer (required)")
	flags.IntVar(&shards.Previous, "previous", 0, "the number of shards now (required)")
	flags.IntVar(&shards.Count, "count", 0, "the number of shards to move to (required)")
	return cmd
}
