"""Measure the figures of the documentation, and print them as tables.

    python -m ci.benchmarks judgement --scale 0.2     error rates and power of the gate: docs/notes/judgement.md
    python -m ci.benchmarks ab                        error rates and time of an A/B comparison: docs/notes/ab.md
    python -m ci.benchmarks tracker --keep DIR        time and size of the tracker: docs/explanation/storage.md
    python -m ci.benchmarks fleet --gpus all          overhead and speed-up of a fleet: docs/notes/fleet.md
    python -m ci.benchmarks kernels RECORDS.jsonl     latencies of the kernels: docs/reference/measured

Each benchmark has parts, and `--only PART` runs one of them. `python -m ci.benchmarks NAME --help` lists them.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from . import ab, fleet, judgement, kernels, stories, tracker

BENCHMARKS = {"judgement": judgement, "stories": stories, "ab": ab, "tracker": tracker, "fleet": fleet}


def main() -> None:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--scale", type=float, default=1.0, help="share of the data to simulate [1]")
    shared.add_argument("--seed", type=int, default=31415, help="seed of the simulations [31415]")
    shared.add_argument("--json", action="store_true", help="print a JSON object for each row")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m ci.benchmarks", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name, module in BENCHMARKS.items():
        command = commands.add_parser(name, parents=[shared], description=module.__doc__, formatter_class=raw)
        command.add_argument("--only", choices=list(module.PARTS), action="append", help="run only this part")
        module.add_options(command)
    kernels.add_options(commands.add_parser("kernels", description=kernels.__doc__, formatter_class=raw))
    options = parser.parse_args()
    if options.benchmark == "kernels":
        kernels.run(options)
        return
    for number, (part, measure) in enumerate(BENCHMARKS[options.benchmark].PARTS.items()):
        if options.only and part not in options.only:
            continue
        options.rng = np.random.default_rng([options.seed, number])
        rows = measure(options)
        head = [str(name) for name in next(rows, ())]
        if head and not options.json:
            print(f"\n{part}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
        for row in rows:
            if options.json:
                print(json.dumps({"part": part, **dict(zip(head, row, strict=True))}, default=str), flush=True)
            else:
                print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
