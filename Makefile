# Every word does its own set-up, on a fresh Debian with python3, git and make. PYTHON= chooses the interpreter (3.11 or newer);
# another interpreter makes .venv anew. What is installed is pinned by hash, builds included.
# --no-deps: the pinned files are complete, and pip's own resolver would look for an extra's newest release beside them.
# Order of set-up: the venv with core.txt, the project on top (editable), then dev.txt. `demo` stops after the second.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_WORDS := python -m pip --quiet --disable-pip-version-check --no-input
PIP := $(BIN)/$(PIP_WORDS)
INTERPRETER := $(shell $(PYTHON) -c 'import platform; print(platform.python_version())' 2>/dev/null)

CORE := $(VENV)/.core-$(INTERPRETER)
PROJECT := $(VENV)/.project-$(INTERPRETER)
DEV := $(VENV)/.dev-$(INTERPRETER)
# What perdure is compared with has an environment of its own, so that it cannot change what the tests run with.
BENCH_VENV ?= .venv-bench
PEERS := $(BENCH_VENV)/.peers-$(INTERPRETER)

export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# Some machines forbid Python to keep what it compiled. The tests start a thousand processes, and each would compile perdure anew.
export PYTHONDONTWRITEBYTECODE :=

# How to tell whether a Debian package is needed: by what it brings, wherever that came from.
probe_python3-venv = $(PYTHON) -c 'import ensurepip, venv'
probe_strace = command -v strace
probe_postgresql = ls /usr/lib/postgresql/*/bin/initdb || command -v initdb
probe_pgbouncer = command -v pgbouncer || test -x /usr/sbin/pgbouncer
probe_redis-server = command -v redis-server || command -v valkey-server
probe_mariadb-server = command -v mariadbd || test -x /usr/sbin/mariadbd
probe_qemu-user-static = command -v qemu-aarch64-static
probe_npm = command -v npm
probe_sqlite3 = command -v sqlite3
probe_curl = command -v curl
probe_jq = command -v jq

# $(call require,packages,otherwise): installs the Debian packages that are missing when run by root. Otherwise names them, and
# does what is said there.
define require
@missing=""; $(foreach package,$(1),{ $(probe_$(package)); } >/dev/null 2>&1 || missing="$$missing $(package)";) \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing$$missing"; export DEBIAN_FRONTEND=noninteractive; \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends $$missing; } </dev/null >/dev/null; \
	else echo "missing:$$missing. Install with: sudo apt-get install$$missing" >&2; $(2); fi
endef

.PHONY: help demo test uvloop contracts chaos mutants lint types bench figures baseline pages lock clean system

help: ## this list
	@grep -E '^[a-z]+:.*## ' Makefile | sed -E 's/^([a-z]+):.*## (.*)/  \1\t\2/'

demo: $(PROJECT) ## a workflow that is killed and goes on, in a few seconds
	$(BIN)/python examples/demo.py

# Five processes also on two cores: they often wait for servers and disks. Each starts the servers that it needs, and
# tests/sharing.py says which files come first and what stays together.
# What fails is run once more, alone, and has to pass then: tests with real processes, kills and servers share two cores with
# others, and one of fourteen thousand may come too late for its deadline. The report of the first run stays in the output.
# If pytest itself broke (exit code 3) or was killed, nobody knows what it left out, so everything is run once more before that.
# Ctrl-C and what cannot be collected (2), and a backend that was not exercised (4), are final.
define run_tests
@run() { echo "$(1) pytest $(2) $$*"; $(1) $(BIN)/python -m pytest $(2) -m "not chaos" "$$@"; code=$$?; }; \
	run -n 5 --dist loadfile; \
	if [ $$code = 3 ] || [ $$code -gt 128 ]; then echo "== pytest broke; everything once more: =="; run -n 5 --dist loadfile; fi; \
	if [ $$code = 1 ]; then echo "== once more, alone: =="; run -n 0 --last-failed --last-failed-no-failures none; fi; \
	exit $$code
endef

test: system $(DEV) ## all tests, long campaigns shortened to a tenth and slow servers spared
	$(call run_tests,,)

uvloop: system $(DEV) ## the tests of the engine again on uvloop; CI runs them too
	$(call run_tests,PERDURE_LOOP=uvloop,tests/engine)

contracts: system $(DEV) ## the contract suites of which `make test` runs every fifth case, whole; CI runs them too
	PERDURE_CHAOS=1 $(BIN)/python -m pytest tests/contract tests/backends/postgres/test_pgbouncer.py -m sampled -n 4 --dist loadfile

chaos: system $(DEV) ## the same tests on every store with campaigns in full, and those that are only for here; workers on uvloop, asyncio's debug mode
	PERDURE_CHAOS=1 $(BIN)/python -m pytest
	PERDURE_LOOP=uvloop $(BIN)/python -m pytest tests/worker -m "not chaos"
	PERDURE_LOOP=debug $(BIN)/python -m pytest tests/engine tests/worker -m "not chaos"

mutants: system $(DEV) ## breaks each guard of tests/mutants, one at a time, and sees its tests fail; ONLY="S10 P4" for some
	$(BIN)/python -m tests.mutants $(ONLY)

lint: $(DEV) ## ruff: rules and format; import-linter: who may import whom
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache

types: $(DEV) ## mypy strict on src and tests, pyright on tests/typing
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(PEERS) $(DEV) ## perdure beside its peers and the plain drivers, a list of a million runs, latencies; BENCH="--quick" LISTING="--runs 1000" for less
	$(call require,postgresql,exit 1)
	@mkdir -p build
	$(BENCH_VENV)/bin/python -m benchmarks --json build/benchmarks.json $(BENCH)
	$(BENCH_VENV)/bin/python -m benchmarks.listing $(LISTING)
	$(BIN)/python -m benchmarks.latency $(if $(findstring --quick,$(BENCH)),--quick)

figures: $(PROJECT) ## puts the figures of the last `make bench` into docs/benchmarks.md
	$(BIN)/python -m benchmarks.page build/benchmarks.json

baseline: $(PROJECT) ## writes down what operations cost now, for the test that compares
	$(BIN)/python -m benchmarks.operations --baseline

pages: $(DEV) ## writes the settings in docs/running.md and the transcripts in docs/command-line.md from the code
	$(BIN)/python -m tests.settings_page
	$(BIN)/python -m tests.cli.transcript

lock: $(DEV) ## pins requirements/*.txt to the newest versions that fit requirements/*.in
	for set in core dev bench; do $(BIN)/uv pip compile --system-certs --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
		requirements/$$set.in --output-file requirements/$$set.txt || exit 1; done

clean: ## removes the environments, caches and build results
	rm -rf $(VENV) $(BENCH_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The tools that tests use, and the servers: postgresql, pgbouncer, redis-server and mariadb-server as they are; libSQL's and
# MongoDB's come from npm, the latter for another processor. Who may not install them tests the backends that are there.
system:
	$(call require,python3-venv strace,exit 1)
	$(call require,postgresql pgbouncer redis-server mariadb-server qemu-user-static npm sqlite3 curl jq,true)

$(CORE): requirements/core.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "perdure needs Python 3.11 or newer, and $(PYTHON) is not; choose one with PYTHON=" >&2; exit 1; }
	$(call require,python3-venv,exit 1)
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --require-hashes --no-deps --only-binary :all: -r requirements/core.txt
	@touch $@

# PATH: without build isolation, uv_build looks for its program there.
$(PROJECT): pyproject.toml $(CORE)
	PATH="$(abspath $(BIN)):$$PATH" $(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

# --use-pep517: old pips would otherwise run setup.py themselves for the one package without a wheel, and say so at length.
$(DEV): requirements/dev.txt $(PROJECT)
	$(PIP) install --require-hashes --no-deps --no-build-isolation --use-pep517 -r requirements/dev.txt
	@touch $@

$(PEERS): requirements/bench.txt
	$(call require,python3-venv,exit 1)
	$(PYTHON) -m venv --clear $(BENCH_VENV)
	$(BENCH_VENV)/bin/$(PIP_WORDS) install --require-hashes --no-deps --only-binary :all: -r requirements/bench.txt
	PATH="$(abspath $(BENCH_VENV)/bin):$$PATH" $(BENCH_VENV)/bin/$(PIP_WORDS) install --no-deps --no-build-isolation --editable .
	@touch $@
