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
        hash=f"{number:016x}", name="gemm", source="def gemm(): ...", ttgir="tt.func" * 9, ptx="add.s32;\n" * 9,
        cubin=noise.randbytes(size),
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


def test_a_kernel_that_is_measured_every_night_is_kept(tmp_path: Path) -> None:
    for number in range(3):
        KernelFolder(tmp_path).add([code(number)])
        os.utime(tmp_path / f"{number:016x}.xz", (number, number))
    folder = KernelFolder(tmp_path, limit=100)
    folder.add([code(0)])
    folder.limit = folder.size() - 1
    folder.prune()
    kept = [folder.get(f"{number:016x}") for number in range(3)]
    assert [one is not None and one.cubin is not None for one in kept] == [True, False, True]


def test_machine_code_comes_back_with_the_next_measurement(tmp_path: Path) -> None:
    folder = KernelFolder(tmp_path)
    folder.add([code(1), code(2)])
    os.utime(tmp_path / f"{1:016x}.xz", (1, 1))
    folder.limit = int(folder.size() / 0.9) - 100
    folder.prune()
    assert folder.get(code(1).hash) == msgspec.structs.replace(code(1), cubin=None)
    folder.limit = 1_000_000
    folder.add([code(1)])
    assert folder.get(code(1).hash) == code(1)
    assert (tmp_path / f"{1:016x}.xz").stat().st_mtime > 1, "it was measured now"
    folder.add([code(3)])
    assert folder._size == folder.size()


def test_a_kernel_without_machine_code_does_not_replace_one_with_it(tmp_path: Path) -> None:
    KernelFolder(tmp_path).add([code(1)])
    folder = KernelFolder(tmp_path)
    folder.add([msgspec.structs.replace(code(1), cubin=None)])
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


def test_the_machine_code_of_the_oldest_goes_first_and_then_the_oldest(tmp_path: Path) -> None:
    folder = KernelFolder(tmp_path, limit=30_000)
    for number in range(6):
        folder.add([code(number)])
        os.utime(tmp_path / f"{number:016x}.xz", (number, number))
    assert folder.size() <= 30_000
    folder.add([code(6), code(7)])
    assert folder.size() <= 27_000
    kept = [folder.get(f"{number:016x}") for number in range(8)]
    assert all(one is not None for one in kept)
    assert [one.cubin is None for one in kept if one] == [True, True] + 6 * [False]
    small = KernelFolder(tmp_path, limit=1000)
    small.prune()
    assert small.size() <= 900
    assert small.get(f"{7:016x}") is not None and small.get(f"{0:016x}") is None
