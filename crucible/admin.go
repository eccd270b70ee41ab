package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

func adminCall(ctx context.Context, base, method, path, body string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimSuffix(base, "/")+"/api/"+path, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode >= 300 && resp.StatusCode != http.StatusNotFound {
		text, _ := io.ReadAll(resp.Body) // the status says enough
		return nil, errors.Join(fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, text), resp.Body.Close())
	}
	return resp, nil
}

// do calls the management API and reads the answer into out unless it is nil.
func (s *site) do(ctx context.Context, method, path, body string, out any) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return adminDo(ctx, s.rabbit.Admin(), method, path, body, out)
}

func adminDo(ctx context.Context, base, method, path, body string, out any) error {
	resp, err := adminCall(ctx, base, method, path, body)
	if err != nil {
		return err
	}
	if out != nil && resp.StatusCode < 300 {
		err = json.NewDecoder(resp.Body).Decode(out)
	}
	return errors.Join(err, resp.Body.Close())
}

// closeConnections closes all connections of the broker.
func (s *site) closeConnections(ctx context.Context) error {
	var conns []struct {
		Name string `json:"name"`
	}
	if err := s.do(ctx, http.MethodGet, "connections", "", &conns); err != nil {
		return err
	}
	for _, c := range conns {
		if err := s.do(ctx, http.MethodDelete, "connections/"+escaped(c.Name), "", nil); err != nil {
			return err
		}
	}
	return nil
}
