"""`python -m groupbench.operators` is the `tritonbench` command."""

from groupbench.operators.cli import main

main()
