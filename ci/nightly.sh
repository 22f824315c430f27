#!/usr/bin/env bash
# The night: install, then `groupbench night`: measure, store, confirm, judge, report, post. Needs nothing but Python 3.11
# and a package index; uses a GPU if there is one.
#
#   bash ci/nightly.sh [PLAN] [OPTION ...]
#
# PLAN is groupbench.toml unless named. Options go to `groupbench night`, which passes what it does not know to
# tritonbench (--budget 2h, --device cpu, --commit HASH, ...). Its environment variables are in docs/reference/configuration.md.
#
# Exit codes: the gate's (0 nothing got worse, 1 a regression or a wrong result, 2 usage, 3 incomplete, 4 not
# comparable), 75 another night is measuring on this GPU, 130 interrupted.
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
