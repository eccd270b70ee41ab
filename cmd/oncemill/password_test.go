package main

import (
	"bytes"
	"strings"
	"testing"
)

// No mistake makes the command print the password of a URL.
func TestErrors_ShowNoPassword(t *testing.T) {
	t.Parallel()
	const url = "http://user:canary%2Fpass@127.0.0.1:1"
	for _, args := range [][]string{
		{url},
		{"conformance", url},
		{"conformance", "--url", url},
		{"conformance", "--url", url + "/\x7f"},
		{"conformance", "--url", "http://user:canary@:x"},
		{"conformance", "--url", url, "--path", "/orders"},
		{"migrate", "up", url},
		{"status", "--database", "postgres://user:can@ary@127.0.0.1:1/x"},
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
