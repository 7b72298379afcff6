#!/usr/bin/env bash
# The gpu suite against several Transformer Engine releases, one after the other, each from a folder of its own that goes
# first on PYTHONPATH: for anyone who keeps them side by side.
#
#   tests/gpu_releases.sh OUT FOLDER...        results in OUT/<name of the folder>
set -uo pipefail
out=$1
shift
here=$(dirname "$0")
status=0
for folder in "$@"; do
  name=$(basename "$folder")
  preload=
  [ -f "$folder/stubs.so" ] && preload=$folder/stubs.so
  PYTHONPATH=$folder:${PYTHONPATH:-} LD_PRELOAD=$preload bash "$here/gpu_suite.sh" "$out/$name" suite || status=1
done
exit $status
