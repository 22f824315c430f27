"""The code of compiled kernels in a folder: one file for each distinct kernel, named by its hash.

Measuring writes it next to the records, and `explain` reads it: source, TTGIR, PTX and machine code of each kernel,
compressed together, since they say much the same (LZMA: 20 KB for a kernel of 150 KB). What the folder holds is
limited: beyond the limit the machine code of the oldest goes first, and then the oldest kernels. One that is compiled
again comes back.
"""

from __future__ import annotations

import contextlib
import lzma
import os
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from groupbench.tracker.record import Code

FOLDER = "kernels"
LIMIT_BYTES = 500_000_000
"""A change a day of one backend's kernels (21 of them, 20 KB each) takes 156 MB a year."""
SLACK = 0.9
"""Share of the limit that is left when it was reached, so that not every kernel prunes again."""
LARGEST = 64 << 20
"""Bytes of one kernel, all of its steps together, that are read."""

_NAME = re.compile(r"[0-9a-f]{8,64}")


class KernelFolder:
    """A folder of kernels. It need not be there."""

    def __init__(self, path: Path, limit: int = LIMIT_BYTES) -> None:
        self.path, self.limit = path, limit
        self._size: int | None = None

    def add(self, kernels: Iterable[Code]) -> None:
        """Keep the kernels that are not kept yet. Raises OSError."""
        for code in kernels:
            if _NAME.fullmatch(code.hash) and not self._file(code.hash).exists():
                self._write(code)
        if self._size is not None and self._size > self.limit:
            self.prune()

    def get(self, hash_: str | None) -> Code | None:
        """Return the code of a kernel, or None where it is not kept or cannot be read."""
        if hash_ is None or not _NAME.fullmatch(hash_):
            return None
        try:
            with lzma.open(self._file(hash_)) as file:
                return msgspec.msgpack.decode(file.read(LARGEST), type=Code)
        except (OSError, EOFError, lzma.LZMAError, msgspec.DecodeError):
            return None

    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(size for _, size, _ in self._files())

    def prune(self) -> None:
        """Let go of machine code, the oldest first, and then of whole kernels, until the folder is below its limit."""
        files, room = sorted(self._files()), int(SLACK * self.limit)
        total = sum(size for _, size, _ in files)
        for _, size, file in files:
            if total <= room:
                break
            code = self.get(file.stem)
            if code is not None and code.cubin is not None:
                total += self._replace(file, msgspec.structs.replace(code, cubin=None)) - size
        for _, _, file in files:
            if total <= room:
                break
            total -= file.stat().st_size
            file.unlink()
        self._size = total

    def _write(self, code: Code) -> None:
        if self._size is None:
            self.path.mkdir(parents=True, exist_ok=True)
            self._size = self.size()
        self._size += self._replace(self._file(code.hash), code)

    def _replace(self, file: Path, code: Code) -> int:
        """Write a file whole, so that nobody reads half of it; its age stays. Return its size."""
        packed = lzma.compress(msgspec.msgpack.encode(code))
        half = file.with_suffix(f".{os.getpid()}")
        half.write_bytes(packed)
        with contextlib.suppress(OSError):
            before = file.stat()
            os.utime(half, ns=(before.st_atime_ns, before.st_mtime_ns))
        half.replace(file)
        return len(packed)

    def _files(self) -> list[tuple[int, int, Path]]:
        """(when it was written, bytes, file) of each kernel."""
        return [(stat.st_mtime_ns, stat.st_size, file) for file in self.path.glob("*.xz") for stat in [file.stat()]]

    def _file(self, hash_: str) -> Path:
        return self.path / f"{hash_}.xz"
