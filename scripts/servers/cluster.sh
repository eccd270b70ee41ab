# shellcheck shell=bash
# Sourced by servers.sh: what a replicated PostgreSQL consists of. etcd keeps who leads, each
# patroni is one node with its PostgreSQL, haproxy leads connections to the primary.

# setting DIR NAME prints the value of a setting.
setting() { sed -n "s/^$2=//p" "$1/settings"; }

# spawn_as USER DIR COMMAND... starts the server and remembers it.
spawn_as() {
	local dir=$2
	as "$1"
	(alone "${AS[@]}" "${@:3}") </dev/null >>"$dir/log" 2>&1 &
	remember "$dir/pid" $! || die "$3 did not start: $(tail -5 "$dir/log")"
}

# await_answer DIR COMMAND... waits until COMMAND succeeds or the server has ended.
await_answer() {
	local dir=$1 tries=1200
	shift
	until "$@"; do
		running "$dir/pid" || die "$dir did not start: $(tail -5 "$dir/log")"
		((tries-- > 0)) || die "$dir does not answer: $(tail -5 "$dir/log")"
		sleep 0.1
	done
}

# http_status PORT METHOD PATH prints the status of the answer. No curl is needed.
http_status() {
	local line=
	{
		exec 3<>"/dev/tcp/127.0.0.1/$1" || return 1
		printf '%s %s HTTP/1.0\r\nHost: localhost\r\n\r\n' "$2" "$3" >&3
		IFS= read -r -t 5 line <&3 || line=
		exec 3>&-
	} 2>/dev/null
	[[ $line =~ ^HTTP/1..\ ([0-9]+) ]] && printf '%s\n' "${BASH_REMATCH[1]}"
}

etcd_installed() { command -v etcd >/dev/null; }
etcd_install() { without_service etcd-server etcd; }
etcd_exports() { export_line ONCEMILL_TEST_ETCD "http://127.0.0.1:$(<"$1/port")"; }
etcd_create() {
	reserve "$1" >"$1/port.peer"
	mkdir -m 700 "$1/data"
	touch "$1/log"
	[[ $EUID -ne 0 ]] || chown etcd: "$1/data" "$1/log"
}

etcd_start() {
	local dir=$1 client peer
	client="http://127.0.0.1:$(<"$dir/port")" peer="http://127.0.0.1:$(<"$dir/port.peer")"
	lock "${dir//\//_}"
	running "$dir/pid" || spawn_as etcd "$dir" etcd --name one --data-dir "$dir/data" --enable-v2=true --log-level warn \
		--listen-client-urls "$client" --advertise-client-urls "$client" \
		--listen-peer-urls "$peer" --initial-advertise-peer-urls "$peer" --initial-cluster "one=$peer"
	await_answer "$dir" port_open "$(<"$dir/port")"
	unlock "${dir//\//_}"
}

etcd_stop() { signal_and_wait "$1/pid" TERM 30; }
etcd_kill() { signal_and_wait "$1/pid" KILL 10; }
etcd_removed() { :; }

patroni_installed() { command -v patroni >/dev/null && /usr/bin/python3 -c 'import etcd' 2>/dev/null && postgres_installed; }
patroni_install() {
	postgres_installed || postgres_install || return 1
	without_service python3-etcd python3 && without_service patroni patroni && patroni_installed
}

patroni_exports() {
	export_line ONCEMILL_TEST_POSTGRES "$(postgres_url "$1")"
	export_line ONCEMILL_TEST_PATRONI "http://127.0.0.1:$(<"$1/port.rest")"
}

# patroni_create DIR makes a node of the cluster whose etcd the setting etcd names. The first
# node of a cluster decides by the setting synchronous (on or off) whether a commit waits for
# a standby.
patroni_create() {
	local dir=$1 etcd synchronous=false
	etcd=$(setting "$dir" etcd)
	of_kind "$etcd" etcd
	[[ $(setting "$dir" synchronous) != on ]] || synchronous=true
	reserve "$dir" >"$dir/port.rest"
	mkdir -m 700 "$dir/data" "$dir/home"
	touch "$dir/log"
	cat >"$dir/patroni.yml" <<-SETTINGS
		scope: oncemill
		name: node-$(<"$dir/port")
		restapi: {listen: "127.0.0.1:$(<"$dir/port.rest")", connect_address: "127.0.0.1:$(<"$dir/port.rest")"}
		etcd: {hosts: "127.0.0.1:$(<"$etcd/port")"}
		bootstrap:
		  dcs:
		    ttl: 10
		    loop_wait: 1
		    retry_timeout: 3
		    maximum_lag_on_failover: 104857600
		    master_start_timeout: 20
		    synchronous_mode: $synchronous
		    synchronous_mode_strict: $synchronous
		    postgresql:
		      use_pg_rewind: true
		      parameters:
		        max_connections: 300
		        max_prepared_transactions: 20
		        wal_log_hints: "on"
		        wal_keep_size: 512MB
		        wal_sender_timeout: 5s
		        wal_receiver_timeout: 5s
		  initdb: [{encoding: UTF8}, {locale: C.UTF-8}, {auth-host: scram-sha-256}, data-checksums]
		postgresql:
		  listen: "127.0.0.1:$(<"$dir/port")"
		  connect_address: "127.0.0.1:$(<"$dir/port")"
		  data_dir: $dir/data
		  bin_dir: $(postgres_bin)
		  pgpass: $dir/home/pgpass
		  basebackup: [{checkpoint: fast}]
		  pg_hba:
		    - host all all 127.0.0.1/32 scram-sha-256
		    - host replication all 127.0.0.1/32 scram-sha-256
		  authentication:
		    superuser: {username: postgres, password: postgres}
		    replication: {username: replicator, password: replicator}
		    rewind: {username: rewinder, password: rewinder}
		  parameters: {unix_socket_directories: "", log_line_prefix: "%m [%p] %a "}
		watchdog: {mode: "off"}
	SETTINGS
	chmod 600 "$dir/patroni.yml"
	[[ $EUID -ne 0 ]] || chown postgres: "$dir/data" "$dir/home" "$dir/log" "$dir/patroni.yml"
}

