package outbox_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// canary stands in what must not appear in errors: payloads and metadata values.
const canary = "secret-canary"

func withMetadata(name, value string) *message.Message {
	msg := newMessage("id", "")
	msg.Metadata.Set(name, value)
	return msg
}

func TestPublish_BadMessagesAreNamedBeforeAnyStatement(t *testing.T) {
	cases := map[string]struct {
		topic string
		msg   *message.Message
		field string
	}{
		"no message":            {"orders", nil, "message"},
		"topic empty":           {"", newMessage("id", ""), "topic"},
		"topic too long":        {strings.Repeat("t", 256), newMessage("id", ""), "topic"},
		"topic with NUL":        {"a\x00b", newMessage("id", ""), "topic"},
		"topic not UTF-8":       {"a\xff", newMessage("id", ""), "topic"},
		"id empty":              {"orders", newMessage("", ""), "id"},
		"id too long":           {"orders", newMessage(strings.Repeat("ü", 128), ""), "id"},
		"id with NUL":           {"orders", newMessage("\x00", ""), "id"},
		"id not UTF-8":          {"orders", newMessage("\xc3\x28", ""), "id"},
		"key too long":          {"orders", newMessage("id", strings.Repeat("k", 256)), "key"},
		"key with NUL":          {"orders", newMessage("id", "k\x00"), "key"},
		"key not UTF-8":         {"orders", newMessage("id", "k\xed\xa0\x80"), "key"},
		"payload too large":     {"orders", message.NewMessage("id", []byte(canary+strings.Repeat("p", 1000))), "payload"},
		"metadata without name": {"orders", withMetadata("", canary), "metadata"},
		"metadata name NUL":     {"orders", withMetadata("a\x00", canary), "metadata"},
		"metadata name UTF-8":   {"orders", withMetadata("a\xff", canary), "metadata"},
		"metadata name long":    {"orders", withMetadata(strings.Repeat("n", 64<<10+1), canary), "metadata"},
		"metadata value NUL":    {"orders", withMetadata("a", canary+"\x00"), "metadata"},
		"metadata value UTF-8":  {"orders", withMetadata("a", canary+"\xff"), "metadata"},
		"metadata value long":   {"orders", withMetadata("a", canary+strings.Repeat("v", 64<<10)), "metadata"},
		"metadata total":        {"orders", withMetadata("a", canary+strings.Repeat("v", 64<<10-20)), "metadata"},
		"metadata when encoded": {"orders", withMetadata("a", canary+strings.Repeat("\x01", 20<<10)), "metadata"},
	}
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.use(t, p.db, func(cfg *outbox.Config) { cfg.MaxPayload = 1000 })
		p.inTx(t, func(tx *sql.Tx) {
			ctx := oncemill.ContextWithTx(t.Context(), tx)
			p.tap.sent()
			for name, c := range cases {
				if c.msg != nil {
					c.msg = c.msg.Copy() // the other databases have theirs
					c.msg.SetContext(ctx)
				}
				for _, publisher := range []*outbox.Publisher{p.box.Publisher(tx), p.box.ContextPublisher()} {
					// The bad one stands behind good ones, of which nothing may be sent.
					msgs := []*message.Message{newMessage("good", ""), newMessage("good too", "k"), c.msg}
					index := 2
					if c.field == "topic" {
						index = 0 // bad for every message
					}
					err := publisher.Publish(c.topic, msgs...)
					var bad *outbox.MessageError
					switch {
					case !errors.As(err, &bad):
						t.Errorf("%s: got error %v", name, err)
					case bad.Index != index || bad.Field != c.field || bad.Problem == "":
						t.Errorf("%s: got %+v", name, bad)
					case !strings.Contains(err.Error(), c.field) || strings.Contains(err.Error(), canary) || len(err.Error()) > 400:
						t.Errorf("%s: the text is %q", name, err)
					case c.msg != nil && c.field != "topic" && c.field != "id" && bad.MessageID != "id":
						t.Errorf("%s: the message is called %q", name, bad.MessageID)
					}
				}
			}
			if sent := p.tap.sent(); len(sent) != 0 {
				t.Errorf("sent %s", firstWords(sent))
			}
			// The transaction is still good.
			expectNoError(t, p.box.Publisher(tx).Publish("orders", newMessage("fine", "")))
		})
		expectIDs(t, p.read(t), "fine")
	})
}

