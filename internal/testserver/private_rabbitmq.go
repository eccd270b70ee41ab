package testserver

import "testing"

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

// Eval evaluates an Erlang expression in the node.
func (s *RabbitServer) Eval(expression string) {
	s.t.Helper()
	s.run("eval", s.dir, expression)
}

// Expressions for Eval.
const (
	StopApp          = "rabbit:stop()"
	StartApp         = "rabbit:start()"
	RaiseMemoryAlarm = "vm_memory_monitor:set_vm_memory_high_watermark(0.0000001), " + alarmed
	ClearMemoryAlarm = "vm_memory_monitor:set_vm_memory_high_watermark({absolute, \"2GB\"})"
	RaiseDiskAlarm   = "rabbit_disk_monitor:set_disk_free_limit(\"1000000GB\"), " + alarmed
	ClearDiskAlarm   = "rabbit_disk_monitor:set_disk_free_limit(\"1MB\")"
	CloseConnections = "[rabbit_networking:close_connection(C, \"test\") || C <- rabbit_networking:connections()]"

	// alarmed answers when all connections know of an alarm. What is published before they do
	// does not block them.
	alarmed = "rabbit_alarm:get_alarms(), [catch rabbit_networking:connection_info(C, [state]) || C <- rabbit_networking:connections()]"
)

// StopApp stops the broker but not its Erlang node: the port refuses
// connections, and StartApp brings it back in a second.
func (s *RabbitServer) StopApp() {
	s.t.Helper()
	s.Eval(StopApp)
}

// StartApp starts the broker again after StopApp.
func (s *RabbitServer) StartApp() {
	s.t.Helper()
	s.Eval(StartApp)
}

// GoAway kills the node in a long run; otherwise it stops the broker alone, since a node takes
// seconds to start. ComeBack starts it again, and returns when it answers.
func (s *RabbitServer) GoAway() {
	s.t.Helper()
	if Long() {
		s.Kill()
		return
	}
	s.StopApp()
}

// ComeBack ends GoAway.
func (s *RabbitServer) ComeBack() {
	s.t.Helper()
	if Long() {
		s.Start()
		return
	}
	s.StartApp()
}

// RaiseMemoryAlarm makes the node block every connection that publishes.
func (s *RabbitServer) RaiseMemoryAlarm() {
	s.t.Helper()
	s.Eval(RaiseMemoryAlarm)
}

// ClearMemoryAlarm clears the memory alarm.
func (s *RabbitServer) ClearMemoryAlarm() {
	s.t.Helper()
	s.Eval(ClearMemoryAlarm)
}

// RaiseDiskAlarm makes the node report a full disk. It blocks publishers, as the memory alarm
// does.
func (s *RabbitServer) RaiseDiskAlarm() {
	s.t.Helper()
	s.Eval(RaiseDiskAlarm)
}

// ClearDiskAlarm clears the disk alarm.
func (s *RabbitServer) ClearDiskAlarm() {
	s.t.Helper()
	s.Eval(ClearDiskAlarm)
}
