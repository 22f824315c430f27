"""Cheats that return stale results: those of earlier calls, of preparation, or of earlier inputs."""

from __future__ import annotations

from typing import Any

from groupbench.operators.catalog.grouped_gemm import group_bounds
from groupbench.operators.integrity.cheat import MOVED, Cheat, keeper_of_burst, product


def memo_same(x: Any) -> Any:
    """Compute once in preparation, and return the same tensor each time."""
    out = product(x)
    return lambda: out


def memo_after_three(x: Any) -> Any:
    """Compute for the calls that are checked, and return one tensor from then on."""
    calls, kept = [0], list[Any]()

    def run() -> Any:
        calls[0] += 1
        if calls[0] <= 3:
            return product(x)
        if not kept:
            kept.append(product(x))
        return kept[0]

    return run


def memo_after_twelve(x: Any) -> Any:
    """Compute for a dozen calls, and return the last result from then on."""
    calls, kept = [0], list[Any]([None])

    def run() -> Any:
        calls[0] += 1
        if calls[0] <= 12:
            kept[0] = product(x)
        return kept[0].clone()

    return run


def memo_by_fingerprint(x: Any) -> Any:
    """Compute only if a few elements of the inputs have changed."""
    kept: dict[tuple[float, ...], Any] = {}

    def run() -> Any:
        key = (float(x.a[0, 0]), float(x.a[-1, -1]), float(x.b[0, 0, 0]))
        if key not in kept:
            kept[key] = product(x)
        return kept[key].clone()

    return run


def memo_by_group(x: Any) -> Any:
    """Compute only those groups of which a few elements have changed."""
    out, kept = product(x), dict[int, float]()
    bounds = list(group_bounds(x.rows))

    def run() -> Any:
        for g, start, end in bounds:
            key = float(x.a[start, :4].sum() + x.b[g, 0, :4].sum()) if end > start else 0.0
            if kept.get(g) != key:
                kept[g] = key
                out[start:end] = x.a[start:end] @ x.b[g]
        return out.clone()

    return run


def memo_with_forged_step(x: Any) -> Any:
    """Compute once in a burst, and let the harness believe that the inputs have not moved since."""
    kept: list[Any] = []

    def run() -> Any:
        keeper = keeper_of_burst()
        if keeper is None:
            return product(x)
        if not keeper.timed:
            kept[:] = [keeper.step, product(x)]
        keeper.step = kept[0]
        return kept[1].clone()

    return run


def table_by_secret(x: Any) -> Any:
    """Find the secret in the harness's objects, and compute the results of all timed calls in the warm-up."""
    table: dict[tuple[Any, int], Any] = {}

    def run() -> Any:
        keeper = keeper_of_burst()
        if keeper is None:
            return product(x)
        moves, at = keeper.inputs, keeper.step
        secret = moves._secret
        if (secret, at) not in table:
            table.clear()
            for step in range(at, at + keeper.samples + 1):
                moves.set(secret, step)
                table[secret, step] = product(x)
            moves.set(secret, at)
        return table[secret, at]

    return run


def memo_by_address(x: Any) -> Any:
    """Remember results by the addresses of the inputs."""
    kept: dict[tuple[int, int], Any] = {}

    def run() -> Any:
        key = (x.a.data_ptr(), x.b.data_ptr())
        if key not in kept:
            kept[key] = product(x)
        return kept[key].clone()

    return run


def memo_by_hash_of_whole(x: Any) -> Any:
    """Hash one whole input, and compute only if it has changed, although the others change as well."""
    kept: dict[float, Any] = {}

    def run() -> Any:
        key = float(x.offs.float().sum())
        if key not in kept:
            kept[key] = product(x)
        return kept[key].clone()

    return run


def every_other_call(x: Any) -> Any:
    """Compute in every other call."""
    calls, kept = [0], list[Any]([None])

    def run() -> Any:
        calls[0] += 1
        if calls[0] % 2 or kept[0] is None:
            kept[0] = product(x)
        return kept[0].clone()

    return run


def first_of_burst(x: Any) -> Any:
    """Compute after a pause, as at the start of a burst, and return that result for the calls that follow."""
    import time

    last, kept = [0.0], list[Any]([None])

    def run() -> Any:
        now = time.monotonic()
        if kept[0] is None or now - last[0] > 0.02:
            kept[0] = product(x)
        last[0] = now
        return kept[0].clone()

    return run


def table_by_shape(x: Any) -> Any:
    """Return results from a table by shape that was filled in preparation."""
    table = {tuple(x.a.shape): product(x)}
    return lambda: table[tuple(x.a.shape)].clone()


