#!/bin/sh
# make.sh PYTHON: makes the directories beside this file again, with a PYTHON that has the older version (see README.md).
# What names a machine is taken out of the journals; what nobody reads at a resume is not kept.
set -eu
python=$1
here=$(cd "$(dirname "$0")" && pwd)
place=/tmp/old-runs
rm -rf "$place"
mkdir -p "$place"
for way in start_run checkpointer lightning transformers accelerate deepspeed megatron; do
    run=$place/$way
    # It dies behind its fifth step, on purpose; the newest save is that of the fourth.
    (cd "$place" && PYTHONPATH='' "$python" "$here/loops.py" "$way" "$run" 5 >"$place/$way.out" 2>"$place/$way.err") || true
    grep '^{' "$place/$way.out" | tail -n 1 >"$place/$way.json"
    rm -rf "${here:?}/$way"
    mkdir "$here/$way"
    if [ "$way" = transformers ]; then
        cp -r "$run"/checkpoint-4 "$here/$way/"
    else
        mkdir "$here/$way/checkpoints"
        cp -r "$run/checkpoints/step-00000004" "$here/$way/checkpoints/"
        if [ -d "$run/journal" ]; then cp -r "$run/journal" "$here/$way/"; fi
    fi
    if [ "$way" = deepspeed ]; then
        PYTHONPATH='' "$python" "$here/without_scripts.py" "$here/$way/checkpoints/step-00000004"
    fi
    cp "$place/$way.json" "$here/$way/expected.json"
    find "$here/$way" -type f -path '*/journal/*' -exec sed -i -E "s/$(hostname)/host/g; s/(\"boot_id\":\")[^\"]*/\10/" {} +
    for file in "$here/$way"/journal/*; do
        if [ -e "$file" ]; then mv "$file" "$here/$way/journal/host-${file##*/"$(hostname)"-}"; fi
    done
done
du -sk "$here"
