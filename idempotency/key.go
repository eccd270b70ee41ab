package idempotency

import (
	"strings"
)

// maxKey is the longest key in bytes.
const maxKey = 255

// ParseKey reads the value of an Idempotency-Key header. It accepts a string item of RFC
// 9651 ("abc", parameters are ignored), as draft-ietf-httpapi-idempotency-key-header
// defines it. It also accepts the same characters without quotes, as most clients send
// them; these take no parameters, so a semicolon is part of the key. "abc" and abc are the
// same key. A key has 1 to 255 visible ASCII characters; within quotes also spaces. The
// error is a [*KeyError].
func ParseKey(value string) (string, error) {
	value = strings.Trim(value, " \t")
	if value == "" {
		return "", &KeyError{Problem: "is empty"}
	}
	var key, rest string
	var err error
	if value[0] == '"' {
		key, rest, err = quotedKey(value[1:])
	} else {
		key, err = bareKey(value)
	}
	if err != nil {
		return "", err
	}
	if !validParameters(rest) {
		return "", &KeyError{Problem: "is followed by something that is no parameter"}
	}
	switch {
	case key == "":
		return "", &KeyError{Problem: "is empty"}
	case len(key) > maxKey:
		return "", &KeyError{Problem: "has more than 255 characters"}
	}
	return key, nil
}

// quotedKey reads the part after an opening quote.
func quotedKey(s string) (key, rest string, err error) {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == '"':
			return b.String(), s[i+1:], nil
		case c == '\\':
			i++
			if i == len(s) || s[i] != '"' && s[i] != '\\' {
				return "", "", &KeyError{Problem: `holds a backslash that escapes neither " nor \`}
			}
			b.WriteByte(s[i])
		case c < 0x20 || c > 0x7e:
			return "", "", &KeyError{Problem: "holds a character that is not printable ASCII"}
		default:
			b.WriteByte(c)
		}
	}
	return "", "", &KeyError{Problem: "has no closing quote"}
}

// bareKey checks a key without quotes. A comma would join two headers, so a key with one
// must be quoted.
func bareKey(s string) (key string, err error) {
	for i := range len(s) {
		switch c := s[i]; {
		case c == ',' || c == '"' || c == '\\':
			return "", &KeyError{Problem: "holds a comma, a quote or a backslash outside of quotes"}
		case c < 0x21 || c > 0x7e:
			return "", &KeyError{Problem: "holds a character that is not visible ASCII outside of quotes"}
		}
	}
	return s, nil
}

// validParameters reports whether s is *( ";" *SP key [ "=" bare-item ] ). A bare item is
// read loosely, since its value is ignored.
func validParameters(s string) bool {
	for s != "" {
		if s[0] != ';' {
			return false
		}
		s = strings.TrimLeft(s[1:], " ")
		n := 0
		for n < len(s) && isParameterName(s[n], n == 0) {
			n++
		}
		if n == 0 {
			return false
		}
		if s = s[n:]; s == "" || s[0] != '=' {
			continue
		}
		s = s[1:]
		if strings.HasPrefix(s, `"`) {
			_, rest, err := quotedKey(s[1:])
			if err != nil {
				return false
			}
			s = rest
			continue
		}
		n = 0
		for n < len(s) && s[n] > 0x20 && s[n] < 0x7f && strings.IndexByte(`";,\`, s[n]) < 0 {
			n++
		}
		if n == 0 {
			return false
		}
		s = s[n:]
	}
	return true
}

func isParameterName(c byte, first bool) bool {
	if c >= 'a' && c <= 'z' || c == '*' {
		return true
	}
	return !first && (c >= '0' && c <= '9' || c == '_' || c == '-' || c == '.')
}

// isUUID reports whether s is a UUID in its usual form, in either case.
func isUUID(s string) bool {
	if len(s) != 36 {
		return false
	}
	for i := range len(s) {
		c := s[i] | 0x20
		switch i {
		case 8, 13, 18, 23:
			if s[i] != '-' {
				return false
			}
		default:
			if (s[i] < '0' || s[i] > '9') && (c < 'a' || c > 'f') {
				return false
			}
		}
	}
	return true
}
