#!/usr/bin/env bash
# Everything that must hold before a change lands: style, types, layers, tests.
#
#   bash ci/test.sh                         as many tests at once as there are cores
#   bash ci/test.sh --exhaustive            also the tests that add volume: whole products of parameters, long runs
#   bash ci/test.sh -n 0 -x tests/tracker   arguments go to pytest
#   bash ci/test.sh --toolchain NAME [--compile-only]   the kernels with other versions of torch and Triton: toolchain.sh
#
# GROUPBENCH_TRITONBENCH  checkout or archive of TritonBench, for the tests of it as the host. Unless set, they run where
#                         it is installed; elsewhere they are skipped, and the last lines say so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/environment.sh
groupbench_help ci/test.sh "$@"
if [ "${1:-}" = --toolchain ]; then
  exec bash ci/toolchain.sh "${@:2}"
fi
groupbench_environment "measure,report,test"

scratch=$(mktemp -d)
trap 'jobs -p | xargs -r kill 2>/dev/null; rm -rf "$scratch"' EXIT

ruff check .
ruff format --check .

# mypy and import-linter read folders, not the editable install's mapping: show them the installed layout.
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
  echo "groupbench: there is no TritonBench in $GROUPBENCH_TRITONBENCH" >&2
  exit 2
fi

# Beside the tests, and printed after them: neither's output is broken up by the other's.
{ types && layers; } >"$scratch/types_and_layers" 2>&1 &
types_and_layers=$!
failed=0
PYTHONPATH="$checkout${PYTHONPATH:+${checkout:+:}$PYTHONPATH}" pytest -n auto --dist worksteal "$@" || failed=$?
wait "$types_and_layers" || failed=1
cat "$scratch/types_and_layers"
exit "$failed"
