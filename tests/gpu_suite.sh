#!/usr/bin/env bash
# The gpu suite against stock Transformer Engine, and the benchmark: for anyone with a GPU, torch, Transformer Engine and
# this project's wheel installed.
#
#   tests/gpu_suite.sh OUT [core|all] [benchmark options...]     OUT: folder for logs and JSON
#
# "core" runs the part that every Transformer Engine release must pass; "all" everything, then benches/step.py.
set -uo pipefail
out=$1 part=${2:-all}
shift 2 || shift $#
mkdir -p "$out"
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1
selection=gpu
[ "$part" = core ] && selection="gpu and core"
PARITY_SUMMARY=$out/parity.json python3 -m pytest -q -p no:cacheprovider -m "$selection" tests/parity --durations=5 >"$out/pytest.log" 2>&1
status=$?
grep -vE '^(SKIPPED|\.|s)' "$out/pytest.log" | tail -45
[ -f "$out/parity.json" ] && cat "$out/parity.json" && echo
if [ "$part" = all ]; then
  python3 benches/step.py --out "$out/step.json" "$@" 2>"$out/step.log" || status=1
  grep "not measured" "$out/step.log"
fi
exit $status
