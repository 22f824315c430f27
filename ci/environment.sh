# Sourced by the scripts beside it: makes the virtual environment .venv of the repository, anew for each set of
# requirements, with the versions of ci/constraints.txt. One that something else made is left alone.
#
#   groupbench_environment EXTRAS      e.g. "measure,report"
#   groupbench_help SCRIPT ARGUMENTS   prints what SCRIPT says of itself, and exits, where they hold -h or --help
#
# PYTHON names the interpreter to make it from (3.11 or newer). GROUPBENCH_VENV names an environment that is used as
# it is, for images that come with one and for machines without a network; the code that runs is this checkout's.
# shellcheck shell=bash

# What the comment at a script's top says, if one of the arguments asks for help.
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
        echo "groupbench: $python is not Python 3.11 or newer; name one by PYTHON=..." >&2
        return 2
    fi
    stamp=$( { "$python" --version; cat pyproject.toml ci/constraints.txt; echo "$PWD $extras"; } | cksum | tr ' ' -)
    if [ ! -e ".venv/groupbench-$stamp" ]; then
        if [ -e .venv ] && ! compgen -G '.venv/groupbench-*' >/dev/null; then
            echo "groupbench: .venv was made by something else, and would be made anew: move it away, or use it as it is" \
                "by GROUPBENCH_VENV=$PWD/.venv" >&2
            return 2
        fi
        echo "groupbench: installing into .venv" >&2
        rm -rf .venv
        "$python" -m venv .venv && touch .venv/groupbench-unfinished || return 2
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -c ci/constraints.txt -e ".${extras:+[$extras]}" ||
            return 2
        touch ".venv/groupbench-$stamp"
    fi
    export PATH="$PWD/.venv/bin:$PATH"
}

# An environment that somebody else made may hold the code of another checkout: this one's comes before it, in the layout
# in which it is installed.
groupbench_own_code() {
    local own="import pathlib, groupbench.tracker as t; print(pathlib.Path(t.__file__).resolve().parents[1])" folder
    [ "$(python -c "$own" 2>/dev/null)" = "$(pwd -P)" ] && return
    folder=$PWD/build/checkout
    mkdir -p "$folder/groupbench" || return
    ln -sfn "$PWD/kernels" "$PWD/operators" "$PWD/tracker" "$folder/groupbench/" || return
    export PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}"
}
