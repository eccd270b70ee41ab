package dlq_test

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/dlqstore"
	"github.com/oncemill/oncemill/internal/testserver"
)

// addFailed adds a dead letter of the consumer stock, as its inbox does, and returns its id.
func (p *testDB) addFailed(t *testing.T, l dlqstore.Letter) int64 {
	t.Helper()
	l.Consumer, l.Topic, l.Reason = "stock", "orders", "failed"
	must(t, p.add(t, &l))
	newest, err := p.List(t.Context(), dlq.Filter{Limit: 1})
	must(t, err)
	return newest[0].ID
}

// copyInto imports an export of p into another database.
func (p *testDB) copyInto(t *testing.T, text string) dlq.Imported {
	t.Helper()
	other := newTestDB(t, testserver.OpenSQLite(t, filepath.Join(t.TempDir(), "other.db")), oncemill.Config{})
	done, err := other.Import(t.Context(), strings.NewReader(text), ada)
	must(t, err)
	return done
}

func TestExport_OfAnEmptyPayloadCanBeImported(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		l, err := p.Get(t.Context(), p.addFailed(t, dlqstore.Letter{MessageID: "a"}))
		if err != nil || l.Payload == nil || len(l.Payload) > 0 {
			t.Errorf("payload %v, %v", l.Payload, err)
		}
		text := p.export(t, dlq.Filter{})
		before := strings.Replace(text, `"payload":""`, `"payload":null`, 1) // of earlier versions
		for _, text := range []string{text, before} {
			if done := p.copyInto(t, text); done.Added != 1 {
				t.Errorf("%+v of %s", done, text)
			}
		}
		if before == text {
			t.Errorf("no empty payload in %s", text)
		}
	})
}

// A consumer's role may write anything as the attempts of its dead letters.
func TestExport_GoesOnBehindForgedAttempts(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		forged := []string{`{"x":1}`, `[{"at":9000000000000000000,"class":"x","text":"y"}]`, `[{"at":-9000000000000000000}]`, `[{"at":1e300}]`, `7`}
		var ids []int64
		for i, attempts := range append(forged, `[{"at":1700000000000000,"class":"failed","text":"once"}]`) {
			id := p.addFailed(t, dlqstore.Letter{MessageID: fmt.Sprint("m", i), Payload: []byte("p")})
			p.exec(t, `update {{dead_letters}} set errors = $2 where id = $1`, id, attempts)
			ids = append(ids, id)
		}
		all := lines(t, p.export(t, dlq.Filter{}))
		if len(all) != len(ids) {
			t.Fatalf("%d of %d lines", len(all), len(ids))
		}
		for i, id := range ids {
			l, err := p.Get(t.Context(), id)
			must(t, err)
			if good := i == len(forged); good != (len(l.Attempts) == 1) || good != (len(all[i].Attempts) == 1) {
				t.Errorf("%d attempts of %s", len(l.Attempts), all[i].MessageID)
			}
			if _, err := json.Marshal(l); err != nil { // as oncemill dlq show does
				t.Error(err)
			}
		}
		if done := p.copyInto(t, p.export(t, dlq.Filter{})); done.Added != len(ids) {
			t.Errorf("%+v", done)
		}
	})
}

// A key, topic or id that is longer than the database keeps is cut, and marked as such.
func TestExport_OfLongTextsCanBeImported(t *testing.T) {
	eachDB(t, func(t *testing.T, p *testDB) {
		for _, char := range []string{"k", "é", "…", "𝄞"} {
			p.addFailed(t, dlqstore.Letter{MessageID: strings.Repeat(char, 5000), Key: strings.Repeat(char, 5000)})
		}
		text := p.export(t, dlq.Filter{})
		if done := p.copyInto(t, text); done.Added != 4 {
			t.Errorf("%+v", done)
		}
		done, err := p.Import(t.Context(), strings.NewReader(text), ada)
		if must(t, err); done.Existing != 4 {
			t.Errorf("imported where it was exported: %+v", done)
		}
	})
}
