# shellcheck shell=bash
# Sourced by servers.sh: messages, locks, processes, ports and the directories of instances.
#
# An instance is a directory with the files kind (as start names them), port
# (and further ports), settings, pid ("PID STARTTIME" of the server), owner (the
# same for the process it belongs to, when it has one), log and the server's data.

BASE=${ONCEMILL_SERVERS_DIR:-${TMPDIR:-/tmp}/oncemill-servers}
BASE=${BASE%/}

say() { printf 'servers: %s\n' "$*" >&2; }
die() {
	say "$@"
	exit 1
}

die_missing() {
	local what=PostgreSQL variable=ONCEMILL_TEST_POSTGRES package=postgresql
	[[ $1 != pgbouncer ]] || die "PgBouncer could not be installed here: sudo apt-get install pgbouncer (this needs root on Debian or Ubuntu)"
	[[ ! $1 =~ ^(etcd|patroni|haproxy)$ ]] || die "$1 could not be installed here: sudo apt-get install etcd-server patroni python3-etcd haproxy (this needs root on Debian or Ubuntu)"
	[[ $1 != redis ]] || die "redis-server could not be installed here: sudo apt-get install redis-server (this needs root on Debian or Ubuntu)"
	[[ $1 != prometheus ]] || die "prometheus could not be installed here: sudo apt-get install prometheus (this needs root on Debian or Ubuntu)"
	[[ $1 == postgres ]] || { what=RabbitMQ variable=ONCEMILL_TEST_AMQP package=rabbitmq-server; }
	say "no usable $what: nothing suitable on the default port, and $package could not be installed here."
	die "either set $variable to its URL, or: sudo apt-get install $package (this needs root on Debian or Ubuntu)"
}

prepare_base() {
	# Its name can be known before it is there, in a directory where everybody writes.
	[[ ! -L $BASE ]] || die "$BASE is a link; remove it, or set ONCEMILL_SERVERS_DIR"
	mkdir -p "$BASE"
	[[ ! -L $BASE && -d $BASE && -O $BASE ]] || die "$BASE is a link, or belongs to somebody else; set ONCEMILL_SERVERS_DIR"
	chmod 755 "$BASE"
	mkdir -p "$BASE/ports" "$BASE/locks"
}

# lock NAME waits for the exclusive lock; unlock NAME gives it back. The kernel
# does so too when this process ends, whatever the reason. No server inherits
# the descriptors (see spawn), or it would hold the lock for ever.
declare -A LOCKS=()
lock() {
	local fd
	exec {fd}>"$BASE/locks/$1"
	flock "$fd"
	LOCKS[$1]=$fd
}
unlock() {
	local fd=${LOCKS[$1]}
	exec {fd}>&-
	unset "LOCKS[$1]"
}

# export_line NAME VALUE prints a line for eval.
export_line() { printf "export %s='%s'\n" "$1" "${2//\'/}"; }

# starttime PID prints when the process was started, in ticks since boot. With
# the pid it identifies a process: a pid alone may have been given out again.
starttime() {
	local stat fields
	read -r stat 2>/dev/null <"/proc/$1/stat" || return 1
	read -ra fields <<<"${stat##*) }"
	[[ ${fields[0]} != Z ]] || return 1
	printf '%s\n' "${fields[19]}"
}

# remember FILE PID writes the identity of a process to FILE.
remember() {
	local started
	started=$(starttime "$2") || return 1
	printf '%s %s\n' "$2" "$started" >"$1.new"
	mv "$1.new" "$1"
}

# running FILE tells whether the process remembered in FILE still runs; its pid is in REPLY.
running() {
	local pid started
	REPLY=
	[[ -s $1 ]] && read -r pid started <"$1" || return 1
	[[ $(starttime "$pid") == "$started" ]] || return 1
	REPLY=$pid
}

# signal_and_wait FILE SIGNAL SECONDS ends the process remembered in FILE.
signal_and_wait() {
	local tries=$(($3 * 20))
	running "$1" || return 0
	kill -s "$2" "$REPLY" 2>/dev/null || true
	while running "$1"; do
		((tries-- > 0)) || return 1
		sleep 0.05
	done
}

# as USER sets AS, a prefix that runs a command as USER when we are root (neither
# server wants to be root) and in an environment made anew.
as() {
	AS=(env -i PATH="$PATH" LANG=C.UTF-8 LC_ALL=C.UTF-8 TZ=UTC)
	[[ $EUID -ne 0 ]] || AS=(setpriv --reuid="$1" --regid="$1" --init-groups "${AS[@]}")
}

