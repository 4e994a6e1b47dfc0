#!/usr/bin/env bash
# Makes a console script's Python ignore PYTHONPATH, PYTHONHOME and what is installed into the user's home (-I): with them
# the command line tool would run somebody else's packages, or not start.
# usage: isolate.sh SCRIPT
set -euo pipefail

# pip writes `#!PYTHON`, or, for a path that is long or has spaces, 'exec' PYTHON "$0" "$@" on the second line.
sed -i -E -e '1s|^(#!.*python[0-9.]*)$|\1 -I|' -e "2s|^('''exec' .*python[0-9.]*\"?) \"\\\$0\"|\1 -I \"\$0\"|" "$1"
