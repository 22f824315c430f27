#!/usr/bin/env bash
# The night: measure, store, confirm, judge, report, post. Needs nothing but Python 3.11 and a package index; uses a GPU
# if there is one. What history alone cannot decide is measured again, the commit before and this one in turns.
#
#   bash ci/nightly.sh [PLAN] [OPTION ...]
#
# PLAN is ci/nightly.toml unless named; options go to tritonbench (--budget 2h, --device cpu, --commit HASH, ...).
# Leaves groupbench.db, report.html, the night's records under records/ and the verdict in CI's formats under artifacts/,
# where what an earlier one left is removed first.
# A night that is interrupted is gone on with by the same command, on the same commit and within a day; what a budget
# left out is what the next night begins with. docs/ci.md tells more.
#
# Exit codes: the gate's (0 nothing got worse, 1 a regression or a wrong result, 2 usage, 3 incomplete, 4 not
# comparable), 75 another night is measuring on this GPU, 130 interrupted.
#
# GROUPBENCH_DB               database, a file or a URL (groupbench.db)
# GROUPBENCH_RECORDS          folder of records (records), which the next night wants to find
# GROUPBENCH_ARTIFACTS        folder of outputs for CI (artifacts)
# GROUPBENCH_REPORT           the report's file (report.html)
# GROUPBENCH_CONFIRM_MINUTES  time for suspects (30; 0 leaves them suspects)
# GROUPBENCH_WAIT_MINUTES     time to wait for another night on this GPU (0)
# GROUPBENCH_WEBHOOK          URL that a message goes to when something changed
# GROUPBENCH_POST             number of a pull request or issue whose comment shows the newest verdict
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
. ci/environment.sh
groupbench_help ci/nightly.sh "$@"
for option; do
  case $option in
    --version | --list-*) why="prints, and measures nothing: tritonbench $option" ;;
    --records | --records=*) why="is this script's to say: GROUPBENCH_RECORDS names the folder" ;;
    *) continue ;;
  esac
  echo "groupbench: ${option%%=*} $why" >&2
  exit 2
done
groupbench_environment "measure,report,test" || exit 2

plan=ci/nightly.toml
if [ "$#" -gt 0 ] && [ "${1#-}" = "$1" ]; then
  plan=$1
  shift
