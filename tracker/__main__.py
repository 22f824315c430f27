"""The `groupbench` command, also as `python -m groupbench.tracker`."""

from groupbench.tracker.facts.programs import begin


def main() -> None:
    """Run the command."""
    begin()
    from groupbench.tracker.tools import signals

    signals.report_and_end("groupbench")  # while modules are imported
    from groupbench.tracker.cli import main as command

    command()


if __name__ == "__main__":
    main()
