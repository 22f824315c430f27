"""The fingerprint of a measured process: the repository's files that it ran, and the versions of packages.

A result without a fingerprint is of unknown code, which equals no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from groupbench.tracker.facts.environment import digest
from groupbench.tracker.facts.record import Loaded, Record, cut

NOTHING = digest({})
"""The hash of an empty list."""

NAMED = 4
"""Number of files or packages that a text names."""


def loaded_of(files: Mapping[str, str] | None, versions: Mapping[str, str]) -> Loaded:
    """Return a fingerprint with its hashes.

    Args:
        files: Hash of each file's content by path relative to the repository; None if any is unknown.
        versions: Version of each distribution by its name.
    """
    kept = None if files is None else dict(sorted((cut(path), value) for path, value in files.items()))
    versions = dict(sorted((cut(name), cut(version)) for name, version in versions.items()))
    return Loaded(
        code=None if kept is None else digest(kept), files=kept or {}, packages=digest(versions), versions=versions
    )


def problem_of(loaded: Loaded) -> str | None:
    """Return which hash contradicts its list, or None. A list may be missing: see `ListsOnce`."""
    if loaded.code is None and loaded.files:
        return "loaded.files has no hash"
    if loaded.files and digest(loaded.files) != loaded.code:
        return "loaded.code is not the hash of loaded.files"
    if loaded.versions and digest(loaded.versions) != loaded.packages:
        return "loaded.packages is not the hash of loaded.versions"
    return None


class ListsOnce:
    """Omits the lists of a record that an earlier record of the same file has. Their hashes stay."""

    def __init__(self) -> None:
        self._written: set[str] = set()

    def __call__(self, record: Record) -> Record:
        """Return the record to write."""
        loaded = record.loaded
        if loaded is None:
            return record
        if loaded.code in self._written:
            loaded = msgspec.structs.replace(loaded, files={})
        if loaded.packages in self._written:
            loaded = msgspec.structs.replace(loaded, versions={})
        self._written |= {value for value in (loaded.code, loaded.packages) if value is not None}
        return msgspec.structs.replace(record, loaded=loaded)


@dataclass(frozen=True)
class LoadedDifference:
    """The differences between the fingerprints of two results.

    Attributes:
        same_code: Whether both ran the same files; None if that is unknown.
        files: Files that differ, or that only one of them loaded; empty if the lists are unknown.
        of: Number of files that either loaded.
        packages: Packages that differ, such as `numpy 2.2.6 → 2.4.0`.
    """

    same_code: bool | None
    files: tuple[str, ...] = ()
    of: int = 0
    packages: tuple[str, ...] = ()

    @property
    def code_text(self) -> str | None:
        """The files as text: `3 of 41 loaded files differ: a.py, b.py, c.py`. None if the code is unknown."""
        if self.same_code is None:
            return None
        if self.same_code:
            return "the loaded files are the same"
        if not self.files:
            return "the loaded files differ"
        return f"{len(self.files)} of {self.of} loaded files differ: {_some(self.files)}"

    @property
    def texts(self) -> tuple[str, ...]:
        """The differing files as one text, and each differing package."""
        files = (self.code_text,) if self.same_code is False and self.code_text is not None else ()
        return (*files, *self.packages)


UNKNOWN = LoadedDifference(None)


def difference_of(before: Loaded | None, after: Loaded | None) -> LoadedDifference:
    """Compare the fingerprints of two results."""
    if before is None or after is None:
        return UNKNOWN
    same = None if before.code is None or after.code is None else before.code == after.code
    files: tuple[str, ...] = ()
    if same is False and before.files and after.files:
        files = tuple(_differing(before.files, after.files, lambda path, old, new: path + _alone(old, new)))
    packages = changed_packages(before.versions, after.versions)
    return LoadedDifference(same, files, len({*before.files, *after.files}), packages)


def changed_packages(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, ...]:
    """Return each package that both imported in different versions, such as `numpy 2.2.6 → 2.4.0`."""
    old, new = ({name: each[name] for name in before if name in after} for each in (before, after))
    return tuple(_differing(old, new, lambda name, one, other: f"{name} {one} → {other}"))


def difference_of_all(pairs: Iterable[tuple[Loaded | None, Loaded | None]]) -> LoadedDifference:
    """Compare several results with their counterparts, and return all differences together."""
    pairs = list(pairs)
    each = [difference_of(*pair) for pair in pairs]
    codes = [one.same_code for one in each if one.same_code is not None]
    paths = {path for pair in pairs for loaded in pair if loaded is not None for path in loaded.files}
    return LoadedDifference(
        all(codes) if codes else None,
        tuple(sorted({file for one in each for file in one.files})),
        len(paths),
        tuple(sorted({package for one in each for package in one.packages})),
    )


def _differing(
    before: Mapping[str, str], after: Mapping[str, str], text: Callable[[str, str | None, str | None], str]
) -> list[str]:
    names = sorted({*before, *after})
    pairs = ((name, before.get(name), after.get(name)) for name in names)
    return [text(name, old, new) for name, old, new in pairs if old != new]


def _alone(old: str | None, new: str | None) -> str:
    """Return a remark for a file that only one of two results loaded."""
    return " (no longer loaded)" if new is None else " (newly loaded)" if old is None else ""


def _some(texts: tuple[str, ...]) -> str:
    more = len(texts) - NAMED
    return ", ".join(texts[:NAMED]) + (f" and {more} more" if more > 0 else "")
