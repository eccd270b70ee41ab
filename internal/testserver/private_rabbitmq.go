package testserver

import (
	"strings"
	"testing"
)

// RabbitServer is a RabbitMQ node for one test. Its methods may be called from any goroutine.
// A failure fails the test.
type RabbitServer struct{ private }

// PrivateRabbitMQ creates a node for t and removes it when t ends. Each setting
// is "name=value" of rabbitmq.conf.
func PrivateRabbitMQ(t testing.TB, settings ...string) *RabbitServer {
	t.Helper()
	return &RabbitServer{startPrivate(t, "rabbitmq", settings)}
}

// URI returns the AMQP URI of the node's default virtual host. It stays the
// same after a restart.
func (s *RabbitServer) URI() string { return s.exports[envAMQP] }

// Ctl runs rabbitmqctl and returns what it prints.
func (s *RabbitServer) Ctl(args ...string) string {
	s.t.Helper()
	return strings.TrimSpace(s.run(append([]string{"ctl", s.dir, "-q"}, args...)...))
}

// StopApp stops the broker but not its Erlang node: the port refuses
// connections, and StartApp brings it back in a second.
func (s *RabbitServer) StopApp() {
	s.t.Helper()
	s.Ctl("stop_app")
}

// StartApp starts the broker again after StopApp.
func (s *RabbitServer) StartApp() {
	s.t.Helper()
	s.Ctl("start_app")
}

// RaiseMemoryAlarm makes the node block every connection that publishes.
func (s *RabbitServer) RaiseMemoryAlarm() {
	s.t.Helper()
	s.Ctl("set_vm_memory_high_watermark", "0.0000001")
}

// ClearMemoryAlarm clears the memory alarm.
func (s *RabbitServer) ClearMemoryAlarm() {
	s.t.Helper()
	s.Ctl("set_vm_memory_high_watermark", "0.6")
}

// RaiseDiskAlarm makes the node report a full disk. It blocks publishers, as the memory alarm
// does.
func (s *RabbitServer) RaiseDiskAlarm() {
	s.t.Helper()
	s.Ctl("set_disk_free_limit", "1000000GB")
}

// ClearDiskAlarm clears the disk alarm.
func (s *RabbitServer) ClearDiskAlarm() {
	s.t.Helper()
	s.Ctl("set_disk_free_limit", "1MB")
}
