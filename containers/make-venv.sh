#!/usr/bin/env bash
# The control plane's environment: exactly what the lock says, every file checked against its hash, and the kit itself.
# usage: make-venv.sh PYTHON VENV LOCK
set -euo pipefail
python=$1 venv=$2 lock=$3
unset PYTHONPATH PYTHONHOME PYTHONUSERBASE
export PYTHONNOUSERSITE=1
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
  echo "dsv4kit: $*" >&2
  exit 2
}

command -v "$python" >/dev/null || fail "PYTHON=$python: no such program; 3.10 or newer is needed"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "PYTHON=$python: $("$python" -V 2>&1), 3.10 or newer is needed"

if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    # Debian and Ubuntu ship Python without these two.
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      echo "dsv4kit: installing $package (apt-get)"
      export DEBIAN_FRONTEND=noninteractive
      { apt-get install -y "$package" || { apt-get update && apt-get install -y "$package"; }; } >/dev/null 2>&1 ||
        fail "apt-get could not install $package"
    else
      fail "this Python cannot make virtual environments; install $package (Debian, Ubuntu) or the like"
    fi
  fi
  "$python" -m venv --clear "$venv"
fi

echo "dsv4kit: installing $lock into $venv"
export PIP_DISABLE_PIP_VERSION_CHECK=1
"$venv/bin/python" -m pip install --quiet --no-deps --require-hashes --requirement "$lock"
# compat: a plain .pth file; setuptools' import hook would cost 60 ms at each start.
"$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --config-settings editable_mode=compat --editable .
./containers/isolate.sh "$venv/bin/dsv4kit"
