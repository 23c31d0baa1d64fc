#!/bin/bash
# All cases, or those named (c01 c07 ...), at most 3 at a time, each bounded by timeout. Prints the table, keeps it in out/table.txt.
# JOBS=1 for fewer at a time. Needs `resilience` on PATH. STOPS_TIMES=2 doubles all limits but the 5 s (busy machine). Exit code: number of cases that do not pass.
cd "$(dirname "$0")" || exit 2
command -v resilience > /dev/null || { echo "no resilience on PATH" >&2; exit 2; }
python=${STOPS_HARNESS_PYTHON:-python3}
mkdir -p out
if [ $# -eq 0 ]; then set -- c{01..24}; fi
for name; do
  name=${name%.py}
  [ -f "$name.py" ] || { echo "no such case: $name" >&2; exit 2; }
  rm -f "out/$name.line"
done
one() {
  name=${1%.py}
  timeout -k 30 ${CASE_LIMIT:-900} "$2" "$name.py" > "out/$name.line" 2> "out/$name.err" < /dev/null
  code=$?
  [ -s "out/$name.line" ] || echo "FAIL $name: expected one line of verdict, saw code $code and $(tail -c 300 "out/$name.err" | tr '\n' ' ')" > "out/$name.line"
  cat "out/$name.line"
}
export -f one
printf '%s\n' "$@" | xargs -P "${JOBS:-3}" -I{} bash -c 'one "$1" "$2"' _ {} "$python"
for name; do cat "out/${name%.py}.line"; done > out/table.txt
echo
echo "--- $(grep -c '^PASS' out/table.txt) of $(wc -l < out/table.txt) pass"
sort -k2 out/table.txt
exit "$(grep -vc '^PASS' out/table.txt)"
