#!/bin/sh
# Put JAX with a compiler for TPUs (libtpu) or GPUs (the CUDA plugin and ptxas, without the libraries that only running
# needs) into an environment of its own; neither needs the device. Prints its Python, or says on stderr why there is none.
# usage: tools/install_compiler.sh tpu|gpu
set -eu
platform=$1
venv=.venv-$platform
python=${PYTHON:-python3}
jax=$(.venv/bin/python -c 'import jax; print(jax.__version__)')
pip="$venv/bin/python -m pip install --quiet --disable-pip-version-check"
if [ ! -f "$venv/.installed-$jax" ]; then
    "$python" -m venv "$venv"
    case $platform in
        tpu) $pip "jax[tpu]==$jax" -e . >&2 ;;
        gpu) $pip "jax==$jax" -e . nvidia-cuda-nvcc nvidia-nvvm >&2 &&
            $pip --no-deps "jax-cuda13-plugin==$jax" "jax-cuda13-pjrt==$jax" >&2 ;;
    esac || { echo "compile-$platform: skipped, the compiler for jax $jax does not install here" >&2; exit 0; }
    touch "$venv/.installed-$jax"
fi
echo "$venv/bin/python"
