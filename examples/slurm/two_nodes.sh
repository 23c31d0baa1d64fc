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
sdk=(python -m resilience_sdk)
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# A launcher that was killed ends the step, since the others would wait for it for minutes; one that dies after Slurm
# has asked it to leave has left. Else its exit code counts.
# shellcheck disable=SC2016
launch='
    trap asked=yes TERM
    trap : INT QUIT HUP
    "$@"
    code=$?
    if [ "$code" -gt 128 ] && [ "$code" -ne 130 ]; then
        if [ -n "${asked:-}" ]; then exit 75; fi
        scancel --signal=KILL "$SLURM_JOB_ID.$SLURM_STEP_ID"
    fi
    if [ "$code" -eq 1 ] && [ -n "${asked:-}" ]; then exit 79; fi
    exit "$code"'

saved=("$run_dir"/checkpoints/step-*/manifest.json)
try=0
while :; do
    start="${SLURM_RESTART_COUNT:-0}-$try"
    # Another one in each start, in case somebody has this one.
    port=$((20000 + (SLURM_JOB_ID + 97 * (${SLURM_RESTART_COUNT:-0} + try)) % 10000))
    # One launcher per node. A node that has finished early must not end the others.
    srun --ntasks-per-node=1 --kill-on-bad-exit=0 --cpu-bind=none bash -c "$launch" launch \
        "${sdk[@]}" run --run-dir "$run_dir" \
        --nnodes "$SLURM_JOB_NUM_NODES" --rdzv-backend c10d --rdzv-endpoint "$head:$port" \
        --rdzv-id "$SLURM_JOB_ID-$start" \
        --nproc-per-node 8 examples/full_run.py
    code=$?
    case $code in
        0|2|77|130) exit "$code" ;;  # finished, bad usage, stop, interrupted by a person: never again
        75|76|79) break ;;  # preempted; hardware; failed when it was to leave
    esac
    # A launcher that was killed, or one that has no restarts left: again in this allocation.
    if [ "$try" -ge "$retries" ]; then
        echo "resilience: exit code $code, and no retry is left (of $retries)" >&2
        exit "$code"
    fi
    try=$((try + 1))
    echo "resilience: exit code $code; retry $try of $retries" >&2
done

# How often in a row this job came back for nothing. A preemption after new checkpoints, or after a minute, is free.
count="$run_dir/slurm-$SLURM_JOB_ID-$code"
now=("$run_dir"/checkpoints/step-*/manifest.json)
limit=$retries  # 76
why="hardware again; 'resilience why $run_dir' names the node, and 'resilience nodes' what the history suspects"
if [ "$code" = 79 ]; then
    why="failed again when it was to leave; 'resilience why $run_dir' tells what stood still"
    if [ "${now[*]}" != "${saved[*]}" ]; then rm -f "$count"; fi
fi
if [ "$code" = 75 ]; then
    limit=2
    why="preempted again within a minute and without a new checkpoint; 'resilience why $run_dir' names who asked"
    if [ "$SECONDS" -ge 60 ] || [ "${now[*]}" != "${saved[*]}" ]; then rm -f "$count"; limit=; fi
fi
if [ -n "$limit" ]; then
    mkdir -p "$run_dir"
    echo "$SLURM_JOB_NODELIST" >> "$count"
    if [ "$code" = 79 ]; then code=1; fi
    if [ "$(wc -l < "$count")" -gt "$limit" ]; then
        rm -f "$count"
        echo "resilience: $why" >&2
        exit "$code"
    fi
fi

# The bare number of an array means all of its tasks, and one of them has it as its own.
job=$SLURM_JOB_ID
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi
by_hand="submit it again with the run directory $run_dir"
# What the verdict blames, and what the history suspects, as far as it can be told soon.
suspects=$(timeout 30 "${sdk[@]}" nodes --exclude-list --after "$run_dir") || suspects=
# The controller may be away for a moment, as when it restarts.
for wait in 1 2 4 8 16 0; do
    if shown=$(scontrol show job --oneliner "$job"); then break; fi
    sleep "$wait"
done
# A job that was cancelled, or is being requeued by somebody else, is left alone.
case $shown in
    *' JobState=RUNNING '*) ;;
    *' JobState='*) exit "$code" ;;
    *)
        echo "resilience: Slurm does not tell whether the job may be requeued; $by_hand" >&2
        exit "$code"
        ;;
esac
# They are left out beside what is left out already. Slurm refuses a list with a node that it does not have: the history
# may be that of several clusters. It takes one of a job that waits, and ends this shell some seconds after the job has
# gone back into the queue.
already=$(sed -n 's/.* ExcNodeList=\([^ ]*\) .*/\1/p' <<< "$shown")
if [ "$already" = "(null)" ]; then already=; fi
leave_out=
if [ -n "$suspects" ]; then
    for node in $(scontrol show hostnames "$suspects"); do
        case ",$already,$leave_out," in *",$node,"*) continue ;; esac
        if scontrol show node "$node" > /dev/null 2>&1; then leave_out+=${leave_out:+,}$node; fi
    done
fi
if [ -n "$already" ]; then leave_out=${leave_out:+$already,$leave_out}; fi
trap '' TERM
echo "resilience: exit code $code; requeue${leave_out:+ without $leave_out}" >&2
if ! scontrol requeue "$job"; then
    echo "resilience: the job cannot be requeued; $by_hand" >&2
elif [ -n "$leave_out" ]; then
    for wait in 0.5 1 2 4 0; do
        if scontrol update "JobId=$job" "ExcNodeList=$leave_out"; then exit "$code"; fi
        sleep "$wait"
    done
    echo "resilience: Slurm was not told to leave out $leave_out; it may choose it again" >&2
fi
exit "$code"

