package main

import (
	"bytes"
	"strings"
	"testing"
)

// No wrong usage makes the command print a password.
func TestErrors_ShowNoPassword(t *testing.T) {
	t.Parallel()
	const url = "http://user:canary%2Fpass@127.0.0.1:1"
	for _, args := range [][]string{
		{url},
		{"http://user:pass canary@127.0.0.1:1"},
		{`http://user:"canary@127.0.0.1:1`},
		{"conformance", url},
		{"conformance", "--url", url},
		{"conformance", "--url", url + "/\x7f"},
		{"conformance", "--url", "http://user:canary@:x"},
		{"conformance", "--url", url, "--path", "/orders"},
		{"migrate", "up", url},
		{"migrate", "status", "postgres://user:1://canary@127.0.0.1:1/x"},
		{"migrate", "status", "postgres://user:canary://pass@127.0.0.1:1/x and amqp://user:s3://canary@127.0.0.1:1/"},
		{"migrate", "status", "see postgres://127.0.0.1:1/x|amqp://user:canary@127.0.0.1:1/"},
		{"conformance", "--url", "http://user:1://canary@127.0.0.1:1"},
		{"migrate", "status", "--database", "postgres://user:can@ary@127.0.0.1:1/x"},
		{"migrate", "status", "--database", "postgres://user:pass canary@127.0.0.1:1/x"},
		{"migrate", "status", "--database", `postgres://user:pass"canary@127.0.0.1:1/x`},
		{"migrate", "status", "--database", "host=127.0.0.1 port=1 password=canary"},
		{"migrate", "status", "--database", "host=127.0.0.1 port=1 password='pass canary'"},
		{"migrate", "status", `postgres://user:"canary@127.0.0.1:1/x`},
		{"migrate", "status", "postgres://user:pass canary@127.0.0.1:1/x and amqp://user:pass canary@127.0.0.1:1/"},
		{"conformance", "--url", "http://user:pass canary@127.0.0.1:1"},
		{"conformance", "--url", `http://user:"canary@127.0.0.1:1`},
		{"conformance", "--url", "http://user:pass canary@127.0.0.1:1", "--path", "/orders"},
		{"relay", "--database", "postgres://127.0.0.1:1/x", "--amqp-url", "amqp://user:pass canary@127.0.0.1:1/"},
		{"relay", "--database", "postgres://127.0.0.1:1/x", "--amqp-url", `amqp://user:"canary@127.0.0.1:x/`},
		{"relay", "--database", "postgres://127.0.0.1:1/x", "--amqp-url", "amqp://us/er:pass canary@127.0.0.1:1/"},
		{"relay", "--database", "postgres://127.0.0.1:1/x", "--amqp-url", "amqp://user:pass@canary/@127.0.0.1:1/"},
		{"migrate", "--database", "postgres://user:pass@canary/word@127.0.0.1:1/x"},
		{"migrate", "--database", "postgres://user:1/canary@127.0.0.1:1/x"},
		{"migrate", "--database", "postgres://user:1?canary@127.0.0.1:1/x"},
		{"migrate", "--database", "postgres://user:pass#canary@127.0.0.1:1/x"},
	} {
		var out bytes.Buffer
		root := newRoot()
		root.SetArgs(args)
		root.SetOut(&out)
		root.SetErr(&out)
		err := root.ExecuteContext(t.Context())
		if err == nil {
			t.Errorf("%q is accepted", args)
			continue
		}
		if text := withoutPasswords(inFlags(err)) + out.String(); strings.Contains(text, "canary") || strings.Contains(text, "ary@") {
			t.Errorf("%q: %s", args, text)
		}
	}
}
