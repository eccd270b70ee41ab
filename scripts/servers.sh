#!/usr/bin/env bash
# Makes the servers that oncemill's tests need available.
#
#   servers.sh up [postgres] [rabbitmq]   make both (or the named) available; prints
#                                         export lines for: eval "$(scripts/servers.sh up)"
#   servers.sh status                     what is used and what runs
#   servers.sh down                       stop and remove everything that this script started
#
# up takes the first of these that works:
#   1. what the environment names: ONCEMILL_TEST_POSTGRES (a postgres:// URL),
#      ONCEMILL_TEST_AMQP (an amqp:// URL), ONCEMILL_TEST_AMQP_ADMIN (the http://
#      URL of RabbitMQ's management API; may be left out when it is on port 15672);
#   2. what answers on the default ports with the usual credentials
#      (postgres:postgres and guest:guest on 127.0.0.1);
#   3. a shared instance of its own, from Debian's packages, which are installed
#      when they are missing and the caller is root.
#
# Instances for tests that stop, kill, fill or reconfigure a server, each in an
# absolute directory that must not exist yet:
#
#   servers.sh start postgres|rabbitmq|redis DIR [--port N] [--owner PID] [--standby-of DIR] [--join DIR] [name=value]...
#                            make one, or start it again; prints the export lines.
#                            name=value goes to the server's configuration file.
#                            It is removed when the process --owner has ended.
#                            --standby-of: a streaming standby of that PostgreSQL
#                            --join: a further node of the cluster of that RabbitMQ
#   servers.sh start pgbouncer DIR upstream=DIR [--port N] [--owner PID] [name=value]...
#                            the same for a PgBouncer, in transaction mode, in front
#                            of the PostgreSQL in the directory upstream
#   servers.sh start prometheus DIR config=FILE rules=FILE [--port N] [--owner PID]
#                            a Prometheus with copies of these files, the rules as rules.yml
#   servers.sh start etcd DIR [--owner PID]
#   servers.sh start patroni DIR etcd=DIR [synchronous=on] [--owner PID]
#   servers.sh start haproxy DIR node=DIR... [--owner PID]
#                            a replicated PostgreSQL: etcd first, then each node, then
#                            what leads to the primary
#   servers.sh signal DIR STOP|CONT        a whole node of it, or of RabbitMQ
#   servers.sh stop DIR      clean stop        servers.sh kill DIR     SIGKILL
#   servers.sh crash DIR     PostgreSQL: immediate shutdown
#   servers.sh dump DIR FILE [option]...   PostgreSQL: pg_dump
#   servers.sh load DIR FILE               PostgreSQL: psql, ends at the first error
#   servers.sh eval DIR EXPRESSION         RabbitMQ: evaluates Erlang, prints the result
#   servers.sh remove DIR    stop and delete
#
# Everything listens on loopback only, has fsync on, and lives under
# ${ONCEMILL_SERVERS_DIR:-${TMPDIR:-/tmp}/oncemill-servers}.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/servers/common.sh
source "$here/servers/common.sh"
# shellcheck source=scripts/servers/postgres.sh
source "$here/servers/postgres.sh"
# shellcheck source=scripts/servers/rabbitmq.sh
source "$here/servers/rabbitmq.sh"
# shellcheck source=scripts/servers/pgbouncer.sh
source "$here/servers/pgbouncer.sh"
# shellcheck source=scripts/servers/redis.sh
source "$here/servers/redis.sh"
# shellcheck source=scripts/servers/prometheus.sh
source "$here/servers/prometheus.sh"
# shellcheck source=scripts/servers/cluster.sh
source "$here/servers/cluster.sh"

usage() { sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; }

