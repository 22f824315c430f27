#!/usr/bin/env bash
# Run the kernels' tests on a GPU under NVIDIA's compute-sanitizer:
#
#   bash ci/sanitize.sh                                     memcheck, racecheck and synccheck; takes one to two hours
#   bash ci/sanitize.sh racecheck tests/kernels/test_split_k.py -k fixup
#
# memcheck finds accesses outside of allocations. torch's caching allocator is off, so that each tensor has its own
# allocation. racecheck finds hazards in shared memory, and synccheck barriers that not all threads reach. The exit code
# is 1 if a tool reports an error or a test fails.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
    exit 0
fi
tools=(memcheck racecheck synccheck)
case ${1:-} in
    memcheck | racecheck | synccheck | initcheck) tools=("$1"); shift ;;
esac
tests=("$@")
((${#tests[@]})) || tests=(tests/kernels --ignore-glob '*test_compile*' --ignore tests/kernels/test_reference.py)
command -v compute-sanitizer >/dev/null || { echo "sanitize: compute-sanitizer is not on the PATH; CUDA's toolkit has it" >&2; exit 2; }

export PYTORCH_NO_CUDA_MEMORY_CACHING=1
failed=0
for tool in "${tools[@]}"; do
    echo "== $tool"
    compute-sanitizer --tool "$tool" --error-exitcode 1 --print-limit 20 python3 -m pytest -q -p no:cacheprovider "${tests[@]}" || failed=1
done
exit $failed
