# shellcheck shell=bash
# Sourced by servers.sh: PgBouncer, in transaction mode, in front of a PostgreSQL that this script made.

pgbouncer_program() { command -v pgbouncer || { [[ -x /usr/sbin/pgbouncer ]] && printf '/usr/sbin/pgbouncer\n'; }; }
pgbouncer_installed() { pgbouncer_program >/dev/null; }
pgbouncer_install() { install_package pgbouncer && pgbouncer_installed; }

pgbouncer_exports() {
	export_line ONCEMILL_TEST_PGBOUNCER "postgres://postgres:postgres@127.0.0.1:$(<"$1/port")/postgres?sslmode=disable"
}

# pgbouncer_create DIR writes the configuration. The setting upstream names the
# directory of the PostgreSQL; the others go to pgbouncer.ini. Roles are looked up
# in the server, so a role made later is known too. Its secret logs in to both: the
# pooler passes on what the client has proved.
pgbouncer_create() {
	local dir=$1 upstream
	upstream=$(sed -n 's/^upstream=//p' "$dir/settings")
	of_kind "$upstream" postgres
	printf '"postgres" "postgres"\n' >"$dir/users"
	cat >"$dir/pgbouncer.ini" <<-SETTINGS
		[databases]
		* = host=127.0.0.1 port=$(<"$upstream/port")
		[pgbouncer]
		listen_addr = 127.0.0.1
		listen_port = $(<"$dir/port")
		unix_socket_dir =
		pool_mode = transaction
		auth_type = scram-sha-256
		auth_file = $dir/users
		auth_user = postgres
		auth_query = select usename, passwd from pg_shadow where usename = \$1
		max_client_conn = 1000
		log_connections = 0
		log_disconnections = 0
		$(sed '/^upstream=/d' "$dir/settings")
	SETTINGS
	touch "$dir/log"
	[[ $EUID -ne 0 ]] || chown postgres: "$dir/log"
}

pgbouncer_start() {
	local dir=$1 tries=200
	lock "${dir//\//_}"
	if ! running "$dir/pid"; then
		as postgres # it refuses to be root
		(alone "${AS[@]}" "$(pgbouncer_program)" "$dir/pgbouncer.ini") </dev/null >>"$dir/log" 2>&1 &
		remember "$dir/pid" $! || die "PgBouncer did not start: $(tail -5 "$dir/log")"
	fi
	until port_open "$(<"$dir/port")"; do
		running "$dir/pid" || die "PgBouncer did not start: $(tail -5 "$dir/log")"
		((tries-- > 0)) || die "PgBouncer does not answer: $(tail -5 "$dir/log")"
		sleep 0.05
	done
	unlock "${dir//\//_}"
}

# SIGINT waits for transactions to end.
pgbouncer_stop() { signal_and_wait "$1/pid" INT 60 || die "PgBouncer does not stop"; }

pgbouncer_kill() { signal_and_wait "$1/pid" KILL 20 || die "PgBouncer survives SIGKILL"; }

pgbouncer_removed() { :; }
