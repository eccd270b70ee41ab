package main

import (
	"net"
	"net/url"
	"os"
	"slices"
	"strings"
)

// verified returns the URL of a PostgreSQL with sslmode=verify-full if it leads to
// another machine and says nothing of TLS. The driver's own default encrypts, and
// takes any certificate.
func verified(database string) string {
	u, mode, ok := remoteTLS(database)
	if !ok || mode != "" {
		return database
	}
	query := u.RawQuery
	if query != "" {
		query += "&"
	}
	u.RawQuery = query + "sslmode=verify-full"
	return u.String()
}

// unverified returns the sslmode of a URL that leads to another machine without
// making sure which one it is, or "".
func unverified(database string) string {
	_, mode, ok := remoteTLS(database)
	if !ok || mode == "" || mode == "verify-full" || mode == "verify-ca" {
		return ""
	}
	return mode
}

// remoteTLS returns the URL of a PostgreSQL and the sslmode that it or the
// environment asks for. ok is false where all its hosts are loopback, and where it
// cannot be parsed, which the driver will say.
func remoteTLS(database string) (u *url.URL, mode string, ok bool) {
	u, err := url.Parse(database)
	if err != nil || u.Scheme != "postgres" && u.Scheme != "postgresql" {
		return nil, "", false
	}
	query := u.Query()
	mode = query.Get("sslmode")
	if mode == "" {
		mode = os.Getenv("PGSSLMODE")
	}
	hosts := []string{query.Get("hostaddr")}
	if hosts[0] == "" {
		hosts = strings.Split(query.Get("host"), ",")
	}
	if hosts[0] == "" {
		hosts = strings.Split(u.Host, ",")
		for i, host := range hosts {
			hosts[i] = (&url.URL{Host: host}).Hostname()
		}
	}
	if hosts[0] == "" {
		hosts = strings.Split(os.Getenv("PGHOST"), ",")
	}
	return u, mode, slices.ContainsFunc(hosts, func(host string) bool { return !loopback(host) })
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "" || host == "localhost" || strings.HasPrefix(host, "/") || ip != nil && ip.IsLoopback()
}