func TestPublish_TakesWhatJustFits(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.use(t, p.db, func(cfg *outbox.Config) { cfg.MaxPayload = 1000 })
		longest := strings.Repeat("ü", 127) + "x"
		msg := message.NewMessage(longest, make([]byte, 1000))
		const braces = len(`{"a":""}`)
		msg.Metadata.Set("a", strings.Repeat("v", 64<<10-braces))
		p.use(t, p.db, func(cfg *outbox.Config) { cfg.Key = func(*message.Message) string { return longest } })
		p.inTx(t, func(tx *sql.Tx) { expectNoError(t, p.box.Publisher(tx).Publish(longest, msg)) })
		if rows := p.read(t); len(rows) != 1 || len(rows[0].Metadata) != 64<<10 || rows[0].Key != longest {
			t.Errorf("got %d rows", len(rows))
		}
	})
}

func TestPublish_ChecksTheKeyThatTheConfiguredFunctionReturns(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		keys := map[string]string{"keyed": "customer", "unkeyed": "", "bad": "\x00"}
		p.use(t, p.db, func(cfg *outbox.Config) {
			cfg.Key = func(msg *message.Message) string { return keys[msg.UUID] }
		})
		p.publish(t, newMessage("keyed", "not this one"), newMessage("unkeyed", "nor this one"))
		for _, r := range p.read(t) {
			if r.Key != keys[r.MessageID] || r.Lane != outbox.Lane(r.Key, r.MessageID) {
				t.Errorf("got %+v", r)
			}
		}
		err := p.box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
			return p.box.Publisher(tx).Publish("orders", newMessage("bad", ""))
		})
		if bad := (*outbox.MessageError)(nil); !errors.As(err, &bad) || bad.Field != "key" {
			t.Errorf("got %v", err)
		}
	})
}

func TestSetKey_TheEmptyKeyIsNone(t *testing.T) {
	t.Parallel()
	msg := &message.Message{UUID: "a"} // metadata are nil
	outbox.SetKey(msg, "")
	if msg.Metadata != nil {
		t.Errorf("metadata are %v", msg.Metadata)
	}
	outbox.SetKey(msg, "k")
	if got := msg.Metadata[outbox.KeyMetadata]; got != "k" {
		t.Errorf("the key is %q", got)
	}
	outbox.SetKey(msg, "")
	if _, ok := msg.Metadata[outbox.KeyMetadata]; ok {
		t.Error("the key is still there")
	}
}

// refusing is a database that must not be asked.
type refusing struct{ t *testing.T }

func (r refusing) Driver() driver.Driver { return r }

func (r refusing) Open(string) (driver.Conn, error) { return r.Connect(r.t.Context()) }

func (r refusing) Connect(context.Context) (driver.Conn, error) {
	r.t.Error("a connection was opened")
	return nil, errors.New("refused")
}

