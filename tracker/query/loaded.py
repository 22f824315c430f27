"""Read which files and packages the processes of points loaded, and compare them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.loaded import LoadedDifference, difference_of
from groupbench.tracker.facts.record import Loaded
from groupbench.tracker.query.rows import PointRow
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.schema import LoadedList


def loaded_lists(session: Session, hashes: Iterable[str]) -> dict[str | None, Mapping[str, str]]:
    """Return the lists of files or packages with these hashes; an unknown list is empty."""
    query = select(LoadedList.content, LoadedList.items)
    return {
        content: items or {}
        for chunk in chunks(hashes)
        for content, items in session.execute(query.where(LoadedList.content.in_(chunk)))
    }


class LoadedLists:
    """The lists of files and packages of some points.

    Args:
        session: The database.
        points: Points whose lists are read, all at once.
    """

    def __init__(self, session: Session, points: Iterable[PointRow]) -> None:
        hashes = {hash_ for point in points for hash_ in (point.code_hash, point.packages_hash) if hash_ is not None}
        self._items: Mapping[str | None, Mapping[str, str]] = loaded_lists(session, hashes)

    def of(self, point: PointRow) -> Loaded | None:
        """Return the files and packages that a point's process loaded, or None if they are unknown."""
        if point.code_hash is None and point.packages_hash is None:
            return None
        files, versions = (dict(self._items.get(hash_, {})) for hash_ in (point.code_hash, point.packages_hash))
        return Loaded(code=point.code_hash, packages=point.packages_hash, files=files, versions=versions)

    def difference(self, before: PointRow, after: PointRow) -> LoadedDifference:
        """Return the differences between the files and packages of two points."""
        if before.code_hash == after.code_hash and before.packages_hash == after.packages_hash:
            same = None if after.code_hash is None else True
            return LoadedDifference(same, of=len(self._items.get(after.code_hash, ())))
        return difference_of(self.of(before), self.of(after))
