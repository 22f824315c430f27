#!/usr/bin/env bash
# Install groupbench, then run `groupbench night`: measure, store, confirm, judge, report, post. This only needs
# Python 3.11 and a package index. It uses a GPU if there is one.
#
#   bash ci/nightly.sh [PLAN] [OPTION ...]
#
# PLAN is groupbench.toml by default. Options go to `groupbench night`, which passes unknown ones to tritonbench
# (--budget 2h, --device cpu, --commit HASH, ...). docs/reference/configuration.md lists the environment variables.
#
# Exit codes: the gate's (0 nothing got worse, 1 a regression or a wrong result, 2 usage, 3 incomplete, 4 not
# comparable), 75 another nightly run is using this GPU, 130 interrupted.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
. ci/environment.sh
groupbench_help ci/nightly.sh "$@"
groupbench_environment "measure,report,test" || exit 2

plan=groupbench.toml
if [ "$#" -gt 0 ] && [ "${1#-}" = "$1" ]; then
  plan=$1
  shift
fi
exec groupbench --config "$plan" night "$@"
