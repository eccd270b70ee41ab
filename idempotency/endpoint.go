package idempotency

import "strings"

// commandEndpoint is the prefix of the endpoints of commands. Those of requests begin with
// a method.
const commandEndpoint = "command "

// endpointOf names the operation for operators. A pattern of http.ServeMux already
// contains the method. A path is not used: there are too many, and some contain secrets.
func endpointOf(method, route, pattern string) string {
	if route == "" {
		if route = pattern; route == "" {
			route = "unmatched"
		}
	}
	if !strings.HasPrefix(route, method+" ") {
		route = method + " " + route
	}
	return printable(route, maxKey)
}

// printable makes foreign text safe for a column, a log or a metric.
func printable(s string, most int) string {
	if len(s) > most {
		s = s[:most]
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == '\uFFFD' {
			return -1
		}
		return r
	}, strings.ToValidUTF8(s, ""))
}
