"""Routing traces: read expert loads over time from dumps with the tokens' experts.

    .npy    [T, k] or [steps, T, k] integers: topk_ids as in vLLM and SGLang; -1 is padding
    .jsonl  one step per line: a list of each token's experts, or an object with that list as `topk_ids` (or
            `topk_indices`, `expert_ids`, `selected_experts`), or with rows by expert as `expert_counts`; `num_experts`
            is optional

A step is one layer in one forward pass: tokens, choices per token, and every expert's rows. A grouped GEMM's shape
takes the loads directly; a layer's tokens are drawn in proportion to them (catalog/moe.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IDS = ("topk_ids", "topk_indices", "expert_ids", "selected_experts")
COUNTS = ("expert_counts", "rows")
MAX_BYTES = 2 << 30  # of a file, which is read whole
MAX_EXPERTS = 4096


@dataclass(frozen=True)
class TraceStep:
    """One layer in one forward pass in a routing trace.

    Attributes:
        tokens, k: Number of tokens, and of choices per token; 0 if only loads are known.
        rows: Number of rows of each expert, at least up to the last expert that has any.
        experts: Number of all experts, 0 if the file does not contain it.
    """

    tokens: int
    k: int
    rows: tuple[int, ...]
    experts: int = 0

    def loads(self, experts: int) -> tuple[int, ...]:
        """Return each expert's rows, for `experts` experts. Raises ValueError if the step has more experts."""
        if len(self.rows) > experts:
            raise ValueError(f"the trace has expert {len(self.rows) - 1}, and the shape has {experts} experts")
        return self.rows + (0,) * (experts - len(self.rows))


def read(path: Path) -> list[TraceStep]:
    """Return a file's steps with a row. Raises ValueError with the wrong place."""
    readers = {".npy": _npy, ".jsonl": _jsonl}
    reader = readers.get(path.suffix)
    if reader is None:
        raise ValueError(f"routing trace {path}: the file name must end in one of {', '.join(readers)}")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES >> 30} GiB")
        steps = [step for step in reader(path) if any(step.rows)]
    except OSError as error:
        raise ValueError(f"routing trace {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"routing trace {path}: {error}") from error
    if not steps:
        raise ValueError(f"routing trace {path}: no token in it has an expert")
    experts = max(max(len(step.rows), step.experts) for step in steps)
    return [TraceStep(step.tokens, step.k, step.loads(experts), experts) for step in steps]


def spread(steps: Sequence[TraceStep], most: int) -> list[TraceStep]:
    """Return at most `most` steps, evenly spread over time, with the first and the last."""
    if len(steps) <= most:
        return list(steps)
    if most == 1:
        return [steps[0]]
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def of_ids(ids: Any, experts: int = 0) -> TraceStep:
    """Return the step from expert numbers [T, k]; a negative number means no expert. Raises ValueError."""
    import numpy as np

    ids = np.asarray(ids)
    if ids.size == 0 and ids.ndim in (1, 2):  # an idle rank has no token in this step
        return TraceStep(0, ids.shape[1] if ids.ndim == 2 else 0, (), experts)
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"expert ids must be integers [T, k], not {ids.dtype} {list(ids.shape)}")
    here = ids[ids >= 0]
    if here.size and int(here.max()) >= MAX_EXPERTS:
        raise ValueError(f"expert {int(here.max())} is too large: at most {MAX_EXPERTS} experts are supported")
    if experts and here.size and int(here.max()) >= experts:
        raise ValueError(f"expert {int(here.max())} does not exist: there are {experts}, numbered from 0")
    tokens = int((ids >= 0).any(axis=1).sum())
    return TraceStep(tokens, ids.shape[1], _trimmed(np.bincount(here.astype(np.int64))), experts)


def _trimmed(rows: Iterable[Any]) -> tuple[int, ...]:
    """Return whole numbers, without the experts after the last one with a row. Raises ValueError."""
    counts = [int(row) for row in rows]
    if len(counts) > MAX_EXPERTS or any(row < 0 for row in counts):
        raise ValueError(f"rows must not be negative, and there may be at most {MAX_EXPERTS} experts")
    while counts and not counts[-1]:
        counts.pop()
    return tuple(counts)


def _npy(path: Path) -> Iterator[TraceStep]:
    import numpy as np

    ids = np.load(path, allow_pickle=False)
    if ids.ndim not in (2, 3):
        raise ValueError(f"topk_ids are [T, k] or [steps, T, k], not {list(ids.shape)}")
    for step in ids if ids.ndim == 3 else [ids]:
        yield of_ids(step)


def _jsonl(path: Path) -> Iterator[TraceStep]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield _object(json.loads(line))
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"line {number}: {error}") from error


def _object(step: Any) -> TraceStep:
    if isinstance(step, list):
        return of_ids(step)
    if not isinstance(step, dict):
        raise TypeError("a step must be a list of tokens' experts, or an object")
    experts = int(step.get("num_experts", 0))
    for name in IDS:
        if name in step:
            return of_ids(step[name], experts)
    for name in COUNTS:
        if name in step:
            return TraceStep(0, 0, _trimmed(step[name]), experts)
    raise ValueError(f"the object needs one of the keys {', '.join((*IDS, *COUNTS))}")
