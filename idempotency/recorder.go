package idempotency

import (
	"bufio"
	"io"
	"maps"
	"net"
	"net/http"
	"net/textproto"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// replayedHeader marks a replay. It is removed from a downstream's response that a handler
// passes on.
const replayedHeader = "Idempotency-Replayed"

// perAnswer are headers that belong to one answer, not to its replays. (Connection headers
// are hop-by-hop.)
var perAnswer = []string{
	"Connection", "Content-Length", "Date", replayedHeader, "Keep-Alive", "Proxy-Authenticate", "Proxy-Connection",
	"Set-Cookie", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
}

// recorder is the http.ResponseWriter of a handler. It holds the response back, except for
// informational ones (1xx). It has no Unwrap, because anything written around it would not
// be stored.
//
// The handler sees the headers that were set outside, and may change them. Its changes are
// what is stored.
type recorder struct {
	w      http.ResponseWriter
	outer  http.Header // as they were before the handler
	header http.Header // the handler's
	limit  int         // most bytes of a body that is stored
	stream bool        // flushing is allowed

	mu       sync.Mutex
	closed   bool        // another answer has been given: nothing more is sent
	status   int         // 0 until the header is written
	sent     http.Header // the header when it was written
	declared int64       // its Content-Length; -1: none
	written  int64       // bytes of the body, until it is streamed
	body     []byte
	overflow *os.File // what exceeds the limit
	failed   error    // of the overflow
	streamed bool     // from now on, the answer is sent as it is written
}

func newRecorder(w http.ResponseWriter, limit int) *recorder {
	return &recorder{w: w, outer: w.Header().Clone(), header: cloneHeader(w.Header()), limit: limit}
}

func cloneHeader(h http.Header) http.Header {
	if c := h.Clone(); c != nil {
		return c
	}
	return http.Header{}
}

// Header implements http.ResponseWriter.
func (r *recorder) Header() http.Header { return r.header }

// WriteHeader implements http.ResponseWriter.
func (r *recorder) WriteHeader(status int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.status != 0 {
		return
	}
	if status >= 100 && status < 200 && status != http.StatusSwitchingProtocols {
		if !r.closed {
			r.informational(status)
		}
		return
	}
	if status < 100 || status > 999 || status == http.StatusSwitchingProtocols {
		status = http.StatusInternalServerError // nothing that could be stored
	}
	r.writeHeader(status)
}

// informational passes on a 1xx with the headers of the handler, and then removes them for
// the answer itself. The caller holds the lock.
func (r *recorder) informational(status int) {
	live := r.w.Header()
	before := live.Clone()
	maps.Copy(live, r.header)
	r.w.WriteHeader(status)
	clear(live)
	maps.Copy(live, before)
}

func (r *recorder) writeHeader(status int) {
	r.status, r.sent = status, cloneHeader(r.header)
	r.sent.Del(replayedHeader)
	var err error
	if r.declared, err = strconv.ParseInt(r.sent.Get("Content-Length"), 10, 64); err != nil {
		r.declared = -1 // and net/http removes what is no number
	}
}

// Write implements http.ResponseWriter.
func (r *recorder) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.status == 0 {
		r.writeHeader(http.StatusOK)
	}
	if !hasBody(r.status) {
		return 0, http.ErrBodyNotAllowed
	}
	if r.streamed {
		return r.w.Write(p)
	}
	switch {
	case r.failed != nil:
		return 0, r.failed
	case r.declared >= 0 && r.written+int64(len(p)) > r.declared:
		return 0, http.ErrContentLength
	}
	write := r.spill
	if r.overflow == nil && len(r.body)+len(p) <= r.limit {
		write = r.keep
	}
	n, err := write(p)
	r.written += int64(n)
	return n, err
}

// keep adds to what is stored.
func (r *recorder) keep(p []byte) (int, error) {
	r.body = append(r.body, p...)
	return len(p), nil
}

func hasBody(status int) bool {
	return status != http.StatusNoContent && status != http.StatusNotModified
}

