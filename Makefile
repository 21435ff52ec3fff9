# make demo   a real vLLM is killed, starts again, and finds its KV cache on disk (three minutes, once set up)
# make test   every property of kvstore, each backend on one server, one restart of a real engine (about six minutes)
# make test-all   all tests but those of lint and test-versions (twenty minutes)
# make test-versions  random walks of real engines of vLLM 0.31 to 0.33, each of 2,000 requests (WALK_REQUESTS)
# make test-gpu PYTHON=python3   tests that need a CUDA GPU (minutes), with a Python that has torch for CUDA and the extra "test"
# make gpu PYTHON=python3   tests, copies and engines of a GPU, in 40 minutes, into gpu-results/ (docs/performance.md; MINUTES); REHEARSE=1 tries it on a CPU
# make test-docs  as root: the pages for users are followed in an empty Debian, to a restarted engine (tests/docs/empty_root.py)
# make campaign  the reliability goals of docs/reliability.md, one line each (CAMPAIGN_MINUTES, CAMPAIGN_GOALS, CAMPAIGN_SEED), and test-versions
# make outside  vLLM's own tests of offloading, SGLang's and LMCache's own classes and programs, against kvstore (tests/outside)
# make lint   ruff, mypy, import contracts, schemas of deploy/, the rules of tests/project for code and pages
# make docs   the documentation, into site/
# make packages  the wheel and the source distribution, installed into empty environments
# make setup  the virtual environment that all of these need; each of them makes it first, and it is not made twice
VENV ?= .venv
export VENV
PY := $(VENV)/bin/python
# Each of the programs that tests start would compile the package.
export PYTHONDONTWRITEBYTECODE :=
# Failed tests run once more, alone.
TESTED := $(PY) -m tests.second_chance -q
MARKS := not walk and not repository
QUICK := not walk and not repository and (smoke or not (engine or matrix or torture or program))
# Tests here import vLLM or torch, or start engines from a process that does. The import takes ten seconds, so they have
# one process, beside those of the other tests.
IMPORT_VLLM := tests/vllm tests/transfer tests/redis/test_vllm.py tests/s3/test_vllm.py
SIDE_BY_SIDE := --no-print-directory --keep-going --jobs=2 --output-sync=line test-core test-vllm
PYTEST_EXTRA ?=
WALK_REQUESTS ?= 2000
VERSIONS ?= 0.31.0 0.32.0 0.33.0

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-core test-vllm test-all test-versions test-gpu gpu test-docs campaign outside lint docs packages
.SILENT:

help:
	sed -n 's/^# make /make /p' Makefile

setup:
	scripts/setup_env.sh

demo: setup
	$(PY) examples/vllm_restart.py --json out.json

test: setup
	status=0; \
	KVSTORE_TEST_SIZE=quick $(MAKE) $(SIDE_BY_SIDE) MARKS="$(QUICK)" || status=$$?; \
	echo "Not run: tests marked engine, matrix, torture or program (make test-all), repository (make lint) or walk (make test-versions)"; \
	exit $$status

test-all: setup
	$(MAKE) $(SIDE_BY_SIDE)

# Three at a time, as they wait for a third of their time.
test-core:
	$(TESTED) -n 3 --dist loadgroup -m "$(MARKS)" $(IMPORT_VLLM:%=--ignore=%) $(PYTEST_EXTRA)

test-vllm:
	$(TESTED) -n 0 -m "$(MARKS)" $(IMPORT_VLLM) $(PYTEST_EXTRA)

# Where a version can't be had, its test skips itself, and says so.
test-versions: setup
	scripts/vllm_versions.sh $(VERSIONS) || true; \
	KVSTORE_WALK_REQUESTS=$(WALK_REQUESTS) $(TESTED) -n 2 --dist worksteal -m walk -k "$$(echo $(VERSIONS) | sed 's/ / or /g')" \
		tests/vllm/test_walk.py tests/vllm/test_each_version.py $(PYTEST_EXTRA)

test-gpu:
	PYTHONPATH=. $(or $(PYTHON),$(PY)) -m pytest -q tests/transfer/gpu

gpu:
	PYTHONPATH=. $(or $(PYTHON),$(PY)) bench/gpu.py --minutes $(or $(MINUTES),40) --serve "$(SERVE)" $(if $(REHEARSE),--rehearse)

test-docs: setup
	$(PY) -m tests.docs.empty_root $(PAGES)

campaign: setup
	failed=0; \
	$(PY) -m tests.campaign --minutes $(or $(CAMPAIGN_MINUTES),0) --seed $(or $(CAMPAIGN_SEED),0) $(CAMPAIGN_GOALS) || failed=1; \
	test -n "$(CAMPAIGN_GOALS)" || $(MAKE) --no-print-directory test-versions || failed=1; \
	exit $$failed

outside: setup
	scripts/vllm_versions.sh 0.33.0
	$(PY) -m tests.outside

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict kvstore
	$(VENV)/bin/lint-imports --no-logo --no-cache
	$(VENV)/bin/hadolint deploy/Dockerfile
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
	$(PY) -m pytest -q -n 2 -m repository tests/project

docs: setup
	$(PY) -m mkdocs build --strict --quiet

packages: setup
	scripts/check_dist.sh
