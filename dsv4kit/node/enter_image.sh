#!/usr/bin/env bash
# Runs a command inside a squashfs image on this node, with bubblewrap and no service: what `container: bwrap` means.
#   enter_image.sh IMAGE EMPTY SCRATCH ro|rw WORKDIR [MOUNT...] -- COMMAND...
# EMPTY is a directory to mount things over; nobody else sees them, because all of it happens in a mount namespace of
# this process, and goes with its last process, however that ends. MOUNT is SRC:DST[:FLAGS]; with FLAGS only ro counts.
# rw: the image's files can be changed; the changes are in memory, and gone at the end. Needs root, or a kernel that lets
# users make namespaces and mount overlays in them (Linux 5.11).
set -euo pipefail

fail() {
  echo "$(hostname): image $image: $*" >&2
  exit 1
}

phase=outside
if [[ $1 == --inside ]]; then
  phase=inside user=$2
  shift 2
fi
image=$1 empty=$2 scratch=$3 writable=$4 workdir=$5
everything=("$@")
shift 5
mounts=()
while [[ $1 != -- ]]; do
  mounts+=("$1")
  shift
done
shift

if [[ $phase == outside ]]; then
  command -v bwrap >/dev/null || fail "bwrap is not installed here (package bubblewrap)"
  [[ -r $image ]] || fail "cannot be read here"
  user=root spaces=(--mount)
  if [[ $(id -u) != 0 ]]; then
    user=$(id -u):$(id -g) spaces=(--user --map-root-user --mount)
  fi
  problem=$(unshare "${spaces[@]}" true 2>&1) || fail "no namespaces can be made here: $problem"
  # slave: what the host mounts later (a home on demand) is still seen.
  exec unshare "${spaces[@]}" --propagation slave -- bash "${BASH_SOURCE[0]}" --inside "$user" "${everything[@]}"
fi

# The image's files at ./image, by whatever this node has: the kernel, squashfuse, or a copy on its own disk.
provide_image() {
  local reason copies copy
  if [[ $user == root ]]; then
    reason=$(mount -t squashfs -o loop,ro,nodev "$image" image 2>&1) && return
  fi
  if command -v squashfuse >/dev/null && [[ -w /dev/fuse ]]; then
    # It ends with this process, and not before: Slurm may signal everything in the job.
    (trap '' TERM && exec setpriv --pdeathsig KILL squashfuse -f "$image" image) 2>/dev/null &
    server=$!
    while ! mountpoint --quiet image && kill -0 "$server" 2>/dev/null; do sleep 0.02; done
    if mountpoint --quiet image; then return; fi
    server=''
  fi
  command -v unsquashfs >/dev/null || fail "cannot be mounted (${reason:-no squashfuse}), and there is no unsquashfs"
  copies=$scratch/dsv4kit-images-${user%:*}
  [[ -d $copies ]] || mkdir -m 700 "$copies"
  [[ -O $copies ]] || fail "$copies belongs to somebody else"
  copy=$copies/$(stat --format='%n %s %Y' -- "$image" | sha256sum | cut -c1-16)
  exec 9>"$copy.lock"
  flock 9
  if [[ ! -d $copy ]]; then
    rm -rf "$copy.new"
    reason=$(unsquashfs -quiet -no-progress -no-xattrs -dest "$copy.new" "$image" 2>&1) ||
      { rm -rf "$copy.new"; fail "cannot be unpacked to $copies: ${reason##*$'\n'}"; }
    mv "$copy.new" "$copy"
  fi
  exec 9>&-
  mount --bind "$copy" image
}

