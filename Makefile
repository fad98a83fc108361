# Everything lives in .venv, and npm packages for tests in .node; remove them to start from nothing.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.PHONY: run tour todo cluster test check alone mutants lint format bench peers soak fuzz pins advisories prose docs dist stubs blocking golden conformance clean help new-venv node-and-browser

# Without bytecode files, every process of a test run compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
PEERS := .venv-peers
NODE := .node
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
# Two more processes than processors, because many tests wait for other processes. A plain `pytest` uses one process.
PYTEST := $(BIN)/python -m pytest --numprocesses=$$(($$(nproc) + 2)) --maxprocesses=8 --dist=worksteal

# Only one make at a time changes an environment. A second one waits, and then checks again what is left to install.
LOCK := .make.lock
LOCKED := $(if $(shell command -v flock),flock --close $(LOCK))
define with-lock
@$(if $(LOCKED),flock --close --nonblock $(LOCK) true || echo "Waiting for another make that installs here …")
@$(LOCKED) $(MAKE) --no-print-directory --silent HAS_LOCK=yes $@
endef

# An environment that was moved or copied here, or whose Python is gone, loses its stamp and is rebuilt.
WHOLE := import os, sys, oncelog; sys.exit(not oncelog.__file__.startswith(os.getcwd() + os.sep))
ifneq ($(wildcard $(VENV)/.run),)
ifneq ($(shell $(BIN)/python -c '$(WHOLE)' 2>/dev/null && echo whole),whole)
$(shell rm -f $(VENV)/.run)
endif
endif

run: $(VENV)/.run ## The server on the embedded store, in development mode; prints what to try next
	@exec $(BIN)/oncelog serve --development

tour: $(VENV)/.run ## A tour of the policies: outcomes of writes that are sent twice; then a log in a file
	@$(BIN)/python examples/narrated.py
	@$(BIN)/python examples/embedded.py

todo: $(VENV)/.dev $(NODE)/.whole ## A shared to-do list in two terminals and a web page; prints what to start
	@echo "Run these commands, each in a separate terminal (examples/todo/README.md):"
	@sed -n 's/^\$$ /  /p' examples/todo/README.md

cluster: $(VENV)/.dev ## PostgreSQL with two standbys, Patroni and etcd, that fails over; prints how to use and to kill it
	@exec $(BIN)/python -m oncelog.testing.cluster start $(if $(CLUSTER_PORT),--port '$(CLUSTER_PORT)')

test: $(VENV)/.dev $(NODE)/.whole ## Everything: lint, types, import rules, all tests, the conformance page
	@$(MAKE) --no-print-directory lint
	@$(PYTEST) --conformance=check

check: $(VENV)/.dev ## The tests for the inner loop: core, protocols, sessions, the SQLite store (under 90 seconds)
	@$(PYTEST) --check

alone: $(VENV)/.dev $(NODE)/.whole ## Every test in a separate process, in random order (takes long)
	@$(BIN)/python -m pytest --alone

mutants: $(VENV)/.dev $(NODE)/.whole ## Introduce 60 faults one at a time; report which ones no test notices (takes long)
	@PYTHONPATH=tests $(BIN)/python -m mutants

lint: $(VENV)/.dev ## Format, lint, types and import rules, without the tests
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python -m tools.check_contracts
	@$(BIN)/python -m tools.prose --check

format: $(VENV)/.dev ## Format the code and apply safe fixes
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(VENV)/.dev ## Measure, and write bench/results/ (see bench/README.md)
	@$(BIN)/python -m bench

peers: $(VENV)/.dev $(PEERS)/.whole ## Measure against Powertools, DBOS, NATS and PostgreSQL, in .venv-peers (about 8 minutes)
	@PYTHONPATH=src $(PEERS)/bin/python -m bench peers
	@PYTHONPATH=src $(PEERS)/bin/python -m bench server

soak: $(VENV)/.dev $(NODE)/.whole ## The long suites: many new seeds, large histories, many kills (takes long)
	@$(PYTEST) --soak

fuzz: $(VENV)/.dev ## Feed mutated inputs to every decoder; INPUTS=1000000 sets how many, SEED=N repeats a run
	@PYTHONPATH=tests $(BIN)/python -m fuzz $(if $(INPUTS),--inputs '$(INPUTS)') $(if $(SEED),--seed '$(SEED)')

golden: $(VENV)/.dev ## Write tests/golden/files again, after an intended change of behaviour
	@PYTHONPATH=tests $(BIN)/python -m golden --write

conformance: $(VENV)/.dev $(NODE)/.whole ## Regenerate docs/conformance.md from the tests
	@$(PYTEST) --conformance=write

