#!/usr/bin/env bash
# slurmctld under a host name of its own, in a UTS and mount namespace that the caller made: it listens on the address
# that its host name stands for, and this machine's own name stands for something else (or is one of the nodes').
set -euo pipefail
hostname "$1"
for file in hosts nsswitch.conf; do
    [[ ! -e /etc/$file ]] || mount --bind "$DSV4KIT_SANDBOX_STATE/etc/$file" "/etc/$file"
done
exec slurmctld -f "$SLURM_CONF"
