"""Fall back between a kernel's variants: try the best first, and use the first that runs here.

A variant is skipped if it reports itself unsuitable, or if it cannot be imported, compiled or launched. The exception's
type does not matter: a newer Triton renames functions, a smaller GPU has less shared memory. `choices` collects the
used variants and the reasons, for a measurement's record.

GROUPBENCH_FALLBACK=off raises the variant's exception instead. Tests set it: a kernel failing to compile must not pass
for a slower one.
"""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar


class _Config(Protocol):
    """A config for two kernels: a plain one, and a specialized one in Gluon."""

    @property
    def specialized(self) -> bool: ...


T = TypeVar("T")
D = TypeVar("D")
C = TypeVar("C", bound=_Config)

SETTING = "GROUPBENCH_FALLBACK"
FATAL = (
    "illegal memory access",
    "misaligned address",
    "unspecified launch failure",
    "illegal instruction",
    "device-side assert",
    "invalid program counter",
    "invalid address space",
    "hardware stack error",
    "launch timed out",
    "ECC error",
    "[CUDA]: out of memory",
    "CUDA error: out of memory",
)
"""Texts of errors after which the GPU's context is lost or its memory full: every other variant would fail too. Other
errors of CUDA, such as too many registers for a launch, are the variant's own."""


@dataclass(frozen=True)
class Choice:
    """The running variant, and the reasons against the preferred ones."""

    kernel: str
    variant: str
    passed_over: tuple[tuple[str, str], ...] = ()  # (variant, reason)


@dataclass(frozen=True)
class Variant(Generic[T]):
    """One implementation. `prepare` returns the callable that computes; both may raise.

    Attributes:
        unsuitable: Why it cannot take this problem or this device, if that is known.
        key: Identifies the compiled kernel: a variant that failed is not tried again for an equal key.
    """

    name: str
    prepare: Callable[[], Callable[..., T]]
    unsuitable: str | None = None
    key: Hashable = None


_collected: ContextVar[list[Choice] | None] = ContextVar("choices", default=None)
_failed: dict[Hashable, str] = {}


@contextmanager
def choices() -> Iterator[list[Choice]]:
    """Collect every choice between variants in a list within this context, once for each kernel and outcome."""
    collected: list[Choice] = []
    token = _collected.set(collected)
    try:
        yield collected
    finally:
        _collected.reset(token)


def first_that_runs(kernel: str, variants: Sequence[Variant[T]]) -> Callable[..., T]:
    """Return a callable using the first variant that runs. The first call selects it, in any thread.

    It passes all arguments on. Raises the last variant's exception if none can be prepared; the call raises it if none
    runs.
    """
    return _FirstThatRuns(kernel, variants)


class _FirstThatRuns(Generic[T]):
    """The callable from `first_that_runs`: it moves on to the next variant until a call has succeeded."""

    def __init__(self, kernel: str, variants: Sequence[Variant[T]]) -> None:
        self._kernel = kernel
        self._left = list(variants)
        self._passed_over: list[tuple[str, str]] = []
        self._proven = False
        self._choice: Choice | None = None
        self._choosing = threading.Lock()
        self._prepare_next(None)

    def __call__(self, *args: Any) -> T:
        if not self._proven:
            with self._choosing:
                return self._choose(*args)
        if self._choice is not None and (collected := _collected.get()) is not None:
            _collect(collected, self._choice)
        return self._run(*args)

    def _choose(self, *args: Any) -> T:
        if self._proven:  # by another thread
            return self._run(*args)
        while True:
            try:
                out = self._run(*args)
            except Exception as error:
                self._pass_over(error)
                self._prepare_next(error)
                continue
            self._choice = Choice(self._kernel, self._variant.name, tuple(self._passed_over))
            self._left = []
            del self._variant  # its `prepare` may hold the operands of this call
            self._proven = True
            if (collected := _collected.get()) is not None:
                _collect(collected, self._choice)
            return out

    def _prepare_next(self, error: Exception | None) -> None:
        """Prepare the best remaining variant. Raises the last one's exception if none can be prepared."""
        while self._left:
            variant = self._variant = self._left.pop(0)
            reason = variant.unsuitable or _failed.get(self._id(variant))
            if reason is not None and self._left:
                self._passed_over.append((variant.name, reason))
                continue
            try:
                self._run = variant.prepare()
            except Exception as raised:
                error = raised
                self._pass_over(raised)
                continue
            return
        for name, reason in self._passed_over[:-1]:
            assert error is not None
            error.add_note(f"{self._kernel}: {name} does not run either: {reason}")
        raise error or RuntimeError(f"{self._kernel} has no variant")

    def _pass_over(self, error: Exception) -> None:
        """Remember why the variant does not run. Raises the error if the variant is not the cause."""
        if os.environ.get(SETTING) == "off" or _fatal(error):
            raise error
        reason = describe(error)
        self._passed_over.append((self._variant.name, reason))
        if self._variant.key is not None:
            _failed[self._id(self._variant)] = reason
        if self._left:
            warnings.warn(f"{self._kernel}: {self._variant.name} does not run: {reason}", RuntimeWarning, stacklevel=4)

    def _id(self, variant: Variant[T]) -> Hashable:
        return None if variant.key is None else (self._kernel, variant.name, variant.key)


