#!/bin/bash
# Submits a run's next segments, where no more than so many of its jobs may be in Slurm's queue. The batch script of a
# segment calls it as it begins and as it ends, on a host that need have no Python; everything a segment needs was written
# when the run was submitted. What is missing and why stays in the segment's `not_submitted`; the next call tries again.
# usage: submit_next.sh SEGMENT_DIR JOB_NAME LAST LIMIT TRIES PAUSE WAIT
#   LAST: number of the chain's last segment; LIMIT: most jobs of the run in the queue; PAUSE: seconds between the TRIES;
#   WAIT: seconds in which whoever else is at it may finish
set -euo pipefail
segment_dir=$1 job_name=$2 last=$3 limit=$4 tries=$5 pause=$6 wait=$7
segments=${segment_dir%/*}
segment=$((10#${segment_dir##*/}))
own_job=${SLURM_JOB_ID:-}
# Begins each answer of Slurm's clients: a site may print more than what is asked for.
mark='dsv4kit|'

# What this job has of Slurm would steer sbatch, or be handed on to the next job.
for name in $(compgen -e); do
  case $name in
    SLURM_CONF | SLURM_CONF_SERVER) ;;
    SLURM_* | SLURMD_* | SBATCH_* | SALLOC_* | SRUN_* | SQUEUE_* | SCANCEL_* | SINFO_* | SCONTROL_* | SPANK_* | _SLURM_* | PMI*_*)
      unset "$name" ;;
  esac
done

# The fields of a job (squeue's --format) behind the mark; nothing where Slurm does not know the job.
shown() { squeue --noheader --states=all --jobs="$1" --format="$mark$2" 2>/dev/null | sed -n "s/^$mark//p" | head -n 1; }

# Notes the job id of the segment in $place.
note() {
  echo "$1" >"$place/.job_id.$$" && mv -- "$place/.job_id.$$" "$place/job_id"
  rm -f -- "$place/not_submitted"
}

# The job id of the segment in $place, if it has been submitted: noted, or in the queue since somebody was killed before
# the job could be noted.
known() {
  local line id
  if grep -xE -m 1 '[0-9]+' -- "$place/job_id" 2>/dev/null; then return 0; fi
  while IFS= read -r line; do
    if [[ $line == "$mark"*"|$place/segment.sbatch" ]]; then
      id=${line#"$mark"} id=${id%%|*}
      note "$id"
      echo "$id"
      return 0
    fi
  done < <(squeue --me --noheader --name="$job_name" --format="$mark%i|%o" || true)
  return 1
}

# One submitter at a time: a file that only one can make. An old one was left by somebody who was killed: a job has tries
# and pauses for up to ten minutes, while `dsv4kit submit`, whose file is empty, renews it at each job that it submits.
claim() {
  local age=10
  if (set -o noclobber && echo "$own_job" >"$place/submitting") 2>/dev/null; then return 0; fi
  [ -s "$place/submitting" ] || age=2
  [ -n "$(find "$place/submitting" -mmin "+$age" 2>/dev/null)" ] || return 1
  mv -- "$place/submitting" "$place/.submitting.$own_job" 2>/dev/null || return 1
  rm -f -- "$place/.submitting.$own_job"
  (set -o noclobber && echo "$own_job" >"$place/submitting") 2>/dev/null
}

# Submits the segment in $place behind the job $previous and prints its id, or else why it could not be.
submit() {
  local answer id found options=("--export-file=$place/job.env" "--dependency=singleton,afterany:$previous")
  # What this job avoids: what the site, an administrator and the run have excluded so far.
  found=$(scontrol show job -o "$own_job" 2>/dev/null | tr ' ' '\n' | sed -n 's/^ExcNodeList=//p' | grep -v '(null)' || true)
  [ -z "$found" ] || options+=("--exclude=$found")
  if ! answer=$(timeout 60 sbatch --parsable "${options[@]}" "$place/segment.sbatch" 2>"$place/.sbatch"); then
    found=$(grep 'error:' "$place/.sbatch" | paste -s -d ';' || true)
    echo "${found:-$(tail -n 1 "$place/.sbatch")}"
    return 1
  fi
  answer=$(tail -n 1 <<<"$answer")
  id=${answer%%;*}
  if [[ ! $id =~ ^[0-9]+$ ]]; then
    echo "sbatch: no job id in the last line of its output: '$answer'"
    return 1
  fi
  found=$(shown "$id" '%E|%j')
  if [ "${found#*|}" != "$job_name" ] || [ "$id" = "$own_job" ] || [ "$id" = "$previous" ]; then
    echo "sbatch named job $id, which is no new job of this run"
    return 1
  fi
  # A dependency that is fulfilled is not shown any more.
  if [[ ! ${found%%|*} =~ afterany:$previous($|[^0-9]) && $(shown "$previous" %T) =~ ^(PENDING|RUNNING|SUSPENDED)$ ]]; then
    scancel "$id" || true
    echo "job $id did not wait for job $previous, as sbatch was told: it waited for '${found%%|*}'"
    return 1
  fi
  echo "$id"
}

# A segment that belongs to an earlier chain, started once more by Slurm, has nothing to add.
for file in "$segments"/*/resumed.json; do
  place=${file%/*}
  if [ -e "$file" ] && [ $((10#${place##*/})) -gt "$segment" ]; then exit 0; fi
done

previous=$own_job
for ((next = segment + 1; next <= last && next < segment + limit; next++)); do
  printf -v place '%s/%04d' "$segments" "$next"
  if [ -e "$place/cancelled.json" ]; then exit 0; fi
  if id=$(known); then
    previous=$id
    continue
  fi
  until claim; do
    if [ "$wait" -le 0 ] || [ ! -w "$place" ]; then
      echo "segment $segment: segment $next is not submitted: somebody else is at it, or $place cannot be written to" >&2
      exit 0
    fi
    sleep 5
    wait=$((wait - 5))
    # By then the other may have done it, or the user have cancelled the run.
    if [ -e "$place/cancelled.json" ]; then exit 0; fi
    if id=$(known); then
      previous=$id
      continue 2
    fi
  done
  for ((try = 1; try <= tries; try++)); do
    if id=$(known) || id=$(submit); then
      note "$id"
      break
    fi
    printf '%s\n' "$id" >"$place/not_submitted" || true
    echo "segment $segment: segment $next is not submitted, try $try of $tries: $id" >&2
    [ "$try" -eq "$tries" ] || sleep "$pause"
    id=''
  done
  rm -f -- "$place/submitting" "$place/.sbatch"
  [ -n "$id" ] || exit 1
  echo "segment $segment: segment $next is job $id"
  # The user may have cancelled the run meanwhile.
  if [ -e "$place/cancelled.json" ]; then
    scancel "$id"
    exit 0
  fi
  previous=$id
done
