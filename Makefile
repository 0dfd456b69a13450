# Everything lives in .venv in this checkout; nothing is installed outside it.
# `make help` lists the targets.

PYTHON ?= python3
PYTEST_WORKERS ?= 2
SECONDS := 120
MINUTES := 20
NODES := 3
ROUNDS := 200
SEED :=
SEEDS := 40
VENV := .venv
STAMP := $(VENV)/.installed
GPU_WHEELS := out/gpu-wheels
GPU_SITE := out/gpu-site
FOREIGN := out/other-libp2p
TRITON := out/triton

# Two processes that let torch use every core run five times slower than with a thread each.
export OMP_NUM_THREADS := 1
# Where this is set, each of hundreds of processes would compile this package again.
unexport PYTHONDONTWRITEBYTECODE
# Every file is checked against the hashes of constraints.txt, also what builds the package. --no-require-hashes is for
# this package itself, which has none. Twice quiet: errors only, no warning for each package that one of several indexes lacks.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
INSTALL := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
  $(VENV)/bin/pip install --quiet --quiet --no-require-hashes

.DEFAULT_GOAL := help
.PHONY: help setup lock check fmt docs pictures demo dist test swarm fuzz scenarios kills test-daemons test-slow test-network test-docs test-hf test-deploy test-foreign test-kernels gpu gpu-wheels clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## make .venv with everything in it, at the versions and hashes of constraints.txt

# First a pip that takes hashes from constraints; then torch from PIP_FIND_LINKS, if there is one: pip prefers the files
# whose hashes an index tells beforehand.
$(STAMP): pyproject.toml constraints.txt p2ptrain/exact/native.c
	@echo "Setting up $(VENV): the first time this downloads several GB, and takes some minutes."
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	sed -n '/^pip==/,/[^\\]$$/p' constraints.txt | $(VENV)/bin/pip install --quiet --quiet --require-hashes -r /dev/stdin
	$(INSTALL) --no-index --no-deps torch 2> /dev/null || true
	$(INSTALL) -e '.[dev]'
	touch $@

lock: ## make constraints.txt from pyproject.toml (NEWEST=1; TORCH_INDEX: PyTorch's index for CPUs)
	test -x $(VENV)/bin/uv || $(INSTALL) uv
	$(VENV)/bin/python deploy/lock.py $(NEWEST:%=--newest) $(TORCH_INDEX:%=--torch-index %)

check: setup ## lint, formatting and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

fmt: setup ## format, and mend what the linter can
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .

docs: setup ## make the reference in docs/ from the code
	$(VENV)/bin/python docs/generate.py || test $$? -eq 1  # 1: something has changed

pictures: setup ## make README's pictures: the dashboard of a real demo, by Chromium, and loss over bytes
	$(VENV)/bin/python docs/pictures.py

demo: setup ## a swarm of three real daemons on this machine (NODES, ROUNDS)
	$(VENV)/bin/p2ptrain demo --nodes $(NODES) --rounds $(ROUNDS)

test: setup ## the tests that take seconds (NO_SKIPS_OF=browser: none of these is skipped)
	$(VENV)/bin/pytest -n $(PYTEST_WORKERS) -m 'not slow and not docs and not daemons and not foreign and not kernels' $(NO_SKIPS_OF:%=--no-skips-of=%)

swarm: setup ## two minutes of drawn scenarios, with faults and liars (SECONDS; SEED: draw the same again)
	$(VENV)/bin/p2ptrain simulate --swarm 10000000 --seconds $(SECONDS) $(SEED:%=--seed %)

fuzz: SECONDS := 60
fuzz: setup ## every decoder of foreign bytes, with altered and random inputs (SECONDS; SEED: draw the same again)
	$(VENV)/bin/python -m benchmarks.fuzz --seconds $(SECONDS) $(SEED:%=--seed %)

scenarios: setup ## every scenario with drawn seeds (SEEDS, SEED)
	$(VENV)/bin/python benchmarks/scenarios.py --seeds $(SEEDS) $(SEED:%=--seed %)

kills: setup ## real daemons, one of which is killed again and again (MINUTES)
	$(VENV)/bin/python benchmarks/kills.py --minutes $(MINUTES)

