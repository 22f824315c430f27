"""List the products in public models' layers, as JSON on standard output: `python -m groupbench.operators.layers`.

`groupbench gains --layer` calls this module in a separate process, because the tracker does not import operators.
"""

from __future__ import annotations

import sys

import msgspec

PARTS = ("gu", "dn")
"""The products of a layer of experts: gate-up and down projection. A shape's name contains one of them as a word."""


def layers() -> dict[str, list[str]]:
    """Return each layer's product shapes, by name: `qwen3_30b_prefill`, `qwen30b`."""
    from groupbench.operators.catalog.models import PHASES
    from groupbench.operators.catalog.shapes import SUITES

    by_layer: dict[str, dict[str, str]] = {}
    for suite in ("moe", *PHASES):
        for name, shape in SUITES[suite].items():
            words = name.split("_")
            part = next((word for word in words if word in PARTS), None)
            if part is not None:
                words.remove(part)
                by_layer.setdefault("_".join(words), {})[part] = str(shape)
    return {name: [parts[part] for part in PARTS] for name, parts in by_layer.items() if len(parts) == len(PARTS)}


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(layers()))
