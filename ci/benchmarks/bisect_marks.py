"""Measure how often `groupbench bisect` names the right commit, and how many steps it takes.

    python ci/benchmarks/bisect_marks.py [--searches 5] [--slowdown 2] [OPTION of bisect ...]

Each search gets a git repository of 32 commits with a kernel in a plugin. A random commit adds work to it: 2 % on a
GPU, 30 % on a CPU, whose clock is noisier. Another random commit fails to import, and one process temporarily measures
three times too much. Then the real command searches from the first to the last commit, and must name the planted one.
Prints a line for each search and a summary. Needs git, but no network.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

COMMITS = 32
STEPS = {"cuda": 100_000, "cpu": 10}
SLOWDOWN = {"cuda": 2.0, "cpu": 30.0}
SHAPE = {"cuda": "4,128,512,256", "cpu": "4,256,512,512"}
DTYPE = {"cuda": "bf16", "cpu": "fp32"}

PLUGIN = '''"""Revision {revision}."""
{broken}
import os
from pathlib import Path

from groupbench.operators.operator import Backend

STEPS = {steps}


def _is_outlier() -> bool:
    """Return whether this process, by its start order, is the one that temporarily measures too much."""
    folder = Path(os.environ["PLANTED_OUTLIER"])
    number = 0
    while True:
        try:
            (folder / str(number)).mkdir()
            return number == int(os.environ["PLANTED_OUTLIER_AT"])
        except FileExistsError:
            number += 1


def prepare(x):
    import torch

    calls, outlier = 0, _is_outlier()

    def product():
        return torch.cat([a @ b for a, b in zip(x.a.split(x.rows), x.b.unbind())])

    if x.a.is_cuda:
        from spin import spin
    else:
        def spin(out, steps):
            for _ in range(steps):
                product()

    def run():
        nonlocal calls
        calls += 1
        out = product()
        spin(out, 3 * STEPS if outlier and 20 <= calls < 40 else STEPS)
        return out

    return run


BACKEND = Backend("planted", prepare, "extra work of a known amount", operator="grouped_gemm")
'''

KERNEL = """import triton
import triton.language as tl


@triton.jit
def _spin(x, n, one, zero, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < n, 0.0).to(tl.float32)
    for _ in range(STEPS):
        value = value * one + zero
    tl.store(x + at, value.to(x.dtype.element_ty), at < n)


def spin(out, steps):
    _spin[(triton.cdiv(out.numel(), 1024),)](out, out.numel(), 1.0, 0.0, steps, 1024)
"""


@dataclass(frozen=True)
class Planted:
    """The faults in a repository. Commits are numbered from 0."""

    culprit: int
    broken: int  # commit that fails to import
    outlier: int  # process that measures too much


def plant(folder: Path, planted: Planted, device: str, slowdown: float) -> list[str]:
    """Make the repository. Returns the hashes of its commits, oldest first."""

    def git(*args: str) -> str:
        identity = ["-c", "user.name=Planter", "-c", "user.email=planter@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", "-C", str(folder), *identity, *args], check=True, capture_output=True, text=True
        ).stdout.strip()

    folder.mkdir()
    git("init", "-q")
    (folder / "spin.py").write_text(KERNEL)
    hashes = []
    for number in range(COMMITS):
        slower = 1 + slowdown / 100 if number >= planted.culprit else 1
        steps = round(STEPS[device] * slower)
        broken = 'raise ImportError("planted: does not import")' if number == planted.broken else ""
        (folder / "planted.py").write_text(PLUGIN.format(revision=number, broken=broken, steps=steps))
        git("add", "-A")
        git("commit", "-q", "-m", f"Revision {number}")
        hashes.append(git("rev-parse", "HEAD"))
    return hashes


def search(scratch: Path, planted: Planted, device: str, slowdown: float, more: list[str]) -> dict[str, object]:
    """Run the command once. Returns the planted faults and the result by name."""
    folder, outliers = scratch / "repository", scratch / "outliers"
    hashes = plant(folder, planted, device, slowdown)
    outliers.mkdir()
    command = [
        *(sys.executable, "-m", "groupbench.tracker", "bisect", hashes[0], hashes[-1]),
        *("--operator", "grouped_gemm", "--backend", "planted", "--shape", SHAPE[device], "--dtype", DTYPE[device]),
        *("--plugin", "planted.BACKEND", "--device", device, "--repo", str(folder), "--format=json", *more),
    ]
    environment = os.environ | {"PLANTED_OUTLIER": str(outliers), "PLANTED_OUTLIER_AT": str(planted.outlier)}
    started = time.monotonic()
    done = subprocess.run(command, cwd=scratch, env=environment, stdout=subprocess.PIPE, text=True)
    seconds = time.monotonic() - started
    if not done.stdout:
        raise SystemExit(f"the command ended with {done.returncode} and printed no result")
    result = json.loads(done.stdout)
    names = [[hashes.index(each["hash"]) for each in culprit["commits"]] for culprit in result["culprits"]]
    return {
        "planted": planted,
        "named": names,
        "right": done.returncode == 1 and names == [[planted.culprit]],
        "innocent": done.returncode == 1 and names != [[planted.culprit]],
        "steps": result["steps"],
        "comparisons": sum(result["comparisons"].values()),
        "confidence": [culprit["confidence"] for culprit in result["culprits"]],
        "change": [culprit["change"] for culprit in result["culprits"]],
        "outlier came": (outliers / str(planted.outlier)).exists(),
        "outcome": result["outcome"],
        "seconds": seconds,
    }


def draw(chance: random.Random) -> Planted:
    """Draw the faults of a search. The culprit and its parent always import, or no search could name the culprit."""
    culprit = chance.randrange(1, COMMITS)
    broken = chance.choice([n for n in range(1, COMMITS - 1) if n not in (culprit - 1, culprit)])
    return Planted(culprit, broken, chance.randrange(4, 16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searches", type=int, default=5)
    parser.add_argument("--slowdown", type=float, help="percent; default: 2 on a GPU, 30 on a CPU")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further search after this many seconds")
    options, more = parser.parse_known_args()
    if shutil.which("git") is None:
        raise SystemExit("git is not installed; this benchmark needs it to make repositories")
    device = options.device
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    slowdown = options.slowdown or SLOWDOWN[device]
    chance = random.Random(options.seed)
    results = []
    began = time.monotonic()
    for number in range(options.searches):
        if time.monotonic() - began > options.seconds:
            break
        planted = draw(chance)
        with tempfile.TemporaryDirectory(prefix="bisect-marks-") as scratch:
            results.append(search(Path(scratch), planted, device, slowdown, more))
        print(f"{number + 1}. {', '.join(f'{name}: {value}' for name, value in results[-1].items())}", flush=True)
    steps = [int(str(each["steps"])) for each in results]
    named, innocent = (sum(bool(each[key]) for each in results) for key in ("right", "innocent"))
    print(
        f"\n{slowdown:g} % on {device}, {COMMITS} commits: right {named} of {len(results)}, wrong {innocent}; "
        f"steps {min(steps)} to {max(steps)}, median {statistics.median(steps):g}; "
        f"{statistics.median(float(str(each['seconds'])) for each in results):.0f} s a search (median)"
    )


if __name__ == "__main__":
    main()
