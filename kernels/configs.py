"""Pass a config on to a kernel."""

from __future__ import annotations

from typing import Any


def launch_keywords(kernel: Any, config: Any, **further: Any) -> dict[str, Any]:
    """Return a launch's keywords: the kernel's constants from the config, warps and stages.

    Args:
        kernel: A `triton.jit` or `gluon.jit` function. The constant BLOCK_M is the config's field `block_m`, and so on.
            A Gluon kernel has a ring with STAGES; for others, `num_stages` is a compiler option.
        config: Dataclass with `num_warps` and `num_stages`.
        further: Other constants, which come before the config's.
    """
    fields = {name.upper(): value for name, value in vars(config).items()} | {"STAGES": config.num_stages}
    constants = {name: fields[name] for name in kernel.arg_names if name in fields}
    options = {"num_warps": config.num_warps}
    if "STAGES" not in constants:
        options["num_stages"] = config.num_stages
    return constants | options | further
