"""Compare environments: a hash over declared fields, and the differences between them.

The declared fields are those that affect a kernel's latency or result. The rest (machine name, memory, number of
processors, version of groupbench) is metadata and never makes two environments differ.

Some declared fields are the toolchain: installed software, which can slow down a kernel just like a code change. A
series continues across a change of these. The other fields are the machine: only results on one machine are comparable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec

from groupbench.tracker.facts.record import PACKAGE, Environment

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
"""CPU fields only count if the device is the CPU. Of `python`, only the major and minor version count."""

SOFTWARE = ("torch", "triton", "helion", "tritonbench", "cuda", "python")
"""Toolchain fields that belong to a Python interpreter, so that two of them can be compared on one machine."""

TOOLCHAIN = (*SOFTWARE, "driver")

AB_SOFTWARE = tuple(name for name in SOFTWARE if name != "tritonbench")
"""Toolchain fields that an A/B depends on: it does not run TritonBench."""


def in_software(field: str) -> bool:
    """Return whether a declared field belongs to a Python interpreter."""
    return field in SOFTWARE or field.startswith(f"setting {PACKAGE}")


def in_toolchain(field: str) -> bool:
    """Return whether a declared field belongs to the toolchain."""
    return in_software(field) or field in TOOLCHAIN


def declared(environment: Environment) -> dict[str, str | None]:
    """Return the identity's values as text, by field; each setting is a separate field."""
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
    """Return the hash shared by environments with the same declared fields."""
    values = {field: value for field, value in declared(environment).items() if value is not None}
    return digest(values)


def machine_identity(environment: Environment) -> str:
    """Return the hash shared by environments that differ at most in their toolchains."""
    return _identity_of(environment, lambda field: not in_toolchain(field))


def toolchain_identity(environment: Environment) -> str:
    """Return the hash shared by environments with the same toolchain, on any machine."""
    return _identity_of(environment, in_toolchain)


def software_identity(environment: Environment) -> str:
    """Return the hash shared by environments whose interpreters have the same versions installed."""
    return _identity_of(environment, in_software)


def ab_software(environment: Environment) -> dict[str, str]:
    """Return the known versions of the software that an A/B in this environment depends on, by field."""
    values = declared(environment)
    return {field: value for field in AB_SOFTWARE if (value := values.get(field)) is not None}


def _identity_of(environment: Environment, counts: Callable[[str], bool]) -> str:
    values = declared(environment).items()
    return digest({field: value for field, value in values if value is not None and counts(field)})


def environment_differences(before: Environment, after: Environment) -> list[str]:
    """Return the differences between two environments, such as `driver 570.1 → 580.2`."""
    return list(_differences(before, after).values())


def toolchain_differences(before: Environment, after: Environment) -> tuple[str, ...]:
    """Return the differences between two toolchains, such as `triton 3.7.1 → 3.8.0`."""
    differences = _differences(before, after)
    packages = (field for field in differences if field not in TOOLCHAIN and in_toolchain(field))
    return tuple(differences[field] for field in (*TOOLCHAIN, *packages) if field in differences)


def toolchain_distinctions(environments: Sequence[Environment]) -> list[list[str]]:
    """Return the packages of each toolchain that differ between them, such as `triton 3.8.0`."""
    values = [declared(environment) for environment in environments]
    packages = dict.fromkeys(field for each in values for field in each if field not in TOOLCHAIN)
    fields = [*TOOLCHAIN, *filter(in_toolchain, packages)]
    differing = [field for field in fields if len({each.get(field) for each in values}) > 1]
    return [[f"{field.removeprefix('setting ')} {_shown(each.get(field))}" for field in differing] for each in values]


def machine_differences(before: Environment, after: Environment) -> tuple[str, ...]:
    """Return the differences between two environments other than their toolchains."""
    return tuple(text for field, text in _differences(before, after).items() if not in_toolchain(field))


@lru_cache(256)  # a night of 20,000 series after an upgrade has one pair of environments
def _differences(before: Environment, after: Environment) -> dict[str, str]:
    """Return the differences by field."""
    old, new = declared(before), declared(after)
    fields = [*old, *(field for field in new if field not in old)]
    return {
        field: f"{field} {_shown(old.get(field))} → {_shown(new.get(field))}"
        for field in fields
        if old.get(field) != new.get(field)
    }


def hardware_class(environment: Environment) -> str:
    """Return the hardware of a series: the GPU model, or the processor model if the device is the CPU."""
    model = environment.gpu if environment.device == "cuda" else environment.cpu
    return model or f"unknown {environment.device}"


_canonical = msgspec.json.Encoder(order="deterministic")


def digest(value: object) -> str:
    """Return a short hash of a JSON-serialisable value, independent of key order."""
    return hashlib.sha256(_canonical.encode(value)).hexdigest()[:32]


def _shown(value: str | None) -> str:
    return "unknown" if value is None else value


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    from importlib.metadata import PackageNotFoundError, version  # needed on machines that measure only

    try:
        return version(package)
    except PackageNotFoundError:
        return None