test-daemons: setup ## swarms of real daemons: own loops and data, regions, plug-ins, recipes, troubles
	$(VENV)/bin/pytest -n $(PYTEST_WORKERS) -m 'daemons and not slow'

test-slow: setup ## the tests that take minutes
	$(VENV)/bin/pytest -n $(PYTEST_WORKERS) -m slow --timeout=1800 || test $$? -eq 5  # 5: there are none

test-network: setup ## real daemons on hosts of their own: Linux network namespaces, as root; skipped elsewhere
	$(VENV)/bin/pytest -m network -rs -s

test-docs: setup ## every command of README.md and docs/, with real daemons
	$(VENV)/bin/pytest -n $(PYTEST_WORKERS) -m docs

dist: setup ## the wheel, in dist/: pip, pipx and uv install it anywhere
	$(VENV)/bin/pip wheel --quiet --quiet --no-deps --build-constraint constraints.txt --wheel-dir dist .

test-hf: setup ## models of transformers, and its Trainer; installs the extra [hf]
	$(INSTALL) -e '.[dev,hf]'
	$(VENV)/bin/pytest -m hf -rs

test-deploy: setup ## what checks deploy/ and trackers; installs the extras [deploy,wandb,tensorboard], takes promtool
	$(INSTALL) -e '.[dev,deploy,wandb,tensorboard]'
	$(VENV)/bin/pytest -n $(PYTEST_WORKERS) -rs --no-skips tests/deploy tests/observe/test_tracking*.py

# Not in $(VENV): it wants other versions of what is there.
$(FOREIGN)/.installed: tests/other_libp2p.txt
	test -x $(FOREIGN)/bin/python || $(PYTHON) -m venv $(FOREIGN)
	$(FOREIGN)/bin/pip install --quiet --quiet --require-hashes -r $<
	touch $@

test-foreign: setup $(FOREIGN)/.installed ## real daemons and another, hostile implementation of libp2p: py-libp2p, in out/other-libp2p
	OTHER_LIBP2P=$(FOREIGN) $(VENV)/bin/pytest tests/hostile -m foreign -rs --no-skips-of=foreign

# Not in $(VENV): torch imports it where it is, which takes a process 100 MB.
$(TRITON)/.installed: constraints.txt
	$(INSTALL) --no-deps --upgrade --target $(TRITON) triton
	touch $@

test-kernels: setup $(TRITON)/.installed ## the programs for a card, interpreted and compiled on this processor, with Triton in out/triton
	PYTHONPATH=$(TRITON) $(VENV)/bin/pytest -n $(PYTEST_WORKERS) tests/kernels -m kernels --no-skips-of=kernels

gpu: ## every figure of a GPU in out/gpu.json, in nine minutes (SMALL=1: tiny, on a CPU; ONLY=steps; JSON=file)
	@if [ -x $(VENV)/bin/python ] || ! ls $(GPU_WHEELS)/*.whl > /dev/null 2>&1; then $(MAKE) --no-print-directory setup; \
	else rm -rf $(GPU_SITE) && for wheel in $(GPU_WHEELS)/*.whl; do $(PYTHON) -m zipfile -e $$wheel $(GPU_SITE) || exit 1; done; fi
	test -e p2ptrain/exact/libnative.so || $(CC) $$(sed -n 's/^FLAGS = "\(.*\)"$$/\1/p' deploy/build_native.py) \
	  -o p2ptrain/exact/libnative.so p2ptrain/exact/native.c || true
	$(if $(SMALL),,env -u OMP_NUM_THREADS) \
	  $$(test -x $(VENV)/bin/python && echo $(VENV)/bin/python || echo env PYTHONPATH=$(GPU_SITE) $(PYTHON)) \
	  -m benchmarks.gpu $(if $(SMALL),--small) $(ONLY:%=--only %) $(JSON:%=--json %)

gpu-wheels: setup ## what `make gpu` takes on a machine without a network, as wheels in out/gpu-wheels
	$(VENV)/bin/python benchmarks/gpu/wheels.py $(GPU_WHEELS)

clean: ## remove .venv and all that tools leave behind
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
