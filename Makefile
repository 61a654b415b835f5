# Each target sets itself up: .venv, installation, run.
SHELL := /bin/sh
PY := .venv/bin/python
PYTEST := $(PY) -m pytest
JOBS ?= 2
# A file's tests stay in one worker: they share compiled programs.
SPREAD := -n $(JOBS) --dist loadfile

.PHONY: demo test test-new test-new-family lint peers nightly compile-tpu compile-gpu notebooks notebooks-check claims clean

demo:
	@tools/setup.sh train
	$(PY) -m train demo

# Which tests: docs/testing.md says how they are divided; SELECT="" takes all.
test: SELECT ?= not nightly
test:
	@tools/setup.sh dev
	$(PYTEST) $(SPREAD) -m "$(SELECT)"

lint:
	@tools/setup.sh dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# Engine, scope and layers (`fast`), then the other operators (`family`), on the newer JAX where a Python 3.12 or newer is
# found.
test-new: SELECT ?= fast and not nightly
test-new-family: SELECT ?= family and not nightly
test-new test-new-family:
	@python=$$(tools/find_python.sh); \
	if [ -z "$$python" ]; then echo "$@: skipped, no Python 3.12 or newer found"; \
	else tools/setup.sh test .venv-new "$$python" && .venv-new/bin/python -m pytest $(SPREAD) -m "$(SELECT)"; fi

# Comparisons with PyTorch; only a CPU build of the named release is taken.
peers:
	@tools/setup.sh dev
	@tools/install_torch.sh
	$(PYTEST) tests/peers || [ $$? -eq 5 ]  # 5: every file was skipped by name

# Everything, some hours: the steps and figures of the last run are in docs/nightly.md.
nightly:
	@tools/setup.sh dev
	$(PY) tools/nightly.py --write

# Every kernel through the compiler of a TPU or GPU, which need not be there: in an environment of its own, skipped where
# it has none.
compile-tpu compile-gpu:
	@tools/setup.sh dev
	@platform=$(@:compile-%=%); python=$$(tools/install_compiler.sh $$platform); \
	if [ -n "$$python" ]; then \
	cuda=$$($$python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cu13; \
	JAX_PLATFORMS=cpu XLA_FLAGS=$${XLA_FLAGS:-}" --xla_gpu_cuda_data_dir=$$cuda" $$python tools/compile_ahead.py $$platform; fi

notebooks:
	@tools/setup.sh dev
	$(PY) tools/run_notebooks.py --write

notebooks-check:
	@tools/setup.sh dev
	$(PY) tools/run_notebooks.py

# docs/claims.md: what is claimed of normalization, what was run here, figures and verdicts; some minutes.
claims:
	@tools/setup.sh dev
	$(PY) -m benchmarks.claims --write
	$(PY) -m benchmarks.templates --write > /dev/null

clean:
	rm -rf .venv .venv-new .venv-tpu .venv-gpu .cache runs build dist
