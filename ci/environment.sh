# Sourced by the scripts beside it: makes the virtual environment .venv of the repository, once for each set of
# requirements, with the versions of ci/constraints.txt.
#
#   groupbench_environment EXTRAS      e.g. "measure,report"
#
# PYTHON names the interpreter to make it from (3.11 or newer). GROUPBENCH_VENV names an environment that is used as
# it is, for images that come with one and for machines without a network.

groupbench_environment() {
    local extras=$1 stamp
    if [ -n "${GROUPBENCH_VENV:-}" ]; then
        export PATH="$GROUPBENCH_VENV/bin:$PATH"
        return
    fi
    local python=${PYTHON:-python3}
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "groupbench: $python is not Python 3.11 or newer; name one by PYTHON=..." >&2
        return 2
    fi
    stamp=$( { "$python" --version; cat pyproject.toml ci/constraints.txt; echo "$PWD $extras"; } | cksum | tr ' ' -)
    if [ ! -e ".venv/groupbench-$stamp" ]; then
        echo "groupbench: installing into .venv" >&2
        rm -rf .venv
        "$python" -m venv .venv || return 2
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -c ci/constraints.txt -e ".[$extras]" ||
            return 2
        touch ".venv/groupbench-$stamp"
    fi
    export PATH="$PWD/.venv/bin:$PATH"
}
