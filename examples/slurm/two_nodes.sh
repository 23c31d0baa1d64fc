#!/bin/bash
#SBATCH --job-name=full_run
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=4:00:00
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@60
#SBATCH --requeue
#SBATCH --open-mode=append
# Printed by `resilience slurm`; submit it with sbatch. Slurm sends the signal above to the launchers before the
# time is up: they save and leave with 75, and the job goes back into the queue and resumes.

set -u
# srun does not take this over from sbatch by itself since 22.05.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
# One name in all steps and after a requeue, so that the run directory is known to be this job's.
export RESILIENCE_JOB_ID="slurm-$SLURM_JOB_ID"

run_dir=/shared/runs/plane
retries=2
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))

try=0
while :; do
    # One launcher per node. A node that has finished early must not end the others.
    srun --ntasks-per-node=1 --kill-on-bad-exit=0 --cpu-bind=none \
        python -m resilience_sdk run --run-dir "$run_dir" \
        --nnodes "$SLURM_JOB_NUM_NODES" --rdzv-backend c10d --rdzv-endpoint "$head:$port" \
        --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$try" \
        --nproc-per-node 8 examples/full_run.py
    code=$?
    case $code in
        0|2|77|130) exit "$code" ;;  # finished, bad usage, stop, interrupted by a person: never again
        75|76) break ;;  # preempted; hardware
    esac
    # A launcher that was killed, or one that has no restarts left: again in this allocation.
    if [ "$try" -ge "$retries" ]; then
        echo "resilience: exit code $code, and $retries retries are spent" >&2
        exit "$code"
    fi
    try=$((try + 1))
    echo "resilience: exit code $code; retry $try of $retries" >&2
done

# The bare number of an array means all of its tasks, and one of them has it as its own.
job=$SLURM_JOB_ID
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi
if [ "$code" = 76 ]; then
    # Slurm may choose the same node again: this is counted, a preemption is not.
    count="$run_dir/slurm-$SLURM_JOB_ID-hardware"
    mkdir -p "$run_dir"
    echo "$SLURM_JOB_NODELIST" >> "$count"
    if [ "$(wc -l < "$count")" -gt "$retries" ]; then
        echo "resilience: hardware again; exclude the node that 'resilience why $run_dir' names" >&2
        exit 76
    fi
fi
# A job that was cancelled, or is being requeued by somebody else, is left alone.
case $(scontrol show job --oneliner "$job") in
    *' JobState=RUNNING '*) ;;
    *) exit "$code" ;;
esac
echo "resilience: exit code $code; requeue" >&2
if ! scontrol requeue "$job"; then
    echo "resilience: the job cannot be requeued; submit it again with the run directory $run_dir" >&2
fi
exit "$code"

