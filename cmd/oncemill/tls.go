package main

import (
	"cmp"
	"net"
	"net/url"
	"slices"
	"strings"

	"github.com/lib/pq"
)

// driverURL returns the URL of a PostgreSQL database as lib/pq needs it. It moves the ports
// of several hosts, and adds sslmode=verify-full if a host is another machine and no mode
// is set. The driver's own default encrypts, but accepts any certificate.
func driverURL(database string) string {
	u, err := url.Parse(database)
	if err != nil || u.Scheme != "postgres" && u.Scheme != "postgresql" {
		return database // the driver reports the problem
	}
	if movePorts(u) {
		database = u.String()
	}
	if mode, remote := remoteTLS(database); !remote || mode != "" {
		return database
	}
	dropEmptyMode(u) // the driver uses the first mode
	addParameter(u, "sslmode=verify-full")
	return u.String()
}

// movePorts moves the ports of several hosts to ?port=5432,5433. libpq and pgx accept them
// with the hosts, lib/pq does not.
func movePorts(u *url.URL) (moved bool) {
	hosts := strings.Split(u.Host, ",")
	if len(hosts) == 1 || !strings.Contains(u.Host, ":") {
		return false
	}
	ports := make([]string, len(hosts))
	for i, host := range hosts {
		hosts[i], ports[i], _ = strings.Cut(host, ":")
		ports[i] = cmp.Or(ports[i], "5432")
	}
	u.Host = strings.Join(hosts, ",")
	addParameter(u, "port="+strings.Join(ports, ","))
	return true
}

// dropEmptyMode removes sslmode= without a value, the result of a template whose variable is
// not set.
func dropEmptyMode(u *url.URL) {
	parameters := slices.DeleteFunc(strings.Split(u.RawQuery, "&"), func(parameter string) bool {
		pair, err := url.ParseQuery(parameter)
		return err == nil && pair.Has("sslmode") && pair.Get("sslmode") == ""
	})
	u.RawQuery = strings.Join(parameters, "&")
}

func addParameter(u *url.URL, parameter string) {
	if u.RawQuery != "" {
		u.RawQuery += "&"
	}
	u.RawQuery += parameter
}

// unverified returns the sslmode of a URL to another machine whose certificate is not
// verified, or "".
func unverified(database string) string {
	mode, remote := remoteTLS(database)
	if !remote || mode == "verify-full" || mode == "verify-ca" {
		return ""
	}
	return mode
}

// socketFirst reports whether a list of hosts begins with a socket and contains another machine.
// lib/pq would send it the password in clear text, whatever sslmode is set.
func socketFirst(database string) bool {
	cfg, err := pq.NewConfig(database)
	if err != nil || !socket(cfg.Host) {
		return false
	}
	return slices.ContainsFunc(cfg.Multi, func(h pq.ConfigMultihost) bool { return !socket(h.Host) && leadsAway(h) })
}

func socket(host string) bool { return strings.HasPrefix(host, "/") || strings.HasPrefix(host, "@") }

// remoteTLS returns the sslmode that the URL, the environment or a service file sets, and
// whether any host is another machine.
func remoteTLS(database string) (mode string, remote bool) {
	cfg, err := pq.NewConfig(database)
	if err != nil {
		return "", false
	}
	hosts := append([]pq.ConfigMultihost{{Host: cfg.Host, Hostaddr: cfg.Hostaddr}}, cfg.Multi...)
	return string(cfg.SSLMode), slices.ContainsFunc(hosts, leadsAway)
}

// leadsAway reports whether a host is another machine.
func leadsAway(h pq.ConfigMultihost) bool {
	if h.Hostaddr.IsValid() {
		return !h.Hostaddr.IsLoopback()
	}
	return !loopback(h.Host)
}

func loopback(host string) bool {
	ip := net.ParseIP(strings.Trim(host, "[]"))
	return host == "" || host == "localhost" || socket(host) || ip != nil && ip.IsLoopback()
}
