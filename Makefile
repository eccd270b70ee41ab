# make prints help: the lines behind ##.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# No build here needs the state of the working copy, and asking git for it fails
# where the copy belongs to another user (containers).
export GOFLAGS := $(strip $(GOFLAGS) $(if $(findstring -buildvcs,$(GOFLAGS)),,-buildvcs=false))

MODULES := $(patsubst %/,%,$(dir $(wildcard go.mod crucible/go.mod examples/go.mod examples/*/go.mod internal/*/go.mod idempotency/*/go.mod pgxtx/go.mod)))
DOCUMENTS := README.md $(wildcard docs/*.md)

# The tools are built from source as tools/go.mod pins them, once.
tool = $$(go -C tools tool -n $(1))
# Runs a command in every module, to the end; the second argument is what to call it.
each = bad=0; for module in $(MODULES); do echo "$(2): $$module"; (cd "$$module" && $(1)) || bad=1; done; exit $$bad
# Where tests and their servers keep files, if there is room in memory: creating tables and syncing
# costs a sixth less there. The benchmarks and the crucible have servers of their own, on disk.
MEMORY := $(shell scripts/memory.sh)
ifneq ($(MEMORY),)
export ONCEMILL_SERVERS_DIR ?= $(MEMORY)/oncemill-servers
endif
# Starts the servers that are missing and runs tests; the argument begins with the files of tests that
# may be skipped, the rest is for internal/testrun and go
# test. make check vets the tests, too. Without what a debugger reads, linking takes two thirds of the
# time. Most tests wait more than they compute, so six of a package run at a time, ten of a heavy one, and internal/testrun
# looks after the processors. While servers are installed, modules are fetched and compiled.
run-tests = echo "looking for PostgreSQL and RabbitMQ, then compiling; the first time takes minutes ..." && \
	if ! command -v rabbitmq-server >/dev/null; then go build ./... >/dev/null 2>&1 & fi && exports=$$(scripts/servers.sh up) && eval "$$exports" && \
	dir=$$(mktemp -d $(or $(MEMORY),$${TMPDIR:-/tmp})/oncemill-test-XXXXXX) && trap 'rm -rf "$$dir"' EXIT && chmod 755 "$$dir" && \
	GOTMPDIR=$${TMPDIR:-/tmp} TMPDIR=$$dir go run ./internal/testrun -skips $(1) -vet=off -ldflags='-s -w' -count=1 -p=6 -parallel=6

# The packages whose goroutines share memory, those that take longest first. All others run with the
# race detector each night.
RACED := ./relay ./idempotency ./inbox ./outbox ./relay/rabbitmq ./inbox/rabbitmq . ./dlq ./idempotency/client ./inbox/inboxtest ./internal/amqpconn ./internal/bounded ./internal/boundtx ./internal/gauges ./internal/group ./internal/labels ./internal/relaystore ./internal/turn ./mill ./relay/forwarder ./relay/relaytest
# Packages that compute much and share nothing, or whose races are not ours: the race detector
# need not look at their loads and stores. Those that synchronize, or only have a cache with
# atomics and a map (encoding/json), must not be here: without their part of the order, correct
# code would be reported.
UNOBSERVED := modernc.org/... github.com/oncemill/oncemill/internal/relaymodel github.com/lib/pq/... github.com/jackc/pgx/v5/pgproto3 compress/... crypto/sha256 crypto/hmac crypto/internal/fips140/... encoding/base64 encoding/hex fmt hash/... math/... regexp/... strconv text/... unicode/...
# A sixth of the time to compile goes into what only a debugger reads.
race := -race -gcflags=all=-dwarf=false $(UNOBSERVED:%='-gcflags=%=-race=false -dwarf=false')
# The race detector lets each process, also those that tests kill and restart, wait a second at
# its end for reports of goroutines that still run; 50 ms do.
export GORACE ?= atexit_sleep_ms=50
empty :=
comma := ,
listed = $(subst $(empty) $(empty),$(comma),$(strip $(1)))

# Runs one test of a package, with flags, and fails if it does not exist.
one-test = go test ./$(1) -count=1 -timeout=30m -run '^$(2)$$' -v $(3) | awk '!/^=== / { print; fflush() } /^--- PASS: $(2) / { ran = 1 } END { exit !ran }'

# go run prints nothing while it compiles, on a fresh machine for minutes.
demo = echo "compiling the demo; the first time takes a minute or two ..." && cd examples && go run ./chaos $(1)

.PHONY: help
help: ## print this
	@awk -F ':.*## ' '/^##@/ { print "\n" substr($$0, 5) } /^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

##@ what users run

.PHONY: demo
demo: ## the whole path with crashes, no server needed
	@$(call demo)

.PHONY: demo-servers
demo-servers: ## the same on PostgreSQL and RabbitMQ
	@echo "looking for PostgreSQL and RabbitMQ; what is missing is installed and started ..."
	@exports=$$(scripts/servers.sh up) && eval "$$exports" && $(call demo,-servers)

.PHONY: recordings
recordings: ## write docs/terminal: what commands print, at 80 and 120 columns
	@exports=$$(scripts/servers.sh up postgres) && eval "$$exports" && ONCEMILL_RECORD=1 go test ./cmd/oncemill -count=1 -run '^TestRecordings_FitTheirTerminals$$'

.PHONY: bench
bench: ## measure against other ways, within 10 minutes; writes bench.json and docs/bench
	cd internal/bench && go run . -out ../../bench.json -docs ../../docs/bench

.PHONY: bench-long
bench-long: ## the same with more rounds, and the rows that grow
	cd internal/bench && go run . -long -out ../../bench.json -docs ../../docs/bench

.PHONY: crucible
crucible: ## processes, servers and connections fail for 3 minutes, then all promises are checked; writes crucible.json (CRUCIBLE_TIME=60s, CRUCIBLE_SEED=n, CRUCIBLE_RATE=150)
	@echo "compiling the crucible; the first time takes a minute or two ..." && cd crucible && go run -tags crashpoints . -out ../crucible.json -time $(or $(CRUCIBLE_TIME),3m) -seed $(or $(CRUCIBLE_SEED),0) -rate $(or $(CRUCIBLE_RATE),170)

.PHONY: crucible-cluster
crucible-cluster: ## the same workload on three nodes of PostgreSQL, synchronous and then asynchronous, and of RabbitMQ, that die, freeze and lose each other (ONLY=name); needs Patroni, etcd and HAProxy (as root it installs them)
	@echo "compiling the crucible; the first time takes a minute or two ..." && cd crucible && go build -tags crashpoints . && \
		for cluster in $(or $(ONLY),postgres postgres-async rabbitmq); do ./crucible -cluster $$cluster -rate 80 -out ../crucible-$$cluster.json -time $(or $(CRUCIBLE_TIME),0) -seed $(or $(CRUCIBLE_SEED),0) || exit 1; done

##@ what contributors run

.PHONY: test
test: ## the tests of every module, except for those that take long; starts what is missing
	@$(call run-tests,.ci/skips$(comma).ci/skips-short -timeout=80m)

.PHONY: test-race
test-race: ## the tests of the packages whose goroutines share memory, with the race detector
	@$(call run-tests,.ci/skips$(comma).ci/skips-short -packages $(call listed,$(RACED)) $(race) -timeout=80m)

.PHONY: test-long
test-long: ## every test in full, with the race detector: all cases, long runs, large sizes; takes hours
	@export ONCEMILL_LONG=1 && $(call run-tests,.ci/skips $(race) -timeout=5h)

.PHONY: sim
sim: ## visit every state of a small model of the relay; run the relay through 50,000 random schedules, inbox and idempotency through 100,000 each (SCHEDULES=n, SHORT_SCHEDULES=n; SEED=n for the first)
	@$(call one-test,internal/relaymodel,TestModel_KeepsItsPromisesInEveryState,-each)
	@$(call one-test,relay,TestEngine_KeepsItsPromisesUnderAnySchedule,-schedules $(or $(SCHEDULES),50000) -seed $(or $(SEED),0))
	@$(call one-test,inbox,TestInbox_KeepsItsPromisesUnderAnySchedule,-schedules $(or $(SHORT_SCHEDULES),100000) -seed $(or $(SEED),0))
	@$(call one-test,idempotency,TestEngine_KeepsItsPromisesUnderAnySchedule,-schedules $(or $(SHORT_SCHEDULES),100000) -seed $(or $(SEED),0))

.PHONY: mutants
mutants: ## plant bugs, one at a time, and see that a test notices each (ONLY=pattern)
	@exports=$$(scripts/servers.sh up) && eval "$$exports" && go run ./internal/mutants -only '$(ONLY)'

.PHONY: check
check: check-format check-tidy check-vet check-lint check-scripts check-documents ## all that is not a test: format, tidy, vet, lint, scripts, documents

.PHONY: fmt
fmt: ## format the code, update the excerpts in the documents
	$(call tool,gofumpt) -w .
	go run ./internal/snippets -write $(DOCUMENTS)

.PHONY: servers
servers: ## make PostgreSQL and RabbitMQ available; print their addresses
	@scripts/servers.sh up

.PHONY: servers-down
servers-down: ## stop and remove what servers started
	@scripts/servers.sh down

.PHONY: clean
clean: ## remove what the targets above left in this directory
	rm -f bench.json crucible.json crucible-*.json

.PHONY: check-format
check-format:
	@files=$$($(call tool,gofumpt) -l .); [[ -z $$files ]] || { echo "not formatted, run make fmt: $$files"; exit 1; }

.PHONY: check-tidy
check-tidy:
	@$(call each,go mod tidy -diff,tidy)

.PHONY: check-vet
check-vet:
	@$(call each,go vet ./...,vet)

.PHONY: check-lint
check-lint:
	@linter=$(call tool,golangci-lint); config=$$PWD/.golangci.yml; $(call each,"$$linter" run --allow-parallel-runners --config "$$config" ./...,lint)

.PHONY: check-scripts
check-scripts:
	@if command -v shellcheck >/dev/null; then shellcheck -x scripts/servers.sh scripts/memory.sh .ci/run; else echo "shellcheck is not installed: scripts are not checked"; fi

.PHONY: check-documents
check-documents:
	go run ./internal/snippets $(DOCUMENTS)
