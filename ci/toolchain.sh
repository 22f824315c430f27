#!/usr/bin/env bash
# Test the kernels and operators with the versions of a file in ci/toolchains. Arguments go to pytest.
#
#   bash ci/toolchain.sh torch-2.15                 test in a separate environment with that torch, Triton and Helion
#   bash ci/toolchain.sh triton-3.9 --compile-only  compile every kernel for sm_90 with that Triton and the default
#                                                   torch; needs neither a GPU nor a CUDA build of torch
#   bash ci/toolchain.sh --list                     print the names
#
# Environments are kept in .toolchains/NAME until their versions change; one with a CUDA build of torch takes 6 GB.
# PYTHON and GROUPBENCH_VENV work as in ci/environment.sh. With GROUPBENCH_VENV, --compile-only adds Triton to that
# environment's packages without changing it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/environment.sh
groupbench_help ci/toolchain.sh "${@:---help}"
if [ "$1" = --list ]; then
    basename -s .txt ci/toolchains/*.txt
    exit
fi
name=$1 versions=ci/toolchains/$1.txt compile_only=
shift
if [ ! -f "$versions" ]; then
    echo "groupbench: unknown toolchain $name; choose from: $(basename -s .txt ci/toolchains/*.txt | xargs)" >&2
    exit 2
fi
if [ "${1:-}" = --compile-only ]; then
    compile_only=1
    shift
fi
if [ -z "$compile_only" ] && ! grep -q '^torch==' "$versions"; then
    echo "groupbench: $name has no version of torch: use --compile-only" >&2
    exit 2
fi
folder=$PWD/.toolchains/$name${compile_only:+-compile}
stamp=$folder/made-$({ cat "$versions" pyproject.toml ci/constraints.txt; echo "$PWD"; } | cksum | tr ' ' -)

if [ -n "$compile_only" ]; then
    groupbench_environment "measure,report,test"
    if [ ! -e "$stamp" ]; then
        rm -rf "$folder"
        python -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" \
            "$(grep '^triton==' "$versions")"
        touch "$stamp"
    fi
    PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}" TRITON_CACHE_DIR=$folder/cache \
        pytest -n 0 tests/kernels/test_compile.py tests/kernels/test_compile_targets.py "$@"
    exit
fi
if [ ! -e "$stamp" ]; then
    rm -rf "$folder"
    "${PYTHON:-python3}" -m venv "$folder"
    names=$(grep -oE '^[A-Za-z0-9_-]+' "$versions" | paste -sd '|')
    { grep -viE "^($names)==" ci/constraints.txt; cat "$versions"; } >"$folder/constraints.txt"
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -c "$folder/constraints.txt" \
        -e ".[measure,report,test]"
    touch "$stamp"
fi
PATH=$folder/bin:$PATH pytest -n auto --dist worksteal tests/kernels tests/operators "$@"
