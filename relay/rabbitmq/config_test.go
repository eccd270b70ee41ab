package rabbitmq_test

import (
	"crypto/tls"
	"errors"
	"strings"
	"testing"
	"time"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

func TestNew_NamesEachBadValue(t *testing.T) {
	t.Parallel()
	const local = "amqp://guest:s3cr3t@localhost"
	tests := map[string]struct {
		uri    string
		spoil  func(cfg *wamqp.Config, opts *rabbitmq.Config)
		fields []string
	}{
		"good":                      {uri: local},
		"good TLS":                  {uri: "amqps://user:s3cr3t@broker.example/vhost?heartbeat=5&auth_mechanism=plain"},
		"good IPv6":                 {uri: "amqp://user:s3cr3t@[::1]:5672/"},
		"plaintext allowed":         {uri: "amqp://user:s3cr3t@broker.example", spoil: func(_ *wamqp.Config, o *rabbitmq.Config) { o.AllowPlaintext = true }},
		"plaintext":                 {uri: "amqp://user:s3cr3t@broker.example", fields: []string{"amqp.Config.Connection.AmqpURI"}},
		"plaintext to all":          {uri: "amqp://user:s3cr3t@0.0.0.0", fields: []string{"amqp.Config.Connection.AmqpURI"}},
		"no URI":                    {uri: "", fields: []string{"amqp.Config.Connection.AmqpURI"}},
		"no AMQP URI":               {uri: "http://user:s3cr3t@localhost", fields: []string{"amqp.Config.Connection.AmqpURI"}},
		"unparsable":                {uri: "amqp://user:s3cr3t@local host", fields: []string{"amqp.Config.Connection.AmqpURI"}},
		"bad port":                  {uri: "amqp://user:s3cr3t@localhost:x", fields: []string{"amqp.Config.Connection.AmqpURI"}},
		"unescaped":                 {uri: "amqp://user:s3cr3t%zz@localhost", fields: []string{"amqp.Config.Connection.AmqpURI"}},
		"auth mechanism":            {uri: local + "/?auth_mechanism=magic", fields: []string{"amqp.Config.Connection.AmqpURI"}},
		"few channels":              {uri: local + "/?channel_max=10", fields: []string{"amqp.Config.Connection.AmqpURI"}},
		"negative timeout":          {uri: local + "/?connection_timeout=-1", fields: []string{"amqp.Config.Connection.AmqpURI"}},
		"TLS config without amqps:": {uri: local, spoil: func(c *wamqp.Config, _ *rabbitmq.Config) { c.Connection.TLSConfig = &tls.Config{} }, fields: []string{"amqp.Config.Connection.AmqpURI"}},
		"two TLS configs": {
			uri: "amqps://localhost",
			spoil: func(c *wamqp.Config, _ *rabbitmq.Config) {
				c.Connection.TLSConfig = &tls.Config{}
				c.Connection.AmqpConfig = &amqp.Config{TLSClientConfig: &tls.Config{}}
			},
			fields: []string{"amqp.Config.Connection.TLSConfig"},
		},
		"library recovery and channels": {
			uri: local,
			spoil: func(c *wamqp.Config, _ *rabbitmq.Config) {
				c.Connection.AmqpConfig = &amqp.Config{Recovery: &amqp.Recovery{}, ChannelMax: 32}
			},
			fields: []string{"amqp.Config.Connection.AmqpConfig.Recovery", "amqp.Config.Connection.AmqpConfig.ChannelMax"},
		},
		"reconnect": {
			uri: local,
			spoil: func(c *wamqp.Config, _ *rabbitmq.Config) {
				c.Connection.Reconnect = &wamqp.ReconnectConfig{BackoffMaxInterval: -1, BackoffRandomizationFactor: 2}
			},
			fields: []string{
				"amqp.Config.Connection.Reconnect.BackoffInitialInterval", "amqp.Config.Connection.Reconnect.BackoffMaxInterval",
				"amqp.Config.Connection.Reconnect.BackoffMultiplier", "amqp.Config.Connection.Reconnect.BackoffRandomizationFactor",
			},
		},
		"header of ours": {
			uri: local,
			spoil: func(c *wamqp.Config, _ *rabbitmq.Config) {
				c.Marshaler = wamqp.DefaultMarshaler{MessageUUIDHeaderKey: "oncemill_id"}
			},
			fields: []string{"amqp.Config.Marshaler.MessageUUIDHeaderKey"},
		},
		"long header": {
			uri: local,
			spoil: func(c *wamqp.Config, _ *rabbitmq.Config) {
				c.Marshaler = wamqp.DefaultMarshaler{MessageUUIDHeaderKey: strings.Repeat("k", 256)}
			},
			fields: []string{"amqp.Config.Marshaler.MessageUUIDHeaderKey"},
		},
		"tables": {
			uri: local,
			spoil: func(c *wamqp.Config, _ *rabbitmq.Config) {
				c.Exchange.Arguments = amqp.Table{"x": struct{}{}}
				c.Connection.AmqpConfig = &amqp.Config{Properties: amqp.Table{strings.Repeat("k", 256): 1}}
			},
			fields: []string{"amqp.Config.Exchange.Arguments", "amqp.Config.Connection.AmqpConfig.Properties"},
		},
		"good reconnect": {uri: local, spoil: func(c *wamqp.Config, _ *rabbitmq.Config) { c.Connection.Reconnect = wamqp.DefaultReconnectConfig() }},
		"nothing set": {
			uri:   local,
			spoil: func(c *wamqp.Config, _ *rabbitmq.Config) { *c = wamqp.Config{} },
			fields: []string{
				"amqp.Config.Marshaler", "amqp.Config.Exchange.GenerateName", "amqp.Config.Publish.GenerateRoutingKey",
				"amqp.Config.TopologyBuilder", "amqp.Config.Connection.AmqpURI",
			},
		},
		"publish": {
			uri: local,
			spoil: func(c *wamqp.Config, _ *rabbitmq.Config) {
				c.Publish.Transactional, c.Publish.Immediate = true, true
			},
			fields: []string{"amqp.Config.Publish.Transactional", "amqp.Config.Publish.Immediate"},
		},
		"options": {
			uri: local,
			spoil: func(_ *wamqp.Config, o *rabbitmq.Config) {
				*o = rabbitmq.Config{Window: -1, WriteBuffer: 4095, DialTimeout: -1, CallTimeout: -time.Second, ConfirmTimeout: -1}
			},
			fields: []string{
				"rabbitmq.Config.Window", "rabbitmq.Config.WriteBuffer", "rabbitmq.Config.DialTimeout",
				"rabbitmq.Config.CallTimeout", "rabbitmq.Config.ConfirmTimeout",
			},
		},
		"only addresses": {spoil: func(_ *wamqp.Config, o *rabbitmq.Config) { o.Addresses = []string{local, local} }},
		"bad addresses": {
			uri: "amqps://user:s3cr3t@broker.example/shop",
			spoil: func(_ *wamqp.Config, o *rabbitmq.Config) {
				o.Addresses = []string{
					"amqps://user:s3cr3t@other.example/shop", "amqp://user:s3cr3t@other.example/shop", "",
					"http://user:s3cr3t@localhost", "amqps://user:s3cr3t@other.example/another", local + "/shop?channel_max=40",
				}
			},
			fields: []string{
				"rabbitmq.Config.Addresses[1]", "rabbitmq.Config.Addresses[2]", "rabbitmq.Config.Addresses[3]",
				"rabbitmq.Config.Addresses[4]", "rabbitmq.Config.Addresses[5]",
			},
		},
		"large window": {uri: local, spoil: func(_ *wamqp.Config, o *rabbitmq.Config) { o.Window = 10_001 }, fields: []string{"rabbitmq.Config.Window"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			cfg, opts := queues(test.uri), rabbitmq.Config{}
			if test.spoil != nil {
				test.spoil(&cfg, &opts)
			}
			_, err := rabbitmq.New(cfg, opts)
			got := map[string]bool{}
			for _, field := range configErrors(err) {
				got[field] = true
			}
			for _, field := range test.fields {
				if !got[field] {
					t.Errorf("%s is not named: %v", field, err)
				}
			}
			if len(got) != len(test.fields) || (err == nil) != (len(test.fields) == 0) {
				t.Errorf("want %v, got %v", test.fields, err)
			}
			if err != nil && strings.Contains(err.Error(), "s3cr3t") {
				t.Errorf("the password is in the error: %v", err)
			}
		})
	}
}

// configErrors returns the fields named by the errors joined in err.
func configErrors(err error) []string {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return nil
	}
	var fields []string
	for _, e := range joined.Unwrap() {
		var c *oncemill.ConfigError
		if errors.As(e, &c) {
			fields = append(fields, c.Field)
		}
	}
	return fields
}
