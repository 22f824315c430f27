"""The `tritonbench` command, also as `python -m groupbench.operators`."""

from groupbench.tracker.facts.programs import begin


def main() -> None:
    """Run the command."""
    begin()
    from groupbench.tracker.tools import signals

    signals.report_and_end("tritonbench")  # while modules are imported
    from groupbench.operators.cli import main as command

    command()


if __name__ == "__main__":
    main()