// fill records the recovered answer of an earlier run.
func (r *recorder) fill(found Recovery) error {
	for name, values := range found.Header {
		if !strings.EqualFold(name, "Content-Length") { // that of a downstream, for example
			r.header[name] = values
		}
	}
	r.WriteHeader(found.Status)
	if len(found.Body) == 0 {
		return nil
	}
	_, err := r.Write(found.Body)
	return err
}

// spill writes the part that is too large to be stored to a file, so that it can be sent
// once. The caller holds the lock.
func (r *recorder) spill(p []byte) (int, error) {
	if r.overflow == nil {
		r.overflow, r.failed = os.CreateTemp("", "oncemill-response-*")
		if r.failed == nil {
			// The open file needs no name. (Where the system refuses to remove it, discard
			// does.)
			_ = os.Remove(r.overflow.Name())
		}
	}
	if r.failed != nil {
		return 0, r.failed
	}
	var n int
	n, r.failed = r.overflow.Write(p)
	return n, r.failed
}

// FlushError is called by http.ResponseController.Flush.
func (r *recorder) FlushError() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case !r.stream:
		return ErrStreaming
	case r.closed:
		return http.ErrHandlerTimeout
	case r.failed != nil:
		return r.failed
	}
	if r.status == 0 {
		r.writeHeader(http.StatusOK)
	}
	if !r.streamed {
		r.streamed = true
		if err := r.send(); err != nil {
			return err
		}
	}
	return http.NewResponseController(r.w).Flush()
}

// SetReadDeadline is called by http.ResponseController.SetReadDeadline.
func (r *recorder) SetReadDeadline(deadline time.Time) error {
	return http.NewResponseController(r.w).SetReadDeadline(deadline)
}

// SetWriteDeadline is called by http.ResponseController.SetWriteDeadline.
func (r *recorder) SetWriteDeadline(deadline time.Time) error {
	return http.NewResponseController(r.w).SetWriteDeadline(deadline)
}

// EnableFullDuplex is called by http.ResponseController.EnableFullDuplex. The body has
// already been read.
func (r *recorder) EnableFullDuplex() error { return nil }

// Hijack is called by http.ResponseController.Hijack.
func (r *recorder) Hijack() (net.Conn, *bufio.ReadWriter, error) { return nil, nil, ErrHijack }

// flusher adds http.Flusher, which cannot return an error, where flushing is allowed.
type flusher struct{ *recorder }

func (f flusher) Flush() { _ = f.FlushError() } // the next Write returns what went wrong

// close keeps later writes of the handler off the wire, when another answer is to be sent;
// they are still recorded. It returns false if the handler's answer has been sent, at
// least in part.
func (r *recorder) close() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = !r.streamed
	return r.closed
}

// discard removes the overflow file.
func (r *recorder) discard() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.overflow != nil {
		_ = r.overflow.Close()           // nothing of it is needed any more
		_ = os.Remove(r.overflow.Name()) // usually removed long ago
		r.overflow = nil
	}
}

// result returns the recorded response, once the handler has returned.
func (r *recorder) result() *response {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.status == 0 {
		r.writeHeader(http.StatusOK)
	}
	short := hasBody(r.status) && r.written < r.declared // net/http breaks off, and a client takes it for no answer
	res := &response{Status: r.status, body: r.body, overflow: r.overflow != nil || r.failed != nil || short}
	sent, now := canonicalHeader(r.sent), canonicalHeader(r.header)
	announced, hops := listed(sent, "Trailer"), listed(sent, "Connection")
	res.Header = changes(canonicalHeader(r.outer), sent, func(name string) bool {
		return !slices.Contains(announced, name) && !slices.Contains(hops, name) && !strings.HasPrefix(name, http.TrailerPrefix)
	})
	for _, name := range slices.Sorted(maps.Keys(now)) {
		if short, ok := strings.CutPrefix(name, http.TrailerPrefix); ok {
			res.Trailer = append(res.Trailer, headerEntry{Name: textproto.CanonicalMIMEHeaderKey(short), Values: bytesOf(now[name])})
		} else if slices.Contains(announced, name) {
			res.Trailer = append(res.Trailer, headerEntry{Name: name, Values: bytesOf(now[name])})
		}
	}
	return res
}

