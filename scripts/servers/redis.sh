# shellcheck shell=bash
# Sourced by servers.sh: Redis. There are private instances only.

redis_installed() { command -v redis-server >/dev/null; }
redis_install() { without_service redis-server redis-server; }

redis_exports() { export_line ONCEMILL_TEST_REDIS "127.0.0.1:$(<"$1/port")"; }

# redis_create DIR makes the configuration. It is a cache: nothing is written to disk.
redis_create() {
	local dir=$1
	mkdir "$dir/data"
	touch "$dir/log"
	[[ $EUID -ne 0 ]] || chown redis: "$dir/data" "$dir/log"
	cat >"$dir/redis.conf" <<-SETTINGS
		bind 127.0.0.1
		port $(<"$dir/port")
		dir $dir/data
		logfile $dir/log
		daemonize no
		save ""
		appendonly no
	SETTINGS
	sed '/^$/d; s/=/ /' "$dir/settings" >>"$dir/redis.conf"
}

redis_start() {
	local dir=$1 tries=200 pid
	lock "${dir//\//_}"
	if ! running "$dir/pid"; then
		as redis
		(alone "${AS[@]}" redis-server "$dir/redis.conf") </dev/null >>"$dir/start.log" 2>&1 &
		pid=$!
		until port_open "$(<"$dir/port")"; do
			((tries-- > 0)) && kill -0 "$pid" 2>/dev/null || die "Redis did not start: $(tail -5 "$dir/log" "$dir/start.log")"
			sleep 0.05
		done
		remember "$dir/pid" "$(redis_pid "$(<"$dir/port")")"
	fi
	unlock "${dir//\//_}"
}

redis_pid() { redis-cli -p "$1" info server | tr -d '\r' | sed -n 's/^process_id://p'; }

redis_stop() { signal_and_wait "$1/pid" TERM 30; }
redis_kill() { signal_and_wait "$1/pid" KILL 10; }
redis_removed() { :; }
