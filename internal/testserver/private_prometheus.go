package testserver

import "testing"

// PrometheusServer is a Prometheus for one test. A failure fails the test.
type PrometheusServer struct{ private }

// PrivatePrometheus starts Prometheus for t and removes it when t ends. config and rules are
// absolute paths of files, which are copied; config names the rules "rules.yml".
func PrivatePrometheus(t testing.TB, config, rules string) *PrometheusServer {
	t.Helper()
	return &PrometheusServer{startPrivate(t, "prometheus", []string{"config=" + config, "rules=" + rules})}
}

// URL returns the URL of its API.
func (s *PrometheusServer) URL() string { return s.exports["ONCEMILL_TEST_PROMETHEUS"] }