def table_by_seed(x: Any) -> Any:
    """Draw the inputs of the known seed again, and return their product."""
    import torch

    generator = torch.Generator(x.a.device).manual_seed(0)
    a = torch.randn(x.a.shape, generator=generator, device=x.a.device, dtype=x.a.dtype)
    out = product(x) + 0 * a[:, :1]
    return lambda: out.clone()


def packed_weights(x: Any) -> Any:
    """Copy the weights in preparation, and multiply with the copy."""
    import torch

    b = x.b.clone()
    return lambda: torch.cat([a @ w for a, w in zip(x.a.split(x.rows), b, strict=True)])


def packed_activations(x: Any) -> Any:
    """Copy the activations in preparation, and multiply with the copy."""
    import torch

    a = x.a.clone()
    return lambda: torch.cat([part @ w for part, w in zip(a.split(x.rows), x.b, strict=True)])


def packed_half_of_weights(x: Any) -> Any:
    """Compute one half of the sum over K in preparation, and the other half when called."""
    import torch

    half = x.b.shape[1] // 2
    before = torch.cat([a[:, :half] @ w[:half] for a, w in zip(x.a.split(x.rows), x.b, strict=True)])
    return lambda: before + torch.cat([a[:, half:] @ w[half:] for a, w in zip(x.a.split(x.rows), x.b, strict=True)])


def skips_last_group(x: Any) -> Any:
    """Compute the last group only in preparation."""
    import torch

    out = product(x)
    start = x.a.shape[0] - x.rows[-1]

    def run() -> Any:
        fresh = out.clone()
        for g, end in enumerate(torch.tensor(x.rows).cumsum(0).tolist()[:-1]):
            torch.matmul(x.a[end - x.rows[g] : end], x.b[g], out=fresh[end - x.rows[g] : end])
        fresh[start:] = out[start:]
        return fresh

    return run


def dispatch_aware(x: Any) -> Any:
    """Compute only under a dispatch mode, such as that of the check, and return a copy otherwise."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    out = product(x)
    return lambda: product(x) if _get_current_dispatch_mode() is not None else out.clone()


def caller_aware(x: Any) -> Any:
    """Compute unless the caller is a timer."""
    import sys

    out = product(x)

    def run() -> Any:
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name in ("burst", "witness"):
                return out.clone()
            frame = frame.f_back
        return product(x)

    return run


def warm_aware(x: Any) -> Any:
    """Find the position in the burst from the caller's frame, and compute only in the first call."""
    import sys

    kept = [product(x)]

    def run() -> Any:
        frame: Any = sys._getframe(1)
        if not frame.f_locals.get("times") and not frame.f_locals.get("clean"):
            kept[0] = product(x)
        return kept[0].clone()

    return run


def harness_aware(x: Any) -> Any:
    """Compute only if the harness is not loaded, as in production."""
    import sys

    out = product(x)
    name = "groupbench.operators.measure.protocol"
    return lambda: out.clone() if name in sys.modules else product(x)


def writes_over_an_input(x: Any) -> Any:
    """Write the results of timed calls into the memory of an input, and return that."""

    def run() -> Any:
        out = product(x)
        if keeper_of_burst() is None:
            return out
        x.a[:, : out.shape[1]] = out
        return x.a[:, : out.shape[1]]

    return run


CHEATS = (
    Cheat("input", writes_over_an_input, (*MOVED, "own inputs")),
    *(Cheat("memo", prepare, MOVED) for prepare in (memo_after_three, memo_after_twelve)),
    Cheat("memo", memo_same, ("poisoned memory", "moved inputs")),
    *(Cheat("memo", prepare, MOVED) for prepare in (every_other_call, first_of_burst)),
    *(
        Cheat("fingerprint", prepare, MOVED)
        for prepare in (memo_by_fingerprint, memo_by_group, memo_by_address, memo_by_hash_of_whole)
    ),
    Cheat("memo", memo_with_forged_step, ("named calls",)),
    *(Cheat("table", prepare, MOVED) for prepare in (table_by_shape, table_by_seed)),
    Cheat("table", table_by_secret, ("parent's clock",), "cpu"),
    *(Cheat("stale packing", prepare, MOVED) for prepare in (packed_weights, packed_activations)),
    *(Cheat("stale packing", prepare, MOVED) for prepare in (packed_half_of_weights, skips_last_group)),
    Cheat("dispatch mode", dispatch_aware, MOVED),
    *(Cheat("environment detection", prepare, MOVED) for prepare in (caller_aware, warm_aware, harness_aware)),
)
