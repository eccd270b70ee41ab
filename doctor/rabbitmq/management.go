package rabbitmq

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/oncemill/oncemill/doctor"
)

// api is RabbitMQ's management API.
type api struct {
	base, user, password, vhost string
	client                      *http.Client
}

const (
	mostAnswer = 4 << 20 // bytes of an answer
	mostQueues = 500     // that are checked
)

// get decodes an answer. Errors do not hold the password.
func (a *api) get(ctx context.Context, into any, path ...string) error {
	for i, part := range path {
		path[i] = url.PathEscape(part)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(a.base, "/")+"/api/"+strings.Join(path, "/"), nil)
	if err != nil {
		return err
	}
	request.SetBasicAuth(a.user, a.password)
	response, err := a.client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close() //nolint:errcheck // it was only read from
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d; the user needs the tag management, and permissions on the virtual host", response.StatusCode)
	}
	return json.NewDecoder(io.LimitReader(response.Body, mostAnswer)).Decode(into)
}

// binding is what an exchange leads to: a queue, or another exchange.
type binding struct {
	Destination string `json:"destination"`
	Type        string `json:"destination_type"`
}

// boundTo returns what is bound to an exchange.
func (a *api) boundTo(ctx context.Context, exchange string) (all []binding, err error) {
	err = a.get(ctx, &all, "exchanges", a.vhost, exchange, "bindings", "source")
	return all, err
}

// queue is what the API says of a queue.
type queue struct {
	Type       string         `json:"type"`
	Durable    bool           `json:"durable"`
	AutoDelete bool           `json:"auto_delete"`
	Exclusive  bool           `json:"exclusive"`
	Arguments  map[string]any `json:"arguments"`
	Policy     any            `json:"effective_policy_definition"` // a list if there is none
}

// setting returns an argument of the queue, or what its policy sets. Of numbers that both have,
// RabbitMQ takes the smaller one; either is enough to lose messages.
func (q *queue) setting(argument string) (any, bool) {
	if value, ok := q.Arguments["x-"+argument]; ok {
		return value, true
	}
	policy, _ := q.Policy.(map[string]any)
	value, ok := policy[argument]
	return value, ok
}

// defaultDeliveryLimit is that of quorum queues from RabbitMQ 4 on.
const defaultDeliveryLimit = 20

// deliveryLimit returns after how many deliveries a queue drops a message.
func (q *queue) deliveryLimit(version string) (limit float64, ok bool) {
	if q.Type != "quorum" {
		return 0, false
	}
	policy, _ := q.Policy.(map[string]any)
	set := false
	for _, value := range []any{q.Arguments["x-delivery-limit"], policy["delivery-limit"]} {
		n, number := value.(float64)
		set = set || number
		if number && n >= 0 && (!ok || n < limit) { // the smaller one, or the one that is not unlimited
			limit, ok = n, true
		}
	}
	if set {
		return limit, ok
	}
	major, _, _ := strings.Cut(version, ".")
	n, err := strconv.Atoi(major)
	return defaultDeliveryLimit, err == nil && n >= 4
}

// managed judges the settings of queues.
func (d *Doctor) managed(ctx context.Context, queues []string, found *findings) error {
	var overview struct {
		Version string `json:"rabbitmq_version"`
	}
	if err := d.api.get(ctx, &overview, "overview"); err != nil {
		return err
	}
	slices.Sort(queues)
	queues = slices.Compact(queues)
	if len(queues) > mostQueues {
		found.add(doctor.Warning, "queue", fmt.Sprintf("Only %d of %d queues were checked.", mostQueues, len(queues)), "Name fewer topics and queues at a time.")
		queues = queues[:mostQueues]
	}
	for _, name := range queues {
		var q queue
		if err := d.api.get(ctx, &q, "queues", d.api.vhost, name); err != nil {
			return fmt.Errorf("queue %s: %w", quoted(name), err)
		}
		q.judge(name, overview.Version, found)
	}
	return nil
}

// judge looks for what drops messages.
func (q *queue) judge(name, version string, found *findings) {
	for _, fault := range []struct {
		found bool
		what  string
	}{
		// RabbitMQ shows an exclusive queue as not durable.
		{q.Exclusive, "is exclusive: it ends with its connection, and its messages are lost"},
		{q.AutoDelete, "is deleted with its last consumer: its messages are lost then"},
		{!q.Durable, "is not durable: a restart of the broker loses it and its messages"},
	} {
		if fault.found {
			found.add(doctor.Error, "durability", fmt.Sprintf("Queue %s %s.", quoted(name), fault.what),
				"Declare it durable, not exclusive and without auto-delete, unless its messages may be lost.")
			break
		}
	}
	_, kept := q.setting("dead-letter-exchange")
	if limit, ok := q.deliveryLimit(version); ok && !kept {
		found.add(doctor.Error, "delivery-limit", fmt.Sprintf("Queue %s drops a message after %.0f deliveries: an outage of the database uses them up.", quoted(name), limit),
			"Set delivery-limit to -1 by a policy (on RabbitMQ 3, remove it), since the inbox counts attempts itself; or set a dead-letter-exchange. A limit among the arguments of the queue goes only if you declare it anew.")
	}
	overflow, _ := q.setting("overflow")
	refuses := overflow == "reject-publish" || overflow == "reject-publish-dlx"
	for _, setting := range []string{"max-length", "max-length-bytes"} {
		if value, ok := q.setting(setting); ok && !refuses && !kept {
			found.add(doctor.Error, "overflow", fmt.Sprintf("Queue %s has %s %s and drops its oldest messages when it is full.", quoted(name), setting, quoted(fmt.Sprint(value))),
				"Set overflow to reject-publish: the outbox then keeps what does not fit.")
		}
	}
	if value, ok := q.setting("message-ttl"); ok && !kept {
		found.add(doctor.Error, "expiry", fmt.Sprintf("Queue %s has message-ttl %s (ms) and drops messages that wait for longer.", quoted(name), quoted(fmt.Sprint(value))),
			"Remove it, or set a dead-letter-exchange.")
	}
	if value, ok := q.setting("expires"); ok { // the messages of a deleted queue are not dead-lettered
		found.add(doctor.Error, "expiry", fmt.Sprintf("Queue %s has expires %s (ms): it is deleted with its messages when it has had no consumer for so long.", quoted(name), quoted(fmt.Sprint(value))),
			"Remove it. A dead-letter-exchange does not help.")
	}
}
