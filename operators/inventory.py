"""List what this machine can measure, as JSON on standard output.

`groupbench doctor` calls this module with its plugins in another process, as the tracker does not import torch. Each
package is imported, since incompatible versions show in no other way. A failing import is reported and does not stop
the list.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from groupbench.tracker.facts.environment import installed_version

PACKAGES = ("torch", "triton", "helion", "tritonbench")
# Modules that the host needs, with their own imports; importing the package alone could not fail.
TRITONBENCH = ("tritonbench.utils.run_utils", "tritonbench.utils.triton_op")


class Package(msgspec.Struct, frozen=True, omit_defaults=True):
    """A package. `version` is None if it is not installed; `error` is the reason why it cannot be imported."""

    name: str
    version: str | None
    error: str | None = None


class Backends(msgspec.Struct, frozen=True):
    """The operator's backends able to run on this device in the first dtype, and why the others cannot."""

    operator: str
    dtype: str
    available: tuple[str, ...]
    unavailable: dict[str, str]


class Inventory(msgspec.Struct, frozen=True, omit_defaults=True):
    """A machine's inspection.

    Attributes:
        device: Cuda or cpu, as `tritonbench --device auto` chooses it.
        cuda: CUDA version that torch was built for, or None.
        capability: Compute capability of the GPU.
    """

    device: str
    packages: tuple[Package, ...]
    cuda: str | None = None
    gpu: str | None = None
    capability: tuple[int, int] | None = None
    operators: tuple[Backends, ...] = ()
    error: str | None = None


def take(plugins: Sequence[str] = ()) -> Inventory:
    """Inspect this machine, with the operators of plugins. Opens the GPU if there is one."""
    from groupbench.operators.measure.environment import resolve_device, tritonbench_version

    device = resolve_device("auto")
    packages = tuple(
        Package(name, version, _import_error(name) if version else None)
        for name in PACKAGES
        for version in [tritonbench_version() if name == "tritonbench" else installed_version(name)]
    )
    facts: dict[str, Any] = {}
    if not any(package.error or not package.version for package in packages[:1]):
        import torch

        from groupbench.kernels.device import cuda_capability

        facts["cuda"] = torch.version.cuda
        if device == "cuda":
            facts |= {"gpu": torch.cuda.get_device_name(0), "capability": cuda_capability()}
    try:
        facts["operators"] = _operators(device, facts.get("capability"), plugins)
    except Exception as error:
        facts["error"] = f"{type(error).__name__}: {error}"
    return Inventory(device, packages, **facts)


def _import_error(name: str) -> str | None:
    try:
        for module in TRITONBENCH if name == "tritonbench" else (name,):
            importlib.import_module(module)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return None


def _operators(device: str, capability: tuple[int, int] | None, plugins: Sequence[str]) -> tuple[Backends, ...]:
    from groupbench.operators.measure.selection import default_dtypes
    from groupbench.operators.operator import Target
    from groupbench.operators.registry import get_operator, operator_names

    runnable = []
    for name in operator_names(plugins):
        operator = get_operator(name, plugins)
        (dtype,) = default_dtypes(operator, device)
        target = Target(device, dtype, device == "cpu", capability)
        reasons = {backend.name: _reason(backend, target) for backend in operator.backends}
        runnable.append(
            Backends(
                name,
                dtype,
                tuple(backend for backend, reason in reasons.items() if reason is None),
                {backend: reason for backend, reason in reasons.items() if reason is not None},
            )
        )
    return tuple(runnable)


def _reason(backend: Any, target: Any) -> str | None:
    try:
        if backend.kind != "torch":
            importlib.import_module(backend.kind)
        reason: str | None = backend.unavailable(target)
        return reason
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # packages may print when imported
    output.write(msgspec.json.encode(take(sys.argv[1:])) + b"\n")
    output.flush()


if __name__ == "__main__":
    main()
