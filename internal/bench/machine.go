package main

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"

	amqp "github.com/rabbitmq/amqp091-go"
)

// reportedModules take part in what is measured.
var reportedModules = []string{
	"github.com/ThreeDotsLabs/watermill", "github.com/ThreeDotsLabs/watermill-amqp/v2", "github.com/ThreeDotsLabs/watermill-sql/v3",
	"github.com/jackc/pgx/v5", "github.com/lib/pq", "github.com/rabbitmq/amqp091-go",
}

// newReport says on what, and with what, the rows are measured.
func (b *bench) newReport(ctx context.Context) (report, error) {
	r := report{Machine: thisMachine(), Versions: map[string]string{"go": runtime.Version()}, Settings: map[string]string{}}
	for _, name := range []string{"server_version", "fsync", "synchronous_commit", "full_page_writes", "shared_buffers", "max_wal_size", "wal_compression", "autovacuum"} {
		var value string
		if err := b.db.QueryRowContext(ctx, `select current_setting($1)`, name).Scan(&value); err != nil {
			return r, fmt.Errorf("setting %s: %w", name, err)
		}
		r.Settings[name] = value
	}
	conn, err := amqp.Dial(b.amqp)
	if err != nil {
		return r, fmt.Errorf("version of RabbitMQ: %w", err)
	}
	defer conn.Close()
	r.Versions["postgresql"], r.Versions["rabbitmq"] = r.Settings["server_version"], fmt.Sprint(conn.Properties["version"])
	delete(r.Settings, "server_version")
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, dep := range info.Deps {
			if slices.Contains(reportedModules, dep.Path) {
				r.Versions[strings.TrimPrefix(dep.Path, "github.com/")] = dep.Version
			}
		}
	}
	return r, nil
}

// machine is what the figures were measured on.
type machine struct {
	CPU    string `json:"cpu"`
	Cores  int    `json:"cores"`
	Memory string `json:"memory"`
	OS     string `json:"os"`
	Kernel string `json:"kernel"`
}

func (m machine) String() string {
	return fmt.Sprintf("%s, %d cores, %s, %s %s", m.CPU, m.Cores, m.Memory, m.OS, m.Kernel)
}

func thisMachine() machine {
	return machine{
		CPU:    firstMatch("/proc/cpuinfo", `model name\s*: (.*)`),
		Cores:  runtime.NumCPU(),
		Memory: firstMatch("/proc/meminfo", `MemTotal:\s*(.*)`),
		OS:     runtime.GOOS + "/" + runtime.GOARCH,
		Kernel: firstMatch("/proc/sys/kernel/osrelease", `(.*)`),
	}
}

// firstMatch returns the group of a pattern in a file, or "" where there is no such file:
// not every system has it.
func firstMatch(file, pattern string) string {
	content, _ := os.ReadFile(file)
	if found := regexp.MustCompile(pattern).FindSubmatch(content); found != nil {
		return string(found[1])
	}
	return ""
}
