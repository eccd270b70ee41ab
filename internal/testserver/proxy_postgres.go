package testserver

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"encoding/binary"
	"errors"
	"net"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// PostgresProxy is a proxy between clients and PostgreSQL. A silenced connection stays open,
// but nothing passes in either direction, not even its end. It looks like a frozen server, or
// like a network that drops packets.
type PostgresProxy struct {
	target    string
	listener  net.Listener
	accepting sync.WaitGroup
	group     sync.WaitGroup

	mu       sync.Mutex // guards the fields below
	conns    map[*proxied]struct{}
	match    func(statement string) bool // nil: none
	left     int                         // connections still to be silenced by match
	silenced int
	late     func(statement string) bool // see Delay; nil: none
	delay    time.Duration
	cuts     int       // commits still to be cut, see CutCommits
	all      bool      // silence new connections too
	rate     int       // bytes a second of answers, all connections together; 0: no limit
	free     time.Time // when the next byte may pass
}

// proxied is one proxied connection.
type proxied struct {
	client, server net.Conn
	statements     map[string]string // prepared, by name
	closed         chan struct{}
	cut            atomic.Bool   // the next answer does not reach the client, and is the last
	resumed        chan struct{} // nil if not silent; guarded by the proxy's mu
}

// NewPostgresProxy returns a proxy to the server of dsn, closed when the test ends, and its
// URL. It does not support TLS.
func NewPostgresProxy(t testing.TB, dsn string) (*PostgresProxy, string) {
	t.Helper()
	p, behind, err := StartPostgresProxy(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p, behind
}

// StartPostgresProxy is NewPostgresProxy for programs, which call Close.
func StartPostgresProxy(ctx context.Context, dsn string) (*PostgresProxy, string, error) {
	u, err := url.Parse(dsn)
	if err != nil {
		return nil, "", errors.New("testserver: the URL of the PostgreSQL cannot be parsed")
	}
	listener, err := listen(ctx)
	if err != nil {
		return nil, "", err
	}
	p := &PostgresProxy{target: u.Host, listener: listener, conns: map[*proxied]struct{}{}}
	u.Host = listener.Addr().String()
	p.accepting.Go(p.accept)
	return p, u.String(), nil
}

// Close ends the proxy and its connections.
func (p *PostgresProxy) Close() {
	_ = p.listener.Close()
	p.accepting.Wait() // or one more connection might come after Cut
	p.Cut()
	p.group.Wait()
}

// OpenSilenceable opens the database of dsn behind a new PostgresProxy.
func OpenSilenceable(t testing.TB, dsn string) (*PostgresProxy, *sql.DB) {
	t.Helper()
	proxy, behind := NewPostgresProxy(t, dsn)
	db, err := sql.Open(DriverName(), behind)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() }) // its connections may have been cut
	return proxy, db
}

// Silence silences up to most connections, each when it sends a statement that
// match accepts: that statement does not reach the server. The text is that of a
// Query or Parse message, or of the prepared statement that a Bind message names.
// With match nil it silences all connections that exist now, at once. New
// connections pass.
func (p *PostgresProxy) Silence(match func(statement string) bool, most int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if match != nil {
		p.match, p.left = match, most
		return
	}
	for c := range p.conns {
		p.silence(c)
	}
}

// Containing returns a match, for Silence, of the statements that contain a text in
// lower case.
func Containing(text string) func(statement string) bool {
	return func(statement string) bool {
		statement = strings.ToLower(statement)
		if text == "commit" { // which "begin isolation level read committed" contains
			return strings.HasPrefix(statement, text)
		}
		return strings.Contains(statement, text)
	}
}

// Delay holds back each statement that match accepts, for a time. match is nil to end it.
func (p *PostgresProxy) Delay(match func(statement string) bool, by time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.late, p.delay = match, by
}

// CutCommits cuts up to most connections, each when it commits: the COMMIT reaches the server,
// its answer does not reach the client. 0 ends it.
func (p *PostgresProxy) CutCommits(most int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cuts = most
}

// SilenceAll silences all connections, also new ones.
func (p *PostgresProxy) SilenceAll() {
	p.Silence(nil, 0)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all = true
}

// Slow limits answers to so many bytes a second, over all connections.
func (p *PostgresProxy) Slow(rate int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rate = rate
}

// pace waits until n bytes of an answer may pass.
func (p *PostgresProxy) pace(c *proxied, n int) {
	p.mu.Lock()
	rate, now := p.rate, time.Now()
	if rate == 0 {
		p.mu.Unlock()
		return
	}
	if p.free.Before(now) {
		p.free = now
	}
	p.free = p.free.Add(time.Duration(n) * time.Second / time.Duration(rate))
	wait := p.free.Sub(now)
	p.mu.Unlock()
	pause(c, wait)
}

