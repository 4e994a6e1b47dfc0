#!/bin/bash
# `methods.sh bare | sleeps | polled`: what people do today, in a job with one Ray node per node of Slurm. BRINGUP_* come
# from the benchmark. This runs on node 0, which has the head.
set -eu
unset ROCR_VISIBLE_DEVICES
export RAY_AUTH_MODE=disabled PATH="$BRINGUP_BIN:$PATH"
head_ip=$(hostname -I)
head_ip=${head_ip%% *}
# A port per job: what is left of the one before it must not join this one.
port=$((20000 + SLURM_JOB_ID % 10000))
head_address=$head_ip:$port
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

resources=("--num-cpus=$BRINGUP_CPUS" "--num-gpus=$BRINGUP_GPUS" "--object-store-memory=$BRINGUP_STORE_BYTES")
resources+=(--disable-usage-stats)
head=(ray start --head "--node-ip-address=$head_ip" "--port=$port" --include-dashboard=false "${resources[@]}")
worker=(ray start "--address=$head_address" "${resources[@]}" --block)
on_head=(srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" --cpu-bind=none)

case $1 in
# `ray start` on all nodes at the same moment, one srun, and a look that costs nothing: the floor of everything else.
# A start that gives up (Ray waits 30 s for its raylet) is made again.
bare)
  # shellcheck disable=SC2016
  srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --cpu-bind=none \
    bash -c 'if [ "$SLURM_PROCID" = 0 ]; then exec $1 --block; fi; until $2; do :; done' start "${head[*]}" "${worker[*]}" &
  python "$BRINGUP_DIR/wait_alive.py" "$head_address" "$SLURM_NNODES"
  ;;
# One srun after the other with fixed sleeps: 10 s for the head, 5 s for each worker.
sleeps)
  "${on_head[@]}" "${head[@]}" --block &
  sleep 10
  for node in "${nodes[@]:1}"; do
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" --cpu-bind=none "${worker[@]}" &
    sleep 5
  done
  ;;
# The head first; when it is up, all workers through one srun; then `ray status` every BRINGUP_POLL_S seconds.
polled)
  marker=$BRINGUP_OUT.head
  # shellcheck disable=SC2016
  "${on_head[@]}" bash -c '$1 && touch "$2" && exec sleep infinity' start "${head[*]}" "$marker" &
  until [ -e "$marker" ]; do sleep 2; done
  others=$((SLURM_NNODES - 1))
  srun --overlap --nodes=$others --ntasks=$others --exclude="${nodes[0]}" --cpu-bind=none "${worker[@]}" &
  until [ "$(ray status --address="$head_address" 2>/dev/null | grep -c ' node_')" -ge "$SLURM_NNODES" ]; do
    sleep "$BRINGUP_POLL_S"
  done
  ;;
esac
RAY_ADDRESS=$head_address "${on_head[@]}" python "$BRINGUP_DIR/bringup_driver.py"
