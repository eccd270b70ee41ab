package main

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strings"

	amqp "github.com/rabbitmq/amqp091-go"
)

// machine is what the numbers were measured on.
type machine struct {
	CPU      string `json:"cpu"`
	Cores    int    `json:"cores"`
	MemoryMB int    `json:"memory_mb"`
	OS       string `json:"os"`
	Kernel   string `json:"kernel"`
}

func (m machine) String() string {
	return fmt.Sprintf("%s, %d cores, %d MB, %s %s", m.CPU, m.Cores, m.MemoryMB, m.OS, m.Kernel)
}

func thisMachine() machine {
	m := machine{
		CPU:    strings.TrimSpace(afterColon("/proc/cpuinfo", "model name")),
		Cores:  runtime.NumCPU(),
		OS:     runtime.GOOS + "/" + runtime.GOARCH,
		Kernel: strings.TrimSpace(readFile("/proc/sys/kernel/osrelease")),
	}
	var kB int
	if _, err := fmt.Sscan(afterColon("/proc/meminfo", "MemTotal"), &kB); err == nil {
		m.MemoryMB = kB >> 10
	}
	return m
}

// afterColon returns what follows the colon in the first line of the file that
// begins with name.
func afterColon(file, name string) string {
	for line := range strings.Lines(readFile(file)) {
		if before, after, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(before) == name {
			return after
		}
	}
	return ""
}

// readFile returns "" where there is no such file: not every system has it.
func readFile(name string) string {
	content, _ := os.ReadFile(name)
	return string(content)
}

// reportedModules take part in what is measured.
var reportedModules = []string{
	"github.com/ThreeDotsLabs/watermill", "github.com/ThreeDotsLabs/watermill-amqp/v2", "github.com/ThreeDotsLabs/watermill-sql/v3",
	"github.com/jackc/pgx/v5", "github.com/lib/pq", "github.com/rabbitmq/amqp091-go",
}

// versionsOf returns the versions of servers and libraries.
func versionsOf(ctx context.Context, db *sql.DB, amqpURI string) (map[string]string, error) {
	versions := map[string]string{"go": runtime.Version()}
	var postgres string
	if err := db.QueryRowContext(ctx, `show server_version`).Scan(&postgres); err != nil {
		return nil, fmt.Errorf("version of PostgreSQL: %w", err)
	}
	versions["postgresql"] = postgres
	conn, err := amqp.Dial(amqpURI)
	if err != nil {
		return nil, fmt.Errorf("version of RabbitMQ: %w", err)
	}
	defer conn.Close()
	versions["rabbitmq"] = fmt.Sprint(conn.Properties["version"])
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return versions, nil
	}
	for _, dep := range info.Deps {
		for _, path := range reportedModules {
			if dep.Path == path {
				versions[strings.TrimPrefix(path, "github.com/")] = dep.Version
			}
		}
	}
	return versions, nil
}

// settings says, for people, under which conditions the rows were measured.
func (b *bench) settings(ctx context.Context) ([]string, error) {
	var line strings.Builder
	line.WriteString("PostgreSQL:")
	for i, name := range []string{"fsync", "synchronous_commit", "full_page_writes", "shared_buffers", "max_wal_size", "wal_compression", "autovacuum"} {
		var value string
		if err := b.db.QueryRowContext(ctx, `select current_setting($1)`, name).Scan(&value); err != nil {
			return nil, fmt.Errorf("setting %s: %w", name, err)
		}
		if i > 0 {
			line.WriteByte(',')
		}
		line.WriteString(" " + name + " " + value)
	}
	return []string{
		line.String() + "; otherwise its defaults",
		fmt.Sprintf("RabbitMQ: one node, one durable %s queue, deleted and declared again before each run", b.queue),
		fmt.Sprintf("messages: %d B of payload, persistent, mandatory, confirmed, %d keys at random", payloadSize, keyCount),
		"both servers, what is measured, and the clients of the other side share this machine; ours runs in the process of the bench",
		"time runs from before connecting to the last confirm, for ours until the last row is deleted",
		"before each run: tables truncated, checkpoint, rows inserted, vacuum analyze, garbage collected; each side has an unmeasured first run; who begins changes from round to round",
		"after each run to RabbitMQ the queue is consumed and every message compared: each once, payload intact, in order per key",
	}, nil
}
