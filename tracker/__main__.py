"""The `groupbench` command, also as `python -m groupbench.tracker`."""

from groupbench.tracker.tools import signals


def main() -> None:
    """Run the command."""
    signals.end_at_once()  # while modules are imported
    from groupbench.tracker.cli import main as command

    command()


if __name__ == "__main__":
    main()
