"""Check a record before it is written, whichever host produced it."""

from __future__ import annotations

import msgspec

from groupbench.operators.measure.texts import one_line
from groupbench.tracker.facts.physics import implausible
from groupbench.tracker.facts.record import Record, RecordError, decode, encode


def vetted(record: Record) -> Record:
    """Return the record; with status `wrong` for an implausible latency, `error` if readers would reject it."""
    try:
        decode(encode(record))
        reason = implausible(record) if record.status == "ok" else None
    except RecordError as error:
        message = one_line(f"the cell's process reported an invalid record: {error}")
        bare = msgspec.structs.replace(record, latency=None, accuracy=None, kernels=(), duration_s=None, metrics={})
        return msgspec.structs.replace(bare, status="error", message=message)
    return record if reason is None else msgspec.structs.replace(record, status="wrong", message=reason)
