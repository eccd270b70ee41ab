package main

import (
	"context"
	"database/sql"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/testserver"
)

func TestMain(m *testing.M) { os.Exit(testserver.Main(m)) }

// The client asks twice, and the broker delivers its message twice more.
func TestServe_TakesOneOfTheStock(t *testing.T) {
	t.Parallel()
	database, broker := ownDatabase(t), testserver.RabbitMQ(t)
	listener := testserver.Listen(t)
	address := listener.Addr().String()
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx, database, broker, address) }()
	for range 2 {
		testserver.Eventually(t, "the order is accepted", func() bool { return order(t, address) == http.StatusCreated })
	}
	db := open(t, database)
	count := func(query string) (n int) {
		if err := db.QueryRowContext(t.Context(), query).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	testserver.Eventually(t, "the mail", func() bool { return count(`select count(*) from mails`) > 0 })
	var id string
	if err := db.QueryRowContext(t.Context(), `select id from orders`).Scan(&id); err != nil {
		t.Fatal(err)
	}
	publisher, err := amqp.NewPublisher(amqp.NewDurablePubSubConfig(broker, nil), watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	defer publisher.Close() //nolint:errcheck // the messages are there
	// A message behind the copies tells when they have been handled.
	for _, copied := range []string{id, id, "last"} {
		if err := publisher.Publish("orders", message.NewMessage(copied, []byte("tea"))); err != nil {
			t.Fatal(err)
		}
	}
	testserver.Eventually(t, "the last mail", func() bool { return count(`select count(*) from mails`) == 2 })
	if orders, left := count(`select count(*) from orders`), count(`select units from stock`); orders != 1 || left != 8 {
		t.Errorf("%d orders, %d of 10 teas are left; want 1 and 8", orders, left)
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// order asks for tea, always under the same key.
func order(t *testing.T, address string) int {
	t.Helper()
	body := strings.NewReader(url.Values{"item": {"tea"}}.Encode())
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+address+"/orders", body)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	request.Header.Set("Idempotency-Key", `"8e03978e-40d5-43e8-bc93-6894a57f9324"`)
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(request)
	if err != nil {
		return 0 // it does not listen yet
	}
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		t.Error(err)
	}
	if err := response.Body.Close(); err != nil {
		t.Error(err)
	}
	return response.StatusCode
}

// ownDatabase returns the URL of a new database: the program has no setting for a schema.
func ownDatabase(t *testing.T) string {
	t.Helper()
	pg := testserver.Postgres(t)
	name := fmt.Sprintf("readme_%d", time.Now().UnixNano())
	if _, err := pg.DB.ExecContext(t.Context(), "create database "+name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := pg.DB.ExecContext(context.WithoutCancel(t.Context()), "drop database "+name+" with (force)"); err != nil {
			t.Error(err)
		}
	})
	at, err := url.Parse(pg.DSN)
	if err != nil {
		t.Fatal(err)
	}
	at.Path = "/" + name
	query := at.Query()
	query.Del("search_path")
	at.RawQuery = query.Encode()
	return at.String()
}

func open(t *testing.T, database string) *sql.DB {
	t.Helper()
	db, err := sql.Open("postgres", database)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}
