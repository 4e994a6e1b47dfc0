#!/bin/bash
# What a node has for enroot, seen from outside any container.
# usage: enroot_host.sh look DIRECTORY    writes DIRECTORY/NODE, lines of NAME|PATH|FILE SYSTEM|FREE BYTES|CAN BE WRITTEN
#        enroot_host.sh clean JOB_ID...   removes this user's containers that pyxis made for these jobs, which are over
set -u
node=${SLURMD_NODENAME:-$(hostname)}
: "${HOME:=/}" "${XDG_DATA_HOME:=$HOME/.local/share}" "${XDG_CACHE_HOME:=$HOME/.cache}"
: "${XDG_RUNTIME_DIR:=/run/user/$(id -u)}"

# What enroot does without a word in its configuration.
declare -A paths=([data]=$XDG_DATA_HOME/enroot [cache]=$XDG_CACHE_HOME/enroot [runtime]=$XDG_RUNTIME_DIR/enroot [temp]=/tmp)

# Its configuration is the administrator's; enroot, too, has a shell expand the values.
etc=
enroot=$(command -v enroot || true)
[ -z "$enroot" ] || etc=$(sed -n 's/.*ENROOT_SYSCONF_PATH"* *"\{0,1\}\([^" ]*\)"\{0,1\}.*/\1/p' "$enroot" | grep '^/' | head -n 1)
for file in "${etc:-/etc/enroot}"/enroot.conf "${etc:-/etc/enroot}"/enroot.conf.d/*.conf; do
  [ -r "$file" ] || continue
  while IFS=$' \t=' read -r key value; do
    case $key in
      ENROOT_DATA_PATH | ENROOT_CACHE_PATH | ENROOT_RUNTIME_PATH | ENROOT_TEMP_PATH)
        name=${key#ENROOT_} name=${name%_PATH}
        paths[${name,,}]=$(eval echo "$value")
        ;;
    esac
  done <"$file"
done

# Containers that pyxis makes for a step without a name are called so.
containers() {
  local path
  for path in "${paths[data]}"/pyxis_*.*; do
    [ ! -d "$path" ] || [ ! -O "$path" ] || echo "$path"
  done
}

look() {
  local name path there free can id live
  echo "enroot|$enroot|||"
  for name in data cache runtime temp; do
    path=${paths[$name]}
    there=$path
    while [ -n "$there" ] && [ ! -d "$there" ]; do there=${there%/*}; done
    there=${there:-/}
    free=$(df --output=avail --block-size=1 -- "$there" 2>/dev/null | tail -n 1 | tr -d ' ')
    can=no
    [ ! -w "$there" ] || can=yes
    echo "$name|$path|$(stat --file-system --format=%T -- "$there" 2>/dev/null)|${free:-0}|$can"
  done
  conf=$(scontrol show config 2>/dev/null | sed -n 's/^PlugStackConfig *= *//p')
  conf=${conf:-/etc/slurm/plugstack.conf}
  if grep -qsE '^[^#]*pyxis.*use_squashfuse=1' "$conf" "$conf".d/* "${conf%/*}"/plugstack.conf.d/*; then
    echo "squashfuse|yes|||"
  fi
  live=$(squeue --me --noheader --format=%A 2>/dev/null) || return 0
  while IFS= read -r path; do
    id=${path##*/pyxis_}
    grep -qxF -e "${id%%.*}" <<<"$live" || echo "left|$path|||"
  done < <(containers)
}

clean() {
  local path id job
  while IFS= read -r path; do
    id=${path##*/pyxis_}
    for job; do
      [ "$job" = "${id%%.*}" ] || continue
      if { [ -n "$enroot" ] && enroot remove -f "${path##*/}" >/dev/null 2>&1; } || rm -rf -- "$path"; then
        echo "$node: removed $path: left by job $job, which is over"
      fi
    done
  done < <(containers)
}

case $1 in
  look) look >"$2/$node" ;;
  clean) shift && clean "$@" ;;
esac
