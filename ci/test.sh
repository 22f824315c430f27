#!/usr/bin/env bash
# Everything that must hold before a change lands: style, types, layers, tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/environment.sh
groupbench_environment "measure,report,test"

ruff check .
ruff format --check .
# mypy and import-linter read folders, not the editable install's mapping: show them the installed layout.
layout=$(mktemp -d)
trap 'rm -rf "$layout"' EXIT
mkdir "$layout/groupbench"
ln -s "$PWD/kernels" "$PWD/operators" "$PWD/tracker" "$layout/groupbench/"
(cd "$layout" && MYPYPATH=$layout mypy --config-file "$OLDPWD/pyproject.toml" --cache-dir "$OLDPWD/.mypy_cache" -p groupbench)
PYTHONPATH=$layout lint-imports --config pyproject.toml --no-cache
pytest "$@"
