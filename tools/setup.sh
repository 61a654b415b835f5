#!/bin/sh
# Create .venv and install the project with one extra, once per change of pyproject.toml.
# usage: tools/setup.sh EXTRA [VENV] [PYTHON]
set -eu
extra=$1
venv=${2:-.venv}
python=${3:-${PYTHON:-python3}}

missing() {
    echo "normlib set-up: $1 is missing. $2" >&2
    exit 1
}

command -v git >/dev/null 2>&1 || missing git "Install it (Debian: apt-get install git)."
command -v "$python" >/dev/null 2>&1 || missing "$python" "Install Python 3.11 or newer, or set PYTHON=/path/to/python3."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    missing "Python 3.11 or newer" "$python is $("$python" --version 2>&1); set PYTHON=/path/to/a/newer/python3."
"$python" -c 'import venv, ensurepip' 2>/dev/null || missing "Python's venv module" "Debian: apt-get install python3-venv."

want=$(cksum <pyproject.toml)
done_for() { [ -f "$venv/.installed-$1" ] && [ "$(cat "$venv/.installed-$1")" = "$want" ]; }
# dev holds everything that the smaller extras hold
if done_for "$extra" || done_for dev && [ "$extra" != peers ]; then exit 0; fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || missing pip "Delete $venv and install Python with pip."
echo "normlib set-up: installing the project with [$extra] into $venv (once; a few minutes)"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e ".[$extra]"
echo "$want" >"$venv/.installed-$extra"
