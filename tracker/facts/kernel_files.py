"""Keep compiled kernels' code in a folder, one file for each distinct kernel, named by hash.

`tritonbench` writes the folder next to the records, and `groupbench explain` reads it. A file has the source, TTGIR and
PTX of a kernel, compressed together because they are similar. The folder's size is limited: the kernels that were
measured longest ago are removed first. A kernel that is compiled again is stored again.
"""

from __future__ import annotations

import lzma
import os
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from groupbench.tracker.facts.record import Code

FOLDER = "kernels"
LIMIT_BYTES = 500_000_000
"""Default limit: tens of thousands of kernels."""
PRUNED_SHARE = 0.9
"""Fraction of the limit to prune to, so that not every new kernel prunes again."""
MOST_KERNEL_BYTES = 64 << 20
"""Most bytes to read for a kernel, over all steps."""

_NAME = re.compile(r"[0-9a-f]{8,64}")


class KernelFolder:
    """A folder of kernels. It may not exist yet."""

    def __init__(self, path: Path, limit: int = LIMIT_BYTES) -> None:
        self.path, self.limit = path, limit
        self._size: int | None = None

    def add(self, kernels: Iterable[Code]) -> None:
        """Store the kernels that are not stored yet, and mark the others as measured now. Raises OSError."""
        for code in kernels:
            if _NAME.fullmatch(code.hash):
                if self.get(code.hash) is not None:
                    self._file(code.hash).touch()
                else:
                    self._write(code)
        if self._size is not None and self._size > self.limit:
            self.prune()

    def get(self, hash_: str | None) -> Code | None:
        """Return the code of a kernel, or None if it is not stored or cannot be read."""
        if hash_ is None or not _NAME.fullmatch(hash_):
            return None
        try:
            with lzma.open(self._file(hash_)) as file:
                return msgspec.msgpack.decode(file.read(MOST_KERNEL_BYTES), type=Code)
        except (OSError, EOFError, lzma.LZMAError, msgspec.DecodeError):
            return None

    def size(self) -> int:
        """Return the total size of the files in bytes."""
        return sum(size for _, size, _ in self._files())

    def prune(self) -> None:
        """Remove the kernels that were measured longest ago, until the folder is below the limit."""
        files = sorted(self._files())
        self._size = sum(size for _, size, _ in files)
        for _, size, file in files:
            if self._size <= PRUNED_SHARE * self.limit:
                break
            file.unlink()
            self._size -= size

    def _write(self, code: Code) -> None:
        """Write a kernel atomically, without machine code, which nothing reads again."""
        if self._size is None:
            self.path.mkdir(parents=True, exist_ok=True)
            self._size = self.size()
        file = self._file(code.hash)
        before = file.stat().st_size if file.exists() else 0
        packed = lzma.compress(msgspec.msgpack.encode(msgspec.structs.replace(code, cubin=None)))
        half = file.with_suffix(f".{os.getpid()}")
        half.write_bytes(packed)
        half.replace(file)
        self._size += len(packed) - before

    def _files(self) -> list[tuple[int, int, Path]]:
        """Return (modification time, size in bytes, path) of each file."""
        return [(stat.st_mtime_ns, stat.st_size, file) for file in self.path.glob("*.xz") for stat in [file.stat()]]

    def _file(self, hash_: str) -> Path:
        return self.path / f"{hash_}.xz"
