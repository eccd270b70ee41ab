package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lib/pq"
)

// A password is sent to another machine only after its certificate was verified.
func TestDriverURL_RequiresACertificateOfOtherMachines(t *testing.T) {
	for _, name := range []string{"PGSSLMODE", "PGHOST", "PGHOSTADDR", "PGSERVICE", "PGSERVICEFILE"} {
		unset(t, name)
	}
	for database, want := range map[string]string{
		"postgres://a:b@db.example.com/shop":                           "verify-full",
		"postgresql://a:b@10.0.0.7:5432/shop?application_name=x%20y":   "verify-full",
		"postgres://a:b@[fd00::1]:5432/shop":                           "verify-full",
		"postgres://a:b@127.0.0.1,db.example.com/shop":                 "verify-full",
		"postgres:///shop?host=db.example.com":                         "verify-full",
		"postgres://localhost/shop?host=db.example.com":                "", // lib/pq goes by the last of them, sorted
		"postgres://localhost.example.com/shop":                        "verify-full",
		"postgres://a@localhost/shop":                                  "",
		"postgres://a@127.0.0.1:5432/shop":                             "",
		"postgres://a@[::1]/shop":                                      "",
		"postgres:///shop?host=/var/run/postgresql":                    "",
		"postgres:///shop":                                             "",
		"postgres://a@localhost,127.0.0.1/shop?port=5432,5433":         "",
		"postgres://localhost/shop?hostaddr=10.0.0.7":                  "verify-full",
		"postgres:///shop?host=localhost,db.example.com":               "verify-full",
		"postgres:///shop?host=,db.example.com":                        "verify-full",
		"postgres://db.example.com/shop?sslrootcert=system":            "", // which says verify-full
		"postgres://a:b@db.example.com/shop?sslmode=":                  "verify-full",
		"postgres://a:b@db.example.com/shop?a=1&ssl%6Dode=&b=2":        "verify-full",
		"postgres://a:b@db.example.com/shop?sslmode&connect_timeout=1": "verify-full",
		"postgres://a:b@db.example.com/shop?sslmode=&sslmode=":         "verify-full",
		"postgres://a:b@db.example.com/shop?sslmode=disable":           "disable",
		"postgres://a:b@db.example.com/shop?sslmode=require&connect=1": "require",
		"postgres://a:b@db.example.com/shop?sslmode=verify-ca":         "verify-ca",
	} {
		u, err := url.Parse(driverURL(database))
		if err != nil || u.Query().Get("sslmode") != want {
			t.Errorf("%s: %v, %v; want sslmode %q", database, u, err, want)
		}
		if cfg, err := pq.NewConfig(driverURL(database)); err != nil || want != "" && string(cfg.SSLMode) != want {
			t.Errorf("%s: the driver has mode %q, %v", database, cfg.SSLMode, err)
		}
		if want == "" && driverURL(database) != database {
			t.Errorf("%s was changed", database)
		}
		warn := want == "disable" || want == "require"
		if got := unverified(database); (got != "") != warn || warn && got != want {
			t.Errorf("%s: unverified %q", database, got)
		}
	}
	t.Setenv("PGHOST", "db.example.com")
	if got := driverURL("postgres:///shop"); !strings.Contains(got, "verify-full") {
		t.Errorf("of the environment: %s", got)
	}
	unset(t, "PGHOST")
	t.Setenv("PGHOSTADDR", "10.0.0.7")
	for _, database := range []string{"postgres:///shop", "postgres://localhost/shop"} {
		if got := driverURL(database); !strings.Contains(got, "verify-full") {
			t.Errorf("of the environment's address: %s", got)
		}
	}
	unset(t, "PGHOSTADDR")
	services := filepath.Join(t.TempDir(), "services")
	if err := os.WriteFile(services, []byte("[shop]\nhost=db.example.com\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PGSERVICEFILE", services)
	if got := driverURL("postgres:///shop?service=shop"); !strings.Contains(got, "verify-full") {
		t.Errorf("of a service: %s", got)
	}
	t.Setenv("PGHOST", "db.example.com")
	t.Setenv("PGSSLMODE", "require")
	if got := driverURL("postgres:///shop"); got != "postgres:///shop" || unverified(got) != "require" {
		t.Errorf("with a mode of the environment: %s", got)
	}
}

// A list of hosts that begins with a socket is refused: the driver would send the password to
// the other hosts in clear text, whatever sslmode is set.
func TestCommand_RefusesASocketBeforeOtherHosts(t *testing.T) {
	t.Parallel()
	for database, want := range map[string]int{
		"postgres://u:p@/shop?host=/nowhere,db.example.com&sslmode=verify-full&connect_timeout=1": 2,
		"postgres://u:p@/shop?host=@abs,db.example.com&connect_timeout=1":                         2,
		"postgres://u:p@/shop?host=/nowhere,/elsewhere&connect_timeout=1":                         1,
		"postgres://u:p@/shop?host=/nowhere&connect_timeout=1":                                    1,
	} {
		cmd, output := command(t.Context(), nil, "dlq", "--database", database)
		err := cmd.Run()
		if code := cmd.ProcessState.ExitCode(); code != want || (want == 2) != strings.Contains(output.String(), "begins with a socket") {
			t.Errorf("%s: %v, %s", database, err, output)
		}
	}
}

// unset removes a variable from the environment until the test ends.
func unset(t *testing.T, name string) {
	t.Helper()
	t.Setenv(name, "") // puts it back afterwards
	if err := os.Unsetenv(name); err != nil {
		t.Fatal(err)
	}
}

// Several hosts are accepted in the syntax of libpq and pgx, and of lib/pq.
func TestCommand_AcceptsSeveralHosts(t *testing.T) {
	t.Parallel()
	for database, want := range map[string]string{
		"postgres://a:5432,b:5433/shop":                          "a:5432 b:5433",
		"postgres://u:p@a:5432,b:5433/shop?connect_timeout=3":    "a:5432 b:5433",
		"postgres://a,b/shop?port=5432,5433":                     "a:5432 b:5433",
		"postgres://a,b/shop":                                    "a:5432 b:5432",
		"postgres://a,b:5433/shop":                               "a:5432 b:5433",
		"postgres://a:5433/shop?target_session_attrs=any":        "a:5433",
		"postgres://[fd00::1]:5433/shop":                         "fd00::1:5433",
		"postgresql://u@a:5432,b:5433,c:5434/shop?sslmode=allow": "a:5432 b:5433 c:5434",
	} {
		cfg, err := pq.NewConfig(driverURL(database))
		if err != nil {
			t.Errorf("%s: %v", database, err)
			continue
		}
		got := fmt.Sprintf("%s:%d", cfg.Host, cfg.Port)
		for _, h := range cfg.Multi {
			got += fmt.Sprintf(" %s:%d", h.Host, h.Port)
		}
		if got != want {
			t.Errorf("%s leads to %s, want %s", database, got, want)
		}
	}
}

// The connection of --notify also verifies the server before it sends the password.
func TestRelayCommand_SendsNoPasswordToAnotherServer(t *testing.T) {
	t.Parallel()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"LOCALHOST"}}
	certificate, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	server, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Close() })
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var startups atomic.Int64
	go func() {
		for {
			conn, err := server.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close() //nolint:errcheck // the client has what it needs
				request := make([]byte, 8)
				if _, err := io.ReadFull(conn, request); err != nil {
					return
				}
				if _, err := conn.Write([]byte("S")); err != nil {
					return
				}
				secure := tls.Server(conn, &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{certificate}, PrivateKey: key}}})
				if _, err := io.ReadFull(secure, request); err == nil {
					startups.Add(1)
					cancel() // nothing else would end the command
				}
			}()
		}
	}()
	_, port, err := net.SplitHostPort(server.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	root := newRoot()
	root.SetErr(io.Discard)
	// The command does not know that this name is loopback.
	root.SetArgs([]string{"relay", "--notify", "--database", "postgres://u:secret@LOCALHOST:" + port + "/shop", "--amqp-url", "amqp://localhost:1", "--stop-timeout", "100ms"})
	err = root.ExecuteContext(ctx)
	if n := startups.Load(); n > 0 || err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("%d connections went on with the certificate of a stranger; the command ended with %v", n, err)
	}
}
