"""When two environments are alike: a hash over declared fields, and the names of those that differ.

The declared fields are those that move a kernel's latency or its result; the rest (machine name, memory, number of
processors, version of groupbench) is kept as metadata and never makes two environments unlike.

Some of the declared fields are the toolchain: what is installed, and may be as much to blame for a slower kernel as the
code is. A series goes on across a change of those. The others are the machine: results compare where it is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec

from groupbench.tracker.record import PACKAGE, Environment

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

SOFTWARE = ("torch", "triton", "helion", "tritonbench", "cuda", "python")
"""Fields of a toolchain that an interpreter brings along, so that two of them can be compared on one machine."""

TOOLCHAIN = (*SOFTWARE, "driver")


def in_software(field: str) -> bool:
    """Whether a declared field is one of those that an interpreter brings along."""
    return field in SOFTWARE or field.startswith(f"setting {PACKAGE}")


def in_toolchain(field: str) -> bool:
    return in_software(field) or field in TOOLCHAIN


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
    """The hash that two environments share which differ in no declared field."""
    known = {field: value for field, value in declared(environment).items() if value is not None}
    return digest(known)


def machine_identity(environment: Environment) -> str:
    """Return the hash that two environments share when they differ in their toolchains at most."""
    return _identity_of(environment, lambda field: not in_toolchain(field))


def toolchain_identity(environment: Environment) -> str:
    """Return the hash that environments of one toolchain share, whatever the machine."""
    return _identity_of(environment, in_toolchain)


def software_identity(environment: Environment) -> str:
    """Return the hash that environments share whose interpreters bring along the same versions."""
    return _identity_of(environment, in_software)


def _identity_of(environment: Environment, counts: Callable[[str], bool]) -> str:
    values = declared(environment).items()
    return digest({field: value for field, value in values if value is not None and counts(field)})


def environment_differences(before: Environment, after: Environment) -> list[str]:
    """What makes `after` unlike `before`: `driver 570.1 → 580.2`. Empty when they are alike."""
    return list(_differences(before, after).values())


def toolchain_differences(before: Environment, after: Environment) -> tuple[str, ...]:
    """Return what differs between two toolchains: `triton 3.7.1 → 3.8.0`. Empty when they are alike."""
    found = _differences(before, after)
    packages = (field for field in found if field not in TOOLCHAIN and in_toolchain(field))
    return tuple(found[field] for field in (*TOOLCHAIN, *packages) if field in found)


def machine_differences(before: Environment, after: Environment) -> tuple[str, ...]:
    """Return what differs between two environments apart from their toolchains."""
    return tuple(text for field, text in _differences(before, after).items() if not in_toolchain(field))


def _differences(before: Environment, after: Environment) -> dict[str, str]:
    """Return what differs by field."""
    old, new = declared(before), declared(after)
    fields = [*old, *(field for field in new if field not in old)]
    return {
        field: f"{field} {_shown(old.get(field))} → {_shown(new.get(field))}"
        for field in fields
        if old.get(field) != new.get(field)
    }


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
