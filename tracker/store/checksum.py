"""The checksum of a row: a hash of its columns, by which `verify` finds a value that changed on the disk.

A point and a comparison have a hash of what was recorded, which merging and repeated ingestion need as well. Every
other row that cannot be computed from its neighbours has a checksum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

_encoder = msgspec.json.Encoder(order="deterministic")


def checksum_of(columns: Mapping[str, Any]) -> int:
    """Return a 48-bit hash of a row's values by column.

    Columns that are null are left out, so that a column added later changes no checksum. Values count as a database
    gives them back: an instant without a time zone is UTC, a whole float is an integer, zero has no sign.
    """
    present = {name: _canonical(value) for name, value in columns.items() if value is not None}
    return int.from_bytes(hashlib.sha256(_encoder.encode(present)).digest()[:6], "big")


def _canonical(value: Any) -> Any:
    if isinstance(value, datetime):
        return (value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)).isoformat()
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    return value
