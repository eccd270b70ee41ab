# shellcheck shell=bash
# Sourced by servers.sh: Prometheus. There are private instances only.

prometheus_installed() { command -v prometheus >/dev/null && command -v promtool >/dev/null; }
prometheus_install() { without_service prometheus promtool; }

prometheus_exports() { export_line ONCEMILL_TEST_PROMETHEUS "http://127.0.0.1:$(<"$1/port")"; }

# prometheus_create DIR copies the files of the settings config and rules. The configuration
# refers to the rules as rules.yml.
prometheus_create() {
	local dir=$1
	mkdir "$dir/data"
	touch "$dir/log"
	[[ $EUID -ne 0 ]] || chown prometheus: "$dir/data" "$dir/log"
	install -m 644 "$(sed -n 's/^config=//p' "$dir/settings")" "$dir/prometheus.yml"
	install -m 644 "$(sed -n 's/^rules=//p' "$dir/settings")" "$dir/rules.yml"
}

prometheus_start() {
	local dir=$1 tries=400 pid
	lock "${dir//\//_}"
	if ! running "$dir/pid"; then
		as prometheus
		(alone "${AS[@]}" prometheus --config.file="$dir/prometheus.yml" --storage.tsdb.path="$dir/data" \
			--web.listen-address="127.0.0.1:$(<"$dir/port")") </dev/null >>"$dir/log" 2>&1 &
		pid=$!
		until port_open "$(<"$dir/port")"; do
			((tries-- > 0)) && kill -0 "$pid" 2>/dev/null || die "Prometheus did not start: $(tail -5 "$dir/log")"
			sleep 0.05
		done
		remember "$dir/pid" "$pid"
	fi
	unlock "${dir//\//_}"
}

prometheus_stop() { signal_and_wait "$1/pid" TERM 30; }
prometheus_kill() { signal_and_wait "$1/pid" KILL 10; }
prometheus_removed() { :; }
