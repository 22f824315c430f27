# Functions for the scripts in this folder, which source this file.
#
#   groupbench_environment EXTRAS      activate the virtual environment .venv with these extras, e.g. "measure,report"
#   groupbench_help SCRIPT ARGUMENTS   print the comment at the top of SCRIPT and exit, if ARGUMENTS has -h or --help
#
# .venv has the versions of ci/constraints.txt and is rebuilt whenever the requirements change. An environment that this
# script did not create is never touched.
#
# PYTHON           interpreter to create it from, 3.11 or newer (python3)
# GROUPBENCH_VENV  environment to use unchanged, for images that contain one and machines without a network; the code
#                  is still this checkout's
# shellcheck shell=bash

# Print the comment at the top of a script, if one of the arguments asks for help.
groupbench_help() {
    local script=$1 word
    shift
    for word; do
        case $word in
            -h | --help)
                awk 'NR == 1 { next } !/^#/ { exit } { sub(/^# ?/, ""); print }' "$script"
                exit 0
                ;;
        esac
    done
}

groupbench_environment() {
    local extras=$1 stamp
    if [ -n "${GROUPBENCH_VENV:-}" ]; then
        export PATH="$GROUPBENCH_VENV/bin:$PATH"
        groupbench_own_code
        return
    fi
    local python=${PYTHON:-python3}
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "groupbench: $python is not Python 3.11 or newer; set PYTHON to an interpreter that is" >&2
        return 2
    fi
    stamp=$( { "$python" --version; cat pyproject.toml ci/constraints.txt; echo "$PWD $extras"; } | cksum | tr ' ' -)
    if [ ! -e ".venv/groupbench-$stamp" ]; then
        if [ -e .venv ] && ! compgen -G '.venv/groupbench-*' >/dev/null; then
            echo "groupbench: .venv was not created by this script, which would replace it: move it away, or use it" \
                "unchanged with GROUPBENCH_VENV=$PWD/.venv" >&2
            return 2
        fi
        echo "groupbench: installing into .venv" >&2
        rm -rf .venv
        "$python" -m venv .venv && touch .venv/groupbench-unfinished || return 2
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c ci/constraints.txt \
            -e ".${extras:+[$extras]}" || return 2
        # On every core, where pip would use one. Some packages contain files that are not valid Python.
        .venv/bin/python -m compileall -q -j 0 .venv/lib/python3*/site-packages >/dev/null 2>&1 || true
        touch ".venv/groupbench-$stamp"
    fi
    export PATH="$PWD/.venv/bin:$PATH"
}

# Put this checkout's code first, in its installed layout: the environment may contain the code of another checkout.
groupbench_own_code() {
    local own="import pathlib, groupbench.tracker as t; print(pathlib.Path(t.__file__).resolve().parents[1])" folder
    [ "$(python -c "$own" 2>/dev/null)" = "$(pwd -P)" ] && return
    folder=$PWD/build/checkout
    mkdir -p "$folder/groupbench" || return
    ln -sfn "$PWD/kernels" "$PWD/operators" "$PWD/tracker" "$folder/groupbench/" || return
    export PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}"
}
