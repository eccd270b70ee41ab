# shellcheck shell=bash
# Sourced by servers.sh: RabbitMQ.

RABBITMQ_DEFAULT='amqp://guest:guest@127.0.0.1:5672/'
RABBITMQ_ADMIN_DEFAULT='http://guest:guest@127.0.0.1:15672'

# rabbitmq_program NAME prints the path of a program behind Debian's wrappers,
# which insist on directories of their own.
rabbitmq_program() {
	if [[ -x /usr/lib/rabbitmq/bin/$1 ]]; then
		printf '%s\n' "/usr/lib/rabbitmq/bin/$1"
	else
		command -v "$1"
	fi
}

rabbitmq_installed() { rabbitmq_program rabbitmq-server >/dev/null && command -v epmd >/dev/null; }
rabbitmq_install() { install_package rabbitmq-server && rabbitmq_installed; }

# amqp_answers HOST PORT: opens an AMQP connection up to the server's first frame.
amqp_answers() {
	local byte
	{
		exec 3<>"/dev/tcp/$1/$2" || return 1
		printf 'AMQP\0\0\011\001' >&3
		IFS= read -r -t 5 -n 1 byte <&3 || byte=
		exec 3>&-
	} 2>/dev/null
	[[ $byte == $'\001' ]]
}

# admin_answers URL: asks the management API who we are. No curl is needed.
admin_answers() {
	local pattern='^http://([^@/]+)@([^:/@]+):([0-9]+)/?$' line credentials
	[[ $1 =~ $pattern ]] || return 1
	credentials=$(printf '%s' "${BASH_REMATCH[1]}" | base64 -w0)
	{
		exec 3<>"/dev/tcp/${BASH_REMATCH[2]}/${BASH_REMATCH[3]}" || return 1
		printf 'GET /api/whoami HTTP/1.0\r\nHost: localhost\r\nAuthorization: Basic %s\r\n\r\n' "$credentials" >&3
		IFS= read -r -t 5 line <&3 || line=
		exec 3>&-
	} 2>/dev/null
	[[ $line == HTTP/1.?\ 200* ]]
}

rabbitmq_answers() {
	admin_answers "$(rabbitmq_admin_url "$1")" && amqp_answers 127.0.0.1 "$(<"$1/port")"
}

# rabbitmq_find sets FOUND (for people), AMQP and ADMIN (URLs) to what up would use without starting anything.
rabbitmq_find() {
	local shared=$BASE/rabbitmq pattern='^amqp://(([^@/]+)@)?([^:/@]+)(:([0-9]+))?'
	if [[ -n ${ONCEMILL_TEST_AMQP:-} ]]; then
		FOUND="named by ONCEMILL_TEST_AMQP" AMQP=$ONCEMILL_TEST_AMQP ADMIN=${ONCEMILL_TEST_AMQP_ADMIN:-}
		if [[ $AMQP =~ $pattern ]]; then
			amqp_answers "${BASH_REMATCH[3]}" "${BASH_REMATCH[5]:-5672}" ||
				die "ONCEMILL_TEST_AMQP is set, but no RabbitMQ answers there"
			if [[ -z $ADMIN ]]; then
				ADMIN="http://${BASH_REMATCH[2]:-guest:guest}@${BASH_REMATCH[3]}:15672"
				admin_answers "$ADMIN" || ADMIN=
			fi
		fi
		[[ -n $ADMIN ]] || rabbitmq_foreign_ctl status >/dev/null 2>&1 ||
			die "the tests make a vhost each: set ONCEMILL_TEST_AMQP_ADMIN to the URL of the management API"
		return
	fi
	if running "$shared/pid" && rabbitmq_answers "$shared"; then
		FOUND="instance in $shared" AMQP=$(rabbitmq_url "$shared") ADMIN=$(rabbitmq_admin_url "$shared")
		return
	fi
	FOUND="default port" AMQP=$RABBITMQ_DEFAULT ADMIN=$RABBITMQ_ADMIN_DEFAULT
	amqp_answers 127.0.0.1 5672 && admin_answers "$ADMIN"
}