// listed returns the names listed in a header.
func listed(h http.Header, header string) []string {
	var names []string
	for _, line := range h[header] {
		for name := range strings.SplitSeq(line, ",") {
			names = append(names, textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(name)))
		}
	}
	return names
}

// canonicalHeader returns a copy of h with canonical names. A handler may write others into
// the map, such as "set-cookie", and rules for what is stored must find them.
func canonicalHeader(h http.Header) http.Header {
	canonical := make(http.Header, len(h))
	for _, name := range slices.Sorted(maps.Keys(h)) {
		as := textproto.CanonicalMIMEHeaderKey(name)
		canonical[as] = append(canonical[as], h[name]...)
	}
	return canonical
}

// changes returns a handler's changes to the headers that it found.
func changes(outer, now http.Header, keep func(name string) bool) []headerEntry {
	names := map[string]bool{}
	for name := range now {
		names[name] = true
	}
	for name := range outer {
		names[name] = true
	}
	var entries []headerEntry
	for _, name := range slices.Sorted(maps.Keys(names)) {
		before, after := outer[name], now[name]
		empty := isEmpty(now, name)
		if slices.Equal(before, after) && empty == isEmpty(outer, name) || slices.Contains(perAnswer, name) || !keep(name) {
			continue
		}
		e := headerEntry{Name: name, Values: bytesOf(after), Empty: empty}
		if len(before) > 0 && len(after) > len(before) && slices.Equal(before, after[:len(before)]) {
			e.Add, e.Values = true, bytesOf(after[len(before):])
		}
		entries = append(entries, e)
	}
	return entries
}

// isEmpty reports whether a header is set to no values. It is not sent then, and net/http does
// not add it.
func isEmpty(h http.Header, name string) bool {
	values, set := h[name]
	return set && len(values) == 0
}

// send writes the first answer, with everything that the handler wrote.
func (r *recorder) send() error {
	live := r.w.Header()
	clear(live)
	maps.Copy(live, r.sent)
	for _, name := range listed(r.sent, "Trailer") {
		delete(live, name) // net/http takes their values after the body
	}
	r.w.WriteHeader(r.status)
	if len(r.body) > 0 {
		if _, err := r.w.Write(r.body); err != nil {
			return err
		}
	}
	if r.overflow != nil {
		if _, err := r.overflow.Seek(0, io.SeekStart); err != nil {
			return err
		}
		if _, err := io.Copy(r.w, r.overflow); err != nil {
			return err
		}
	}
	return nil
}

// sendAll writes the first answer with its trailers.
func (r *recorder) sendAll() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var err error
	if !r.streamed {
		if r.status == 0 {
			r.writeHeader(http.StatusOK)
		}
		err = r.send()
	}
	live := r.w.Header()
	for _, name := range listed(r.sent, "Trailer") {
		if values, ok := r.header[name]; ok {
			live[name] = values
		}
	}
	for name, values := range r.header {
		if strings.HasPrefix(name, http.TrailerPrefix) {
			live[name] = values
		}
	}
	return err
}

// writeTo writes a replay. Headers that are set outside stay, except for the handler's
// changes to them.
func (res *response) writeTo(w http.ResponseWriter) error {
	live := w.Header()
	for _, e := range res.Header {
		switch {
		case e.Empty:
			live[e.Name] = nil
		case len(e.Values) == 0:
			delete(live, e.Name)
		case e.Add:
			live[e.Name] = append(slices.Clone(live[e.Name]), stringsOf(e.Values)...)
		default:
			live[e.Name] = stringsOf(e.Values)
		}
	}
	for _, e := range res.Trailer {
		live.Add("Trailer", e.Name)
	}
	live.Set(replayedHeader, "true")
	w.WriteHeader(res.Status)
	if len(res.body) > 0 {
		if _, err := w.Write(res.body); err != nil {
			return err
		}
	}
	for _, e := range res.Trailer {
		live[e.Name] = stringsOf(e.Values)
	}
	return nil
}

func stringsOf(values [][]byte) []string {
	out := make([]string, len(values))
	for i, value := range values {
		out[i] = string(value)
	}
	return out
}
