#!/usr/bin/env bash
# Makes control.lock and dev.lock again from pyproject.toml: every version and hash, for every platform and Python.
# usage: make-locks.sh VENV   (a virtual environment that has uv)
set -euo pipefail
venv=$1
cd "$(dirname "${BASH_SOURCE[0]}")/.."

compile() { # compile OUT [uv options...]
  "$venv/bin/uv" pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-header --no-annotate \
    --output-file "$@" pyproject.toml
}
compile containers/locks/control.lock --group config-tree --group build
compile containers/locks/dev.lock --group config-tree --group build --group dev --constraints containers/locks/control.lock
