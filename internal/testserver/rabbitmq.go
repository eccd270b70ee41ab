package testserver

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"
)

// RabbitMQ returns the AMQP URI of a virtual host for t on the shared RabbitMQ. It is removed
// with its queues when t ends, and the server then closes its connections.
func RabbitMQ(t testing.TB) string {
	t.Helper()
	shared, err := sharedRabbitMQ()
	if err != nil {
		t.Fatal(err)
	}
	return shared.vhost(t)
}

func (r rabbit) vhost(t testing.TB) string {
	t.Helper()
	uri, err := url.Parse(r.uri)
	if err != nil {
		t.Fatalf("testserver: the URI of the RabbitMQ cannot be parsed")
	}
	name, user := uniqueName(t), uri.User.Username()
	if user == "" {
		user = "guest"
	}
	if err := r.addVhost(t.Context(), name, user); err != nil {
		t.Fatalf("testserver: create virtual host: %v", err)
	}
	t.Cleanup(func() {
		if err := r.deleteVhost(context.WithoutCancel(t.Context()), name); err != nil {
			t.Errorf("testserver: remove virtual host: %v", err)
		}
	})
	uri.Path = "/" + name
	return uri.String()
}

func (r rabbit) addVhost(ctx context.Context, name, user string) error {
	if r.admin == "" {
		_, err := script(ctx, "vhost-add", name)
		return err
	}
	if err := r.api(ctx, http.MethodPut, "vhosts/"+name, ""); err != nil {
		return err
	}
	return r.api(ctx, http.MethodPut, "permissions/"+name+"/"+url.PathEscape(user),
		`{"configure":".*","write":".*","read":".*"}`)
}

func (r rabbit) deleteVhost(ctx context.Context, name string) error {
	if r.admin == "" {
		_, err := script(ctx, "vhost-delete", name)
		return err
	}
	return r.api(ctx, http.MethodDelete, "vhosts/"+name, "")
}

// api calls RabbitMQ's management API on a new connection, and leaves no goroutine running.
func (r rabbit) api(ctx context.Context, method, path, body string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimSuffix(r.admin, "/")+"/api/"+path, strings.NewReader(body))
	if err != nil {
		return err
	}
	req.Close = true
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close() //nolint:errcheck // it was read to its end
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode >= 300 {
		return fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, answer)
	}
	return nil
}