func TestNew_NamesEveryBadValueWithoutAConnection(t *testing.T) {
	t.Parallel()
	db := sql.OpenDB(refusing{t})
	t.Cleanup(func() { db.Close() })
	const schema, prefix, dialect = "oncemill.Config.Schema", "oncemill.Config.Prefix", "oncemill.Config.Dialect"
	postgres := func(c oncemill.Config) outbox.Config {
		c.Dialect = oncemill.PostgreSQL
		return outbox.Config{Database: c}
	}
	sqlite := func(c oncemill.Config) outbox.Config {
		c.Dialect = oncemill.SQLite
		return outbox.Config{Database: c}
	}
	with := func(change func(*outbox.Config)) outbox.Config {
		cfg := postgres(oncemill.Config{})
		change(&cfg)
		return cfg
	}
	for name, c := range map[string]struct {
		cfg    outbox.Config
		fields []string
	}{
		"injection":           {postgres(oncemill.Config{Schema: `a"; drop schema public; --`}), []string{schema}},
		"upper case":          {postgres(oncemill.Config{Schema: "Orders"}), []string{schema}},
		"unicode":             {postgres(oncemill.Config{Schema: "schéma"}), []string{schema}},
		"a dot":               {postgres(oncemill.Config{Schema: "a.b"}), []string{schema}},
		"a digit in front":    {postgres(oncemill.Config{Schema: "1a"}), []string{schema}},
		"a line end":          {postgres(oncemill.Config{Schema: "a\n"}), []string{schema}},
		"a NUL":               {postgres(oncemill.Config{Schema: "a\x00"}), []string{schema}},
		"too long":            {postgres(oncemill.Config{Schema: strings.Repeat("a", 32)}), []string{schema}},
		"PostgreSQL's":        {postgres(oncemill.Config{Schema: "pg_mill"}), []string{schema}},
		"prefix":              {postgres(oncemill.Config{Prefix: "a-"}), []string{prefix}},
		"prefix too long":     {postgres(oncemill.Config{Prefix: strings.Repeat("a", 32)}), []string{prefix}},
		"both":                {postgres(oncemill.Config{Schema: " ", Prefix: "'"}), []string{schema, prefix}},
		"schema on SQLite":    {sqlite(oncemill.Config{Schema: "main"}), []string{schema}},
		"prefix on SQLite":    {sqlite(oncemill.Config{Prefix: "x]"}), []string{prefix}},
		"dialect":             {outbox.Config{Database: oncemill.Config{Dialect: 7}}, []string{dialect}},
		"payload negative":    {with(func(c *outbox.Config) { c.MaxPayload = -1 }), []string{"outbox.Config.MaxPayload"}},
		"payload too large":   {with(func(c *outbox.Config) { c.MaxPayload = 128<<20 + 1 }), []string{"outbox.Config.MaxPayload"}},
		"history negative":    {with(func(c *outbox.Config) { c.History = -2 }), []string{"outbox.Config.History"}},
		"history too short":   {with(func(c *outbox.Config) { c.History = time.Hour - 1 }), []string{"outbox.Config.History"}},
		"retries":             {with(func(c *outbox.Config) { c.Retries = -1 }), []string{"outbox.Config.Retries"}},
		"everything together": {outbox.Config{Database: oncemill.Config{Dialect: oncemill.PostgreSQL, Schema: "?", Prefix: "?"}, MaxPayload: -5, History: -5, Retries: -5}, []string{schema, prefix, "outbox.Config.MaxPayload", "outbox.Config.History", "outbox.Config.Retries"}},
	} {
		box, err := outbox.New(db, c.cfg)
		if box != nil {
			t.Errorf("%s: an outbox was made", name)
		}
		got := testserver.ConfigErrors(err)
		if len(got) != len(c.fields) {
			t.Errorf("%s: got %v", name, err)
			continue
		}
		for i, bad := range got {
			if bad.Field != c.fields[i] || bad.Value == "" || bad.Problem == "" || !strings.Contains(err.Error(), c.fields[i]) {
				t.Errorf("%s: got %+v, want field %s", name, bad, c.fields[i])
			}
		}
	}
}

func TestNew_NeedsADatabaseOfAKnownDialect(t *testing.T) {
	t.Parallel()
	if _, err := outbox.New(nil, outbox.Config{}); len(testserver.ConfigErrors(err)) != 1 {
		t.Errorf("without a database: %v", err)
	}
	db := sql.OpenDB(refusing{t})
	t.Cleanup(func() { db.Close() })
	_, err := outbox.New(db, outbox.Config{MaxPayload: -1})
	expectError(t, err, oncemill.ErrUnknownDialect)
	if got := testserver.ConfigErrors(err); len(got) != 1 || got[0].Field != "outbox.Config.MaxPayload" {
		t.Errorf("got %v", err)
	}
}

func TestNew_DoesNoIO(t *testing.T) {
	t.Parallel()
	db := sql.OpenDB(refusing{t})
	t.Cleanup(func() { db.Close() })
	for _, dialect := range []oncemill.Dialect{oncemill.PostgreSQL, oncemill.SQLite} {
		for _, history := range []time.Duration{0, time.Hour, outbox.NoHistory} {
			box, err := outbox.New(db, outbox.Config{Database: oncemill.Config{Dialect: dialect}, History: history})
			if err != nil {
				t.Fatal(err)
			}
			if box.DB() != db || box.Config().Database.Prefix == "" && box.Config().Database.Schema == "" {
				t.Errorf("got %+v", box.Config().Database)
			}
		}
	}
}