fi
device=auto
for ((i = 1; i <= $#; i++)); do
  case ${!i} in
    --device=*) device=${!i#*=} ;;
    --device | -d) next=$((i + 1)) && device=${!next:-auto} ;;
  esac
done

# One night at a time on a GPU: this script again, below a process that holds the GPU's lock.
if [ -z "${GROUPBENCH_ALONE:-}" ]; then
  exec python -m groupbench.operators.alone --device "$device" --wait "${GROUPBENCH_WAIT_MINUTES:-0}" -- \
    bash ci/nightly.sh "$plan" "$@"
fi

records_folder=${GROUPBENCH_RECORDS:-records}
artifacts=${GROUPBENCH_ARTIFACTS:-artifacts}
mkdir -p "$records_folder" "$artifacts" || exit 2
# What another verdict left there could be taken for this night's, or be posted as such.
rm -f "$artifacts"/{summary.md,comment.md,gate.xml,gate.sarif,verdict.json,badge.svg,badge.json,alerts.atom} || exit 2
database=${GROUPBENCH_DB:-groupbench.db}
case $database in *://*) ;; *) mkdir -p "$(dirname "$database")" || exit 2 ;; esac

# An interrupt, from a terminal or from CI, ends the step at hand, which tidies up, and then this script.
child='' stopped=''
# shellcheck disable=SC2329 # the trap calls it
stop() {
  stopped=yes
  [ -n "$child" ] && kill -TERM "$child" 2>/dev/null
}
trap stop INT TERM
step() {
  local code
  "$@" &
  child=$!
  wait "$child"
  code=$?
  while kill -0 "$child" 2>/dev/null; do # a trap ends `wait` before the child
    wait "$child"
    code=$?
  done
  child=
  if [ -n "$stopped" ] || [ "$code" -eq 130 ]; then
    echo "groupbench: interrupted; the same command goes on with this night" >&2
    exit 130
  fi
  return "$code"
}

# The file of a night that has not ended is named in another, one for each device.
unfinished=$records_folder/.unfinished-$(basename "$GROUPBENCH_ALONE" .lock)
ended=$records_folder/.newest-$(basename "$GROUPBENCH_ALONE" .lock)
# A file that no reader takes must not stop this night, nor all that come: it is set aside, for a person to look at.
readable() {
  python - "$1" <<'PYTHON'
import sys
from pathlib import Path

from groupbench.operators.errors import UsageError
from groupbench.operators.resume import read_run

try:
    read_run(Path(sys.argv[1]))
except UsageError as error:
    sys.exit(f"groupbench: {error}")
PYTHON
}
set_aside() {
  mv "$1" "$1.unreadable" || exit 2
  echo "groupbench: set aside as $1.unreadable; a new night begins" >&2
}
for pointer in "$unfinished" "$ended"; do
  [ -f "$pointer" ] || continue
  file=$records_folder/$(cat "$pointer")
  if [ -f "$file" ] && ! readable "$file"; then
    set_aside "$file"
    rm -f "$pointer"
  fi
done
previous=()
[ -f "$ended" ] && [ -f "$records_folder/$(cat "$ended")" ] && previous=(--previous "$records_folder/$(cat "$ended")")

new=''
begin() {
  new=yes
  night=$(date -u +%Y%m%dT%H%M%SZ)-$$.jsonl
  echo "$night" >"$unfinished" || exit 2
}
if [ -f "$unfinished" ]; then night=$(cat "$unfinished"); else begin; fi

measure() {
  step tritonbench --plan "$plan" --trigger nightly --records "$records_folder/$night" --resume "${previous[@]}" "$@"
}
measure "$@"
measured=$?
if [ "$measured" -eq 4 ]; then # another commit's night, say: stored as far as it came, and a new one begins
  step groupbench ingest "$records_folder/$night" || exit 2
  begin
  measure "$@"
  measured=$?
fi
if [ "$measured" -eq 2 ] || [ ! -s "$records_folder/$night" ]; then
  if [ -n "$new" ]; then
    rm -f "$unfinished"
  else # a word misspelled must not cost what was measured
    echo "groupbench: the night that was interrupted is kept; to begin another, remove $unfinished" >&2
  fi
  exit 2
fi

echo
step groupbench ingest "$records_folder/$night" || exit 2
# This run, and not the newest: the database may hold other machines' nights, whose clocks may be ahead.
run=$(head -n 1 "$records_folder/$night" | python -c 'import json, sys; print(json.load(sys.stdin)["run"]["id"])') || exit 2
minutes=${GROUPBENCH_CONFIRM_MINUTES:-30}
if [ "$minutes" != 0 ]; then
  step groupbench confirm "$run" --budget "${minutes}m" # what stays undecided is the gate's to say
fi
outputs=(-o "summary=$artifacts/summary.md" -o "comment=$artifacts/comment.md" -o "junit=$artifacts/gate.xml"
  -o "sarif=$artifacts/gate.sarif" -o "json=$artifacts/verdict.json" -o "badge=$artifacts/badge.svg"
  -o "badge=$artifacts/badge.json" -o "atom=$artifacts/alerts.atom")
[ -n "${GITHUB_STEP_SUMMARY:-}" ] && outputs+=(-o summary)
[ -n "${GROUPBENCH_WEBHOOK:-}" ] && outputs+=(-o webhook)
step groupbench gate --update --run "$run" "${outputs[@]}"
judged=$?
step groupbench report --run "$run" -o "${GROUPBENCH_REPORT:-report.html}" || exit 2
# The night is judged: that a server is away does not change the verdict.
if [ -n "${GROUPBENCH_POST:-}" ]; then
  step groupbench post "$artifacts/comment.md" --pr "$GROUPBENCH_POST" || echo "groupbench: not posted" >&2
fi
mv "$unfinished" "$ended" || exit 2
[ "$judged" -eq 0 ] && exit "$measured"
exit "$judged"