rabbitmq_up() {
	local dir=$BASE/rabbitmq
	if ! rabbitmq_find; then
		rabbitmq_installed || rabbitmq_install || die_missing rabbitmq
		create_shared rabbitmq "$dir"
		rabbitmq_start "$dir"
		AMQP=$(rabbitmq_url "$dir") ADMIN=$(rabbitmq_admin_url "$dir")
	fi
	export_line ONCEMILL_TEST_AMQP "$AMQP"
	export_line ONCEMILL_TEST_AMQP_ADMIN "$ADMIN"
}

rabbitmq_url() { printf 'amqp://guest:guest@127.0.0.1:%s/\n' "$(<"$1/port")"; }
rabbitmq_admin_url() { printf 'http://guest:guest@127.0.0.1:%s\n' "$(<"$1/port.management")"; }
rabbitmq_exports() {
	export_line ONCEMILL_TEST_AMQP "$(rabbitmq_url "$1")"
	export_line ONCEMILL_TEST_AMQP_ADMIN "$(rabbitmq_admin_url "$1")"
}

rabbitmq_create() {
	local dir=$1 name
	for name in management distribution; do reserve "$dir" >"$dir/port.$name"; done
	if [[ -n ${FIRST:-} ]]; then # the nodes of a cluster share the name registry
		cp "$FIRST/port.epmd" "$dir/port.epmd"
		printf '%s\n' "$FIRST" >"$dir/first"
	else
		reserve "$dir" >"$dir/port.epmd"
	fi
	printf '[rabbitmq_management,rabbitmq_consistent_hash_exchange].\n' >"$dir/enabled_plugins"
	cat >"$dir/rabbitmq.conf" <<-SETTINGS
		listeners.tcp.local = 127.0.0.1:$(<"$dir/port")
		management.tcp.ip = 127.0.0.1
		management.tcp.port = $(<"$dir/port.management")
		$(<"$dir/settings")
	SETTINGS
	mkdir "$dir/home"
	touch "$dir/log"
	if [[ -n ${FIRST:-} ]]; then # and the cookie; at its first start, a node joins the first one
		cp -p "$FIRST/home/.erlang.cookie" "$dir/home/"
		cat >>"$dir/rabbitmq.conf" <<-SETTINGS
			cluster_formation.peer_discovery_backend = classic_config
			cluster_formation.classic_config.nodes.1 = $(rabbitmq_node "$FIRST")
			cluster_formation.classic_config.nodes.2 = $(rabbitmq_node "$dir")
		SETTINGS
	fi
	[[ $EUID -ne 0 ]] || chown -R rabbitmq: "$dir/home" "$dir/log"
}

# rabbitmq_node DIR prints the name of the node.
rabbitmq_node() { printf 'oncemill-%s@localhost\n' "$(<"$1/port")"; }

# rabbitmq_as DIR sets AS to run programs of RabbitMQ's for this node: its own
# cookie (in HOME), ports and name registry, so that it neither sees nor
# disturbs another node of this machine.
rabbitmq_as() {
	local dir=$1
	as rabbitmq
	AS+=(
		HOME="$dir/home"
		ERL_EPMD_ADDRESS=127.0.0.1
		ERL_EPMD_PORT="$(<"$dir/port.epmd")"
		RABBITMQ_NODENAME="$(rabbitmq_node "$dir")"
		RABBITMQ_DIST_PORT="$(<"$dir/port.distribution")"
		RABBITMQ_CONF_ENV_FILE="$dir/none"
		RABBITMQ_CONFIG_FILE="$dir/rabbitmq.conf"
		RABBITMQ_ADVANCED_CONFIG_FILE="$dir/none.config"
		RABBITMQ_ENABLED_PLUGINS_FILE="$dir/enabled_plugins"
		RABBITMQ_MNESIA_BASE="$dir/home/mnesia"
		RABBITMQ_LOG_BASE="$dir/home/log"
		RABBITMQ_SCHEDULER_BIND_TYPE=u
		# Threads wait a moment for more work before they sleep, as is Erlang's default, not
		# RabbitMQ's: while a node starts, they wake each other for each file that it looks
		# for, and on a virtual machine that took half of the 9 s.
		RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS='-kernel inet_dist_use_interface {127,0,0,1} +sbwt very_short +sbwtdio very_short'
		# Makes the start script become the server instead of waiting for it,
		# so that the pid we know is the server's.
		RUNNING_UNDER_SYSTEMD=true
	)
}