// pause waits, unless the connection is cut.
func pause(c *proxied, d time.Duration) {
	if d <= 0 {
		return
	}
	select {
	case <-time.After(d):
	case <-c.closed:
	}
}

// Silenced returns how many connections have been silenced so far.
func (p *PostgresProxy) Silenced() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.silenced
}

// Resume ends all silences and passes on what was held back.
func (p *PostgresProxy) Resume() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.match, p.all = nil, false
	for c := range p.conns {
		if c.resumed != nil {
			close(c.resumed)
			c.resumed = nil
		}
	}
}

// Cut closes all connections.
func (p *PostgresProxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		delete(p.conns, c)
		close(c.closed)
		_, _ = c.client.Close(), c.server.Close()
	}
}

// silence is called with mu held.
func (p *PostgresProxy) silence(c *proxied) {
	if c.resumed == nil {
		c.resumed = make(chan struct{})
		p.silenced++
	}
}

func (p *PostgresProxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := new(net.Dialer).DialContext(context.Background(), "tcp", p.target)
		if err != nil {
			_ = client.Close()
			continue
		}
		c := &proxied{client: client, server: server, statements: map[string]string{}, closed: make(chan struct{})}
		p.mu.Lock()
		p.conns[c] = struct{}{}
		if p.all {
			p.silence(c)
		}
		p.mu.Unlock()
		var sides sync.WaitGroup
		sides.Go(func() { p.requests(c) })
		sides.Go(func() { p.answers(c) })
		p.group.Go(func() {
			sides.Wait()
			_, _ = client.Close(), server.Close()
			p.mu.Lock()
			delete(p.conns, c)
			p.mu.Unlock()
		})
	}
}

// hold waits while c is silent.
func (p *PostgresProxy) hold(c *proxied) {
	resumed := p.silent(c)
	if resumed == nil {
		return
	}
	select {
	case <-resumed:
	case <-c.closed:
	}
}

// silent returns what is closed when c is no longer silent, nil if it is not.
func (p *PostgresProxy) silent(c *proxied) <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return c.resumed
}

// requests passes on what the client sends, message by message. It writes together what has
// arrived together: each write wakes the server's process.
func (p *PostgresProxy) requests(c *proxied) {
	reader, writer := bufio.NewReaderSize(c.client, proxyBuffer), bufio.NewWriterSize(c.server, proxyBuffer)
	defer closeWrite(c.server) // the server's last answers still have to pass
	defer writer.Flush()       //nolint:errcheck // the connection ends in any case
	defer p.hold(c)
	const protocol3 = 196608
	started := false
	for {
		size := 0 // of the type of a message; there is none before the session starts
		if started {
			size = 1
		}
		message, err := readPacket(reader, size)
		if err != nil {
			return
		}
		late := time.Duration(0)
		if started {
			late = p.look(c, message)
		} else {
			started = len(message) >= 8 && binary.BigEndian.Uint32(message[4:]) == protocol3
		}
		if late > 0 || p.silent(c) != nil {
			if writer.Flush() != nil {
				return
			}
			pause(c, late)
			p.hold(c)
		}
		if _, err := writer.Write(message); err != nil {
			return
		}
		if reader.Buffered() == 0 && writer.Flush() != nil {
			return
		}
	}
}

func (p *PostgresProxy) answers(c *proxied) {
	defer closeWrite(c.client)
	defer p.hold(c)
	defer func() {
		if c.cut.Load() {
			_ = c.client.Close()
		}
	}()
	buffer := make([]byte, proxyBuffer)
	for {
		n, err := c.server.Read(buffer)
		if err != nil || c.cut.Load() {
			return
		}
		p.pace(c, n)
		p.hold(c)
		if _, err := c.client.Write(buffer[:n]); err != nil {
			return
		}
	}
}

// look silences c if the message is a statement that match accepts. It returns for how long
// the message is to be held back.
func (p *PostgresProxy) look(c *proxied, message []byte) (late time.Duration) {
	var statement string
	parsed := false // before, by the message before this one
	switch fields := bytes.SplitN(message[5:], []byte{0}, 3); {
	case message[0] == 'Q':
		statement = string(fields[0])
	case message[0] == 'P' && len(fields) > 1:
		statement = string(fields[1])
		c.statements[string(fields[0])] = statement
	case message[0] == 'B' && len(fields) > 1:
		statement = c.statements[string(fields[1])]
		parsed = len(fields[1]) == 0
	default:
		return 0
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cuts > 0 && isCommit(statement) {
		p.cuts--
		c.cut.Store(true)
	}
	if p.match != nil && p.left > 0 && c.resumed == nil && p.match(statement) {
		p.left--
		p.silence(c)
	}
	if p.late != nil && !parsed && p.late(statement) {
		late = p.delay
	}
	return late
}

var isCommit = Containing("commit")

// closeWrite closes the writing half of a connection.
func closeWrite(conn net.Conn) {
	if half, ok := conn.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite()
	}
}
