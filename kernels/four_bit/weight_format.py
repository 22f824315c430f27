"""The names of four-bit weight formats and their sizes, without torch: listings read them."""

from __future__ import annotations

import re
from dataclasses import dataclass

HELP = "mxfp4, int4(GROUP) or int4(GROUP,zp), with GROUP of 32, 64 or a multiple of 64"


@dataclass(frozen=True)
class Format:
    """A weight format: the kind of code, how many values along K share a scale, and whether they have a zero."""

    name: str  # "mxfp4" or "int4"
    group: int = 32
    zero_point: bool = False

    def __str__(self) -> str:
        return self.name if self.floating else f"int4({self.group}{',zp' * self.zero_point})"

    @property
    def floating(self) -> bool:
        """Whether codes are e2m1, not integers."""
        return self.name == "mxfp4"

    @property
    def scale_bytes(self) -> int:
        """Bytes for a group's scale and zero point."""
        return 1 if self.floating else 2 + self.zero_point

    def groups(self, K: int) -> int:
        """Return how many groups a row has."""
        return -(-K // self.group)

    def row_bytes(self, K: int) -> int:
        """Return a weight row's bytes."""
        return -(-K // 2) + self.groups(K) * self.scale_bytes


MXFP4 = Format("mxfp4")


def parse_format(text: str) -> Format:
    """Parse a format's text. Raises ValueError naming the accepted forms."""
    if text == "mxfp4":
        return MXFP4
    match = re.fullmatch(r"int4\((\d{1,6})(,zp)?\)", text)
    group = int(match[1]) if match else 0
    if match is None or (group != 32 and (group % 64 or not group)):
        raise ValueError(f"fmt={text[:40]} is not {HELP}")
    return Format("int4", group, match[2] is not None)