pins: $(VENV)/.dev ## Update the pins of requirements/*.in, with hashes
	@for name in runtime image dev peers; do \
	  CUSTOM_COMPILE_COMMAND="make pins" $(BIN)/pip-compile --quiet --upgrade --generate-hashes \
	    --no-strip-extras --allow-unsafe --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
	    --output-file=requirements/$$name.txt requirements/$$name.in; done

advisories: $(VENV)/.dev ## Check the pinned versions against the committed advisories; ADVISORIES=DIR updates the list first
	@$(BIN)/python -m tools.advisories $(if $(ADVISORIES),--renew '$(ADVISORIES)')

prose: $(VENV)/.dev ## List sentences that read like a translation; the lint fails when there are more than before
	@$(BIN)/python -m tools.prose

docs: $(VENV)/.dev ## Build the documentation site into build/site
	@$(BIN)/python -m tools.site

dist: $(VENV)/.dev ## Build the wheel, which contains an SBOM, and the sdist into dist/
	@$(BIN)/python -m build --no-isolation --outdir dist . >/dev/null
	@ls dist

stubs: $(VENV)/.dev ## Compile the ledger's .proto into Python files
	@$(BIN)/python -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src --grpc_python_out=src \
	  --plugin=$(BIN)/protoc-gen-mypy_grpc --mypy_grpc_out=quiet:src oncelog/ledger/v1/ledger.proto

blocking: $(VENV)/.dev ## Generate the blocking classes again, after a change of an async class
	@$(BIN)/python -m tools.blocking

clean: ## Remove the environment and all caches
	@$(LOCKED) rm -rf $(VENV) $(PEERS) $(NODE) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## This list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 22

# A stamp exists only while the environment is complete: make removes it before an installation and writes it after.
# An environment without its stamp was interrupted and is rebuilt, because pip takes a half-written package for an
# installed one.
ifndef HAS_LOCK
$(VENV)/.run: requirements/runtime.txt pyproject.toml
	$(with-lock)
$(VENV)/.dev: $(VENV)/.run requirements/dev.txt
	$(with-lock)
$(PEERS)/.whole: requirements/peers.txt
	$(with-lock)
$(NODE)/.whole: tests/insieme/package.json tests/insieme/package-lock.json | node-and-browser
	$(with-lock)
else
$(VENV)/.run: requirements/runtime.txt pyproject.toml
	@if [ ! -e $@ ]; then rm -rf $(VENV); $(MAKE) --no-print-directory new-venv; fi
	@rm -f $(VENV)/.run $(VENV)/.dev
	@echo "Installing Oncelog into $(VENV) …"
	@$(PIP) --require-hashes -r requirements/runtime.txt
	@$(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.run requirements/dev.txt
	@rm -f $(VENV)/.run $(VENV)/.dev
	@echo "Installing what the tests need into $(VENV) …"
	@$(PIP) --require-hashes -r requirements/dev.txt
	@touch $(VENV)/.run $@

$(PEERS)/.whole: requirements/peers.txt
	@rm -rf $(PEERS)
	@echo "Installing the peers into $(PEERS) …"
	@$(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/peers.txt
	@touch $@

# The npm client that tests run in Node and in a browser, in exact versions with checked hashes.
$(NODE)/.whole: tests/insieme/package.json tests/insieme/package-lock.json
	@rm -rf $(NODE) && mkdir $(NODE)
	@echo "Installing npm packages for the tests into $(NODE) …"
	@cp tests/insieme/package.json tests/insieme/package-lock.json $(NODE)/
	@cd $(NODE) && npm ci --silent --ignore-scripts --no-audit --no-fund
	@touch $@
endif

# If a program is missing, make installs Debian's package if it runs as root, and otherwise prints the command to run.
node-and-browser:
	@missing=""; for one in chromium:chromium node:nodejs npm:npm; do \
	   command -v $${one%%:*} >/dev/null || missing="$$missing $${one##*:}"; done; \
	 if [ -n "$$missing" ]; then \
	   if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	     echo "Installing Debian's$$missing …"; export DEBIAN_FRONTEND=noninteractive; \
	     $(LOCKED) apt-get update -qq; $(LOCKED) apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	   else echo "The tests need$$missing. Install: sudo apt-get install$$missing" >&2; exit 1; fi; fi

# Debian packages venv separately from Python. If it is missing, make installs it if it runs as root, and otherwise
# prints the command to run.
new-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Oncelog needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.11 run" >&2; exit 1; }
	@if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
	   if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	     echo "Installing Debian's python3-venv …"; apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null; \
	   else echo "python3-venv is missing. Install it: sudo apt-get install python3-venv" >&2; exit 1; fi; fi
	@$(PYTHON) -m venv $(VENV)