up() {
	local wanted=("$@") kind
	[[ ${#wanted[@]} -gt 0 ]] || wanted=(postgres rabbitmq)
	for kind in "${wanted[@]}"; do
		[[ $kind == postgres || $kind == rabbitmq ]] || die "unknown server: $kind"
	done
	lock up
	reap
	for kind in "${wanted[@]}"; do "${kind}_up"; done
	unlock up
}

down() {
	local dir
	lock up
	while read -r dir; do remove "$dir"; done < <(instances)
	lock initdb
	rm -rf "$BASE"/initdb-*
	unlock initdb
	unlock up
}

status() {
	local dir
	while read -r dir; do
		if running "$dir/pid"; then
			say "$(<"$dir/kind") running (pid $REPLY, port $(<"$dir/port")) in $dir"
		else
			say "$(<"$dir/kind") stopped in $dir"
		fi
	done < <(instances)
	# In subshells: a bad value in the environment ends only those.
	(if postgres_find; then say "PostgreSQL for tests: $FOUND"; else say "PostgreSQL for tests: none yet"; fi) || true
	(if rabbitmq_find; then say "RabbitMQ for tests: $FOUND"; else say "RabbitMQ for tests: none yet"; fi) || true
}

# start KIND DIR [--port N] [--owner PID] [--standby-of DIR] [--join DIR] [name=value]...
start() {
	local kind=${1:-} dir=${2:-} port="" owner="" first="" settings=()
	[[ $kind =~ ^(postgres|rabbitmq|pgbouncer|redis|prometheus|etcd|patroni|haproxy)$ ]] || die "start postgres|rabbitmq|pgbouncer|redis|prometheus|etcd|patroni|haproxy DIR"
	[[ $dir == /* ]] || die "start: the directory must be absolute"
	shift 2
	while [[ $# -gt 0 ]]; do
		case $1 in
		--port) port=$2 && shift 2 ;;
		--owner) owner=$2 && shift 2 ;;
		--standby-of) first=$2 && of_kind "$first" postgres && shift 2 ;;
		--join) first=$2 && of_kind "$first" rabbitmq && shift 2 ;;
		*=*) settings+=("$1") && shift ;;
		*) die "start: unexpected argument: $1" ;;
		esac
	done
	if [[ ! -e $dir ]]; then
		lock up
		reap
		"${kind}_installed" || "${kind}_install" || die_missing "$kind"
		unlock up
		FIRST=$first create "$kind" "$dir" "$port" "$owner" "${settings[@]}"
	fi
	of_kind "$dir" "$kind"
	"${kind}_start" "$dir"
	"${kind}_exports" "$dir"
}

evaluate() {
	of_kind "${1:-}" rabbitmq
	rabbitmq_eval "$1" "${2:?an expression}"
}

signal() {
	of_kind "${1:-}"
	[[ $KIND == patroni || $KIND == rabbitmq ]] || die "$1 is $KIND, whose processes cannot be stopped and continued"
	"${KIND}_signal" "$1" "${2:?STOP or CONT}"
}

crash() {
	of_kind "${1:-}" postgres
	postgres_stop "$1" immediate
}

dump() {
	of_kind "${1:-}" postgres
	"$(postgres_bin)/pg_dump" -d "$(postgres_url "$1")" -f "$2" "${@:3}"
}

load() {
	of_kind "${1:-}" postgres
	"$(postgres_bin)/psql" -XAtq -v ON_ERROR_STOP=1 -d "$(postgres_url "$1")" -f "$2" >/dev/null
}

main() {
	local command=${1:-help}
	[[ $# -eq 0 ]] || shift
	case $command in
	help | -h | --help) usage ;;
	up | down | status | start | signal | crash | dump | load) prepare_base && "$command" "$@" </dev/null ;;
	eval) prepare_base && evaluate "$@" </dev/null ;;
	stop | kill)
		prepare_base
		of_kind "${1:-}"
		"${KIND}_$command" "$1" </dev/null
		;;
	remove) prepare_base && remove "${1:-}" </dev/null ;;
	vhost-add | vhost-delete) rabbitmq_foreign_vhost "${command#vhost-}" "${1:?a vhost name}" </dev/null ;;
	*) die "unknown command: $command (try: scripts/servers.sh help)" ;;
	esac
}

main "$@"