# A path as it is inside, its links followed as they lead there.
resolved() {
  local found='' rest=$1 part target links=0
  while [[ $rest ]]; do
    part=${rest%%/*}
    if [[ $rest == */* ]]; then rest=${rest#*/}; else rest=''; fi
    case $part in
      '' | .) ;;
      ..) found=${found%/*} ;;
      *)
        if [[ -L image$found/$part ]] && ((links++ < 40)); then
          target=$(readlink "image$found/$part")
          [[ $target != /* ]] || found=''
          rest=$target/$rest
        else
          found+=/$part
        fi
        ;;
    esac
  done
  printf '%s\n' "${found:-/}"
}

# What the image lacks and the command needs: mount points, this host's names, and the user's own.
add_what_is_missing() {
  local uid=$1 gid=$2 file source target name
  mkdir extra/{etc,dev,proc,sys,run,tmp}
  for file in hosts hostname resolv.conf; do
    [[ ! -r /etc/$file ]] || cat "/etc/$file" >"extra/etc/$file"
  done
  name=${LOGNAME:-user$uid}
  if [[ -r image/etc/passwd ]] && ! cut -d: -f3 image/etc/passwd | grep -qx "$uid"; then
    { cat image/etc/passwd && echo "$name:x:$uid:$gid::${HOME:-/}:/bin/sh"; } >extra/etc/passwd
    { cat image/etc/group && echo "$name:x:$gid:"; } >extra/etc/group
  fi
  for mount in "${mounts[@]}"; do
    IFS=: read -r source target _ <<<"$mount"
    [[ -e $source ]] || fail "mount $mount: there is no $source on this node"
    target=$(resolved "${target:-$source}")
    case $target/ in /tmp/* | /run/* | /dev/* | /proc/* | /sys/*) continue ;; esac
    if [[ -e image$target ]]; then
      continue
    elif [[ -d $source ]]; then
      mkdir -p "extra$target"
    else
      mkdir -p "extra${target%/*}"
      : >"extra$target"
    fi
  done
}

mount -t tmpfs -o mode=755 dsv4kit "$empty" || fail "cannot mount over $empty"
cd "$empty"
mkdir image extra root upper work
provide_image
ids=(0 0)
[[ $user == root ]] || IFS=: read -ra ids <<<"$user"
add_what_is_missing "${ids[@]}"
options=lowerdir=extra:image
if [[ $writable == rw ]]; then
  options+=,upperdir=upper,workdir=work
  [[ $user == root ]] || options+=,userxattr
fi
problem=$(mount -t overlay -o "$options" dsv4kit root 2>&1) || fail "no overlay can be mounted here: $problem"

arguments=(--bind root / --dev-bind /dev /dev --proc /proc --ro-bind /sys /sys)
arguments+=(--perms 1777 --tmpfs /tmp --tmpfs /run)
for mount in "${mounts[@]}"; do
  IFS=: read -r source target flags <<<"$mount"
  how=--bind
  [[ +${flags:-}+ != *+ro+* ]] || how=--ro-bind
  arguments+=("$how" "$source" "$(resolved "${target:-$source}")")
done
# The image's own environment wins over the job's, as with pyxis.
arguments+=(--setenv PATH /usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
if [[ -r image/etc/environment ]]; then
  while IFS= read -r line || [[ -n $line ]]; do
    [[ ! $line =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] || arguments+=(--setenv "${line%%=*}" "${line#*=}")
  done <image/etc/environment
fi
[[ $user == root ]] || arguments+=(--unshare-user --uid "${ids[0]}" --gid "${ids[1]}")
# With a process namespace of its own nothing that the command starts outlives it. It is that namespace's first process:
# as bwrap's child it can be told of a signal.
arguments+=(--unshare-pid --as-pid-1 --die-with-parent --chdir "$workdir")

# Slurm signals this process, in some configurations every one of the job. What merely carries the command must not go
# before it has had its say.
(trap '' TERM && exec bwrap --json-status-fd 8 "${arguments[@]}" -- env --default-signal=TERM "$@" 8>ended) &
child=$!
trap 'kill -TERM $(pgrep --parent "$child") 2>/dev/null || true' TERM
# A signal ends a `wait` early, and one that comes as the command ends makes bash forget how it ended: bwrap has it in
# writing, unless it was killed itself.
status=0
while wait "$child" && status=0 || status=$?; kill -0 "$child" 2>/dev/null; do :; done
trap '' TERM
[[ ! $(<ended) =~ '"exit-code": '([0-9]+) ]] || status=${BASH_REMATCH[1]}
[[ -z ${server:-} ]] || kill -KILL "$server"
exit "$status"
