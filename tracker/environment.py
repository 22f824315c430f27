"""When two environments are alike: a hash over declared fields, and the names of those that differ.

A latency is compared with another only when their environments have one identity. The declared fields are
those that move a kernel's latency or its result; the rest (machine name, memory, number of processors,
version of groupbench) is kept as metadata and never makes two environments unlike.
"""

from __future__ import annotations

import hashlib

import msgspec

from groupbench.tracker.record import Environment

IDENTITY_FIELDS = (
    "device",
    "gpu",
    "gpu_uuid",
    "driver",
    "cuda",
    "power_limit_w",
    "cpu",
    "cpu_threads",
    "torch",
    "triton",
    "helion",
    "tritonbench",
    "python",
    "settings",
)
"""What is the cpu's counts only where it is the device; of `python` only major and minor version count."""


def declared(environment: Environment) -> dict[str, str | None]:
    """The values that make up the identity, as text, one for each field; settings one for each variable."""
    values: dict[str, str | None] = {}
    for field in IDENTITY_FIELDS:
        value = getattr(environment, field)
        if field == "settings":
            values.update((f"setting {name}", value[name]) for name in sorted(value))
        elif field in ("cpu", "cpu_threads") and environment.device != "cpu":
            continue
        elif field == "python" and value is not None:
            values[field] = ".".join(value.split(".")[:2])
        elif isinstance(value, (int, float)):
            values[field] = f"{value:g}"
        else:
            values[field] = value
    return values


def environment_identity(environment: Environment) -> str:
    """The hash that two environments share when their results can be compared."""
    known = {field: value for field, value in declared(environment).items() if value is not None}
    return digest(known)


def environment_differences(before: Environment, after: Environment) -> list[str]:
    """What makes `after` unlike `before`: `driver 570.1 → 580.2`. Empty when they are alike."""
    old, new = declared(before), declared(after)
    fields = [*old, *(field for field in new if field not in old)]
    return [
        f"{field} {_shown(old.get(field))} → {_shown(new.get(field))}"
        for field in fields
        if old.get(field) != new.get(field)
    ]


def hardware_class(environment: Environment) -> str:
    """What a series is bound to: the GPU's model, or the processor's where the device is the cpu."""
    model = environment.gpu if environment.device == "cuda" else environment.cpu
    return model or f"unknown {environment.device}"


_canonical = msgspec.json.Encoder(order="deterministic")


def digest(value: object) -> str:
    """A short hash of anything that JSON can hold, whatever the order of its keys."""
    return hashlib.sha256(_canonical.encode(value)).hexdigest()[:32]


def _shown(value: str | None) -> str:
    return "unknown" if value is None else value
