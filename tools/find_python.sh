#!/bin/sh
# Print a Python 3.12 or newer that runs, or nothing. Behind pyenv the bare shim may fail, so the prefixes are tried too.
for version in 3.13 3.12; do
    for candidate in "python$version" "$(pyenv prefix "$version" 2>/dev/null)/bin/python"; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
            command -v "$candidate"
            exit 0
        fi
    done
done
