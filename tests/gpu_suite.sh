#!/usr/bin/env bash
# The gpu suite against stock Transformer Engine, and the benchmark: for anyone with a GPU, torch, Transformer Engine,
# pytest-xdist and this project's wheel installed.
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
tally=$(mktemp -d)
export OMP_NUM_THREADS=1 FAILURES=$out/failures.txt
run() { PARITY_SUMMARY=$tally python3 -m pytest -q -p no:cacheprovider -p no:benchmark --durations=5 "$@" >>"$out/pytest.log" 2>&1; }
tests="tests/parity tests/load tests/clients tests/distributed tests/test_guides.py"
: >"$out/pytest.log"
status=0
run -n "${PROCESSES:-8}" -m "$selection and not alone" $tests || status=$?
[ "$part" = core ] || run -m "$selection and alone" $tests || status=$?
grep -vE '^(SKIPPED|\.|s)' "$out/pytest.log" | tail -45
python3 - "$tally" "$out/parity.json" "$selection" <<'PY'
import collections, datetime, json, pathlib, sys
import torch, te_patches
total = collections.Counter()
for file in pathlib.Path(sys.argv[1]).glob("*.json"):
    total.update(json.loads(file.read_text()))
about = {"te": te_patches._releases._version(), "torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
about |= {"date": datetime.date.today().isoformat(), "selection": sys.argv[3]}
text = json.dumps({**total, **about}, indent=1)
pathlib.Path(sys.argv[2]).write_text(text + "\n")
print(text)
PY
unset OMP_NUM_THREADS
if [ "$part" = all ]; then
  python3 benches/step.py --out "$out/step.json" "$@" 2>"$out/step.log" || status=1
  grep "not measured" "$out/step.log"
fi
exit $status
