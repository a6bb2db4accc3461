# From an empty clone to a served model: `make demo`. What else there is: `make help`.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Python 3.11 or newer, to make the environment with.
PYTHON ?= python3
# Python 3.12 or newer, for the wheel that serves all of these.
PYTHON312 ?= python3.12
# For pip: an index, for instance, on a machine where plain torch is not the CPU build.
PIP_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
# pip compiles no Python ahead (--no-compile): first imports do, and have to keep it.
export PYTHONDONTWRITEBYTECODE :=
# No advice of pip's over the output, in programs that call it, too.
export PIP_ROOT_USER_ACTION := ignore
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Where there is no Ninja, too.
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc)
# What a new vLLM is tried with, unless VLLM and NEXT say otherwise: its names, engines of a kind, the
# GPU's, and what docs/surprises.md says. With 0.33 vLLM's own log-probs of prompts fail where there
# are adapters (device_lora).
NEXT ?= $(foreach name,vllm_names vllm_contract upstream plugin refusals remedies finer doctor scheduler runners \
	batching kv_connectors kv_hints store_engine store_sessions serving_store cuda_platform,$(wildcard tests/*/test_$(name).py)) \
	$(filter-out %_lora.py,$(wildcard tests/device/test_device_*.py)) $(wildcard tests/surprises/test_*.py)
# Files of tests that want all cores: to collect those of all files takes a while.
WITH_CORES = $(shell grep -l 'mark\.cores' tests/*/test_*.py)
CODE := $(wildcard vllm_kvretrieval benchmarks examples tests tools)

LOCKS := requirements/runtime.txt requirements/build.txt requirements/dev.txt
METADATA := tools/packaging/vllm-metadata
# What compiles is there in seconds, and compiles while the rest is fetched.
TOOLS := $(VENV)/.tools-$(shell sha256sum < requirements/build.txt | cut -c1-12)
# Named after what is installed: another lock file means another stamp, whatever the clocks say.
DIGEST := $(shell cat $(LOCKS) $(METADATA)/pyproject.toml | sha256sum | cut -c1-12)
INSTALLED := $(VENV)/.installed-$(DIGEST)
# For tests alone: serving on a CPU is quieter without.
INTERPRETER_LOCK := requirements/interpreter.txt
INTERPRETER := $(VENV)/.interpreter-$(shell sha256sum < $(INTERPRETER_LOCK) | cut -c1-12)
TORCHVISION := build/torchvision/.installed
BUILT := $(VENV)/.built
SOURCES := pyproject.toml CMakeLists.txt tools/packaging/backend.py $(wildcard csrc/cpu/* csrc/cpu/*/*)

.PHONY: help venv build wheel wheels check-wheels docs lint-workflows notebook model torchvision test-models models demo lint style types test shared-tests test-all test-next bench gpu gpu-bundle clean distclean

help:
	@echo "make venv    environment with the pinned dependencies, in $(VENV)"
	@echo "make build   the package with its C++ extension, installed there (editable)"
	@echo "make wheel   the same as a wheel, in dist; make wheels: those of all Pythons, and the sdist"
	@echo "make check-wheels  install them into empty environments"
	@echo "make model   SmolLM2-135M-Instruct, in models; make models: every model of tests"
	@echo "make model NAME=qwen-1.5b  another one: tools/get_model.py lists them"
	@echo "make demo    serve that model, ask it about a long document, compare with vLLM alone"
	@echo "make lint    ruff, mypy, and which folder may import which"
	@echo "make test    all of the set-up, lint and the test suite; make test-all: slow ones, too"
	@echo "make test-next VLLM=0.33.0   the tests that a new vLLM is tried with, over its Python"
	@echo "make docs    the pages of documentation, in build/site"
	@echo "make notebook  run examples/compare.ipynb, and keep what its cells give"
	@echo "make lint-workflows  check the workflows and forms of a public host, CITATION.cff and compose file"
	@echo "make bench   speed against stock vLLM"
	@echo "make gpu     what needs an NVIDIA GPU (CALLS=day: nine minutes of it)"
	@echo "make gpu-bundle  what a GPU machine without network needs to be brought (VLLM=0.33: of that vLLM)"
	@echo "make clean   remove builds and caches; make distclean: $(VENV) and models, too"

venv: $(INSTALLED)

# torch's CUDA build, which pip takes where the index has no other.
CUDA_TORCH := ls $(VENV)/lib/python3*/site-packages/torch/lib/libtorch_cuda.so >/dev/null 2>&1

# What is missing on the machine is said before anything is downloaded.
$(TOOLS):
	@test "$$(uname -sm)" = "Linux x86_64" || \
	  { echo "make sets up Linux on x86-64, and this is $$(uname -sm): see docs/installation.md"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "needs Python 3.11 or newer: make PYTHON=/path/to/python3"; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || \
	  { echo "needs the C++ compiler $${CXX:-g++}: install it (Debian: g++)"; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig as s; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' || \
	  { echo "needs Python.h, the C headers of $(PYTHON): install them (Debian: python3-dev)"; exit 1; }
	@$(PYTHON) -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' || \
	  { echo "vLLM's CPU kernels need libnuma.so.1: install libnuma (Debian: libnuma1)"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || \
	  { echo "venv: making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(PIP) install -q --no-deps --no-compile $(PIP_FLAGS) -r requirements/build.txt \
	  $$(grep -E '^(ninja|packaging)==' requirements/runtime.txt)
	@rm -f $(VENV)/.tools-* && touch $@

$(INSTALLED): | $(TOOLS)
	@echo "venv: fetching $$(cat $(LOCKS) | grep -c ==) pinned distributions (some minutes)"
	@$(PIP) install --no-deps --no-compile --progress-bar off $(PIP_FLAGS) $(addprefix -r ,$(LOCKS)) | \
	  sed -unE 's/^Collecting ([^ ]+).*/  \1/p; s/^Installing collected.*/venv: unpacking/p'
	@! $(CUDA_TORCH) || { $(PIP) uninstall -q -y torch; \
	  echo "The index has torch's CUDA build, which does not load without a GPU's libraries (it is uninstalled again)."; \
	  echo "Name PyTorch's index of CPU builds (docs/installation.md, \"The URL of CPU builds\", says where to find its URL):"; \
	  echo "  make demo PIP_FLAGS=\"--extra-index-url URL\""; exit 1; }
	@$(PIP) install -q --no-deps --no-build-isolation ./$(METADATA)
	@rm -f $(VENV)/.installed-* && touch $@
	@echo "venv: done"

$(INTERPRETER): $(INSTALLED)
	@echo "venv: fetching Triton, for tests"
	@$(PIP) install -q --no-deps $(PIP_FLAGS) -r $(INTERPRETER_LOCK)
	@rm -f $(VENV)/.interpreter-* && touch $@

# With -j2 it compiles while it fetches.
build: $(INSTALLED) $(BUILT)

# Editable: Python files are read from the checkout; what C++ is built from makes it rebuild.
$(BUILT): $(TOOLS) $(SOURCES)
	@echo "build: compiling the C++ extension"
	@$(PIP) install -q --no-deps --no-build-isolation --config-settings=build-dir=build/editable -e .
	@touch $@
	@echo "build: done"

# Serves every Python from 3.12 on where it is made with one of those.
wheel: $(INSTALLED)
	$(PIP) wheel -q --no-deps --no-build-isolation -w dist .

# A wheel for Python 3.11, one for all newer ones, and the sdist.
wheels:
	bash tools/packaging/wheels.sh $(PYTHON) $(PYTHON312)

check-wheels: wheels
	bash tools/packaging/check_wheels.sh $(PYTHON) $(PYTHON312)

# In environments of their own, named after what is installed there.
DOCS := build/docs-$(shell sha256sum < requirements/docs.txt | cut -c1-12)
WORKFLOWS := build/workflows-$(shell sha256sum < requirements/workflows.txt | cut -c1-12)
NOTEBOOK := build/notebook-$(shell sha256sum < requirements/notebook.txt | cut -c1-12)

docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict

lint-workflows: $(WORKFLOWS)/.installed
	$(WORKFLOWS)/bin/python -m check_jsonschema --builtin-schema vendor.github-workflows \
	  .github/workflows/*.yml
	$(WORKFLOWS)/bin/python -m check_jsonschema --builtin-schema vendor.github-issue-forms \
	  .github/ISSUE_TEMPLATE/*.yml
	$(WORKFLOWS)/bin/python -m check_jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(WORKFLOWS)/bin/python -m check_jsonschema --builtin-schema vendor.compose-spec docker/compose.yaml
	$(WORKFLOWS)/bin/zizmor --offline --no-progress --config .github/zizmor.yml .github/workflows

$(DOCS)/.installed: requirements/docs.txt
$(WORKFLOWS)/.installed: requirements/workflows.txt
$(NOTEBOOK)/.installed: requirements/notebook.txt
$(DOCS)/.installed $(WORKFLOWS)/.installed $(NOTEBOOK)/.installed:
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install -q --no-deps $(PIP_FLAGS) -r $<
	@touch $@

# With what its cells give. Its environment sees that of vLLM.
notebook: $(NOTEBOOK)/.installed build
	@cd $(NOTEBOOK) && of() { "$$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; } && \
	  echo "import site; site.addsitedir('$$(of $(CURDIR)/$(BIN)/python)')" > "$$(of bin/python)/vllm.pth"
	$(NOTEBOOK)/bin/python tools/run_notebook.py examples/compare.ipynb

# One that tools/get_model.py lists, by the command line alone: some environments have a NAME, too.
model: $(INSTALLED)
	@$(BIN)/python tools/get_model.py $(if $(filter command,$(origin NAME)),$(NAME),smollm2)

# For slow tests, which read text alone: a folder of its own, since its operators do not load.
torchvision: $(TORCHVISION)

$(TORCHVISION): requirements/torchvision.txt | $(INSTALLED)
	@$(BIN)/python -m pip install -q --no-deps --upgrade $(PIP_FLAGS) --target $(@D) -r $<
	@touch $@

# What tests need that are not slow.
test-models: $(INSTALLED)
	@$(BIN)/python tools/get_model.py smollm2 smollm2-32k gemma3

models: $(INSTALLED)
	@$(BIN)/python tools/get_model.py smollm2 smollm2-32k gemma3 qwen

# One compiles while the other downloads.
demo:
	@$(MAKE) -j2 build model
	@$(BIN)/python examples/demo.py

lint: style types

# mypy reads the types of the extension, which the build writes.
types: build
	$(BIN)/mypy $(CODE)

style: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache

# An engine keeps about one core busy, so the tests share the cores out, and mypy has a part of them
# at first; then come those that want all cores. It ends with the instruction sets that this machine
# has for the kernels.
test:
	@$(MAKE) -j4 build test-models style $(INTERPRETER)
	@$(MAKE) -j2 types shared-tests
	$(BIN)/python -m pytest -m "cores and not slow" $(WITH_CORES)

shared-tests:
	$(BIN)/python -m pytest -m "not cores and not slow" -n auto --dist loadfile

# Another vLLM's Python over the installed libraries: is there what we call, and do engines serve?
test-next: build test-models $(INTERPRETER)
	@test -n "$(VLLM)" || { echo "say which: make test-next VLLM=0.33.0"; exit 1; }
	$(BIN)/python tools/overlay.py $(VLLM)
	VLLM_KVRETRIEVAL_ALLOW_UNTESTED=1 PYTHONPATH=$(CURDIR)/build/vllm-$(VLLM) \
	  $(BIN)/python -m pytest $(NEXT)

# And the combinations that it leaves out, some minutes more.
test-all: test
	@$(MAKE) models torchvision
	$(BIN)/python -m pytest -m "slow and not cores" -n auto --dist loadfile
	$(BIN)/python -m pytest -m "slow and cores" $(WITH_CORES)

bench: build models
	$(BIN)/python -m benchmarks.serving decode

# All of them take the better part of an hour: make gpu CALLS=day.
CALLS ?= day kernels engine host million baseline sanitizer

# A call that fails does not keep the next from being made.
gpu:
	@failed=; for call in $(CALLS); do \
	  PYTHON=$(PYTHON) bash tools/gpu/run.sh $$call || failed="$$failed $$call"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

gpu-bundle:
	$(PYTHON) tools/gpu/bundle.py build $(addprefix --vllm ,$(VLLM)) .gpu/bundle

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache vllm_kvretrieval/_cpu.pyi $(BUILT)

distclean: clean
	rm -rf $(VENV) models
