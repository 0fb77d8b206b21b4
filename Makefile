# Every target prepares what it needs; a fresh clone needs only Python 3.11+, make and a package index.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
EXTRAS ?= dev,postgres,redis,tls,train
PY := $(VENV)/bin/python
TOOL := scripts/tool $(VENV)-tools $(PYTHON) tools
PYTEST_ARGS ?=
# Tests also wait, for about half of their time, so two workers for each of two cores. A file stays with one worker, so that its tests share their cluster.
TEST_WORKERS ?= 4
BENCH_ARGS ?=
LOCK_ARGS ?=
AUDIT_ARGS ?=
FLAKES_ARGS ?=
FUZZ_ARGS ?=
INTEROP_ARGS ?=
# Today's plugin (v2), else yesterday's program (v1).
COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)
NODES ?= 2
SECRETS := .secrets/token .secrets/postgres-password .secrets/redis-password
# Chosen here so that a failing run can print it: order by hash must never reach a decision.
export PYTHONHASHSEED ?= $(shell echo $$RANDOM)
# Where it is set, each of a thousand processes compiles all our modules for itself: a cluster starts in 0.9 s, not in 0.5.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help env services demo demo-elastic test test-all interop sim fuzz chaos flakes check types format docs site lock sbom audit release bench bench-elastic up down pin soak clean

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env:  ## create or refresh the virtual environment
	@scripts/env $(VENV) $(PYTHON) $(EXTRAS)

services: env
	@scripts/services $(VENV)

demo: env  ## train a small model on a local cluster
	@$(PY) examples/demo.py

demo-elastic: env  ## three elastic jobs share eight GPUs that are only said to be there, for two minutes
	@$(PY) examples/demo_elastic.py

test: services  ## run the tests that need no GPU but the slowest (about 15 minutes on 2 cores)
	@$(PY) -m tests.machine
	@$(PY) -m pytest -q -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-all:  ## run every test that needs no GPU (about 35 minutes on 2 cores)
	@$(MAKE) test PYTEST_ARGS="--slow $(PYTEST_ARGS)"

interop: env  ## tests with libraries of others (joblib, dask, optuna, airflow, ray, notebook, generated_clients, prometheus, huggingface), each in an environment of its own (INTEROP_ARGS="dask --fresh")
	@$(PY) -m tests.interop $(INTEROP_ARGS)

sim: env  ## Random worlds under faults: 1,000 x 10,000 events of the scheduler's core, 2,000 of objects, 5,000 clusters (SIM_ARGS="--clusters 100")
	@$(PY) -m tests.sim $(SIM_ARGS)

fuzz: env  ## 10,000 cases of the live API by its own documents, 100,000 damaged inputs of every decoder (FUZZ_ARGS="--only frames")
	@$(PY) -m tests.fuzz $(FUZZ_ARGS)

chaos: services  ## 4 workloads through 31 faults of real processes, within an hour, and a report (CHAOS_ARGS="--faults 'gcs killed'")
	@$(PY) -m tests.chaos.matrix $(CHAOS_ARGS)

flakes: services  ## the suite 5 times with fresh seeds, once under load, once at nice 19 (FLAKES_ARGS="--runs 5")
	@$(PY) -m tests.machine
	@$(PY) -m tests.tiers.flakes --workers $(TEST_WORKERS) $(FLAKES_ARGS)

check: env  ## lint, format, spelling and types: what must pass before a commit
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/codespell
	@$(MAKE) types

types: env  ## mypy, strict
	@$(VENV)/bin/mypy

format: env  ## apply the formatter and the safe lint fixes
	@$(VENV)/bin/ruff check --fix-only .
	@$(VENV)/bin/ruff format .

docs: env  ## write the pages of docs/ that are made of the code
	@$(PY) scripts/docs.py

site: docs  ## build site/, the documentation as web pages; a warning is an error
	@NO_MKDOCS_2_WARNING=1 scripts/tool $(VENV)-docs $(PYTHON) docs mkdocs build --strict --quiet

lock:  ## write locks/: exact versions and hashes of what pyproject.toml asks for (LOCK_ARGS="--upgrade-package NAME", --upgrade)
	@$(TOOL) python scripts/lock.py $(LOCK_ARGS)

audit:  ## ask for known vulnerabilities of what is locked: 0 none, 1 some, 3 no verdict (AUDIT_ARGS="--service osv")
	@$(TOOL) python scripts/audit.py $(AUDIT_ARGS)

sbom:  ## write dist/sbom.cdx.json: what is locked, as CycloneDX
	@$(TOOL) python scripts/sbom.py dist/sbom.cdx.json

release: env sbom  ## write sdist, wheel, bill of materials and their checksums into dist/
	@$(VENV)/bin/hatchling build -d dist
	@cd dist && sha256sum sbom.cdx.json stoker-* >SHA256SUMS && cat SHA256SUMS

bench-elastic: env  ## compare the policy of elastic jobs with Pollux (BENCH_ARGS="--data DIR --sensitivity")
	@OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(PY) -m benchmarks.elastic $(BENCH_ARGS)

bench: env  ## time our workloads, and Ray's and Dask's in turn where a Python has them
	@$(PY) -m benchmarks $(BENCH_ARGS)

up: $(SECRETS)  ## start a cluster in containers, with NODES=2 nodes
	@$(COMPOSE) up --build --detach --scale nodelet=$(NODES)
	@url=http://127.0.0.1:$${STOKER_PUBLISH_PORT:-7600}; \
	echo "[up] $(NODES) nodes; the API is $$url, its token is in .secrets. To use it from this shell:"; \
	echo "  export STOKER_ADDRESS=$$url STOKER_TOKEN=\$$(cat .secrets/token)"; \
	echo "[up] stop it with: make down"

down: $(SECRETS)  ## stop the containers; what they stored stays
	@$(COMPOSE) rm --stop --force -v
	@$(COMPOSE) down
	@echo "[down] the volumes stay; to remove them too: $(COMPOSE) down --volumes"

# The folder keeps others out; the containers' own users must be able to read the files.
$(SECRETS):
	@umask 077; mkdir -p .secrets; od -An -N24 -tx1 /dev/urandom | tr -d ' \n' >$@; chmod 444 $@; \
	echo "[up] wrote a new secret to $@"

pin:  ## write into .env the digests that the tags of compose's images have now; again, to refresh them
	@scripts/pin-images

soak: services  ## an hour of mixed load (STOKER_SOAK_S=seconds): prints the slope of memory
	@STOKER_TEST_SOAK_S=$${STOKER_SOAK_S:-3600} $(PY) -m pytest -q -s -m soak --timeout 3600 $(PYTEST_ARGS)

clean:  ## remove the environment and the caches
	@rm -rf $(VENV) $(VENV)-interop $(VENV).lock $(VENV)-tools $(VENV)-docs site .mypy_cache .pytest_cache .ruff_cache .hypothesis
