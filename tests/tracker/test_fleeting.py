"""Parts of names that change with each run."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.tracker.facts.fleeting import settled, settled_machine
from groupbench.tracker.facts.spelling import canonical, canonical_environment

WHEN = datetime(2026, 3, 15, 4, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "kept", "kind"),
    [
        ("f=<Net object at 0x7f31c0de4a90>,n=8", "f=<Net object>,n=8", "memory address"),
        ("<function f at 0x55d0c0a1b2c3>", "<function f>", "memory address"),
        ("key=5f0c1d8e-1b2a-4c3d-8e9f-0a1b2c3d4e5f,n=8", "n=8", "UUID"),
        ("n=8,pid=41233", "n=8", "process id"),
        ("read[pid 41233]", "read", "process id"),
        ("file=/tmp/pytest-of-root/pytest-12/test_read0/big.csv,n=8", "file=big.csv,n=8", "temporary path"),
        ("file=/tmp/tmpab12cd34,n=8", "n=8", "temporary path"),
        ("/var/folders/q1/x8/T/tmpq8w7e6r5/a.bin", "a.bin", "temporary path"),
        (r"C:\Users\ci\AppData\Local\Temp\build\a.bin", "a.bin", "temporary path"),
        ("load_tmpab12cd34", "load", "temporary name"),
        ("nightly-2026-03-15", "nightly", "date"),
        ("nightly_20260314_031500,n=8", "nightly,n=8", "date"),
        ("run 2026-03-15T03:12:44Z", "run", "date"),
        ("run-1773540000", "run", "date"),
        ("host:09e45318565b,n=8", "n=8", "container id"),
        ("x=-1,pid=3", "x=-1", "process id"),
    ],
)
def test_what_changes_is_dropped(text: str, kept: str, kind: str) -> None:
    name, kinds = settled(text, WHEN)
    assert name == kept
    assert list(kinds) == [kind]


@pytest.mark.parametrize(
    "text",
    [
        *("G=4,M_g=64,N=64,K=64", "start='2011-01-01'", "N=137438953472", "mask=0xffff", "template", "rapid=3"),
        *("tmp_buffers", "M=20480101", "config=3f2a1b4c5d6e", "n=1700000000", "attempt", "param1=<lambda>"),
    ],
)
def test_what_stays_is_kept(text: str) -> None:
    assert settled(text, WHEN) == (text, {})


@pytest.mark.parametrize(
    "name",
    [
        *("09e45318565b", "123456789012", "a" * 63 + "1", "GitHub Actions 12", "fv-az123-456", "pkrvmf6wy0o8zjz"),
        *("runnervm1a2b3c", "Mac-1699999999999.local", "runner-jlguopmm-project-278964-concurrent-0"),
        "i-0abc123def4567890",
        *("ip-10-0-1-23.ec2.internal", "5f0c1d8e-1b2a-4c3d-8e9f-0a1b2c3d4e5f", "172.17.0.2", "localhost", ""),
    ],
)
def test_a_machine_of_one_job_has_no_name(name: str) -> None:
    assert settled_machine(name) is None


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        *((name, name) for name in ("box", "i7", "AMD EPYC 7763 64-Core Processor", "Apple M2", "dgx-a100-04")),
        ("Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz", "Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz"),
        ("linux.aws.a100-x7b2p-runner-8kz5h", "linux.aws.a100"),
        ("bench-5d4f8b7c9d-x2x4z", "bench"),
        ("bench-09e45318565b", "bench"),
    ],
)
def test_a_machine_with_a_name(name: str, kept: str) -> None:
    assert settled_machine(name) == kept


@given(st.text(max_size=60))
def test_settling_any_text_again_changes_nothing_that_it_keeps(text: str) -> None:
    once, kinds = settled(text, WHEN)
    assert kinds or once == text
    assert len(once) <= len(text)


ADDRESS = st.integers(0x7F0000000000, 0x7FFFFFFFFFFF)


@given(
    st.lists(ADDRESS, min_size=2, max_size=2),
    st.sampled_from(["<a.B object at {:#x}>", "n=8,f=<f at {:#x}>", "{:#x}/8"]),
)
def test_two_runs_have_one_name(addresses: list[int], form: str) -> None:
    first, second = (settled(form.format(address), WHEN)[0] for address in addresses)
    assert first == second


def test_a_stored_cell_and_machine(make: Any) -> None:
    record = make(0)
    cell = msgspec.structs.replace(record.cell, shape="f=<f at 0x7f31c0de4a90>", backend="pid=3", dtype="float32")
    assert (canonical(cell).shape, canonical(cell).backend, canonical(cell).dtype) == ("f=<f>", "-", "fp32")
    machine = msgspec.structs.replace(record.environment, device="cpu", cpu="09e45318565b", cpu_count=4)
    assert canonical_environment(machine).cpu == "4 CPUs"
    assert canonical_environment(msgspec.structs.replace(machine, cpu="box")).cpu == "box"
