package conformance_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"strings"
)

// fingerprint describes a request, so that equal descriptions mean the same request.
func (p *process) fingerprint(r *http.Request, body []byte) (string, error) {
	media, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	content := string(body)
	if strings.HasPrefix(media, "multipart/") && err == nil && p.bug != comparesBoundaries {
		if content, err = parts(body, params["boundary"]); err != nil {
			return "", err
		}
		delete(params, "boundary")
	}
	fields := []string{r.Method, r.URL.EscapedPath(), r.URL.Query().Encode(), mime.FormatMediaType(media, params), content}
	switch p.bug {
	case ignoresMethods:
		fields[0] = ""
	case ignoresPaths:
		fields[1] = ""
	case ignoresQueries:
		fields[2] = ""
	case comparesQueryOrders:
		fields[2] = r.URL.RawQuery
	case ignoresTypes:
		fields[3] = ""
	case ignoresBodies:
		fields[4] = ""
	case comparesBeginnings:
		fields[4] = content[:min(len(content), 1<<20)]
	case comparesValues, comparesFloats:
		fields[4] = decoded(body, p.bug == comparesValues)
	case comparesUserAgents:
		fields = append(fields, r.UserAgent())
	case comparesLengths:
		fields = append(fields, fmt.Sprint(r.ContentLength))
	}
	return fmt.Sprintf("%q", fields), nil
}

// parts describes the parts of a body, whatever is between them.
func parts(body []byte, boundary string) (string, error) {
	reader := multipart.NewReader(bytes.NewReader(body), boundary)
	var all []string
	for {
		part, err := reader.NextRawPart()
		if err == io.EOF { //nolint:errorlint // NextRawPart returns it unwrapped at the end; wrapped, it is an error
			return fmt.Sprintf("%q", all), nil
		}
		if err != nil {
			return "", err
		}
		content, err := io.ReadAll(part)
		if err != nil {
			return "", err
		}
		all = append(all, fmt.Sprint(part.Header), string(content))
	}
}

// decoded is JSON as a parser of objects and floats has it.
func decoded(body []byte, exact bool) string {
	decoder := json.NewDecoder(bytes.NewReader(body))
	if exact {
		decoder.UseNumber()
	}
	var value any
	if decoder.Decode(&value) != nil {
		return string(body)
	}
	return fmt.Sprint(value)
}
