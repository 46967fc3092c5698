# Everything a newcomer or CI runs. Each target installs what it needs first.
# A Python that is linked to a shared libpython, as pyenv's with --enable-shared, runs code about a fifth slower. If
# `python3` is such a one, the default is /usr/bin/python3, if that is at least 3.11 and has ensurepip and C headers.
FIT = import ensurepip, os, sys, sysconfig; \
	sys.exit(sys.version_info < (3, 11) or not os.path.exists(sysconfig.get_path("include") + "/Python.h"))
PYTHON ?= $(shell ldd "$$(python3 -c 'import sys; print(sys.executable)')" 2>/dev/null | grep -q libpython \
	&& /usr/bin/python3 -c '$(FIT)' 2>/dev/null && echo /usr/bin/python3 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := $(VENV)/.native
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
PEERS_VENV := .venv-peers
PEERS_STAMP := $(PEERS_VENV)/.installed
# Half of the tests' time is waiting, so three processes keep two cores busy. A file's tests stay in one process; what is
# long comes early.
PARALLEL = -n $(shell expr $$(nproc) \* 3 / 2) --maxprocesses 6 --dist loadfile --no-loadscope-reorder
ZIG = $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt ziglang
export DAGSTER_DISABLE_TELEMETRY := 1
# Container images set it: each of the hundreds of processes that tests start would then compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo test suite test-slow test-escape test-redteam test-browser test-vllm test-large test-peers test-trainers test-kubernetes test-gpu fuzz-frames lint style types format proto ui bench clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

install: $(NATIVE)  ## virtual environment in .venv with everything the demo and the tests need

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Triplane needs Python 3.11 or newer: set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch numpy
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

# without a C compiler the one in ziglang's wheel compiles
$(NATIVE): $(STAMP) $(wildcard envd/native/*.c envd/native/*.h) envd/native/build.py
	command -v "$${CC:-cc}" >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || $(ZIG)
	$(BIN)/python -m envd.native.build
	touch $@

demo: $(NATIVE)  ## one small model learns to fix code, on this CPU, in minutes
	$(BIN)/triplane demo

# mypy uses one core and the suite leaves some of two idle: they run side by side
test: style  ## lint, types, import rules and the whole default suite
	$(MAKE) --no-print-directory --jobs=2 types suite

suite: $(NATIVE)  ## the default test suite alone
	$(BIN)/pytest $(PARALLEL)

SLOW = tests
test-slow: $(NATIVE)  ## minutes-long suites: end to end, the web server, kill and resume, no C compiler; SLOW=tests/trainer
	$(ZIG)
	$(BIN)/pytest $(PARALLEL) -m slow $(SLOW)

test-large: $(NATIVE) $(VLLM_STAMP)  ## a checkpoint of 3 GB in bounded memory; takes 12 GB of memory and of disk
	$(BIN)/pytest -s -m large

test-escape: $(NATIVE)  ## attacks on sandboxes, on every backend that starts here; WITHOUT="gvisor qemu" leaves these out
	$(BIN)/pytest -m escape tests/escape -k "$(patsubst %,not % and,$(WITHOUT)) escape"

test-redteam: $(NATIVE)  ## every forged final state is caught, every honest one is clean
	$(BIN)/pytest -n auto --maxprocesses 4 -m redteam tests/redteam

SECONDS = 120
fuzz-frames: $(NATIVE)  ## mutated frames and requests against the agent and the spawner under ASan and UBSan; SECONDS=600
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

test-browser: $(NATIVE)  ## needs Chromium (Debian's package chromium)
	$(BIN)/pytest -m browser

test-vllm: $(NATIVE) $(VLLM_STAMP)  ## iterations on a real vLLM, on this CPU; its environment takes 3.5 GB in .venv-vllm
	$(BIN)/pytest -m vllm tests/vllm tests/inference/test_engine_contract.py

# afterwards without packages that it depends on, does not use on a CPU, and that do not fit its torch
$(VLLM_STAMP): tests/vllm/requirements.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --requirement $< \
		|| { echo "make test-vllm: the packages of $< can't be installed in $(VLLM_VENV): see pip's message above; they come from PyPI" >&2; exit 1; }
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

# tests/trainer/conftest.py needs packages of Triplane that this environment lacks
test-peers: $(PEERS_STAMP)  ## the trainer's losses against TRL's; its environment takes 1.5 GB in .venv-peers
	$(PEERS_VENV)/bin/pytest --noconftest -m peers tests/trainer/test_against_trl.py

$(PEERS_STAMP): tests/trainer/requirements-peers.txt
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/pip install --quiet --disable-pip-version-check --requirement $< \
		|| { echo "make test-peers: the packages of $< can't be installed in $(PEERS_VENV): see pip's message above; they come from PyPI" >&2; exit 1; }
	touch $@

test-trainers: $(NATIVE) $(PEERS_STAMP)  ## other trainers learn over the bridge: a PPO loop, and TRL's GRPOTrainer
	$(BIN)/pytest -s -m trainers tests/trainers

test-kubernetes: $(NATIVE)  ## on a real cluster: needs KUBECONFIG, kubectl and TRIPLANE_TEST_IMAGE; docs/kubernetes.md
	$(BIN)/pytest -s -m kubernetes tests/kubernetes/cluster

test-gpu: $(NATIVE)  ## needs a CUDA device
	$(BIN)/pytest -n auto --maxprocesses 8 -m gpu tests/kernels tests/trainer

lint: style types  ## ruff, mypy (strict), import rules
	$(BIN)/pytest tests/test_import_rules.py

style: $(STAMP)  ## ruff alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy (strict) alone
	$(BIN)/mypy

format: $(STAMP)  ## reformat in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(STAMP)  ## regenerate contracts/pb from contracts/protos
	$(BIN)/python contracts/protos/generate.py

ui: $(NATIVE)  ## the Dagster web server and daemon on http://127.0.0.1:3000
	$(BIN)/triplane ui

bench: $(NATIVE)  ## every benchmark against its goals; GPU benchmarks only if there is a GPU
	for name in $$($(BIN)/python -m benchmarks list --names); do $(BIN)/python -m benchmarks $$name || test $$? = 2 || exit 1; done

clean:  ## remove the virtual environments and caches; keeps .triplane
	rm -rf $(VENV) $(VLLM_VENV) $(PEERS_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
