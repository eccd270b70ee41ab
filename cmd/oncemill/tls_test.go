package main

import (
	"net/url"
	"strings"
	"testing"
)

// A password on its way to another machine is shown to that machine alone.
func TestVerified_DemandsTheCertificateOfOtherMachines(t *testing.T) {
	t.Setenv("PGSSLMODE", "")
	t.Setenv("PGHOST", "")
	for database, want := range map[string]string{
		"postgres://a:b@db.example.com/shop":                           "verify-full",
		"postgresql://a:b@10.0.0.7:5432/shop?application_name=x%20y":   "verify-full",
		"postgres://a:b@[fd00::1]:5432/shop":                           "verify-full",
		"postgres://a:b@127.0.0.1,db.example.com/shop":                 "verify-full",
		"postgres:///shop?host=db.example.com":                         "verify-full",
		"postgres://localhost/shop?host=db.example.com":                "verify-full",
		"postgres://localhost.example.com/shop":                        "verify-full",
		"postgres://a@localhost/shop":                                  "",
		"postgres://a@127.0.0.1:5432/shop":                             "",
		"postgres://a@[::1]/shop":                                      "",
		"postgres:///shop?host=/var/run/postgresql":                    "",
		"postgres:///shop":                                             "",
		"postgres://a:b@db.example.com/shop?sslmode=disable":           "disable",
		"postgres://a:b@db.example.com/shop?sslmode=require&connect=1": "require",
		"postgres://a:b@db.example.com/shop?sslmode=verify-ca":         "verify-ca",
	} {
		u, err := url.Parse(verified(database))
		if err != nil || u.Query().Get("sslmode") != want {
			t.Errorf("%s: %v, %v; want sslmode %q", database, u, err, want)
		}
		if want == "" && verified(database) != database {
			t.Errorf("%s was changed", database)
		}
		warn := want == "disable" || want == "require"
		if got := unverified(database); (got != "") != warn || warn && got != want {
			t.Errorf("%s: unverified %q", database, got)
		}
	}
	t.Setenv("PGHOST", "db.example.com")
	if got := verified("postgres:///shop"); !strings.Contains(got, "verify-full") {
		t.Errorf("of the environment: %s", got)
	}
	t.Setenv("PGSSLMODE", "require")
	if got := verified("postgres:///shop"); got != "postgres:///shop" || unverified(got) != "require" {
		t.Errorf("with a mode of the environment: %s", got)
	}
}
