#!/bin/bash
# What becomes of the run's waiting segments once a segment's srun is over. Its batch script calls it, on a host that need
# have no Python: the agents may never have started, or may have died before they could say what happened.
# usage: conclude.sh SEGMENT_DIR CHECKPOINT_DIR JOB_NAME NODES LIMIT SRUN_STATUS LOG_START
#   LIMIT: attempts in a row without progress that stop the run; LOG_START: bytes of slurm.log from before this start
set -euo pipefail
segment_dir=$1 checkpoint_dir=$2 job_name=$3 nodes=$4 limit=$5 srun_status=$6 log_start=$7
run_dir=${segment_dir%/segments/*}
segment=$((10#${segment_dir##*/}))
# The last attempt of this job: its agents may have started the trainer more than once.
attempt=${DSV4KIT_ATTEMPT:-${SLURM_RESTART_COUNT:-0}}
while [ -d "$segment_dir/attempt-$((attempt + 1))" ]; do attempt=$((attempt + 1)); done
outcome=$segment_dir/attempt-$attempt/outcome.json
# Begins each answer of Slurm's clients: a site may print more than what is asked for.
mark='dsv4kit|'

# The ids of this run's waiting segments.
waiting() {
  local line answer
  answer=$(squeue --me --noheader --name="$job_name" --states=PENDING --format="$mark%i") || return 1
  while IFS= read -r line; do
    if [[ $line == "$mark"* && ${line#"$mark"} =~ ^[0-9]+$ ]]; then echo "${line#"$mark"}"; fi
  done <<<"$answer"
}

# A text as a JSON string.
quoted() {
  local text
  text=$(printf '%s' "$1" | tr -d '\000-\010\013\014\016-\037\177' | tr '\t\n\r' '   ' | cut -c1-300)
  text=${text//\\/\\\\}
  printf '"%s"' "${text//\"/\\\"}"
}

# Lines as a JSON list.
listed() {
  local line separator=''
  printf '['
  while IFS= read -r line; do
    [ -n "$line" ] || continue
    printf '%s%s' "$separator" "$(quoted "$line")"
    separator=', '
  done
  printf ']'
}

# The value of a key in an outcome: a number or a plain text.
value() { sed -n "s/^ *\"$2\": \"\\{0,1\\}\\([^\",]*\\)\"\\{0,1\\},\\{0,1\\}\$/\\1/p" "$1" | head -n 1; }

# What srun, slurmstepd, the container or Python said since this start: causes before what only follows from them.
said() {
  local log
  log=$(tail -c "+$((log_start + 1))" -- "$segment_dir/slurm.log" 2>/dev/null | tr -d '\000' || true)
  {
    grep -E 'error: .*(pyxis|enroot|container)' <<<"$log" | grep -v 'error: pyxis: *$' | head -n 3
    grep -E '(srun|slurmstepd[^:]*): error: ' <<<"$log" | grep -vE 'Exited with exit code|: (Terminated|Killed|Aborted)$|CANCELLED AT'
    grep -E '^([0-9]+: )?[A-Za-z_.]*(Error|Exception)(:|$)' <<<"$log" | tail -n 1
    grep -E 'No space left on device|[Qq]uota exceeded|No such file or directory|[Pp]ermission denied' <<<"$log" | tail -n 1
    grep -E 'error: .*Exited with exit code' <<<"$log"
  } | awk '!seen[$0]++' | head -n 3 || true
}

# The nodes that the lines name as those where it began; the others were only ended with them.
named() {
  {
    sed -nE 's/^slurmstepd-([^: ]+): error: .*/\1/p; s/.* failed on node ([^: ]+):.*/\1/p'
  } <<<"$1"
  sed -nE 's/^srun: error: ([^: ]+): tasks? [^:]*: Exited with exit code.*/\1/p' <<<"$1"
}

# Attempts before this one, in a row, that saved nothing and had the chance to.
fruitless() {
  local count=0 file begins
  begins=$(find "$run_dir/segments" -maxdepth 2 -name resumed.json 2>/dev/null | sort | tail -n 1)
  while IFS= read -r file; do
    [ "$file" != "$outcome" ] || continue
    [[ -z $begins || ! ${file%/attempt-*} < ${begins%/*} ]] || break
    if [ "$(value "$file" reached)" -gt "$(value "$file" start)" ] 2>/dev/null; then break; fi
    case $(value "$file" end) in cancelled | "another job is live" | "terminated by slurm" | "node lost" | lost) ;; *) count=$((count + 1)) ;; esac
  done < <(find "$run_dir/segments" -mindepth 3 -maxdepth 3 -path '*/attempt-*/outcome.json' 2>/dev/null | sort -rV)
  echo "$count"
}

# An attempt that left no outcome gets one. Prints what the chain does next.
record_lost() {
  local step lines bad='' count next reason now end='never started'
  now=$(date +%s)
  # With a course the attempt had begun; what it saved is on the disk.
  [ ! -e "${outcome%/*}/plan.json" ] || end=lost
  step=$(head -c 20 -- "$checkpoint_dir/latest_checkpointed_iteration.txt" 2>/dev/null | tr -cd '0-9' || true)
  step=${step:-0}
  lines=$(said)
  [ -n "$lines" ] || lines="srun ended with status $srun_status and no agent of this attempt left a word"
  bad=$(named "$lines" | while IFS= read -r node; do scontrol show hostnames "$node" 2>/dev/null || echo "$node"; done |
    awk '!seen[$0]++')
  # If every node failed, no single node is to blame.
  if [ "$(grep -c . <<<"$bad" || true)" -ge "${SLURM_JOB_NUM_NODES:-$nodes}" ]; then bad=''; fi
  count=$(($(fruitless) + 1))
  if [ "$count" -ge "$limit" ]; then
    next=stop reason="$count attempts in a row without progress, at step $step"
  else
    next=continue reason="no progress ($end), attempt $count of $limit allowed in a row"
  fi
  mkdir -p -- "${outcome%/*}" || return 1
  cat >"$outcome.new" <<JSON || return 1
{
 "segment": $segment,
 "attempt": $attempt,
 "job_id": $(quoted "${SLURM_JOB_ID:-}"),
 "start": $step,
 "target": $step,
 "reached": $step,
 "end": "$end",
 "verdict": "$next",
 "reason": $(quoted "$reason"),
 "evidence": $(listed <<<"$lines"),
 "notes": [],
 "excluded_nodes": $(listed <<<"$bad"),
 "nodes": [],
 "exit_status": $srun_status,
 "started": $now,
 "ended": $now
}
JSON
  mv -- "$outcome.new" "$outcome" || return 1
  local node
  while IFS= read -r node; do
    [ -n "$node" ] || continue
    printf '{"time": %s, "segment": %s, "node": %s, "reason": %s}\n' \
      "$now" "$segment" "$(quoted "$node")" "$(quoted "$(head -n 1 <<<"$lines")")" >>"$run_dir/excluded_nodes.jsonl"
  done <<<"$bad"
  tr '\n' ',' <<<"$bad" | sed 's/,*$//' >"$segment_dir/excluded_nodes"
  echo "$next" >"$segment_dir/verdict" || return 1
  echo "$next"
}

# The waiting segments avoid what this run has found, besides what the site or an administrator had excluded already.
exclude() {
  local found own ids id before all usable
  found=$(tr ',' '\n' <"$segment_dir/excluded_nodes" 2>/dev/null | grep . || true)
  own=$(sed -n 's/.*"node": "\([^"]*\)".*/\1/p' "$run_dir/excluded_nodes.jsonl" 2>/dev/null | sort -u || true)
  [ -n "$found$own" ] || return 0
  if ! ids=$(waiting); then
    echo "segment $segment: the waiting segments were not told to avoid $(tr '\n' ' ' <<<"$found")" >&2
    return 0
  fi
  for id in $ids; do
    before=$(scontrol show job -o "$id" | tr ' ' '\n' | sed -n 's/^ExcNodeList=//p' | grep -v '(null)' || true)
    [ -z "$before" ] || before=$(scontrol show hostnames "$before" | grep -vxF -e "${own:-.}" || true)
    all=$(printf '%s\n%s\n' "$before" "$found" | grep . | awk '!seen[$0]++' || true)
    usable=$(sinfo --noheader --Node --partition="${SLURM_JOB_PARTITION:-}" --format="$mark%N|%T" |
      sed -n "s/^$mark\\([^|]*\\)|\\([a-z]*\\).*/\\1 \\2/p" | grep -vE ' (down|drain|fail|unknown)' | cut -d' ' -f1 | sort -u)
    while [ -n "$found" ] && [ "$(grep -vxF -e "${all:-.}" <<<"$usable" | grep -c . || true)" -lt "$nodes" ]; do
      echo "segment $segment: not enough other nodes for this run: $(tail -n 1 <<<"$found") is not avoided any longer"
      found=$(sed '$d' <<<"$found")
      all=$(printf '%s\n%s\n' "$before" "$found" | grep . | awk '!seen[$0]++' || true)
    done
    scontrol update JobId="$id" ExcNodeList="$(tr '\n' ',' <<<"$all" | sed 's/,*$//')" ||
      echo "segment $segment: job $id was not told which nodes to avoid" >&2
  done
}

# Nothing can be written: no further segment may be used up by that. The reason goes where Slurm keeps it.
hold() {
  local id
  echo "segment $segment: $1" >&2 || true
  for id in $(waiting); do
    scontrol update JobId="$id" Comment="held by segment $segment: $1" || true
    scontrol hold "$id" || true
  done
}

# The container's removal: from the last word of node 0's agent, whose clock this is too, to srun's end.
if [ -n "${DSV4KIT_STEP_ENDED:-}" ] && ended=$(value "$outcome" ended 2>/dev/null) && [ -n "$ended" ]; then
  printf '{"phase": "container removal", "time": %s, "until": %s}\n' "$ended" "$DSV4KIT_STEP_ENDED" \
    >>"${outcome%/*}/phases.jsonl" || true
fi

verdict=$(cat -- "$segment_dir/verdict" 2>/dev/null || true)
if [ -z "$verdict" ] && [ -s "$outcome" ]; then verdict=$(value "$outcome" verdict); fi
if [ -z "$verdict" ] && ! verdict=$(record_lost); then
  hold "nothing can be written to $run_dir; make room there, then cancel and resume the run"
  exit 1
fi
echo "segment $segment: next $verdict, srun status $srun_status"
case $verdict in
  finished | stop) scancel --me --name="$job_name" --state=PENDING ;;
  continue) exclude ;;
esac
# Slurm's own job state should tell the same story; afterany lets the chain go on either way.
case $verdict in continue | finished) ;; *) exit 1 ;; esac
