// Package etag makes PUT and PATCH safe against lost updates, as defined by RFC 9110. The
// client sends the entity tag that it has read in If-Match. If another client has changed the
// resource meanwhile, the request is answered with 412 instead of overwriting that change.
// A retried PUT with If-Match whose first attempt had its effect gets 412, too: to return
// the first answer again, wrap it with idempotency.
//
//	current := etag.Of(order.Version)
//	if !etag.Match(w, r, current) {
//		return // answered: 412 or 428
//	}
//
// Read the current version and write the new one in one transaction, under the row's lock
// or with the version in the update's condition.
package etag

import (
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"net/http"
	"strings"
)

// Tag is an entity tag as written in a header: quoted, and prefixed with W/ if it is weak.
// The empty Tag is that of a resource that does not exist.
type Tag string

// Of returns a strong tag of a version: equal values have equal tags.
func Of(version any) Tag {
	sum := sha256.Sum256(fmt.Appendf(nil, "%v", version))
	return Tag(`"` + base64.RawURLEncoding.EncodeToString(sum[:12]) + `"`)
}

// Set sets the header ETag.
func (t Tag) Set(w http.ResponseWriter) { w.Header().Set("ETag", string(t)) }

// Match reports whether a request may change a resource whose tag is current. It evaluates
// If-Match (strong comparison) and If-None-Match (weak), where "*" matches any existing
// resource. If it returns false, it has sent the answer: 412 for a tag that does not
// match, 428 (RFC 6585) for a request that has neither header, 400 for one that cannot be
// parsed.
func Match(w http.ResponseWriter, r *http.Request, current Tag) bool {
	match, none := r.Header.Values("If-Match"), r.Header.Values("If-None-Match")
	if len(match) == 0 && len(none) == 0 {
		refuse(w, http.StatusPreconditionRequired, "Precondition required", "Send the entity tag of what you have read in If-Match, or If-None-Match: * to create.")
		return false
	}
	ok := true
	for _, condition := range []struct {
		lines []string
		weak  bool
		want  bool
	}{{match, false, true}, {none, true, false}} {
		if len(condition.lines) == 0 {
			continue
		}
		matches, valid := contains(strings.Join(condition.lines, ","), current, condition.weak)
		if !valid {
			refuse(w, http.StatusBadRequest, "Precondition cannot be read", "An entity tag is quoted; a list is separated by commas.")
			return false
		}
		ok = ok && matches == condition.want
	}
	if !ok {
		if current != "" {
			current.Set(w)
		}
		refuse(w, http.StatusPreconditionFailed, "Precondition failed", "The resource has been changed since you read it. Read it again.")
	}
	return ok
}

func refuse(w http.ResponseWriter, status int, title, detail string) {
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(status)
	_, _ = fmt.Fprintf(w, `{"type":"about:blank","title":%q,"status":%d,"detail":%q}`, title, status, detail) // a client that is gone needs no answer
}

// contains parses a list of tags. valid is false if it is not one.
func contains(list string, current Tag, weak bool) (matches, valid bool) {
	list = strings.Trim(list, " \t")
	if list == "*" {
		return current != "", true
	}
	for {
		list = strings.TrimLeft(list, " \t,")
		if list == "" {
			return matches, valid
		}
		tag, rest, ok := next(list)
		if !ok {
			return false, false
		}
		valid = true
		matches = matches || current != "" && same(tag, current, weak)
		if list = strings.TrimLeft(rest, " \t"); list != "" && list[0] != ',' {
			return false, false
		}
	}
}

// next removes the first tag of a list.
func next(list string) (tag Tag, rest string, ok bool) {
	start := 0
	if strings.HasPrefix(list, "W/") {
		start = 2
	}
	if start >= len(list) || list[start] != '"' {
		return "", "", false
	}
	for i := start + 1; i < len(list); i++ {
		switch c := list[i]; {
		case c == '"':
			return Tag(list[:i+1]), list[i+1:], true
		case c <= ' ' || c == 0x7f:
			return "", "", false
		}
	}
	return "", "", false
}

func same(a, b Tag, weak bool) bool {
	if weak {
		return strings.TrimPrefix(string(a), "W/") == strings.TrimPrefix(string(b), "W/")
	}
	return a == b && !strings.HasPrefix(string(a), "W/")
}
