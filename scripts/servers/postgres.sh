# shellcheck shell=bash
# Sourced by servers.sh: PostgreSQL.

POSTGRES_DEFAULT='postgres://postgres:postgres@127.0.0.1:5432/postgres?sslmode=disable'

# postgres_bin prints the directory of the newest server programs.
postgres_bin() {
	local newest initdb
	newest=$(printf '%s\n' /usr/lib/postgresql/*/bin | sort -V | tail -1)
	if [[ -x $newest/initdb ]]; then
		printf '%s\n' "$newest"
	else
		initdb=$(command -v initdb) && dirname "$initdb"
	fi
}

postgres_installed() { postgres_bin >/dev/null; }
postgres_install() { install_package postgresql && postgres_installed; }

# postgres_answers URL QUERY tells whether the server there answers true.
postgres_answers() {
	[[ $(PGCONNECT_TIMEOUT=3 psql -XAtq -d "$1" -c "$2" 2>/dev/null) == t ]]
}

# postgres_find sets FOUND (for people) and POSTGRES (the URL) to what up would use without starting anything.
postgres_find() {
	local shared=$BASE/postgres
	if [[ -n ${ONCEMILL_TEST_POSTGRES:-} ]]; then
		FOUND="named by ONCEMILL_TEST_POSTGRES" POSTGRES=$ONCEMILL_TEST_POSTGRES
		! command -v psql >/dev/null || postgres_answers "$POSTGRES" 'select true' ||
			die "ONCEMILL_TEST_POSTGRES is set, but no PostgreSQL answers there"
		return
	fi
	if running "$shared/pid" && port_open "$(<"$shared/port")"; then
		FOUND="instance in $shared" POSTGRES=$(postgres_url "$shared")
		return
	fi
	# The tests use two-phase commit and many connections; a server without them would fail, not skip.
	FOUND="default port" POSTGRES=$POSTGRES_DEFAULT
	port_open 5432 && command -v psql >/dev/null && postgres_answers "$POSTGRES" \
		"select current_setting('max_prepared_transactions')::int >= 10
		    and current_setting('max_connections')::int >= 100
		    and current_setting('server_version_num')::int >= 130000"
}

postgres_up() {
	local dir=$BASE/postgres
	if ! postgres_find; then
		postgres_installed || postgres_install || die_missing postgres
		create_shared postgres "$dir"
		postgres_start "$dir"
		POSTGRES=$(postgres_url "$dir")
	fi
	export_line ONCEMILL_TEST_POSTGRES "$POSTGRES"
}

postgres_url() {
	printf 'postgres://postgres:postgres@127.0.0.1:%s/postgres?sslmode=disable\n' "$(<"$1/port")"
}
postgres_exports() { export_line ONCEMILL_TEST_POSTGRES "$(postgres_url "$1")"; }

# What PostgreSQL keeps of the password "postgres", with 1,000 rounds, as few as lib/pq accepts.
# With the usual 4,096, logging in was a quarter of what a small test computes.
POSTGRES_VERIFIER='SCRAM-SHA-256$1000:b25jZW1pbGwtdGVzdGluZw==$RVKBEMCYCcRkQV7Sf/4LOqb2xaDgsr/d/MYcBJ63B0g=:6RB7DA7AqNb3uqBObByTBl2AlmQOL/b7SsCqYqcVWBo='

# postgres_program DIR PROGRAM ARGUMENT... runs one of the server's programs.
postgres_program() {
	local dir=$1
	as postgres
	(cd / && "${AS[@]}" "$(postgres_bin)/$2" "${@:3}") >"$dir/$2.log" 2>&1 || {
		tail -5 "$dir/$2.log" >&2
		die "$2 failed"
	}
}

POSTGRES_INITDB=(-U postgres -A scram-sha-256 -E UTF8 --locale=C.UTF-8)

# postgres_copy DIR makes DIR/data a copy of a cluster that was never started. Making one takes half a
# second of a processor, more than a start, and copying it a tenth of that.
postgres_copy() {
	local pattern of
	of=$("$(postgres_bin)/initdb" --version && printf '%s\n' "${POSTGRES_INITDB[@]}" "$POSTGRES_VERIFIER")
	pattern=$BASE/initdb-$(cksum <<<"$of" | cut -d ' ' -f 1)
	lock initdb
	if [[ ! -d $pattern/data ]]; then
		rm -rf "$pattern"
		mkdir "$pattern" "$pattern/making"
		[[ $EUID -ne 0 ]] || chown postgres: "$pattern/making"
		printf '%s\n' "$POSTGRES_VERIFIER" >"$pattern/password"
		postgres_program "$pattern" initdb -D "$pattern/making/data" "${POSTGRES_INITDB[@]}" --pwfile="$pattern/password"
		mv "$pattern/making/data" "$pattern/data"
	fi
	cp -a "$pattern/data/." "$1/data" # not synced; the servers themselves sync
	unlock initdb
}

# postgres_create DIR makes the cluster, or a standby of that in FIRST. Roles need
# their passwords, that of the superuser is in postgres_url: other users of the machine
# reach the port, and what trusts them runs programs for them.
postgres_create() {
	local dir=$1
	mkdir "$dir/data"
	chmod 700 "$dir/data"
	touch "$dir/log"
	[[ $EUID -ne 0 ]] || chown postgres: "$dir/data" "$dir/log"
	if [[ -n ${FIRST:-} ]]; then
		postgres_program "$dir" pg_basebackup -D "$dir/data" -d "$(postgres_url "$FIRST")" -R -X stream -c fast --no-sync
	else
		postgres_copy "$dir"
	fi
	# A standby has its primary's settings; the last of two counts. Shared memory is in files of the
	# server's directory: otherwise each server that is killed leaves some in /dev/shm.
	cat >>"$dir/data/postgresql.conf" <<-SETTINGS
		listen_addresses = '127.0.0.1'
		port = $(<"$dir/port")
		unix_socket_directories = ''
		max_connections = 300
		max_prepared_transactions = 20
		max_locks_per_transaction = 256
		dynamic_shared_memory_type = mmap
		fsync = on
		synchronous_commit = on
		full_page_writes = on
		log_line_prefix = '%m [%p] %a '
		log_lock_waits = on
		$(<"$dir/settings")
	SETTINGS
}

postgres_start() {
	local dir=$1
	lock "${dir//\//_}"
	if ! running "$dir/pid"; then
		as postgres
		# pg_ctl waits until the server answers.
		(alone "${AS[@]}" "$(postgres_bin)/pg_ctl" -D "$dir/data" -l "$dir/log" -w -t 120 -s start) \
			</dev/null >>"$dir/start.log" 2>&1 || die "PostgreSQL did not start: $(tail -5 "$dir/log")"
		remember "$dir/pid" "$(head -1 "$dir/data/postmaster.pid")"
	fi
	unlock "${dir//\//_}"
}

# postgres_stop DIR [fast|immediate]
postgres_stop() {
	local tries=400
	running "$1/pid" || return 0
	as postgres
	(cd / && "${AS[@]}" "$(postgres_bin)/pg_ctl" -D "$1/data" -m "${2:-fast}" -w -t 60 -s stop) </dev/null >&2
	# pg_ctl waits for the removal of a file. The process is still there for a moment, and a
	# start would take it for a running server.
	while running "$1/pid"; do
		((tries-- > 0)) || die "PostgreSQL does not end"
		sleep 0.05
	done
}

# postgres_kill DIR ends the server with SIGKILL, children included: they would
# hold the shared memory and block a restart.
postgres_kill() {
	local parent children child tries=200
	running "$1/pid" || return 0
	parent=$REPLY
	kill -s STOP "$parent" # so that no further child appears
	children=$(cat "/proc/$parent/task/$parent/children" 2>/dev/null || ps -o pid= --ppid "$parent" || true)
	# shellcheck disable=SC2086 # a list of numbers
	kill -s KILL "$parent" $children 2>/dev/null || true
	# Until init has reaped them, too: a restart takes a zombie for a living server.
	for child in $parent $children; do
		while [[ -e /proc/$child ]] && ((tries-- > 0)); do sleep 0.05; done
		! starttime "$child" >/dev/null || die "process $child survives SIGKILL"
	done
	# Where nobody reaps, the file must go. (Its small shared memory segment stays.)
	[[ ! -e /proc/$parent ]] || rm -f "$1/data/postmaster.pid"
}

postgres_removed() { :; }
