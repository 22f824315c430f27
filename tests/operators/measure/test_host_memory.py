"""The memory that a cell may use, and that its processes use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from groupbench.operators.errors import UsageError
from groupbench.operators.measure import host_memory, warden


@pytest.mark.parametrize("setting", ["much", "-1", "0", "nan", "inf"])
def test_a_memory_limit_that_is_not_a_positive_number_is_refused(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("GROUPBENCH_MEMORY_GIB", setting)
    with pytest.raises(UsageError, match="is not a positive number of GiB"):
        host_memory.limit()


def test_a_control_group_limits_the_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On each version of control groups, and files that the kernel keeps in memory are not use."""
    monkeypatch.delenv("GROUPBENCH_MEMORY_GIB", raising=False)
    monkeypatch.setattr(host_memory, "_CONTROL_GROUPS", tmp_path)
    for folder, most, use in (
        (tmp_path, "memory.max", "memory.current"),
        (tmp_path / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        folder.mkdir(exist_ok=True)
        (folder / most).write_text("1000\n")
        (folder / use).write_text("790\n")
        (folder / "memory.stat").write_text("anon 10\ninactive_file 700\nactive_file 80\n")
    assert host_memory.limit() == 800
    assert not host_memory.may_exceed(800)
    for folder in (tmp_path, tmp_path / "memory"):
        (folder / "memory.stat").write_text("anon 790\ninactive_file 0\nactive_file 0\n")
    assert host_memory.may_exceed(800)


def test_memory_that_processes_share_counts_once() -> None:
    """A forked process shares its parent's pages until either writes; all of them share the shared mapping."""
    program = """if True:
        import mmap, os, sys
        private, shared = bytearray(b"x") * (100 << 20), mmap.mmap(-1, 100 << 20)
        shared.write(private)
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                sum(shared[::4096])
                os.write(1, b"ready\\n")
                sys.stdin.read()
                os._exit(0)
        sys.stdin.read()
    """
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        assert [process.stdout.readline() for _ in range(3)] == [b"ready\n"] * 3
        processes = [process.pid, *warden.below(process.pid)]
        assert len(processes) == 4
        used, bound = host_memory.used_by(processes, 0), host_memory.used_by(processes, 1 << 40)
        process.stdin.close()
    assert 200 << 20 < used < 300 << 20
    assert bound > 4 * (200 << 20)
