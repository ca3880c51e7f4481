# The environment is made once, in .venv, and brought up to date when pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-gpu exactness mutants invariance soak bench curves startup lint train-demo clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

demo: $(READY)  ## complete eight prompts in one batch, then each alone, and compare
	$(BIN)/polytempo demo $(ARGS)

test: $(READY)  ## quick tests, what CI runs
	$(BIN)/python -m pytest -m 'not long and not gpu' $(ARGS)
	$(if $(ARGS),,$(BIN)/python -m pytest -m 'not long and not gpu and not twin' --kernels auto tests/model)

test-long: $(READY)  ## the sweeps that take minutes
	$(BIN)/python -m pytest -m 'long and not gpu' $(ARGS)

test-gpu: $(READY)  ## what needs a CUDA device; the same tests run on the CPU in `make test`
	$(BIN)/python -m pytest -m gpu -rs tests $(ARGS)

exactness: $(READY)  ## 250,000 speculated tokens against each request alone without drafts
	$(BIN)/python -m pytest -m long -s tests/engine/test_speculation_random.py $(ARGS)

mutants: $(READY)  ## break one line at a time; the tests must notice
	$(BIN)/python tests/mutations/run.py $(ARGS)

invariance: $(READY)  ## probe whether rows depend on their neighbours, on this machine
	$(BIN)/python -m polytempo.invariance $(ARGS)

SECONDS ?= 600
soak: $(READY)  ## ten minutes of clients that come, vanish and send nonsense; SECONDS=60 is shorter
	SECONDS_TO_RUN=$(SECONDS) $(BIN)/python tests/server/soak.py $(ARGS)

bench: $(READY)  ## engine steps in C++ against torch, as ratios, beside the last committed ones
	$(BIN)/python benchmarks/regression.py $(ARGS)

curves: $(READY)  ## engine steps, state, prefill and loading by size, with plots in runs/scale
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/scale.py $(ARGS)

startup: $(READY)  ## time to the first token from the start of the process
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/startup.py $(ARGS)

lint: $(READY)  ## style checks
	$(BIN)/ruff check .

train-demo: $(READY)  ## train the demo model from nothing into runs/demo/model (about 100 minutes on one core)
	$(BIN)/python scripts/train_demo.py $(ARGS)

clean:  ## remove the environment, caches and builds, but not runs/
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
