#!/usr/bin/env bash
# Build the documentation as a site that works offline: build/site/index.html. A broken link or anchor is an error.
#
#   bash ci/site.sh                    install into .venv, then build
#   bash ci/site.sh --site-dir FOLDER  arguments go to `mkdocs build`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/environment.sh
groupbench_help ci/site.sh "$@"
groupbench_environment "measure,report,test"
python ci/docs.py --check
export NO_MKDOCS_2_WARNING=1 # ci/site/mkdocs.yml states how long Material is supported
exec mkdocs build --quiet --strict --clean --config-file ci/site/mkdocs.yml "$@"
