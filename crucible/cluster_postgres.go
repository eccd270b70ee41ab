package main

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/lib/pq"
	"golang.org/x/sync/errgroup"

	"github.com/oncemill/oncemill/crucible/check"
	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/internal/testserver"
)

// replicated is a PostgreSQL of three nodes that take over for each other: Patroni with etcd,
// and HAProxy, which leads to the primary.
type replicated struct {
	etcd, proxy *testserver.Instance
	nodes       []*testserver.Instance
	synchronous bool
	reigns      []reign // whenever all was well: before the first fault, and after each
}

const nodes = 3

// newReplicated starts one. A commit of a synchronous one waits for a standby.
func newReplicated(ctx context.Context, dir string, synchronous bool) (*replicated, error) {
	r := &replicated{synchronous: synchronous}
	var err error
	if r.etcd, err = testserver.NewInstance(ctx, "etcd", filepath.Join(dir, "etcd")); err != nil {
		return r, err
	}
	settings := []string{"etcd=" + r.etcd.Dir()}
	if synchronous {
		settings = append(settings, "synchronous=on")
	}
	r.nodes = make([]*testserver.Instance, nodes)
	start := func(ctx context.Context, i int) (err error) {
		r.nodes[i], err = testserver.NewInstance(ctx, "patroni", filepath.Join(dir, fmt.Sprint("node", i+1)), settings...)
		return err
	}
	if err := start(ctx, 0); err != nil { // it becomes the primary, from which the others copy
		return r, err
	}
	group, together := errgroup.WithContext(ctx)
	for i := 1; i < nodes; i++ {
		group.Go(func() error { return start(together, i) })
	}
	if err := group.Wait(); err != nil {
		return r, err
	}
	var members []string
	for _, n := range r.nodes {
		members = append(members, "node="+n.Dir())
	}
	if r.proxy, err = testserver.NewInstance(ctx, "haproxy", filepath.Join(dir, "haproxy"), members...); err != nil {
		return r, err
	}
	return r, r.awaitHealth(ctx)
}

// urls returns the two ways to the primary: HAProxy, and all nodes in one URL.
func (r *replicated) urls() (proxy, several string, err error) {
	var hosts, ports []string
	var u *url.URL
	for _, n := range r.nodes {
		if u, err = url.Parse(n.URL()); err != nil {
			return "", "", err
		}
		hosts, ports = append(hosts, u.Hostname()), append(ports, u.Port())
	}
	u.Host = strings.Join(hosts, ",")
	u.RawQuery += "&target_session_attrs=read-write&port=" + strings.Join(ports, ",")
	return r.proxy.URL(), u.String(), nil
}

// member is a node as Patroni describes it.
type member struct {
	Name, Role, State string
	Port              int
}

var (
	errNoPrimary = errors.New("no node says who the members are")
	errNoLeader  = errors.New("no node leads")
)

// members asks each node until one answers.
func (r *replicated) members(ctx context.Context) ([]member, error) {
	for _, n := range r.nodes {
		var all struct{ Members []member }
		if err := r.call(ctx, n, http.MethodGet, "/cluster", nil, &all); err == nil && len(all.Members) > 0 {
			return all.Members, nil
		}
	}
	return nil, errNoPrimary
}

// call calls the REST API of a node. out may be nil.
func (r *replicated) call(ctx context.Context, n *testserver.Instance, method, path string, body []byte, out any) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	if method == http.MethodGet {
		var short context.CancelFunc
		ctx, short = context.WithTimeout(ctx, time.Second)
		defer short()
	}
	req, err := http.NewRequestWithContext(ctx, method, n.Patroni()+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close() //nolint:errcheck // it was read
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode >= 300 {
		return fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, text)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(text, out)
}

// node returns a member's node, or nil.
func (r *replicated) node(m member) *testserver.Instance {
	i := slices.IndexFunc(r.nodes, func(n *testserver.Instance) bool { return strings.Contains(n.URL(), fmt.Sprint(":", m.Port, "/")) })
	if i < 0 {
		return nil
	}
	return r.nodes[i]
}

// find returns the member with one of the roles, the earlier ones first, and its node.
func (r *replicated) find(ctx context.Context, roles ...string) (member, *testserver.Instance, error) {
	members, err := r.members(ctx)
	if err != nil {
		return member{}, nil, err
	}
	for _, role := range roles {
		for _, m := range members {
			if n := r.node(m); m.Role == role && n != nil {
				return m, n, nil
			}
		}
	}
	return member{}, nil, fmt.Errorf("no node is %s: %+v", strings.Join(roles, " or "), members)
}

