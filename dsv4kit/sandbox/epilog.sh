#!/usr/bin/env bash
# Ends what a job left behind on this node, found by the job id in its environment: processes that detached themselves
# (setsid, double fork) outlive a job under proctrack/linuxproc.
# As Slurm's Epilog (root, once per node and job) it ends all of the job's; as TaskEpilog (the job's user, after each
# task) those of that one task. Always exits 0, as Slurm drains a node whose epilog fails.
set -u
[[ ${SLURM_JOB_ID:-} ]] || exit 0
wanted=(SLURM_JOB_ID)
if [[ ${SLURM_SCRIPT_CONTEXT:-} == epilog_task ]]; then
    [[ ${SLURM_STEP_ID:-} && ${SLURM_PROCID:-} ]] || exit 0
    wanted+=(SLURM_STEP_ID SLURM_PROCID)
fi

# matches PID: true for a process of the job, not for Slurm's own or for this script and its helpers.
matches() {
    local stat parent name line environ=() variable
    stat=$(<"/proc/$1/stat") || return 1
    read -r _ parent _ <<<"${stat##*) }"
    [[ $1 != 1 && $1 != "$$" && $parent != "$$" ]] || return 1
    name=$(<"/proc/$1/comm") || return 1
    [[ $name != slurmd && $name != slurmstepd && $1 != "$PPID" ]] || return 1
    mapfile -d '' -t environ <"/proc/$1/environ" || return 1
    for variable in "${wanted[@]}"; do
        for line in "${environ[@]}"; do
            [[ $line == "$variable=${!variable}" ]] && continue 2
        done
        return 1
    done
}

# A process may fork while it is being looked for, so look until nothing is found; one that is dying has no environment.
for _ in {1..50}; do
    found=0
    while IFS= read -r file; do
        pid=${file#/proc/}
        pid=${pid%/environ}
        if matches "$pid"; then
            found=1
            kill -KILL "$pid"
        fi
    done < <(exec grep -lszxF "SLURM_JOB_ID=$SLURM_JOB_ID" /proc/[0-9]*/environ)
    ((found)) || break
done 2>/dev/null
exit 0
