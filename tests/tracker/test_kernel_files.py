"""The code of kernels in a folder: kept once, read again, and limited."""

from __future__ import annotations

import os
import random
from pathlib import Path

import msgspec
import pytest

from groupbench.tracker.facts.kernel_files import KernelFolder
from groupbench.tracker.facts.record import Code


def code(number: int, size: int = 4000) -> Code:
    noise = random.Random(number)
    return Code(
        hash=f"{number:016x}", name="gemm", source="def gemm(): ...", ttgir="tt.func" * 9,
        ptx=noise.randbytes(size).hex(),
    )  # fmt: skip


def test_stored_code_is_read_back(tmp_path: Path) -> None:
    folder = KernelFolder(tmp_path / "kernels")
    assert folder.get("0" * 16) is None
    folder.add([code(1), code(2), code(1)])
    assert folder.get(code(1).hash) == code(1)
    assert len(list((tmp_path / "kernels").iterdir())) == 2
    assert folder.size() == sum(file.stat().st_size for file in (tmp_path / "kernels").iterdir())


def test_stored_code_is_not_written_again(tmp_path: Path) -> None:
    folder = KernelFolder(tmp_path)
    folder.add([code(1)])
    (file,) = tmp_path.iterdir()
    before = file.stat()
    KernelFolder(tmp_path).add([code(1)])
    assert file.stat().st_ino == before.st_ino


def test_machine_code_is_not_kept(tmp_path: Path) -> None:
    folder = KernelFolder(tmp_path)
    folder.add([msgspec.structs.replace(code(1), cubin=b"machine code")])
    assert folder.get(code(1).hash) == code(1)


def test_a_damaged_file_is_written_again(tmp_path: Path) -> None:
    (tmp_path / f"{1:016x}.xz").write_bytes(b"no xz")
    folder = KernelFolder(tmp_path)
    folder.add([code(1)])
    assert folder.get(code(1).hash) == code(1)


@pytest.mark.parametrize("hash_", [None, "", "../../etc/passwd", "ABC", "0" * 16])
def test_an_invalid_hash_is_not_a_file(hash_: str | None, tmp_path: Path) -> None:
    assert KernelFolder(tmp_path).get(hash_) is None


@pytest.mark.parametrize("content", [b"", b"no xz", b"\xfd7zXZ\x00broken"])
def test_a_damaged_file_is_not_a_kernel(content: bytes, tmp_path: Path) -> None:
    (tmp_path / f"{1:016x}.xz").write_bytes(content)
    assert KernelFolder(tmp_path).get(f"{1:016x}") is None


def test_a_name_that_leaves_the_folder_is_not_written(tmp_path: Path) -> None:
    KernelFolder(tmp_path / "kernels").add([Code(hash="../out", name="gemm")])
    assert list(tmp_path.rglob("*.xz")) == []


def test_the_kernels_measured_longest_ago_go_first(tmp_path: Path) -> None:
    folder = KernelFolder(tmp_path)
    for number in range(6):
        folder.add([code(number)])
        os.utime(tmp_path / f"{number:016x}.xz", (number, number))
    folder.limit = folder.size()
    folder.add([code(0), code(6)])
    assert folder._size == folder.size() <= 0.9 * folder.limit
    kept = [number for number in range(7) if folder.get(f"{number:016x}") is not None]
    assert kept == [0, 3, 4, 5, 6]
