"""The tuners' command, which `groupbench tune` becomes: `python -m groupbench.operators.tuners`."""

from groupbench.tracker.tools import signals

if __name__ == "__main__":  # Helion's autotuner starts processes that import this module again
    signals.report_and_end("groupbench tune")  # while modules are imported
    from groupbench.operators.tuners.cli import run

    run()
