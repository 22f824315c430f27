#!/usr/bin/env bash
# Run the checks that a change must pass before it lands: style, types, layers, tests.
#
#   bash ci/test.sh                         three tests at once for every two cores
#   bash ci/test.sh --exhaustive            also run the long tests: full products of parameters, more seeds
#   bash ci/test.sh --exhaustive -p randomly   in random order; the output starts with the seed
#   bash ci/test.sh -n 0 -x tests/tracker   arguments go to pytest
#   bash ci/test.sh --toolchain NAME [--compile-only]   test with other versions of torch and Triton; see toolchain.sh
#
# GROUPBENCH_TRITONBENCH  checkout or archive of TritonBench, for the tests with it as the host. If unset, these tests
#                         run only if it is installed; the last lines of the output list skipped tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/environment.sh
groupbench_help ci/test.sh "$@"
if [ "${1:-}" = --toolchain ]; then
  exec bash ci/toolchain.sh "${@:2}"
fi
groupbench_environment "measure,report,test"

scratch=$(mktemp -d)
trap 'jobs -p | xargs -r kill 2>/dev/null; rm -rf "$scratch" "${memory:-}"' EXIT

# Databases and checkouts of tests are small, and most of their time on a disk is waiting for it.
if [ -z "${TMPDIR:-}" ] && [ -w /dev/shm ] && [ "$(df --output=avail -BG /dev/shm | tail -n 1 | tr -dc 0-9)" -ge 4 ]; then
  memory=$(mktemp -d /dev/shm/groupbench-tests-XXXXXX)
  export TMPDIR=$memory
fi

ruff check .
ruff format --check .

# The tests start many programs. Each would compile the product's modules, if PYTHONDONTWRITEBYTECODE is set.
python -m compileall -q -j 0 kernels operators tracker

# mypy and import-linter cannot read the editable install's mapping: give them folders in the installed layout.
mkdir "$scratch/groupbench"
ln -s "$PWD/kernels" "$PWD/operators" "$PWD/tracker" "$scratch/groupbench/"
types() {
  (cd "$scratch" && MYPYPATH=$scratch mypy --config-file "$OLDPWD/pyproject.toml" --cache-dir "$OLDPWD/.mypy_cache" \
    -p groupbench)
}
layers() {
  PYTHONPATH=$scratch lint-imports --config pyproject.toml --no-cache
}

checkout=${GROUPBENCH_TRITONBENCH:+$(realpath "$GROUPBENCH_TRITONBENCH")}
if [ -f "$checkout" ]; then
  mkdir "$scratch/tritonbench"
  tar -xf "$checkout" -C "$scratch/tritonbench"
  package=$(find "$scratch/tritonbench" -mindepth 2 -maxdepth 3 -path '*/tritonbench/__init__.py' -print -quit)
  checkout=${package%/tritonbench/__init__.py}
fi
if [ -n "${GROUPBENCH_TRITONBENCH:-}" ] && [ ! -e "$checkout/tritonbench/__init__.py" ]; then
  echo "groupbench: TritonBench was not found in $GROUPBENCH_TRITONBENCH" >&2
  exit 2
fi

# Run these during the tests, and print their output afterwards so that it does not mix with the tests' output.
{ types && layers; } >"$scratch/types_and_layers" 2>&1 &
types_and_layers=$!
failed=0
PYTHONPATH="$checkout${PYTHONPATH:+${checkout:+:}$PYTHONPATH}" pytest -n auto --dist worksteal "$@" || failed=$?
wait "$types_and_layers" || failed=1
cat "$scratch/types_and_layers"
exit "$failed"
