#!/bin/bash
# Slurm's B:TERM habit: the batch shell gets the signal and passes it on.
echo $$ > job.pid
trap 'echo "job.sh: told to leave"; kill -TERM "$training"' TERM
resilience run --nproc-per-node 2 --run-dir run train.py &
training=$!
wait "$training"; code=$?
while kill -0 "$training" 2>/dev/null; do wait "$training"; code=$?; done
wait "$training" 2>/dev/null; last=$?
[ "$last" -ne 127 ] && code=$last
echo "job.sh: the training left with $code"
exit "$code"
