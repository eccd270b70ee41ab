package conformance

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// Operation is a real operation of a service without a [Probe]. Only the first path is
// required; cases that need a missing field are skipped. In paths, bodies and the values of
// headers, {{unique}}, {{uuid}} and {{number}} stand for [Values], which copies of a request
// share and other requests do not.
type Operation struct {
	Method      string // default POST
	Path        string // with its query if there is one, for example /orders?shop=1
	ContentType string // default application/json
	Body        []byte // of a valid request

	// The rest differs from this request in one thing, and is valid too.

	Other       []byte   // another body
	OtherPaths  []string // other paths or queries for Body
	OtherMethod string   // another method for Path and Body
	Tenant      *Caller  // another tenant
	User        *Caller  // another user of the same tenant
}

// Caller is what identifies a caller: a path with its query, headers, or both.
type Caller struct {
	Path   string      // in place of Operation.Path; empty: the same
	Header http.Header // in place of the headers of these names in Target.Header
}

// Values differ from request to request of an [Operation].
type Values struct {
	Unique string // 24 hexadecimal digits
	UUID   string // version 8
	Number int64  // positive, at most 1<<53
}

func valuesOf(id string) Values {
	sum := sha256.Sum256([]byte(id))
	u := sum[16:]
	u[6], u[8] = u[6]&0x0f|0x80, u[8]&0x3f|0x80
	return Values{
		Unique: fmt.Sprintf("%x", sum[:12]),
		UUID:   fmt.Sprintf("%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:]),
		Number: int64(binary.BigEndian.Uint64(sum[8:])>>11) + 1, //nolint:gosec // 53 bits
	}
}

func (v Values) fill(text string) string {
	return strings.NewReplacer("{{unique}}", v.Unique, "{{uuid}}", v.UUID, "{{number}}", strconv.FormatInt(v.Number, 10)).Replace(text)
}

// check returns an error for an operation that cannot be sent.
func (o *Operation) check() error {
	var errs []error
	paths := append([]string{o.Path}, o.OtherPaths...)
	for name, caller := range map[string]*Caller{"Tenant": o.Tenant, "User": o.User} {
		if caller == nil {
			continue
		}
		if caller.Path == "" && len(caller.Header) == 0 {
			errs = append(errs, fmt.Errorf("%s differs in nothing", name))
		}
		paths = append(paths, cmp.Or(caller.Path, "/"))
	}
	for _, path := range paths {
		if !strings.HasPrefix(path, "/") {
			errs = append(errs, fmt.Errorf("path %q does not begin with /", path))
		}
	}
	if len(o.Other) > 0 && string(o.Other) == string(o.Body) {
		errs = append(errs, errors.New("the bodies Other and Body are the same"))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("conformance: operation: %w", err)
	}
	return nil
}

// as makes m a request of another caller.
func (m message) as(caller *Caller) message {
	m.path = caller.Path
	m.header = caller.Header
	return m
}

// values returns those of a message, whose effects count as the session's.
func (x *session) values(m message) Values {
	if !m.uncounted {
		x.mu.Lock()
		x.used[m.fill] = true
		x.mu.Unlock()
	}
	return valuesOf(x.name + "/" + strconv.Itoa(m.fill))
}

// operation completes a message to one of the operation.
func (x *session) operation(m message) (message, http.Header) {
	o := x.target.Operation
	v := x.values(m)
	m.method = cmp.Or(m.method, o.Method, http.MethodPost)
	m.path = v.fill(cmp.Or(m.path, o.Path))
	if m.body == nil {
		m.body = o.Body
	}
	m.body = []byte(v.fill(string(m.body)))
	header := http.Header{}
	if len(m.body) > 0 {
		header.Set("Content-Type", cmp.Or(o.ContentType, "application/json"))
	}
	for _, more := range []http.Header{x.target.Header, m.header} {
		for name, values := range more {
			header.Del(name)
			for _, value := range values {
				header.Add(name, v.fill(value))
			}
		}
	}
	m.header = nil // it is in header
	return m, header
}

// effects returns how often the operation has had effects in this case; it is false if
// nobody counts them.
func (x *session) effects() (total int, known bool) {
	count := x.target.Hooks.Effects
	if x.target.Operation == nil {
		return x.counts().Effects, true
	}
	if count == nil {
		return 0, false
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	for fill := range x.used {
		n, err := count(x.ctx, valuesOf(x.name+"/"+strconv.Itoa(fill)))
		if err != nil {
			x.fail("hook Effects: %v", err)
		}
		total += n
	}
	return total, true
}

// marksReplays reports whether the service marks replays. A probe has to; an operation is
// tried out.
func (x *session) marksReplays() bool {
	if x.target.Operation == nil {
		return true
	}
	m := message{keys: []string{unique()}, fill: tryFill, uncounted: true}
	x.run(m)
	return x.marked(x.settle(m))
}

// tryFill is the fill of requests whose effects nobody counts.
const tryFill = -1
