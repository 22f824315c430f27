"""`python -m groupbench.tracker` is the `groupbench` command."""

from groupbench.tracker.cli import main

main()
