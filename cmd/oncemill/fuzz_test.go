package main

import (
	"strings"
	"testing"
)

// Whatever a password consists of, nothing of it is left in a text.
func FuzzWithoutPasswords(f *testing.F) {
	f.Add("cannot connect to ", "canary-password", "127.0.0.1/orders")
	f.Add("", "canary@p/a?s#s:word", "[::1]:5432")
	f.Add("x@y ", "canary\npassword", " and more")
	f.Add("amqp://guest:guest@127.0.0.1 ", "%40canary", "host")
	f.Fuzz(func(t *testing.T, before, password, after string) {
		if len(password) < 4 || strings.Contains(password, "://") || strings.Contains(before+"http://user:xxxxx@"+after, password) {
			return // it is not a password, or occurs elsewhere
		}
		if shown := withoutPasswords(before + "http://user:" + password + "@" + after); strings.Contains(shown, password) {
			t.Errorf("%q shows %q", shown, password)
		}
	})
}
