package testserver_test

import (
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/internal/testserver"
)

func dial(t *testing.T, uri string) *amqp.Channel {
	t.Helper()
	conn, err := amqp.Dial(uri)
	if err != nil {
		t.Fatalf("dial: %v", err)
	}
	t.Cleanup(func() { conn.Close() })
	ch, err := conn.Channel()
	if err != nil {
		t.Fatalf("channel: %v", err)
	}
	return ch
}

func publish(t *testing.T, ch *amqp.Channel, queue string) {
	t.Helper()
	if err := ch.PublishWithContext(t.Context(), "", queue, true, false, amqp.Publishing{Body: []byte("x")}); err != nil {
		t.Fatalf("publish: %v", err)
	}
}

func TestRabbitMQ_GivesEveryTestItsOwnVirtualHost(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"one", "two"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ch := dial(t, testserver.RabbitMQ(t))
			q, err := ch.QueueDeclare("orders", true, false, false, false, nil)
			if err != nil || q.Messages != 0 {
				t.Fatalf("queue has %d messages, %v", q.Messages, err)
			}
			publish(t, ch, "orders")
		})
	}
}

func TestRabbitMQ_RemovesTheVirtualHostAtTheEnd(t *testing.T) {
	t.Parallel()
	var uri string
	t.Run("inner", func(t *testing.T) { uri = testserver.RabbitMQ(t) })
	if conn, err := amqp.Dial(uri); err == nil {
		conn.Close()
		t.Error("the virtual host is still there")
	}
}

// One node, since each takes seconds to start.
func TestPrivateRabbitMQ(t *testing.T) {
	t.Parallel()
	server := testserver.PrivateRabbitMQ(t)
	t.Run("blocks publishers in an alarm", func(t *testing.T) { blocksInAnAlarm(t, server) })
	t.Run("keeps its queues over stop and kill", func(t *testing.T) { keepsItsQueues(t, server) })
}

func keepsItsQueues(t *testing.T, server *testserver.RabbitServer) {
	t.Helper()
	conn, err := amqp.Dial(server.URI())
	if err != nil {
		t.Fatal(err)
	}
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ch.QueueDeclare("orders", true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}

	server.StopApp()
	if _, err := amqp.Dial(server.URI()); err == nil {
		t.Error("accepts connections after StopApp")
	}
	server.StartApp()
	if testserver.Long() { // starting it takes seconds
		server.Kill()
		if _, err := amqp.Dial(server.URI()); err == nil {
			t.Error("accepts connections after Kill")
		}
		server.Start()
	}
	if _, err := dial(t, server.URI()).QueueDeclarePassive("orders", true, false, false, false, nil); err != nil {
		t.Errorf("the durable queue is gone: %v", err)
	}
	server.Stop()
}

func blocksInAnAlarm(t *testing.T, server *testserver.RabbitServer) {
	t.Helper()
	conn, err := amqp.Dial(server.URI())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	blocked := conn.NotifyBlocked(make(chan amqp.Blocking, 4))
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	expect := func(active bool) {
		t.Helper()
		select {
		case b := <-blocked:
			if b.Active != active {
				t.Fatalf("blocked = %t, want %t", b.Active, active)
			}
		case <-time.After(testserver.MaxWait):
			t.Fatalf("no notification that blocked = %t", active)
		}
	}
	for _, alarm := range []struct{ raise, clear func() }{
		{server.RaiseMemoryAlarm, server.ClearMemoryAlarm},
		{server.RaiseDiskAlarm, server.ClearDiskAlarm},
	} {
		alarm.raise()
		publish(t, ch, "nowhere")
		expect(true)
		alarm.clear()
		expect(false)
	}
}
