#!/usr/bin/env bash
# One node of the sandbox.
#   node_init.sh power-on NETNS FREEZER    on the host: becomes the node's first process, in namespaces of its own
#   node_init.sh init FREEZER              pid 1 of the node: private mounts, slurmd, then reaps orphans for ever
# FREEZER is this node's directory of the cgroup v1 freezer, or empty. The state directory and the node's name come in
# the environment, where they also mark every process of the node.
set -euo pipefail
umask 022
state=$DSV4KIT_SANDBOX_STATE
node=$DSV4KIT_SANDBOX_ROLE

# Where a path of the host is found in the node, whose own /tmp, /run and /dev/shm hide the host's.
host_path() {
    case $1 in
        /tmp/* | /run/* | /dev/shm/*) printf '/run/host%s' "$1" ;;
        *) printf '%s' "$1" ;;
    esac
}

# show SOURCE TARGET: bind the host's directory SOURCE at TARGET.
show() {
    local source
    source=$(host_path "$1")
    if [[ ! -d $source ]]; then
        echo "shared directory $1 is gone: left out"
        return
    fi
    [[ $source -ef $2 ]] && return
    mkdir -p -- "$2"
    mount --rbind -- "$source" "$2"
}

# replace FILE PATH: FILE in place of PATH, where this machine has such a file.
replace() {
    [[ ! -e $2 ]] || mount --bind "$1" "$2"
}

power_on() {
    exec </dev/null >"$state/log/$node.log" 2>&1
    exec nsenter --net="/run/netns/$1" \
        unshare --uts --ipc --mount --propagation private --pid --fork --kill-child --mount-proc \
        "${BASH_SOURCE[0]}" init "$2"
}

private_mounts() {
    local files=$state/nodes/$node shares i
    echo "$node" >"$files/hostname"
    replace "$files/hostname" /etc/hostname
    replace "$state/etc/hosts" /etc/hosts
    replace "$state/etc/nsswitch.conf" /etc/nsswitch.conf
    [[ -z $1 ]] || mount --bind "$1" /sys/fs/cgroup/freezer

    # The new /run is filled before it is moved into place, while the host's directories are still in sight. The host's
    # /run comes without what is mounted in it: its network namespaces must not be held by this node.
    mount -t tmpfs -o mode=755,size=256m tmpfs "$files/run"
    mkdir -p "$files/run/lock" "$files"/run/host/{tmp,run,dev/shm}
    chmod 1777 "$files/run/lock"
    mount --rbind /tmp "$files/run/host/tmp"
    mount --rbind /dev/shm "$files/run/host/dev/shm"
    mount --bind /run "$files/run/host/run"
    mount --no-mtab --move "$files/run" /run
    mount -t tmpfs -o mode=1777,size=50% tmpfs /dev/shm
    mount --bind "$(host_path "$files/tmp")" /tmp

    show "$state" "$state"
    mapfile -d '' -t shares <"$state/run/shares"
    for ((i = 0; i + 1 < ${#shares[@]}; i += 2)); do
        show "${shares[i]}" "${shares[i + 1]}"
    done
}

if [[ $1 == power-on ]]; then
    power_on "$2" "$3"
fi

hostname "$node"
private_mounts "$2"
cd /
mkdir -p /run/slurmd
slurmd -f "$SLURM_CONF" -N "$node"

# bash reaps whatever is handed to pid 1; reading a pipe that nobody writes to keeps it here without a helper process.
set +e
exec 8<> <(:)
while true; do
    read -r -u 8
done
