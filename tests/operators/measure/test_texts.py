"""Texts of exceptions and command lines in a record."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.operators.measure.texts import LONGEST_LINE, one_line, storable
from groupbench.tracker.facts.record import Record, decode, encode

TEXTS = {
    "empty": ("", ""),
    "plain": ("12 µs, 3 %", "12 µs, 3 %"),
    "bytes of a file's name": (os.fsdecode(b"caf\xe9"), r"caf\udce9"),
    "half of a pair": ("\ud83d", r"\ud83d"),
    "NUL": ("a\0b", r"a\x00b"),
    "several lines": ("a\nb", "a\nb"),
}


@pytest.mark.parametrize(("text", "expected"), TEXTS.values(), ids=TEXTS)
def test_storable(text: str, expected: str) -> None:
    assert storable(text) == expected


@given(text=st.text(st.characters(), min_size=1))
def test_a_record_holds_any_message(text: str, make: Callable[..., Record]) -> None:
    message = one_line(text + ".")
    record = msgspec.structs.replace(make(ms=None, status="error"), message=message)
    assert decode(encode(record)) == record
    assert storable(message) == message and "\n" not in message and len(message) <= LONGEST_LINE