// stuckAfter is how long a standby may not follow the primary before it is made anew. One that
// received more than the one that was promoted cannot follow that, and Patroni tries for ever. An
// operator would do the same.
const stuckAfter = 15 * time.Second

// awaitHealth waits until all standbys follow the primary, and one is synchronous if one has to be.
// Patroni says of a standby that it is running although it receives nothing.
func (r *replicated) awaitHealth(ctx context.Context) error {
	stuck := map[string]time.Time{}
	return untilWell(ctx, "PostgreSQL", func() (string, bool, error) {
		members, err := r.members(ctx)
		if err != nil {
			return "", false, err
		}
		now, err := r.reign(ctx, members)
		if err != nil {
			clear(stuck) // whom should they follow?
			return fmt.Sprintf("%+v", members), false, err
		}
		well, synchronous := 0, !r.synchronous
		for _, m := range members {
			switch since := stuck[m.Name]; {
			case m.Role == "leader":
				well++
			case slices.Contains(now.followers, m.Name):
				well++
				delete(stuck, m.Name)
			case m.State == "creating replica": // made anew, or for the first time
				delete(stuck, m.Name)
			case since.IsZero():
				stuck[m.Name] = time.Now()
			case time.Since(since) > stuckAfter:
				err = errors.Join(err, r.reinitialize(ctx, m))
				stuck[m.Name] = time.Now()
			}
			synchronous = synchronous || m.Role == "sync_standby"
		}
		if err != nil || well < nodes || !synchronous {
			return fmt.Sprintf("%+v, followed by %v", members, now.followers), false, err
		}
		r.reigns = append(r.reigns, now)
		return "", true, nil
	})
}

// reign is what a primary says of itself.
type reign struct {
	asked     time.Time
	followers []string // the standbys that receive everything from it
	timeline  int      // it has the next one with each promotion

	// inherited is when the last transaction was committed that it had received when it was
	// promoted. Zero: it had received nothing since it was started.
	inherited time.Time
}

const askReign = `select ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int, pg_last_xact_replay_timestamp(),
	array(select application_name from pg_stat_replication where state = 'streaming')`

// reign asks the primary.
func (r *replicated) reign(ctx context.Context, members []member) (now reign, err error) {
	i := slices.IndexFunc(members, func(m member) bool { return m.Role == "leader" && r.node(m) != nil })
	if i < 0 {
		return now, errNoLeader
	}
	db, err := sql.Open("postgres", r.node(members[i]).URL()+"&connect_timeout=2")
	if err != nil {
		return now, err
	}
	defer db.Close() //nolint:errcheck // it was read
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	now.asked = time.Now()
	var inherited sql.NullTime
	err = db.QueryRowContext(ctx, askReign).Scan(&now.timeline, &inherited, (*pq.StringArray)(&now.followers))
	now.inherited = inherited.Time
	return now, err
}

// reinitialize makes a node copy the primary.
func (r *replicated) reinitialize(ctx context.Context, m member) error {
	n := r.node(m)
	if n == nil {
		return fmt.Errorf("%s is no node of this cluster", m.Name)
	}
	return r.call(ctx, n, http.MethodPost, "/reinitialize", []byte(`{"force": true}`), nil)
}

func (r *replicated) switchover(ctx context.Context) error {
	leader, node, err := r.find(ctx, "leader")
	if err != nil {
		return err
	}
	next, _, err := r.find(ctx, "sync_standby", "replica")
	if err != nil {
		return err
	}
	body, err := json.Marshal(map[string]string{"leader": leader.Name, "candidate": next.Name})
	if err != nil {
		return err
	}
	return r.call(ctx, node, http.MethodPost, "/switchover", body, nil)
}

