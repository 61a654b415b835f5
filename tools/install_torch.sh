#!/bin/sh
# Install PyTorch 2.13.0 beside the project if its CPU build is to be had; a CUDA build (gigabytes) is left alone.
python=.venv/bin/python
pip="$python -m pip --disable-pip-version-check"
$python -c 'import torch, sys; sys.exit(not torch.__version__.startswith("2.13.0"))' 2>/dev/null && exit 0
plan=$($pip install --quiet --dry-run --report - torch==2.13.0 2>/dev/null) || {
    echo "peers: torch 2.13.0 is not to be had; its tests are skipped"
    exit 0
}
# the packages that would be installed, not those that the metadata merely mentions
if printf '%s' "$plan" | $python -c '
import json, sys
names = [item["metadata"]["name"].lower() for item in json.load(sys.stdin)["install"]]
sys.exit(any(name.startswith(("nvidia", "triton")) for name in names))'; then
    $pip install --quiet torch==2.13.0
else
    echo "peers: only a CUDA build of torch 2.13.0 is to be had; its tests are skipped"
fi
