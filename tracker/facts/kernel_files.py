"""Keep compiled kernels' code in a folder, one file for each distinct kernel, named by hash.

`tritonbench` writes the folder next to the records, and `groupbench explain` reads it. A file has the source, TTGIR,
PTX and machine code of a kernel, compressed together because they are similar (LZMA: 20 KB for a kernel of 150 KB). The
folder's size is limited: first the machine code of the kernels that were measured longest ago is removed, then these
kernels. The newest kernels keep their machine code. A kernel that is compiled again is stored again.
"""

from __future__ import annotations

import contextlib
import lzma
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from groupbench.tracker.facts.record import Code

FOLDER = "kernels"
LIMIT_BYTES = 500_000_000
"""Default limit. One change per day of a backend's 21 kernels of 20 KB takes 156 MB per year."""
PRUNED_SHARE = 0.9
"""Fraction of the limit to prune to, so that not every new kernel prunes again."""
WHOLE = 0.25
"""Fraction of the limit for the newest kernels, which keep their machine code while older kernels can be removed."""
MOST_KERNEL_BYTES = 64 << 20
"""Largest number of bytes of a kernel to read, over all its steps."""

_NAME = re.compile(r"[0-9a-f]{8,64}")


class KernelFolder:
    """A folder of kernels. It may not exist yet."""

    def __init__(self, path: Path, limit: int = LIMIT_BYTES) -> None:
        self.path, self.limit = path, limit
        self._size: int | None = None
        self._whole: set[str] = set()  # hashes of kernels that are stored with their machine code

    def add(self, kernels: Iterable[Code]) -> None:
        """Store the kernels that are not stored yet, and mark the others as measured now. Raises OSError.

        Machine code that was removed is stored again.
        """
        for code in kernels:
            if not _NAME.fullmatch(code.hash):
                continue
            file = self._file(code.hash)
            if file.exists() and self._is_whole(code):
                file.touch()
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
        """Remove machine code, then whole kernels, until the folder is below the limit.

        Those measured longest ago go first. The newest ones keep their machine code, unless they alone are too large.
        """
        files, room = sorted(self._files()), int(PRUNED_SHARE * self.limit)
        self._whole.clear()
        total = sum(size for _, size, _ in files)
        for _, size, file in files[: self._older(files)]:
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

    def _older(self, files: Sequence[tuple[int, int, Path]]) -> int:
        """Return the number of files, oldest first, that are older than the newest ones of `WHOLE`."""
        newest, number = 0, len(files)
        while number and newest + files[number - 1][1] <= WHOLE * self.limit:
            newest += files[number - 1][1]
            number -= 1
        return number

    def _is_whole(self, code: Code) -> bool:
        """Return whether a stored kernel has all that this code has."""
        if code.cubin is not None and code.hash not in self._whole:
            stored = self.get(code.hash)
            if stored is None or stored.cubin is None:
                return False
            self._whole.add(code.hash)
        return True

    def _write(self, code: Code) -> None:
        if self._size is None:
            self.path.mkdir(parents=True, exist_ok=True)
            self._size = self.size()
        file = self._file(code.hash)
        before = file.stat().st_size if file.exists() else 0
        self._size += self._replace(file, code) - before
        file.touch()

    def _replace(self, file: Path, code: Code) -> int:
        """Write a file atomically, keeping the modification time, and return the size."""
        packed = lzma.compress(msgspec.msgpack.encode(code))
        half = file.with_suffix(f".{os.getpid()}")
        half.write_bytes(packed)
        with contextlib.suppress(OSError):
            before = file.stat()
            os.utime(half, ns=(before.st_atime_ns, before.st_mtime_ns))
        half.replace(file)
        return len(packed)

    def _files(self) -> list[tuple[int, int, Path]]:
        """Return (modification time, size in bytes, path) of each file."""
        return [(stat.st_mtime_ns, stat.st_size, file) for file in self.path.glob("*.xz") for stat in [file.stat()]]

    def _file(self, hash_: str) -> Path:
        return self.path / f"{hash_}.xz"
