#!/bin/sh
# Put JAX with the TPU compiler (libtpu) into an environment of its own; no TPU is needed to compile for one.
# Prints its Python, or says on stderr why there is none.
set -eu
venv=.venv-tpu
python=${PYTHON:-python3}
jax=$(.venv/bin/python -c 'import jax; print(jax.__version__)')
if [ ! -f "$venv/.installed-$jax" ]; then
    "$python" -m venv "$venv"
    if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "jax[tpu]==$jax" -e . >&2; then
        echo "compile-tpu: skipped, jax[tpu]==$jax does not install here" >&2
        exit 0
    fi
    touch "$venv/.installed-$jax"
fi
echo "$venv/bin/python"