def _collect(collected: list[Choice], choice: Choice) -> None:
    if choice not in collected:
        collected.append(choice)


class Gluon:
    """A module with a Gluon kernel, imported when it is used, for one problem.

    Args:
        module: Full name. It has `unsuitable`, which says why it cannot take a problem, and `prepare_specialized`.
        problem: Arguments for `unsuitable`.
    """

    def __init__(self, module: str, *problem: Any) -> None:
        self._module, self._problem = module, problem

    def why_not(self) -> str | None:
        """Return why the module cannot be imported or cannot take the problem, or None if it can."""
        try:
            unsuitable: Callable[..., str | None] = importlib.import_module(self._module).unsuitable
        except Exception as error:  # Gluon is experimental: another Triton may raise anything
            import triton

            return f"Gluon differs in Triton {triton.__version__}: {describe(error)}"
        return unsuitable(*self._problem)

    def prepare(self, *args: Any) -> Any:
        """Return the module's `prepare_specialized` with the arguments. Raises ValueError if it cannot run."""
        if reason := self.why_not():
            raise ValueError(f"the specialized kernel cannot run: {reason}")
        return importlib.import_module(self._module).prepare_specialized(*args)


def by_config(
    kind: str,  # begins the names
    configs: Iterable[tuple[str, D, str | None]],  # (name, config, why it cannot run or None)
    prepare: Callable[[D], Callable[..., T]],
    compiled_for: Hashable,
) -> list[Variant[T]]:
    """Return a variant for each config, in their order."""
    return [
        Variant(f"{kind}{name} config", partial(prepare, config), reason, (config, compiled_for))
        for name, config, reason in configs
    ]


def specialized_or_not(
    plain: str,  # the name of the kernel that is not specialized
    configs: Iterable[tuple[str, C, str | None]],  # (name, config, why it cannot run or None)
    prepare: Callable[[C], Callable[..., T]],
    specialized: Gluon,
    compiled_for: Hashable,
) -> list[Variant[T]]:
    """Return a variant for each config, in their order."""
    return [
        Variant(
            f"{'specialized' if config.specialized else plain}, {name} config",
            partial(prepare, config),
            reason or (specialized.why_not() if config.specialized else None),
            (config, compiled_for),
        )
        for name, config, reason in configs
    ]


def describe(error: BaseException) -> str:
    """Return the exception's name and first informative line, in at most 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A compiler prints the source first, and the error last.
    text = lines[-1] if type(error).__name__ == "CompilationError" and lines else (lines or [""])[0]
    return f"{type(error).__name__}: {text}"[:200] if text else type(error).__name__


def _fatal(error: Exception) -> bool:
    """Return whether the GPU's memory is full or the context lost."""
    import torch

    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(word in str(error) for word in FATAL)
