package testserver

import "testing"

// RedisServer is a Redis server for one test. Its methods may be called from any goroutine. A
// failure fails the test.
type RedisServer struct{ private }

// PrivateRedis creates an empty Redis server for t and removes it when t ends. Each setting
// is "name=value" of redis.conf.
func PrivateRedis(t testing.TB, settings ...string) *RedisServer {
	t.Helper()
	return &RedisServer{startPrivate(t, "redis", settings)}
}

// Address returns the host and port of the server.
func (s *RedisServer) Address() string { return s.exports["ONCEMILL_TEST_REDIS"] }