// lossy returns when a primary without synchronous standbys may have lost what it acknowledged:
// from the last commit that the next one had received until it was killed or frozen, and shortly
// after it goes on, since it has yet to notice that it is no longer the primary. Before a
// switchover, the standby receives everything.
func (r *replicated) lossy(faults []check.Fault) (all []check.Window, err error) {
	for _, f := range faults {
		if r.synchronous || !strings.HasPrefix(f.Kind, "primary-") {
			continue
		}
		next := slices.IndexFunc(r.reigns, func(now reign) bool { return now.asked.After(f.To) })
		if next < 1 {
			return nil, fmt.Errorf("%s: %w", f.Kind, errNoReign)
		}
		last, now := r.reigns[next-1], r.reigns[next]
		if promotions := now.timeline - last.timeline; promotions > 1 {
			return nil, fmt.Errorf("%s: %w: %d", f.Kind, errPromotions, promotions)
		} else if promotions == 0 || now.inherited.IsZero() { // the same node goes on with all that it had
			continue
		}
		all = append(all, check.Window{From: now.inherited.Add(-answer), To: f.Injected.Add(answer)})
		if f.Kind == primaryFrozen {
			all = append(all, check.Window{From: f.To.Add(-answer), To: f.To.Add(thawed)})
		}
	}
	return all, nil
}

const (
	answer        = time.Second     // until a client has read and noted one; and commits do not end in the order in which they begin
	thawed        = 5 * time.Second // until a primary that goes on has noticed that it is none
	primaryFrozen = "primary-frozen"
)

var (
	errNoReign    = errors.New("the nodes were not well before and after it")
	errPromotions = errors.New("nobody knows what was lost in more than one promotion")
)

// killAhead kills the primary when its standbys have not received the last eight seconds.
func (r *replicated) killAhead(ctx context.Context) (heal, error) {
	_, primary, err := r.find(ctx, "leader")
	if err != nil {
		return nil, err
	}
	end := func(ctx context.Context) error { return primary.Start(ctx) }
	standbys := slices.DeleteFunc(slices.Clone(r.nodes), func(n *testserver.Instance) bool { return n == primary })
	thaw := func() (err error) {
		for _, n := range standbys {
			err = errors.Join(err, n.Thaw(context.WithoutCancel(ctx)))
		}
		return err
	}
	for _, n := range standbys {
		if err := n.Freeze(ctx); err != nil {
			return end, errors.Join(err, thaw())
		}
	}
	// Or they would find the last seconds in the buffers of their connections.
	err = disconnectStandbys(ctx, primary)
	sleep.For(ctx, 8*time.Second)
	return end, errors.Join(err, primary.Kill(ctx), thaw())
}

func disconnectStandbys(ctx context.Context, primary *testserver.Instance) error {
	db, err := sql.Open("postgres", primary.URL())
	if err != nil {
		return err
	}
	_, err = db.ExecContext(ctx, "select pg_terminate_backend(pid) from pg_stat_replication")
	return errors.Join(err, db.Close())
}

// turn is a fault of a cluster. The nodes recover from one before the next begins.
type turn struct {
	name   string
	inject func(ctx context.Context) (heal, error)
	lasts  time.Duration
}

// turns are the faults of a replicated PostgreSQL.
func (r *replicated) turns() []turn {
	of := func(roles []string, begin func(*testserver.Instance, context.Context) error, end func(*testserver.Instance, context.Context) error) func(context.Context) (heal, error) {
		return func(ctx context.Context) (heal, error) {
			_, node, err := r.find(ctx, roles...)
			if err != nil {
				return nil, err
			}
			return func(ctx context.Context) error { return end(node, ctx) }, begin(node, ctx)
		}
	}
	primary, standby := []string{"leader"}, []string{"sync_standby", "replica"}
	kill, start := (*testserver.Instance).Kill, (*testserver.Instance).Start
	freeze, thaw := (*testserver.Instance).Freeze, (*testserver.Instance).Thaw
	if !r.synchronous {
		return []turn{
			{"switchover", func(ctx context.Context) (heal, error) { return done, r.switchover(ctx) }, 0},
			{"primary-killed", of(primary, kill, start), 15 * time.Second},
			{"primary-killed-ahead", r.killAhead, 15 * time.Second},
			{primaryFrozen, of(primary, freeze, thaw), 20 * time.Second},
		}
	}
	return []turn{
		{"switchover", func(ctx context.Context) (heal, error) { return done, r.switchover(ctx) }, 0},
		{"primary-killed", of(primary, kill, start), 15 * time.Second},
		{primaryFrozen, of(primary, freeze, thaw), 20 * time.Second},
		{"standby-killed", of(standby, kill, start), 10 * time.Second},
		{"etcd-killed", func(ctx context.Context) (heal, error) { return r.etcd.Start, r.etcd.Kill(ctx) }, 10 * time.Second},
	}
}
