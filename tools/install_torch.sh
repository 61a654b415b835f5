#!/bin/sh
# Install PyTorch 2.13.0 beside the project if its CPU build is to be had; a CUDA build (gigabytes) is left alone.
pip=".venv/bin/python -m pip --disable-pip-version-check"
.venv/bin/python -c 'import torch, sys; sys.exit(not torch.__version__.startswith("2.13.0"))' 2>/dev/null && exit 0
plan=$($pip install --quiet --dry-run --report - torch==2.13.0 2>/dev/null) || { echo "peers: torch 2.13.0 is not to be had; its tests are skipped"; exit 0; }
case "$plan" in
    *nvidia*) echo "peers: only a CUDA build of torch 2.13.0 is to be had; its tests are skipped"; exit 0 ;;
esac
$pip install --quiet torch==2.13.0
