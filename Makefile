# Everything lives in .venv in this checkout; nothing is installed outside it.
# `make help` lists the targets.

PYTHON ?= python3
PYTEST_WORKERS ?= 2
PYTHONS ?= 3.12 3.13 3.14
PYTHONS_TESTS ?= tests/config tests/net tests/store tests/test_*.py
SECONDS := 120
MINUTES := 20
NODES := 3
ROUNDS := 200
SEED :=
SEEDS := 40
VENV := .venv
STAMP := $(VENV)/.installed
GPU_WHEELS := out/gpu-wheels
GPU_SITE := $(CURDIR)/out/gpu-site
DIST := dist
RELEASED := $(CURDIR)/out/release
FOREIGN := out/other-libp2p
TRITON := out/triton
ARM := out/arm
IROH := out/iroh

# Two processes that let torch use every core run five times slower than with a thread each.
export OMP_NUM_THREADS := 1
# Where this is set, each of hundreds of processes would compile this package again.
unexport PYTHONDONTWRITEBYTECODE
# Every file is checked against the hashes of constraints.txt, also what builds the package. --no-require-hashes is for
# this package itself, which has none. It lists the files for Linux on x86-64: elsewhere, CONSTRAINTS=/dev/null takes the
# newest versions that pyproject.toml allows. Twice quiet: errors only, no warning for each package that one of several indexes lacks.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
CONSTRAINTS ?= constraints.txt
INSTALL := PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) \
  $(VENV)/bin/pip install --quiet --quiet --no-require-hashes

.DEFAULT_GOAL := help
.PHONY: help setup lock check fmt docs pictures demo dist release test swarm fuzz scenarios kills test-daemons test-slow test-network test-docs test-release test-hf test-deploy test-foreign test-kernels test-arm test-pythons iroh gpu gpu-wheels clean

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

$(VENV)/bin/uv: $(STAMP)
	$(INSTALL) uv
	touch $@

lock: $(VENV)/bin/uv ## make constraints.txt from pyproject.toml (NEWEST=1; TORCH_INDEX: PyTorch's index for CPUs)
	$(VENV)/bin/python deploy/lock.py $(NEWEST:%=--newest) $(TORCH_INDEX:%=--torch-index %)

check: setup ## lint, formatting and types, also those that macOS has
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy --platform darwin --cache-dir .mypy_cache/darwin

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
	$(VENV)/bin/pytest -n $(PYTEST_WORKERS) -m 'not slow and not docs and not daemons and not foreign and not kernels and not arm' $(NO_SKIPS_OF:%=--no-skips-of=%)

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

# zig is a C compiler for every processor, in a wheel. The files bear the date of the last commit, to be the same next year.
dist: setup $(VENV)/bin/uv ## the wheel and the source archive, in dist/: pip, pipx and uv install them anywhere (MACHINE=aarch64: for Arm)
	$(if $(MACHINE),$(INSTALL) ziglang)
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct 2> /dev/null || date +%s) \
	  $(if $(MACHINE),CC="$$(echo $(CURDIR)/$(VENV)/lib/python3*/site-packages/ziglang/zig) cc -target $(MACHINE)-linux-musl" \
	  P2PTRAIN_MACHINE=$(MACHINE)) \
	  $(VENV)/bin/uv build --quiet --python $(VENV)/bin/python --build-constraint $(CONSTRAINTS) --out-dir $(DIST)
	@cd $(DIST) && sha256sum p2ptrain-* 2> /dev/null || shasum -a 256 p2ptrain-*

release: setup $(VENV)/bin/uv ## a release's files, from the last commit, in dist/: built twice, hashes of all that the wheel takes, bill of materials
	$(VENV)/bin/python -m deploy.release $(DIST)

# PIP_FIND_LINKS: where torch's build for CPUs may be.
test-release: release ## the release's files, and what test-docs runs with its wheel, in out/release: before a release
	$(INSTALL) -e '.[dev,deploy]'
	RELEASE=$(DIST) $(VENV)/bin/pytest -n $(PYTEST_WORKERS) -rs --no-skips tests/deploy/test_deploy_release.py
	rm -rf $(RELEASED)
	$(VENV)/bin/python -m venv $(RELEASED)
	cd $(DIST) && UV_FIND_LINKS=$(PIP_FIND_LINKS) $(CURDIR)/$(VENV)/bin/uv pip install --quiet --python $(RELEASED)/bin/python \
	  --require-hashes \
	  -r requirements$$($(CURDIR)/$(VENV)/bin/python -c 'import torch; print("" if torch.version.cuda else "-cpu")').txt
	P2PTRAIN=$(RELEASED)/bin/p2ptrain $(VENV)/bin/pytest -n $(PYTEST_WORKERS) -m docs

test-hf: setup ## models of transformers, and its Trainer; installs the extra [hf], also beside the program P2PTRAIN, if that is given
	$(INSTALL) -e '.[dev,hf]'
	$(if $(P2PTRAIN),$(VENV)/bin/uv pip install --quiet --python $(dir $(P2PTRAIN))python --constraint $(CONSTRAINTS) \
	  "$$(ls -t $(DIST)/*.whl | head -n 1)[hf]")
	$(VENV)/bin/pytest -n $(PYTEST_WORKERS) -m hf -rs

