"""Record the Triton kernels launched by a call, with the compiler's facts about them.

The hash covers each kernel's PTX without line numbers and comments: equal hashes mean unchanged code, even if the
latency changed. Triton has no hook for the compiled kernel at launch, so this module wraps the one method that returns
it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import msgspec

from groupbench.kernels.variants import Choice
from groupbench.tracker.facts.record import Code, Kernel

_SCALARS = (bool, int, float, str)
_CONFIG = ("num_warps", "num_stages", "num_ctas", "maxnreg")


@contextmanager
def watched(code: dict[str, Code] | None = None) -> Iterator[list[Kernel]]:
    """Record every distinct Triton kernel launched in this context; none if Triton interprets.

    Args:
        code: Receives the code of each kernel by its hash.
    """
    kernels: dict[str, Kernel] = {}
    launched: list[Kernel] = []
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield launched
        return
    original = JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = original(self, *args, **kwargs)
        kernel = _describe(compiled, kwargs)
        if kernel is not None:
            kernels.setdefault(kernel.hash or kernel.name, kernel)
            if code is not None and kernel.hash is not None and kernel.hash not in code:
                code[kernel.hash] = _code_of(kernel.hash, compiled)
        return compiled

    with replaced(JITFunction, "run", run), _bound_at_every_launch():
        yield launched
    launched.extend(kernels.values())


def replaced(holder: object, name: str, value: object) -> AbstractContextManager[object]:
    """Replace an attribute in a context."""
    from unittest import mock  # takes 30 ms, unless torch has been imported

    return mock.patch.object(holder, name, value)


def _bound_at_every_launch() -> AbstractContextManager[object]:
    """Let our kernels' launches go through `JITFunction.run`.

    The module is not imported: the commit under test may lack it, and if nothing has imported it yet, each kernel's
    next launch is the first, which is bound anyway.
    """
    launch = sys.modules.get("groupbench.kernels.launch")
    return nullcontext() if launch is None else replaced(launch, "through_triton", True)


def with_variants(kernels: Iterable[Kernel], chosen: Iterable[Choice]) -> tuple[Kernel, ...]:
    """Return the kernels with the chosen variants in `config`, and why preferred variants did not run.

    `variant` maps each choice to a variant; `passed_over`, if present, maps it to reasons by variant.
    """
    choices = list(chosen)
    more: dict[str, Any] = {"variant": {choice.kernel: choice.variant for choice in choices}}
    passed_over = {choice.kernel: dict(choice.passed_over) for choice in choices if choice.passed_over}
    if passed_over:
        more["passed_over"] = passed_over
    return tuple(
        msgspec.structs.replace(kernel, config=kernel.config | more) if choices else kernel for kernel in kernels
    )


@contextmanager
def interpreted() -> Iterator[list[str]]:
    """List the kernels run by Triton's interpreter in this context."""
    names: list[str] = []
    try:
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        yield names
        return
    original = GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(getattr(self.fn, "__name__", "kernel"))
        return original(self, *args, **kwargs)

    with replaced(GridExecutor, "__call__", call):
        yield names


def _describe(compiled: Any, kwargs: dict[str, Any]) -> Kernel | None:
    """Return the facts about a compiled Triton kernel; None if this Triton does not expose them."""
    try:
        metadata = compiled.metadata
        config = {key: getattr(metadata, key) for key in _CONFIG if getattr(metadata, key, None) is not None}
        config |= {key: value for key, value in kwargs.items() if key.isupper() and isinstance(value, _SCALARS)}
        return Kernel(
            name=metadata.name,
            hash=code_hash(compiled.asm["ptx"]),
            registers=_number(compiled, "n_regs"),
            spills=_number(compiled, "n_spills"),
            shared_bytes=metadata.shared,
            config=config,
        )
    except (AttributeError, KeyError, TypeError):
        return None


def _code_of(hash_: str, compiled: Any) -> Code:
    """Return a compiled kernel's code without line numbers and debug information, which the hash ignores."""
    ptx, cubin = compiled.asm.get("ptx"), compiled.asm.get("cubin")
    return Code(
        hash=hash_,
        ptx="\n".join(instructions(ptx)) if isinstance(ptx, str) else None,
        cubin=bytes(cubin) if isinstance(cubin, bytes | bytearray) else None,
    )


def _number(compiled: Any, name: str) -> int | None:
    value = getattr(compiled, name, None)
    return value if isinstance(value, int) else None


def code_hash(ptx: str) -> str:
    """Return a hash over the code run by the GPU. It does not depend on source line numbers."""
    return hashlib.sha256("\n".join(instructions(ptx)).encode()).hexdigest()[:16]


def instructions(ptx: str) -> list[str]:
    """Return PTX lines without comments, line numbers and debug information."""
    code = []
    for line in ptx.splitlines():
        stripped = line.split("//")[0].strip()
        if stripped.startswith(".section"):
            break  # debug information to the end of the file
        if stripped and not stripped.startswith((".loc", ".file")):
            code.append(stripped)
    return code
