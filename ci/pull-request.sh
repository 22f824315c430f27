#!/usr/bin/env bash
# A change, judged beside what it is based on: both commits in turns on one card, until it is clear whether they differ.
#
#   bash ci/pull-request.sh BASE [HEAD]
#
# BASE is a branch or a commit; HEAD (this checkout's commit) is measured beside the merge base of both. Each line of
# ci/pull-request.txt is the options of one `groupbench ab`; it needs a GPU, as its --device cuda says. Leaves
# artifacts/comment.md for `groupbench post`, removes an earlier one first, and adds to artifacts/comparisons.jsonl.
#
# Exit codes: 0 nothing got worse, 1 something is slower, less accurate or wrong, 2 usage, 3 something failed or was not
# resolved, 75 another measures on this GPU, 130 interrupted.
#
# GROUPBENCH_AB            file of comparisons (ci/pull-request.txt)
# GROUPBENCH_ARTIFACTS     folder of outputs (artifacts)
# GROUPBENCH_WAIT_MINUTES  time to wait for whoever measures on this GPU (60)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
. ci/environment.sh
groupbench_help ci/pull-request.sh "$@"
# However this ends, what another verdict left there is not this one's.
artifacts=${GROUPBENCH_ARTIFACTS:-artifacts}
mkdir -p "$artifacts" && rm -f "$artifacts/comment.md" || exit 2

if [ "$#" -lt 1 ] || [ "$#" -gt 2 ] || [ "${1#-}" != "$1" ]; then
  echo "usage: bash ci/pull-request.sh BASE [HEAD]; --help tells more" >&2
  exit 2
fi
list=${GROUPBENCH_AB:-ci/pull-request.txt}
if [ ! -r "$list" ]; then
  echo "groupbench: cannot read $list, which says what is compared" >&2
  exit 2
fi
commit() {
  git rev-parse --verify --quiet --end-of-options "$1^{commit}" && return
  echo "groupbench: git knows no commit $1 here; is it misspelled, or not fetched?" >&2
  return 2
}
head=$(commit "${2:-HEAD}") || exit 2
base=$(commit "$1") || exit 2
base=$(git merge-base "$base" "$head") ||
  { echo "groupbench: $1 and ${head:0:10} have no common commit here; fetch the whole history" >&2 && exit 2; }
if [ "$base" = "$head" ]; then
  echo "groupbench: $1 holds ${head:0:10} already: there is nothing to compare. Name an earlier commit, HEAD~1 say;" \
    "what is not committed yet: groupbench ab HEAD . --operator NAME" >&2
  exit 2
fi

groupbench_environment "measure,report,test" || exit 2
if [ -z "${GROUPBENCH_ALONE:-}" ]; then
  exec python -m groupbench.operators.alone --wait "${GROUPBENCH_WAIT_MINUTES:-60}" -- \
    bash ci/pull-request.sh "$base" "$head"
fi
# The lock is that of the device which is measured on.
if [[ ${GROUPBENCH_ALONE##*/} == groupbench-cpu-* ]] && grep -qE '^[^#]*--device[ =]+cuda' "$list"; then
  echo "groupbench: $list says --device cuda, and there is no GPU here; name a list of what a CPU runs by GROUPBENCH_AB" >&2
  exit 2
fi

tables=$(mktemp) || exit 2
trap 'rm -f "$tables"' EXIT
worst=0 compared=0
while read -r -a options || [ "${#options[@]}" -gt 0 ]; do # the last line may lack its end
  [ "${#options[@]}" -eq 0 ] || [ "${options[0]:0:1}" = "#" ] && continue
  compared=$((compared + 1))
  printf '\n\x60%s\x60\n\n' "${options[*]}" >>"$tables"
  groupbench ab "$base" "$head" "${options[@]}" --records "$artifacts/comparisons.jsonl" --md </dev/null >>"$tables"
  code=$?
  if [ "$code" -ge 128 ]; then exit "$code"; fi
  # A regression is graver than what could not be told, and that graver than nothing; usage ends it.
  case $code in
    0) ;;
    1) worst=1 ;;
    2) exit 2 ;;
    *) [ "$worst" -eq 0 ] && worst=3 ;;
  esac
done <"$list"
if [ "$compared" -eq 0 ]; then
  echo "groupbench: $list names no comparison" >&2
  exit 2
fi

words=("nothing got worse" "something got worse" "" "not all could be told")
{
  echo "**groupbench: ${words[$worst]}.** \`${head:0:10}\` beside its merge base \`${base:0:10}\`, in turns on one device."
  cat "$tables"
} >"$artifacts/comment.md"
cat "$artifacts/comment.md"
[ -n "${GITHUB_STEP_SUMMARY:-}" ] && cat "$artifacts/comment.md" >>"$GITHUB_STEP_SUMMARY"
exit "$worst"
