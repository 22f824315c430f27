#!/usr/bin/env bash
# The night: measure, store, confirm, judge, report. Needs nothing but Python 3.11 and a package index; uses a GPU if
# there is one. What history alone cannot decide is measured again, the commit before and this one in turns.
#
#   bash ci/nightly.sh [PLAN]
#
# Leaves groupbench.db, report.html and the night's records under records/, and exits with the gate's code:
# 0 nothing got worse, 1 a regression or a wrong result, 2 usage, 3 incomplete, 4 not comparable.
# GROUPBENCH_DB names another database, GROUPBENCH_CONFIRM_MINUTES the time for suspects (30; 0 leaves them suspects).
# Options for tritonbench may follow the plan (--commit HASH, --branch NAME, ...).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
. ci/environment.sh
groupbench_environment "measure,report,test" || exit 2

plan=${1:-ci/nightly.toml}
shift || true
records=records/$(date -u +%Y%m%dT%H%M%SZ)-$$.jsonl
mkdir -p records || exit 2

tritonbench --plan "$plan" --trigger nightly --records "$records" "$@"
measured=$?
[ "$measured" -eq 2 ] && exit 2

echo
groupbench ingest "$records" || exit 2
minutes=${GROUPBENCH_CONFIRM_MINUTES:-30}
if [ "$measured" -ne 130 ] && [ "$minutes" != 0 ]; then
  groupbench confirm --budget "$minutes"  # what stays undecided is the gate's to say
fi
groupbench gate --update
judged=$?
groupbench report -o report.html || exit 2
# An interrupted night is stored and judged as far as it came, but never passes.
[ "$measured" -eq 130 ] && exit 130
[ "$judged" -eq 0 ] && exit "$measured"
exit "$judged"
