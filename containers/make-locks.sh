#!/usr/bin/env bash
# Makes the locks again: control.lock and dev.lock from pyproject.toml, for every platform and Python, and those of the
# images from stack.yaml, one per stack and architecture. The CPU runtime's are made by hand; they say how themselves.
# usage: make-locks.sh VENV   (a virtual environment that has uv)
set -euo pipefail
venv=$1
cd "$(dirname "${BASH_SOURCE[0]}")/.."

compile() { # compile OUT [uv options...]
  "$venv/bin/uv" pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-header --no-annotate \
    --output-file "$@" pyproject.toml
}
compile containers/locks/control.lock --group config-tree --group build --group report --group sbom
compile containers/locks/dev.lock --group config-tree --group build --group report --group sbom --group dev --constraints containers/locks/control.lock
"$venv/bin/python" -m dsv4kit.image.locks "$venv/bin/uv"
