"""Find the files to import: files, folders, archives, and patterns such as `nights/*.json`."""

from __future__ import annotations

import glob
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import IO

from groupbench.tracker.facts.errors import IngestError

_ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")

_OF_ASV = ("machine.json", "benchmarks.json")
"""Files of asv's results folder without results."""

_NOT_RESULTS = (".bin", ".md", ".html", ".png", ".svg", ".py", ".sh", ".gz", ".db", ".toml", ".yml", ".yaml")
"""Endings of file names without results."""

_MOST_TIMES = 200
_MOST_BEYOND = 1 << 30
"""An archive may unpack to this many times its size, and as many bytes beyond that."""


@dataclass(frozen=True)
class Source:
    """One file to import."""

    path: Path
    name: str  # for messages; inside an archive: `nights.zip:2026/a.json`


@dataclass(frozen=True)
class Given:
    """One argument of the command."""

    name: str
    sources: tuple[Source, ...]
    several: bool  # a folder, an archive or a pattern: a file of no known format is passed over


def arguments_of(names: list[str] | tuple[str, ...], stack: ExitStack) -> list[Given]:
    """Return the files of each argument in a stable order.

    Args:
        names: Files, folders, archives and patterns.
        stack: Archives are unpacked into folders that its exit removes.

    Raises IngestError for a pattern or folder without files and for an archive that cannot be unpacked safely.
    """
    return [_argument(name, stack) for name in names]


def _argument(name: str, stack: ExitStack) -> Given:
    path = Path(name)
    if not path.exists() and glob.has_magic(name):
        paths = [Path(match) for match in sorted(glob.glob(name, recursive=True))]  # noqa: PTH207 - may be absolute
        if not paths:
            raise IngestError(f"{name}: no file matches")
        inner = [_argument(str(path), stack) for path in paths]
        return Given(name, tuple(source for one in inner for source in one.sources), True)
    if path.is_dir():
        sources = tuple(Source(file, str(file)) for file in _files(path))
        if not sources:
            raise IngestError(f"{name}: has no known format; the folder contains no file")
        return Given(name, sources, True)
    if path.name.lower().endswith(_ARCHIVES) and path.is_file():
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="groupbench-import-")))
        _unpack(path, folder)
        sources = tuple(Source(file, f"{name}:{file.relative_to(folder).as_posix()}") for file in _files(folder))
        if not sources:
            raise IngestError(f"{name}: the archive contains no file")
        return Given(name, sources, True)
    return Given(name, (Source(path, name),), False)


def _files(folder: Path) -> Iterator[Path]:
    """Yield a folder's possible results, ordered by name. Hidden ones are not."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        of_asv = (Path(root) / "benchmarks.json").is_file() or (Path(root).parent / "benchmarks.json").is_file()
        for name in sorted(names):
            hidden = name.startswith(".") or name.lower().endswith(_NOT_RESULTS)
            if not hidden and not (of_asv and name in _OF_ASV):
                yield Path(root) / name


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive's regular files. Raises IngestError for a name outside the folder, and for a bomb."""
    room = [archive.stat().st_size * _MOST_TIMES + _MOST_BEYOND]
    try:
        if archive.suffix.lower() == ".zip":
            with zipfile.ZipFile(archive) as packed:
                for member in packed.infolist():
                    if not member.is_dir() and (member.external_attr >> 28) != 0xA:  # a symbolic link
                        _write(packed.open(member), _inside(folder, member.filename), room)
            return
        with tarfile.open(archive) as tar:
            for entry in tar:
                stream = tar.extractfile(entry) if entry.isreg() else None
                if stream is not None:
                    _write(stream, _inside(folder, entry.name), room)
    except IngestError as error:
        raise IngestError(f"{archive}: {error.message}") from error
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, RuntimeError, NotImplementedError) as error:
        raise IngestError(f"{archive}: cannot be unpacked: {getattr(error, 'strerror', None) or error}") from error
    except (ValueError, zlib.error) as error:
        raise IngestError(f"{archive}: cannot be unpacked: {error}") from error


def _inside(folder: Path, name: str) -> Path:
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if not parts or ".." in parts or parts[0] == "/" or ":" in parts[0] or "\0" in name:
        raise IngestError(f"the name {name!r} is outside the archive")
    return folder.joinpath(*parts)


def _write(stream: IO[bytes], path: Path, room: list[int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with stream, path.open("wb") as file:
        while chunk := stream.read(1 << 20):
            room[0] -= len(chunk)
            if room[0] < 0:
                raise IngestError("unpacks to far more bytes than it has; unpack it yourself if this is right")
            file.write(chunk)
