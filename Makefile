# Each target sets itself up: .venv, installation, run.
SHELL := /bin/sh
PY := .venv/bin/python
PYTEST := $(PY) -m pytest
JOBS ?= 2

.PHONY: demo test test-new lint peers nightly compile-tpu notebooks notebooks-check claims clean

demo:
	@tools/setup.sh train
	$(PY) -m train demo

test:
	@tools/setup.sh dev
	$(PYTEST) -n $(JOBS) --dist loadgroup -m "not nightly"

lint:
	@tools/setup.sh dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# The tests marked `fast` on the newer JAX, where a Python 3.12 or newer is found.
test-new:
	@python=$$(tools/find_python.sh); \
	if [ -z "$$python" ]; then echo "test-new: skipped, no Python 3.12 or newer found"; \
	else tools/setup.sh test .venv-new "$$python" && .venv-new/bin/python -m pytest -n $(JOBS) --dist loadgroup -m "fast and not nightly"; fi

# Comparisons with PyTorch; only a CPU build of the named release is taken.
peers:
	@tools/setup.sh dev
	@tools/install_torch.sh
	$(PYTEST) tests/peers || [ $$? -eq 5 ]  # 5: every file was skipped by name

nightly:
	@tools/setup.sh dev
	$(PYTEST) -n $(JOBS) --dist loadgroup
	$(MAKE) compile-tpu

# Every kernel through the TPU compiler, which needs no TPU: in an environment of its own, skipped where it has none.
compile-tpu:
	@tools/setup.sh dev
	@python=$$(tools/install_tpu.sh); \
	if [ -n "$$python" ]; then JAX_PLATFORMS=cpu $$python tools/compile_tpu.py; fi

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
	rm -rf .venv .venv-new .venv-tpu .cache runs build dist
