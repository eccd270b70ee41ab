package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/oncemill/oncemill/crucible/work"
	"github.com/oncemill/oncemill/internal/testserver"
)

// brokers is a RabbitMQ of three nodes with quorum queues. Clients know all their addresses.
type brokers struct {
	nodes []*testserver.Instance
}

// newBrokers starts one. The part of a divided cluster that is smaller pauses.
func newBrokers(ctx context.Context, dir string, settings ...string) (*brokers, error) {
	b := &brokers{nodes: make([]*testserver.Instance, nodes)}
	// A node notices sooner that another is silent: 8 s instead of a minute.
	settings = append(settings, "cluster_partition_handling=pause_minority", "net_ticktime=8")
	start := func(ctx context.Context, i int, args ...string) (err error) {
		b.nodes[i], err = testserver.NewInstance(ctx, "rabbitmq", filepath.Join(dir, fmt.Sprint("rabbit", i+1)), append(args, settings...)...)
		return err
	}
	if err := start(ctx, 0); err != nil { // the others join it
		return b, err
	}
	group, together := errgroup.WithContext(ctx)
	for i := 1; i < nodes; i++ {
		group.Go(func() error { return start(together, i, "--join", b.nodes[0].Dir()) })
	}
	if err := group.Wait(); err != nil {
		return b, err
	}
	var members []struct{}
	err := ask(ctx, b.nodes[0].Admin(), "nodes?columns=name", &members)
	if err == nil && len(members) != nodes {
		err = fmt.Errorf("%d nodes of RabbitMQ are together, want %d", len(members), nodes)
	}
	return b, err
}

// urls returns the addresses of all nodes, beginning with the nth.
func (b *brokers) urls(n int) (all []string) {
	for i := range b.nodes {
		all = append(all, b.nodes[(n+i)%len(b.nodes)].URL())
	}
	return all
}

// name returns the name of a node, as scripts/servers/rabbitmq.sh makes it.
func (b *brokers) name(node *testserver.Instance) (string, error) {
	u, err := url.Parse(node.URL())
	if err != nil {
		return "", err
	}
	return "oncemill-" + u.Port() + "@localhost", nil
}

// quorum is a quorum queue as the management API describes it.
type quorum struct {
	Name, Leader string
	Online       []string
}

// queues asks each node until one answers.
func (b *brokers) queues(ctx context.Context) (all []quorum, err error) {
	for _, n := range b.nodes {
		if err = ask(ctx, n.Admin(), "queues/%2F?columns=name,leader,online", &all); err == nil && len(all) > 0 {
			return all, nil
		}
	}
	return nil, errors.Join(errors.New("no node says where the queues are"), err)
}

// leader returns the node that leads the queue of the first hop. A busy node does not say so at once.
func (b *brokers) leader(ctx context.Context) (leader *testserver.Instance, err error) {
	err = untilWell(ctx, "RabbitMQ", func() (string, bool, error) {
		all, err := b.queues(ctx)
		for _, q := range all {
			if q.Name != work.Queue(work.TopicTransfers, work.RoleLedger) {
				continue
			}
			for _, n := range b.nodes {
				if name, err := b.name(n); err == nil && name == q.Leader {
					leader = n
				}
			}
		}
		return fmt.Sprintf("%+v", all), leader != nil, err
	})
	return leader, err
}

// awaitHealth waits until all nodes run and every queue has all its members.
func (b *brokers) awaitHealth(ctx context.Context) error {
	return untilWell(ctx, "RabbitMQ", func() (string, bool, error) {
		all, err := b.queues(ctx)
		complete := func(q quorum) bool { return q.Leader != "" && len(q.Online) == len(b.nodes) }
		return fmt.Sprintf("%+v", all), err == nil && !slices.ContainsFunc(all, func(q quorum) bool { return !complete(q) }), err
	})
}

// isolate divides a node from the others: they no longer accept each other's cookies.
func (b *brokers) isolate(ctx context.Context, node *testserver.Instance) error {
	return b.eachPeer(ctx, node, "erlang:set_cookie('%[1]s', divided), erlang:disconnect_node('%[1]s')")
}

func (b *brokers) reunite(ctx context.Context, node *testserver.Instance) error {
	return b.eachPeer(ctx, node, "erlang:set_cookie('%[1]s', erlang:get_cookie()), net_kernel:connect_node('%[1]s')")
}

func (b *brokers) eachPeer(ctx context.Context, node *testserver.Instance, call string) error {
	var calls []string
	for _, peer := range b.nodes {
		name, err := b.name(peer)
		if err != nil {
			return err
		}
		if peer != node {
			calls = append(calls, fmt.Sprintf(call, name))
		}
	}
	return node.Eval(ctx, strings.Join(calls, ", "))
}

// turns are the faults of the nodes.
func (b *brokers) turns() []turn {
	led := func(begin, end func(*testserver.Instance, context.Context) error) func(context.Context) (heal, error) {
		return func(ctx context.Context) (heal, error) {
			node, err := b.leader(ctx)
			if err != nil {
				return nil, err
			}
			return func(ctx context.Context) error { return end(node, ctx) }, begin(node, ctx)
		}
	}
	all := []turn{
		{"leader-killed", led((*testserver.Instance).Kill, (*testserver.Instance).Start), 10 * time.Second},
		{"leader-frozen", led((*testserver.Instance).Freeze, (*testserver.Instance).Thaw), 20 * time.Second},
		{"leader-isolated", led(
			func(n *testserver.Instance, ctx context.Context) error { return b.isolate(ctx, n) },
			func(n *testserver.Instance, ctx context.Context) error { return b.reunite(ctx, n) }), 15 * time.Second},
	}
	for i, n := range b.nodes { // in turn, as an upgrade does
		all = append(all, turn{fmt.Sprintf("node-%d-restarted", i+1), func(ctx context.Context) (heal, error) {
			return n.Start, n.Stop(ctx)
		}, 0})
	}
	return all
}

// ask reads an answer of the management API of one node.
func ask(ctx context.Context, base, path string, out any) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	return adminDo(ctx, base, "GET", path, "", out)
}
