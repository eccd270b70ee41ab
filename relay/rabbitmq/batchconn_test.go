package rabbitmq_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncemill/oncemill/relay/rabbitmq"
)

// pipe returns a batchConn, with its flush running until the test ends, and the
// other side of it. Its write calls are counted and wait for the reading side.
func pipe(t *testing.T, limit int, drained func()) (conn rabbitmq.BatchConn, peer net.Conn, calls *atomic.Int32) {
	t.Helper()
	ours, peer := net.Pipe()
	counted := &countedConn{Conn: ours}
	conn = rabbitmq.NewBatchConn(counted, limit, drained)
	var group sync.WaitGroup
	group.Go(conn.Flush)
	t.Cleanup(func() {
		_ = peer.Close()
		conn.Abort()
		group.Wait()
	})
	return conn, peer, &counted.calls
}

type countedConn struct {
	net.Conn
	calls atomic.Int32
}

func (c *countedConn) Write(p []byte) (int, error) {
	c.calls.Add(1)
	return c.Conn.Write(p)
}

func TestBatchConn_GathersWhatIsWrittenDuringACall(t *testing.T) {
	conn, peer, calls := pipe(t, 1<<20, nil)
	var want bytes.Buffer
	for i := range 1000 {
		frame := bytes.Repeat([]byte{byte(i)}, i%50+1)
		want.Write(frame)
		if n, err := conn.Write(frame); n != len(frame) || err != nil {
			t.Fatal(n, err)
		}
	}
	got := make([]byte, want.Len())
	if _, err := io.ReadFull(peer, got); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want.Bytes()) {
		t.Error("other bytes, or another order")
	}
	if n := calls.Load(); n > 10 {
		t.Errorf("%d calls for 1000 writes that came while the first one waited", n)
	}
}

func TestBatchConn_KeepsItsOwnCopy(t *testing.T) {
	conn, peer, _ := pipe(t, 1<<20, nil)
	frame := []byte("first")
	if _, err := conn.Write(frame); err != nil {
		t.Fatal(err)
	}
	copy(frame, "later")
	got := make([]byte, 5)
	if _, err := io.ReadFull(peer, got); err != nil || string(got) != "first" {
		t.Errorf("%q, %v", got, err)
	}
}

func TestBatchConn_SaysWhenThereIsRoomAgain(t *testing.T) {
	drained := make(chan struct{}, 1)
	conn, peer, _ := pipe(t, 100, func() { drained <- struct{}{} })
	if !conn.Room() {
		t.Fatal("no room in an empty buffer")
	}
	if _, err := conn.Write(make([]byte, 150)); err != nil {
		t.Fatal(err)
	}
	if conn.Room() {
		t.Fatal("room beyond the limit")
	}
	select {
	case <-drained:
		t.Fatal("drained, and nothing was read")
	case <-time.After(20 * time.Millisecond):
	}
	if _, err := io.ReadFull(peer, make([]byte, 150)); err != nil {
		t.Fatal(err)
	}
	select {
	case <-drained:
	case <-time.After(maxWait):
		t.Fatal("not told")
	}
	if !conn.Room() {
		t.Error("no room")
	}
}

func TestBatchConn_ReturnsAnErrorOfTheNetworkAndCloses(t *testing.T) {
	conn, peer, _ := pipe(t, 1<<20, nil)
	_ = peer.Close()
	var err error
	eventually(t, "the error", func() bool {
		_, err = conn.Write([]byte("x"))
		return err != nil
	})
	if !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("%v", err)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("the reading side goes on")
	}
}

func TestBatchConn_SendsWhatWasWrittenBeforeClose(t *testing.T) {
	conn, peer, _ := pipe(t, 1<<20, nil)
	if _, err := conn.Write([]byte("last words")); err != nil {
		t.Fatal(err)
	}
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write([]byte("more")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("write after close: %v", err)
	}
	got, err := io.ReadAll(peer)
	if err != nil || string(got) != "last words" {
		t.Errorf("%q, %v", got, err)
	}
	if err := conn.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
}

func TestBatchConn_ClosesThoughNobodyReads(t *testing.T) {
	conn, _, _ := pipe(t, 1<<20, nil)
	if _, err := conn.Write([]byte("unread")); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	_ = conn.Close()
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("read after close")
	}
	if took := time.Since(begin); took > 500*time.Millisecond {
		t.Errorf("the reading side ended after %v", took)
	}
}

func TestBatchConn_KeepsDeadlines(t *testing.T) {
	conn, _, _ := pipe(t, 1<<20, nil)
	if err := conn.SetDeadline(time.Now().Add(30 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read: %v", err)
	}
	var err error
	eventually(t, "the write to fail", func() bool {
		_, err = conn.Write([]byte("x"))
		return err != nil
	})
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("write: %v", err)
	}
}