patroni_answers() { [[ $(http_status "$(<"$1/port.rest")" GET /health) == 200 ]]; }

patroni_start() {
	local dir=$1
	lock "${dir//\//_}"
	running "$dir/pid" || spawn_as postgres "$dir" patroni "$dir/patroni.yml"
	await_answer "$dir" patroni_answers "$dir"
	unlock "${dir//\//_}"
}

patroni_stop() { signal_and_wait "$1/pid" TERM 60; }

# patroni_family DIR prints the processes of the node: Patroni, the postmaster, its children.
patroni_family() {
	local postmaster
	! running "$1/pid" || printf '%s\n' "$REPLY"
	if [[ -s $1/data/postmaster.pid ]] && postmaster=$(head -1 "$1/data/postmaster.pid") && [[ -d /proc/$postmaster ]]; then
		printf '%s\n' "$postmaster"
		cat "/proc/$postmaster/task/$postmaster/children" 2>/dev/null | tr ' ' '\n' || true
	fi
}

# patroni_signal DIR SIGNAL sends STOP or CONT to the whole node.
patroni_signal() {
	for _ in 1 2; do # a child may have appeared before its parent was stopped
		# shellcheck disable=SC2046 # a list of numbers
		kill -s "$2" $(patroni_family "$1") 2>/dev/null || true # some have ended
	done
}

# patroni_kill DIR ends the whole node, as a power cut would.
patroni_kill() {
	local family pid tries=200
	patroni_signal "$1" STOP
	family=$(patroni_family "$1")
	# shellcheck disable=SC2086 # a list of numbers
	[[ -z $family ]] || kill -s KILL $family 2>/dev/null || true
	for pid in $family; do
		while starttime "$pid" >/dev/null && ((tries-- > 0)); do sleep 0.05; done
	done
}
patroni_removed() { :; }

haproxy_program() { command -v haproxy || { [[ -x /usr/sbin/haproxy ]] && printf '/usr/sbin/haproxy\n'; }; }
haproxy_installed() { haproxy_program >/dev/null; }
haproxy_install() {
	without_service haproxy true
	haproxy_installed
}
haproxy_exports() { export_line ONCEMILL_TEST_POSTGRES "$(postgres_url "$1")"; }

# haproxy_create DIR leads to the primary among the nodes that the settings node name. A node
# that is no longer primary loses its connections.
haproxy_create() {
	local dir=$1 node number=0
	cat >"$dir/haproxy.cfg" <<-SETTINGS
		global
		  maxconn 1000
		defaults
		  mode tcp
		  retries 2
		  timeout connect 3s
		  timeout client 30m
		  timeout server 30m
		  timeout check 2s
		listen primary
		  bind 127.0.0.1:$(<"$dir/port")
		  option httpchk OPTIONS /primary
		  http-check expect status 200
		  default-server inter 500ms fall 2 rise 1 on-marked-down shutdown-sessions
	SETTINGS
	while read -r node; do
		of_kind "$node" patroni
		printf '  server node%d 127.0.0.1:%s check port %s\n' $((++number)) "$(<"$node/port")" "$(<"$node/port.rest")" >>"$dir/haproxy.cfg"
	done < <(setting "$dir" node)
	touch "$dir/log"
	[[ $EUID -ne 0 ]] || chown haproxy: "$dir/log"
}

haproxy_start() {
	local dir=$1
	lock "${dir//\//_}"
	running "$dir/pid" || spawn_as haproxy "$dir" "$(haproxy_program)" -db -f "$dir/haproxy.cfg"
	await_answer "$dir" port_open "$(<"$dir/port")"
	unlock "${dir//\//_}"
}

haproxy_stop() { signal_and_wait "$1/pid" TERM 10; }
haproxy_kill() { signal_and_wait "$1/pid" KILL 10; }
haproxy_removed() { :; }
