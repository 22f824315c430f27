#!/usr/bin/env bash
# Judge a change against its merge base: A/B-test both commits on one device until it is clear whether they differ.
#
#   bash ci/pull-request.sh BASE [HEAD]
#
# BASE is a branch or a commit. HEAD, by default this checkout's commit, is compared with the merge base of both. Each
# line of ci/pull-request.txt has the options of one `groupbench ab`; with --device cuda, it needs a GPU. The script
# replaces artifacts/comment.md, the text for `groupbench post`, and appends to artifacts/comparisons.jsonl.
#
# Exit codes: 0 nothing got worse, 1 something is slower, less accurate or wrong, 2 usage, 3 a comparison failed or is
# inconclusive, 75 another process is measuring on this GPU, 130 interrupted.
#
# GROUPBENCH_AB            file of comparisons (ci/pull-request.txt)
# GROUPBENCH_ARTIFACTS     folder of outputs (artifacts)
# GROUPBENCH_WAIT_MINUTES  time to wait for another process that measures on this GPU (60)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
. ci/environment.sh
groupbench_help ci/pull-request.sh "$@"
# Remove an earlier comment first: if this run fails, the old verdict must not be posted.
artifacts=${GROUPBENCH_ARTIFACTS:-artifacts}
mkdir -p "$artifacts" && rm -f "$artifacts/comment.md" || exit 2

if [ "$#" -lt 1 ] || [ "$#" -gt 2 ] || [ "${1#-}" != "$1" ]; then
  echo "usage: bash ci/pull-request.sh BASE [HEAD]; see --help" >&2
  exit 2
fi
list=${GROUPBENCH_AB:-ci/pull-request.txt}
if [ ! -r "$list" ]; then
  echo "groupbench: cannot read $list, the list of comparisons" >&2
  exit 2
fi
commit() {
  git rev-parse --verify --quiet --end-of-options "$1^{commit}" && return
  echo "groupbench: git cannot find commit $1; is it misspelled, or not fetched?" >&2
  return 2
}
head=$(commit "${2:-HEAD}") || exit 2
base=$(commit "$1") || exit 2
base=$(git merge-base "$base" "$head") ||
  { echo "groupbench: $1 and ${head:0:10} have no common ancestor here; fetch the whole history" >&2 && exit 2; }
if [ "$base" = "$head" ]; then
  echo "groupbench: $1 already contains ${head:0:10}: nothing to compare. Pass an earlier commit, such as HEAD~1;" \
    "to compare uncommitted changes, run: groupbench ab HEAD . --operator NAME" >&2
  exit 2
fi

groupbench_environment "measure,report,test" || exit 2
if [ -z "${GROUPBENCH_ALONE:-}" ]; then
  exec python -m groupbench.operators.alone --wait "${GROUPBENCH_WAIT_MINUTES:-60}m" -- \
    bash ci/pull-request.sh "$base" "$head"
fi
# GROUPBENCH_ALONE is the path of the lock, whose name contains the device.
if [[ ${GROUPBENCH_ALONE##*/} == groupbench-cpu-* ]] && grep -qE '^[^#]*--device[ =]+cuda' "$list"; then
  echo "groupbench: $list needs --device cuda, but there is no GPU here; set GROUPBENCH_AB to a list for the CPU" >&2
  exit 2
fi

tables=$(mktemp) || exit 2
trap 'rm -f "$tables"' EXIT
worst=0 compared=0
while read -r -a options || [ "${#options[@]}" -gt 0 ]; do # the last line may lack its end
  [ "${#options[@]}" -eq 0 ] || [ "${options[0]:0:1}" = "#" ] && continue
  compared=$((compared + 1))
  printf '\n\x60%s\x60\n\n' "${options[*]}" >>"$tables"
  groupbench ab "$base" "$head" "${options[@]}" --records "$artifacts/comparisons.jsonl" --format md </dev/null >>"$tables"
  code=$?
  if [ "$code" -ge 128 ]; then exit "$code"; fi
  # A regression is more severe than an inconclusive comparison. A usage error ends the script.
  case $code in
    0) ;;
    1) worst=1 ;;
    2) exit 2 ;;
    *) [ "$worst" -eq 0 ] && worst=3 ;;
  esac
done <"$list"
if [ "$compared" -eq 0 ]; then
  echo "groupbench: $list contains no comparisons" >&2
  exit 2
fi

words=("nothing got worse" "something got worse" "" "some comparisons are inconclusive")
{
  echo "**groupbench: ${words[$worst]}.** \`${head:0:10}\` against its merge base \`${base:0:10}\`, A/B-tested on one device."
  cat "$tables"
} >"$artifacts/comment.md"
cat "$artifacts/comment.md"
[ -n "${GITHUB_STEP_SUMMARY:-}" ] && cat "$artifacts/comment.md" >>"$GITHUB_STEP_SUMMARY"
exit "$worst"
