package main

import (
	"cmp"
	"net"
	"net/url"
	"slices"
	"strings"

	"github.com/lib/pq"
)

// driverURL returns the URL of a PostgreSQL as lib/pq is to have it: the ports of
// several hosts where that looks for them, and sslmode=verify-full if it leads to
// another machine and says nothing of TLS, or names no mode. The driver's own default
// encrypts, and takes any certificate.
func driverURL(database string) string {
	u, err := url.Parse(database)
	if err != nil || u.Scheme != "postgres" && u.Scheme != "postgresql" {
		return database // the driver says what is wrong with it
	}
	if movePorts(u) {
		database = u.String()
	}
	if mode, remote := remoteTLS(database); !remote || mode != "" {
		return database
	}
	dropEmptyMode(u) // the driver goes by the first
	addParameter(u, "sslmode=verify-full")
	return u.String()
}

// movePorts makes ?port=5432,5433 of the ports of several hosts, as lib/pq wants them,
// where libpq and pgx take them with the hosts.
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

// dropEmptyMode drops what a template makes of a variable that is not set.
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

// unverified returns the sslmode of a URL that leads to another machine without
// making sure which one it is, or "".
func unverified(database string) string {
	mode, remote := remoteTLS(database)
	if !remote || mode == "verify-full" || mode == "verify-ca" {
		return ""
	}
	return mode
}

// socketFirst reports that a list of hosts begins with a socket and leads to another
// machine, too: whatever mode it asks for, lib/pq would show the password in clear.
func socketFirst(database string) bool {
	cfg, err := pq.NewConfig(database)
	if err != nil || !socket(cfg.Host) {
		return false
	}
	return slices.ContainsFunc(cfg.Multi, func(h pq.ConfigMultihost) bool { return !socket(h.Host) && leadsAway(h) })
}

func socket(host string) bool { return strings.HasPrefix(host, "/") || strings.HasPrefix(host, "@") }

// remoteTLS returns the sslmode that a URL, the environment or a service file asks
// for, and whether any of the hosts is another machine.
func remoteTLS(database string) (mode string, remote bool) {
	cfg, err := pq.NewConfig(database)
	if err != nil {
		return "", false
	}
	hosts := append([]pq.ConfigMultihost{{Host: cfg.Host, Hostaddr: cfg.Hostaddr}}, cfg.Multi...)
	return string(cfg.SSLMode), slices.ContainsFunc(hosts, leadsAway)
}

// leadsAway reports that a host is another machine.
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
