# Two commands: `make quickstart` and `make test`. Everything is installed into .venv, nothing outside it.

# The first Python that is new enough. 3.11 comes first: constraints.txt was tried with it.
# Another one: make test PYTHON=/path/to/python
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$python && break; done)

VENV := .venv
OLDEST := .venv-transformers-5.17
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
PYTEST := -m pytest
DECLARED := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help quickstart install test test-slow test-browser test-gpu test-multigpu kill-test interop quantize-quality lint types wheel clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: $(VENV)/.installed  ## install, then tune a small real model on a CPU and show what it says
	$(VENV)/bin/swiftkit sft --model smollm2-135m --dataset data/persona.jsonl --num_train_epochs 6

install: $(VENV)/.installed-dev  ## swiftkit, editable, with what tests, lint and type check need

test: $(VENV)/.installed-dev  ## install what the tests need and run the quick ones
	$(VENV)/bin/python $(PYTEST) -m "not slow and not gpu and not multigpu and not browser"

test-slow: $(VENV)/.installed-dev $(OLDEST)/.installed-dev  ## the slow tests; then some with the oldest transformers
	$(VENV)/bin/python $(PYTEST) -m "slow and not gpu and not multigpu and not browser"
	$(OLDEST)/bin/python $(PYTEST) -m "compat and not gpu and not multigpu and not browser"

test-browser: $(VENV)/.installed-dev  ## open the HTML pages in a headless Chromium, where there is one
	$(VENV)/bin/python $(PYTEST) -m browser

N ?= 5
kill-test: $(VENV)/.installed-dev  ## kill N runs at random moments, resume, compare bit for bit (make kill-test N=200)
	$(VENV)/bin/python -m tests.kill_test --times $(N)

test-gpu:  ## what needs a GPU, in the Python of PYTHON (it has a CUDA build of torch)
	$(PYTHON) $(PYTEST) -m "gpu and not multigpu"

test-multigpu:  ## what needs several GPUs, over all that this machine has, in the Python of PYTHON
	$(PYTHON) $(PYTEST) -m multigpu

INTEROP := .interop
interop: $(INTEROP)/auto-gptq/.installed $(INTEROP)/gptqmodel/.installed $(INTEROP)/compressed/.installed $(VENV)/.installed  ## quantized models, read by auto-gptq, gptqmodel and transformers (make interop TEXT=FILE)
	@test -n "$(TEXT)" || { echo "give a text to calibrate on: make interop TEXT=my.txt" >&2; exit 1; }
	$(VENV)/bin/python benchmarks/quantize_interop.py --envs $(INTEROP) --dataset $(TEXT)

QUALITY_ROWS := fp32,rtn,gptq,gptqmodel,rtn-asymmetric,awq,llmcompressor-awq
quantize-quality: $(INTEROP)/gptqmodel/.installed $(INTEROP)/llmcompressor/.installed $(VENV)/.installed  ## perplexity beside other quantizers (CALIBRATION=FILE TEXT=FILE)
	@test -n "$(CALIBRATION)" -a -n "$(TEXT)" || { echo "give CALIBRATION=valid.txt TEXT=test.txt" >&2; exit 1; }
	$(VENV)/bin/python benchmarks/quantize_quality.py --envs $(INTEROP) --calibration $(CALIBRATION) --text $(TEXT) \
		--rows $(QUALITY_ROWS)

lint: $(VENV)/.installed-dev  ## ruff: rules and format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.installed-dev  ## mypy
	$(VENV)/bin/mypy

wheel: $(VENV)/.installed  ## build dist/swiftkit-*.whl, with the recipes and data inside
	$(VENV)/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

clean:  ## remove environments, builds and caches; runs in output/ stay
	rm -rf $(VENV) $(OLDEST) $(INTEROP) dist build .pytest_cache .mypy_cache .ruff_cache
	find swiftkit tests -type d -name __pycache__ -exec rm -rf {} +

# ---- environments of other readers; their packages exclude each other's versions, and ours -----------------

$(INTEROP)/auto-gptq/.installed:
	$(PYTHON) -m venv $(INTEROP)/auto-gptq
	$(INTEROP)/auto-gptq/bin/python $(PIP_INSTALL) torch==2.13.0 transformers==4.57.6 tokenizers==0.22.2 \
		huggingface_hub==0.36.2 peft==0.17.1 datasets==3.6.0 accelerate==1.7.0 numpy==2.4.6 rouge gekko sentencepiece
	$(INTEROP)/auto-gptq/bin/python $(PIP_INSTALL) --no-deps auto-gptq==0.7.1
	@touch $@

$(INTEROP)/gptqmodel/.installed:
	$(PYTHON) -m venv $(INTEROP)/gptqmodel
	$(INTEROP)/gptqmodel/bin/python $(PIP_INSTALL) torch==2.13.0 transformers==5.24.0 numpy==2.2.6 setuptools wheel
	$(INTEROP)/gptqmodel/bin/python $(PIP_INSTALL) --no-build-isolation gptqmodel==7.6.0 optimum==2.3.0 numpy==2.2.6
	@touch $@

$(INTEROP)/llmcompressor/.installed:
	$(PYTHON) -m venv $(INTEROP)/llmcompressor
	$(INTEROP)/llmcompressor/bin/python $(PIP_INSTALL) torch==2.13.0 transformers==5.17.0 numpy==2.4.6 \
		llmcompressor==0.14.0.1 compressed-tensors==0.19.0
	@touch $@

$(INTEROP)/compressed/.installed:
	$(PYTHON) -m venv $(INTEROP)/compressed
	$(INTEROP)/compressed/bin/python $(PIP_INSTALL) torch==2.13.0 transformers==5.24.0 numpy==2.4.6 accelerate \
		compressed-tensors==0.20.1
	@touch $@

# ---- environments: a stamp is newer than what it was installed from ----------------------------------------

$(VENV)/bin/python $(OLDEST)/bin/python:
	@test -n "$(PYTHON)" || { echo "swiftkit needs Python 3.11 or newer: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(patsubst %/bin/python,%,$@)

$(VENV)/.installed: $(DECLARED) | $(VENV)/bin/python
	@echo "installing swiftkit into $(VENV) (a minute or two)"
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(DECLARED) | $(VENV)/bin/python
	@echo "installing swiftkit and its test tools into $(VENV) (a minute or two)"
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@touch $(VENV)/.installed $@

$(OLDEST)/.installed-dev: $(DECLARED) constraints-transformers-5.17.txt | $(OLDEST)/bin/python
	@echo "installing the same with the oldest transformers into $(OLDEST) (a minute or two)"
	$(OLDEST)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	$(OLDEST)/bin/python $(PIP_INSTALL) -c constraints-transformers-5.17.txt transformers
	@touch $@
