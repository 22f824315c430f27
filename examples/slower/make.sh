#!/usr/bin/env bash
# Make a small repository with a history in which a function becomes slower: bash examples/slower/make.sh FOLDER
set -euo pipefail
files=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:?name the folder to make}
if [ -e "$folder" ]; then
  echo "make.sh: $folder exists already; remove it, or name another" >&2
  exit 2
fi
git init -q -b main "$folder"
cd "$folder"
day=0
commit() {
  day=$((day + 1)) # a commit a day: histories are by time
  export GIT_AUTHOR_DATE="2026-01-0${day}T12:00:00Z" GIT_COMMITTER_DATE="2026-01-0${day}T12:00:00Z"
  git add -A
  git -c user.name=Ada -c user.email=ada@example.org -c commit.gpgsign=false commit -q -m "$1"
}

cat >norm.py <<'PYTHON'
import numpy as np


def rms_norm(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
PYTHON
cp "$files"/{bench_norm.py,groupbench.toml} .
printf '%s\n' 'groupbench.db*' records/ artifacts/ report.html __pycache__/ >.gitignore
commit "Normalise rows"

printf '# Norms\n\nRows, by their root mean square.\n' >README.md
commit "Say what this is"

cat >norm.py <<'PYTHON'
import numpy as np


def rms_norm(x):
    return np.stack([row / np.sqrt((row * row).mean() + 1e-6) for row in x])
PYTHON
commit "Normalise one row at a time"

printf '\nTested with NumPy 2.\n' >>README.md
commit "Name the version"