# alone COMMAND... runs it in place of this (sub)shell, in a session of its own,
# so that neither Ctrl-C nor the end of a test run reaches it, and without our
# locks. Its pid is that of the subshell.
alone() {
	local fd
	for fd in "${LOCKS[@]}"; do exec {fd}>&-; done
	cd /
	exec setsid "$@"
}

port_open() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# reserve DIR [PORT] takes a free port (or PORT) for the instance and prints it.
# Below the ephemeral range, so that no outgoing connection happens to sit on it.
reserve() {
	local dir=$1 port=${2:-} tries=0 holder
	lock ports
	if [[ -z $port ]]; then
		while :; do
			((tries++ < 200)) || die "no free port found"
			port=$((21000 + RANDOM % 10000))
			if [[ -e $BASE/ports/$port ]]; then
				holder=$(<"$BASE/ports/$port")
				[[ ! -d $holder ]] || continue
			fi
			port_open "$port" || break
		done
	fi
	printf '%s\n' "$dir" >"$BASE/ports/$port"
	unlock ports
	printf '%s\n' "$port"
}

# instances prints the directory of every instance there is.
instances() {
	local file
	for file in "$BASE"/ports/*; do
		[[ -e $file ]] || continue
		if [[ -f $(<"$file")/kind ]]; then cat "$file"; fi
	done | sort -u
}

# user_of KIND prints the user whom Debian's package runs the server as.
user_of() {
	case $1 in
	pgbouncer | patroni) printf 'postgres\n' ;;
	*) printf '%s\n' "$1" ;;
	esac
}

# create KIND DIR PORT OWNER [name=value]... makes the directory; "" means any port, no owner.
create() {
	local kind=$1 dir=$2 port=$3 owner=$4
	shift 4
	mkdir -p "$(dirname "$dir")"
	mkdir "$dir" || die "$dir: cannot be made"
	chmod 755 "$dir"
	as "$(user_of "$kind")"
	"${AS[@]}" test -x "$dir" || {
		rmdir "$dir"
		die "the user of $kind cannot reach $dir; set ONCEMILL_SERVERS_DIR to a directory that everybody can enter"
	}
	[[ -z $owner ]] || remember "$dir/owner" "$owner" || die "--owner $owner: no such process"
	reserve "$dir" "$port" >"$dir/port"
	printf '%s\n' "$@" >"$dir/settings"
	"${kind}_create" "$dir"
	# Last: a directory with it is complete.
	printf '%s\n' "$kind" >"$dir/kind"
}

# create_shared KIND DIR makes the directory unless it is there, complete.
create_shared() {
	[[ ! -f $2/kind ]] || return 0
	rm -rf "$2"
	create "$1" "$2" "" ""
}

# of_kind DIR [KIND] fails unless DIR is an instance (of that kind); sets KIND.
of_kind() {
	[[ -n $1 && -f $1/kind ]] || die "${1:-(no directory)}: not a directory made by this script"
	KIND=$(<"$1/kind")
	[[ -z ${2:-} || $KIND == "$2" ]] || die "$1 is $KIND, not $2"
}

# remove DIR kills the server, which has nothing to keep, and deletes the directory.
remove() {
	local file
	of_kind "$1"
	"${KIND}_kill" "$1"
	"${KIND}_removed" "$1"
	rm -rf "$1"
	for file in "$BASE"/ports/*; do
		if [[ -e $file && $(<"$file") == "$1" ]]; then rm -f "$file"; fi
	done
}

# reap removes instances whose owner has ended without removing them.
reap() {
	local dir
	while read -r dir; do
		if [[ -f $dir/owner ]] && ! running "$dir/owner"; then remove "$dir"; fi
	done < <(instances)
}

# install PACKAGE from Debian or Ubuntu; fails where that is impossible.
install_package() {
	local log=$BASE/install.log
	[[ $EUID -eq 0 ]] && command -v apt-get >/dev/null || return 1
	say "installing $1"
	local get=(env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq)
	{ "${get[@]}" install -y --no-install-recommends "$1" ||
		{ "${get[@]}" update && "${get[@]}" install -y --no-install-recommends "$1"; }; } \
		>"$log" 2>&1 || {
		tail -5 "$log" >&2
		return 1
	}
}

# without_service PACKAGE COMMAND installs Debian's package, which would start a service.
without_service() {
	local policy=/usr/sbin/policy-rc.d ours=""
	if [[ $EUID -eq 0 && ! -e $policy ]]; then
		ours=yes
		printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
	fi
	install_package "$1" || true
	[[ -z $ours ]] || rm -f "$policy"
	command -v "$2" >/dev/null
}
