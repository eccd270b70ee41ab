package testserver_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// servers runs the script with a directory and an environment of the test's own.
type servers struct {
	dir string
	env []string
}

func newServers(t *testing.T, env ...string) servers {
	t.Helper()
	dir, err := os.MkdirTemp("", "oncemill-script-") //nolint:usetesting // the servers' users could not enter t.TempDir()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	s := servers{dir: dir, env: []string{"ONCEMILL_SERVERS_DIR=" + dir}}
	for _, variable := range os.Environ() {
		if !strings.HasPrefix(variable, "ONCEMILL_") {
			s.env = append(s.env, variable)
		}
	}
	s.env = append(s.env, env...)
	t.Cleanup(func() {
		if out, err := s.run(context.WithoutCancel(t.Context()), "down"); err != nil {
			t.Errorf("down: %v\n%s", err, out)
		}
		os.RemoveAll(dir)
	})
	return s
}

func (s servers) run(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "../../scripts/servers.sh", args...)
	cmd.Env = s.env
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (s servers) must(t *testing.T, args ...string) string {
	t.Helper()
	out, err := s.run(t.Context(), args...)
	if err != nil {
		t.Fatalf("servers.sh %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// sleeper starts a process that does nothing and ends it with the test.
func sleeper(t *testing.T) *os.Process {
	t.Helper()
	cmd := exec.Command("sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	return cmd.Process
}

// Somebody else may have put a link, or a directory, where the script keeps its own.
func TestScript_DoesNotFollowPlantedLinks(t *testing.T) {
	t.Parallel()
	target := t.TempDir()
	if err := os.Chmod(target, 0o700); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "oncemill-servers")
	if err := os.Symlink(target, link); err != nil {
		t.Fatal(err)
	}
	s := servers{env: append(os.Environ(), "ONCEMILL_SERVERS_DIR="+link)}
	if out, err := s.run(t.Context(), "status"); err == nil || !strings.Contains(out, "is a link") {
		t.Errorf("%v\n%s", err, out)
	}
	if info, err := os.Stat(target); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the target of the link is %v, %v", info, err)
	}
	if left, err := os.ReadDir(target); err != nil || len(left) != 0 {
		t.Errorf("left in the target: %v, %v", left, err)
	}
}

func TestScript_StartsOneServerForTwoCallers(t *testing.T) {
	t.Parallel()
	s := newServers(t)
	var out [2]string
	var wg sync.WaitGroup
	for i := range out {
		wg.Go(func() {
			var err error
			if out[i], err = s.run(t.Context(), "up", "postgres"); err != nil {
				t.Errorf("up: %v", err)
			}
		})
	}
	wg.Wait()
	if out[0] != out[1] || !strings.HasPrefix(out[0], "export ONCEMILL_TEST_POSTGRES='postgres://") {
		t.Errorf("first:\n%s\nsecond:\n%s", out[0], out[1])
	}
}

func TestScript_RemovesServersOfDeadProcesses(t *testing.T) {
	t.Parallel()
	s := newServers(t, "ONCEMILL_TEST_POSTGRES=postgres://127.0.0.1:1/")
	owner, dir := sleeper(t), filepath.Join(s.dir, "private", "orphan")
	s.must(t, "start", "postgres", dir, "--owner", fmt.Sprint(owner.Pid))
	port, err := os.ReadFile(filepath.Join(dir, "port"))
	if err != nil {
		t.Fatal(err)
	}
	s.run(t.Context(), "up", "postgres") // fails: nobody answers there
	if _, err := os.Stat(dir); err != nil {
		t.Fatalf("removed while its owner lives: %v", err)
	}
	owner.Kill()
	owner.Wait()
	s.run(t.Context(), "up", "postgres")
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("the directory is still there: %v", err)
	}
	if conn, err := net.DialTimeout("tcp", "127.0.0.1:"+strings.TrimSpace(string(port)), time.Second); err == nil {
		conn.Close()
		t.Error("the server still runs")
	}
}

func TestScript_SparesAProcessThatGotThePidOfAServer(t *testing.T) {
	t.Parallel()
	s := newServers(t)
	dir, bystander := filepath.Join(s.dir, "private", "stopped"), sleeper(t)
	s.must(t, "start", "postgres", dir)
	s.must(t, "stop", dir)
	if err := os.WriteFile(filepath.Join(dir, "pid"), fmt.Appendf(nil, "%d 1\n", bystander.Pid), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"stop", "kill", "remove"} {
		s.must(t, command, dir)
	}
	if out, err := exec.Command("ps", "-o", "stat=", "-p", fmt.Sprint(bystander.Pid)).Output(); err != nil || strings.HasPrefix(string(out), "Z") {
		t.Errorf("the bystander was ended: %s %v", out, err)
	}
}

func TestScript_NamesTheVariableThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	for _, variable := range []string{
		"ONCEMILL_TEST_POSTGRES=postgres://me:verysecret@127.0.0.1:1/x?sslmode=disable",
		"ONCEMILL_TEST_AMQP=amqp://me:verysecret@127.0.0.1:1/",
	} {
		name, _, _ := strings.Cut(variable, "=")
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			kind := map[string]string{"ONCEMILL_TEST_POSTGRES": "postgres", "ONCEMILL_TEST_AMQP": "rabbitmq"}[name]
			out, err := newServers(t, variable).run(t.Context(), "up", kind)
			if err == nil || !strings.Contains(out, name) || strings.Contains(out, "verysecret") || strings.Contains(out, "export") {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