test-deploy: setup ## what checks deploy/ and trackers; installs the extras [deploy,wandb,tensorboard], takes promtool
	$(INSTALL) -e '.[dev,deploy,wandb,tensorboard]'
	$(VENV)/bin/pytest -n $(PYTEST_WORKERS) -rs --no-skips tests/deploy tests/observe/test_tracking*.py \
	  --ignore tests/deploy/test_deploy_release.py

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

$(ARM)/.installed: tests/arm/wheels.txt tests/helpers/arm.py
	$(VENV)/bin/python -m tests.helpers.arm $(ARM)
	touch $@

test-arm: setup $(ARM)/.installed ## the exact arithmetic on Arm, emulated by qemu, in out/arm; on Debian, whose apt brings Python for Arm
	rm -rf $(ARM)/wheel
	$(MAKE) --no-print-directory dist MACHINE=aarch64 DIST=$(ARM)/wheel
	ARM=$(ARM) $(VENV)/bin/pytest -n $(PYTEST_WORKERS) tests/arm -m arm -rs --no-skips-of=arm

# PYENV_VERSION: where pyenv has several, its commands otherwise start none but the one that is chosen.
test-pythons: dist ## the wheel's demo and quick tests under other versions of Python (PYTHONS), each in out/python-*
	@for version in $(PYTHONS); do \
	  place=out/python-$$version; \
	  test -x $$place/bin/python || PYENV_VERSION=$$version $(VENV)/bin/uv venv --quiet --python $$version $$place \
	    || { echo "no Python $$version can be had here: nothing is tested with it" >&2; continue; }; \
	  $(VENV)/bin/uv pip install --quiet --python $$place/bin/python --constraint $(CONSTRAINTS) --reinstall-package p2ptrain \
	    "$$(ls -t dist/*.whl | head -n 1)[dev]" \
	  && (cd $$place && bin/p2ptrain demo --nodes 2 --rounds 4) \
	  && $$place/bin/python -m pytest -n $(PYTEST_WORKERS) -m 'not slow and not daemons' $(PYTHONS_TESTS) || exit 1; \
	done

# Not in $(VENV): this package does not take it. The hashes are of its wheels for Linux, macOS and Windows.
$(IROH)/.installed: Makefile
	printf 'iroh==1.2.0 %s %s %s %s\n' \
	  --hash=sha256:61222adc81745009f34ca1fed42633f6cac865c9ed35a4701eb8c0174cb8399a \
	  --hash=sha256:049eef820a5710093cb0cc9d645da00f69dfbf5b0ac7647741da2168b79d0c10 \
	  --hash=sha256:d7c407d9483c8e0c7680e569f906e892a19d4c13af537ba9127f7de130c0d399 \
	  --hash=sha256:1eedafeb906f57d4252b69379673b039894e28a35bbb9b54ddfdcae83411cfa5 \
	  | $(VENV)/bin/pip install --quiet --quiet --no-deps --upgrade --require-hashes --target $(IROH) -r /dev/stdin
	touch $@

iroh: setup $(IROH)/.installed ## the wheel that benchmarks/transports.py compares p2pd with, in out/iroh

gpu: SECONDS :=
gpu: ## every figure of a GPU in out/gpu.json, in nine minutes (SMALL=1: tiny, on a CPU; ONLY=steps; JSON=file; SECONDS=300)
	@if [ -x $(VENV)/bin/python ] || ! ls $(GPU_WHEELS)/*.whl > /dev/null 2>&1; then $(MAKE) --no-print-directory setup; \
	else rm -rf $(GPU_SITE) && for wheel in $(GPU_WHEELS)/*.whl; do $(PYTHON) -m zipfile -e $$wheel $(GPU_SITE) || exit 1; done; \
	  chmod +x $(GPU_SITE)/hivemind/hivemind_cli/p2pd || true; fi
	test -e p2ptrain/exact/libnative.so || $(CC) $$(sed -n 's/^FLAGS = "\(.*\)"$$/\1/p' deploy/build_native.py) \
	  -o p2ptrain/exact/libnative.so p2ptrain/exact/native.c || true
	$(if $(SMALL),,env -u OMP_NUM_THREADS) \
	  $$(test -x $(VENV)/bin/python && echo $(VENV)/bin/python || echo env PYTHONPATH=$(GPU_SITE) $(PYTHON)) \
	  -m benchmarks.gpu $(if $(SMALL),--small) $(ONLY:%=--only %) $(JSON:%=--json %) $(SECONDS:%=--seconds %)

gpu-wheels: setup ## what `make gpu` takes on a machine without a network, as wheels in out/gpu-wheels
	$(VENV)/bin/python benchmarks/gpu/wheels.py $(GPU_WHEELS)

clean: ## remove .venv and all that tools leave behind
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