# rabbitmq_spawn DIR FILE COMMAND... starts a daemon of the node and remembers it in FILE.
rabbitmq_spawn() {
	local dir=$1 file=$2
	shift 2
	rabbitmq_as "$dir"
	(alone "${AS[@]}" "$@") </dev/null >>"$dir/log" 2>&1 &
	remember "$file" $! || die "$1 did not start: $(tail -5 "$dir/log")"
}

rabbitmq_start() {
	local dir=$1 tries=600
	lock "${dir//\//_}"
	[[ -e $dir/first ]] || running "$dir/epmd.pid" ||
		rabbitmq_spawn "$dir" "$dir/epmd.pid" epmd -address 127.0.0.1 -port "$(<"$dir/port.epmd")"
	running "$dir/pid" ||
		rabbitmq_spawn "$dir" "$dir/pid" "$(rabbitmq_program rabbitmq-server)"
	until rabbitmq_answers "$dir"; do
		running "$dir/pid" || die "RabbitMQ did not start: $(tail -5 "$dir/log")"
		((tries-- > 0)) || die "RabbitMQ does not answer after 120 s: $(tail -5 "$dir/log")"
		sleep 0.2
	done
	unlock "${dir//\//_}"
}

# On SIGTERM the server stops cleanly by itself.
rabbitmq_stop() { signal_and_wait "$1/pid" TERM 60 || die "RabbitMQ does not stop"; }

rabbitmq_kill() { signal_and_wait "$1/pid" KILL 20 || die "RabbitMQ survives SIGKILL"; }

rabbitmq_signal() { ! running "$1/pid" || kill -s "$2" "$REPLY"; }

# rabbitmq_removed DIR ends what is left when the node has gone: its name registry.
rabbitmq_removed() { signal_and_wait "$1/epmd.pid" KILL 20 || die "epmd survives SIGKILL"; }

# rabbitmq_eval DIR EXPRESSION evaluates it in the node. rabbitmqctl would take seconds: it is an
# Erlang node itself. On a busy machine a node gives up the handshake of a connection after some
# seconds, before it has seen the expression.
rabbitmq_eval() {
	local dir=$1 erts answer try
	erts=("$(dirname "$(readlink -f "$(command -v erl)")")"/../erts-*/bin/erl_call)
	for try in {1..5}; do
		! answer=$(HOME=$dir/home "${erts[0]}" -address "127.0.0.1:$(<"$dir/port.distribution")" -e <<<"$2." 2>&1) || break
		[[ $answer == *'failed to connect'* && $try -lt 5 ]] || die "the node does not answer $2: $answer"
		sleep 1
	done
	[[ $answer == '{ok, '* && $answer != '{ok, {error'* && $answer != '{ok, {badrpc'* ]] || die "the node answers ${answer:-nothing} to $2"
	answer=${answer#'{ok, '}
	printf '%s\n' "${answer%\}}"
}

# rabbitmq_foreign_ctl ARGUMENTS... speaks to the node of this machine that the environment names.
rabbitmq_foreign_ctl() { [[ $EUID -eq 0 ]] && command -v rabbitmqctl >/dev/null && rabbitmqctl -q "$@"; }

# rabbitmq_foreign_vhost add|delete NAME does without a management API what the
# tests otherwise do through it.
rabbitmq_foreign_vhost() {
	local pattern='^amqp://([^:@/]+)[:@]' user=guest
	[[ ! ${ONCEMILL_TEST_AMQP:-} =~ $pattern ]] || user=${BASH_REMATCH[1]}
	rabbitmq_foreign_ctl "$1_vhost" "$2" >&2
	[[ $1 == delete ]] || rabbitmq_foreign_ctl set_permissions -p "$2" "$user" '.*' '.*' '.*' >&2
}
