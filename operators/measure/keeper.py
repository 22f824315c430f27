"""Keep timed calls' outputs, some judged after the burst."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from groupbench.operators.measure import exchange, moves
from groupbench.operators.measure.arrays import size_of
from groupbench.operators.measure.deferred import torch
from groupbench.operators.measure.protocol import Watch, reserved_l2


@dataclass(frozen=True)
class Room:
    """The tuned numbers of this module: the room for a burst's outputs, which are kept until some of them are judged.

    They are choices: more outputs need more memory, and a backend foresees the judged ones less.
    """

    most: int = 32
    cuda: int = 1 << 30  # bytes
    cpu: int = 64 << 20


ROOM = Room()


class Keeper(Watch):
    """Move the inputs before each call in a burst, and keep timed calls' outputs.

    buffers  copies of outputs of earlier bursts, whose memory is used again
    """

    def __init__(self, inputs: moves.Moves, device: str, samples: int, buffers: list[list[Any]] | None = None) -> None:
        self.inputs, self.device, self.samples = inputs, device, samples
        self.kept: list[tuple[int, str, list[Any]]] = []
        self.step = self.timed = self.room = 0
        self.buffers = [] if buffers is None else buffers
        self.reserved = 0  # bytes of a GPU's L2

    def before(self) -> None:
        self.step += 1
        self.inputs.advance()

    def warm(self, out: Any) -> None:
        """Allocate output buffers, so nothing is allocated while the GPU's queue is being filled."""
        if not self.buffers and self.device == "cuda":
            _, parts = exchange.plain_parts(out, self.device)
            self.room = room_for(size_of(parts), self.samples, self.device)
            self.buffers = [[torch.empty_like(part) for part in parts] for _ in range(self.room)]

    def after(self, out: Any) -> None:
        """Keep a random output sample.

        The draw follows the call, so a backend cannot know during a call whether the output will be checked. On a CPU,
        the other outputs are copied too, so reading an output takes as long whether it is kept or not.
        """
        form, parts = exchange.plain_parts(out, self.device)
        self.room = self.room or room_for(size_of(parts), self.samples, self.device)
        self.timed += 1
        slot = len(self.kept)
        if slot >= self.room:
            slot = min(random.SystemRandom().randrange(self.timed), self.room)
        copies = self._copied(slot, parts) if slot < self.room or self.device == "cpu" else []
        if slot < self.room:
            self.kept[slot : slot + 1] = [(self.step, form, copies)]
        if self.device == "cuda":
            self.reserved = max(self.reserved, reserved_l2())

    def _copied(self, slot: int, parts: list[Any]) -> list[Any]:
        """Return copies of the parts, in this number's buffers if they are alike."""
        held = self.buffers[slot] if slot < len(self.buffers) else []
        if [(copy.shape, copy.dtype) for copy in held] == [(part.shape, part.dtype) for part in parts]:
            return [copy.copy_(part) for copy, part in zip(held, parts, strict=True)]
        copies = [part.clone() for part in parts]
        if self.device == "cpu":  # a GPU's memory is for the next backend
            self.buffers[slot : slot + 1] = [copies]
        return copies

    def sums(self) -> tuple[int, ...]:
        """Return the kept outputs' sums."""
        return exchange.sums([parts for _, _, parts in self.kept])


def room_for(size: int, samples: int, device: str) -> int:
    """Return how many outputs with this many bytes are kept from a burst with so many timed calls."""
    return max(1, min(samples, ROOM.most, (ROOM.cuda if device == "cuda" else ROOM.cpu) // max(size, 1)))
