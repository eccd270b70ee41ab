package inbox_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/inbox"
)

func TestPostgres_LostAnswerOfTheCommitIsResolvedByTheRedelivery(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		arrives bool
		runs    int
	}{
		"the commit has arrived":     {arrives: true, runs: 1},
		"the commit has not arrived": {arrives: false, runs: 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := places["postgresql"](t)
			cut := newCommitCutter(t, p.dsn, c.arrives)
			through := *p
			through.tap = &tap{driver: p.tap.driver, dsn: cut.dsn}
			through.db = openTap(t, through.tap)
			in := through.inbox(t, nil)
			runs := 0
			handler := func(msg *message.Message) ([]*message.Message, error) {
				runs++
				return returns("b")(msg)
			}
			msg := routed(t, "a", "results")
			cut.arm()
			expectError(t, deliverMessage(t, in, msg, handler), inbox.ErrCommitUnknown)
			expectNoError(t, deliverMessage(t, in, msg, handler))
			expectNoError(t, deliverMessage(t, in, msg, handler))
			p.expect(t, 1, 1, 1)
			if runs != c.runs {
				t.Errorf("the handler ran %d times", runs)
			}
		})
	}
}

// As pgx does when the context ends while it waits for the answer.
func TestInbox_ContextThatEndsDuringTheCommitLeavesItsOutcomeUnknown(t *testing.T) {
	onEachPlace(t, func(t *testing.T, p *place) {
		in := p.inbox(t, nil)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		p.tap.committed = func(error) error {
			cancel()
			return fmt.Errorf("receive message: %w", ctx.Err())
		}
		expectError(t, deliverMessage(t, in, message.NewMessageWithContext(ctx, "a", nil), effect), inbox.ErrCommitUnknown)
		p.tap.committed = nil
		expectNoError(t, deliver(t, in, "a", effect))
		p.expect(t, 1, 1, 0)
	})
}

// commitCutter is a proxy that, once armed, cuts the next connection that sends a
// commit: before the commit reaches the server, or after the server has answered.
type commitCutter struct {
	dsn     string
	server  string
	arrives bool

	mu    sync.Mutex
	armed bool
}

func newCommitCutter(t *testing.T, dsn string, arrives bool) *commitCutter {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &commitCutter{server: u.Host, arrives: arrives}
	u.Host = listener.Addr().String()
	c.dsn = u.String()
	var running sync.WaitGroup
	running.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			running.Go(func() { c.serve(t, client) })
		}
	})
	t.Cleanup(func() {
		if err := listener.Close(); err != nil {
			t.Error(err)
		}
		running.Wait()
	})
	return c
}

func (c *commitCutter) arm() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.armed = true
}

func (c *commitCutter) fire() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	fire := c.armed
	c.armed = false
	return fire
}

func (c *commitCutter) serve(t *testing.T, client net.Conn) {
	server, err := net.Dial("tcp", c.server)
	if err != nil {
		t.Error(err)
		return
	}
	var answers sync.WaitGroup
	defer answers.Wait()
	defer server.Close() //nolint:errcheck // cut
	defer client.Close() //nolint:errcheck // cut
	var mute sync.Mutex  // held: answers are not passed on
	answered := make(chan struct{}, 1)
	answers.Go(func() {
		buf := make([]byte, 64<<10)
		for {
			n, err := server.Read(buf)
			if err != nil {
				_ = client.Close() // ends the reader of the other direction
				return
			}
			if !mute.TryLock() {
				answered <- struct{}{}
				return
			}
			_, err = client.Write(buf[:n])
			mute.Unlock()
			if err != nil {
				return
			}
		}
	})
	size := 0 // of the type of a message; the first has none
	for {
		packet, err := readPacket(client, size)
		if err != nil {
			return
		}
		size = 1
		isCommit := packet[0] == 'Q' && strings.HasPrefix(strings.ToLower(string(packet[5:])), "commit")
		if isCommit && c.fire() {
			if c.arrives {
				mute.Lock()
				if _, err := server.Write(packet); err != nil {
					t.Error(err)
				}
				<-answered
			}
			return
		}
		if _, err := server.Write(packet); err != nil {
			return
		}
	}
}

// readPacket reads a message of PostgreSQL's protocol: a type, a length that
// counts itself, and the rest.
func readPacket(r io.Reader, typeSize int) ([]byte, error) {
	head := make([]byte, typeSize+4)
	if _, err := io.ReadFull(r, head); err != nil {
		return nil, err
	}
	length := int(binary.BigEndian.Uint32(head[typeSize:]))
	if length < 4 {
		return nil, errors.New("not a packet")
	}
	packet := append(head, make([]byte, length-4)...)
	_, err := io.ReadFull(r, packet[len(head):])
	return packet, err
}
