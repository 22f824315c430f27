"""Named shape suites, made when first read: a cell from one suite needs no other suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TypeVar

V = TypeVar("V")
W = TypeVar("W")


class Suites(Mapping[str, V]):
    """A mapping from suite names to shapes. Each value is made once, when it is first read."""

    def __init__(self, makers: Mapping[str, Callable[[], V]]) -> None:
        self._makers = dict(makers)
        self._made: dict[str, V] = {}

    def __getitem__(self, name: str) -> V:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __contains__(self, name: object) -> bool:  # Mapping's own would make the suite
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def each(self, function: Callable[[V], W]) -> Suites[W]:
        """Return suites with the same names, whose values are `function` of these."""
        return Suites({name: partial(lambda name: function(self[name]), name) for name in self})

    def without(self, *names: str) -> Suites[V]:
        """Return the suites without these names."""
        return Suites({name: partial(self.__getitem__, name) for name in self if name not in names})
