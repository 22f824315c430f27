"""Write new values to the input buffers, so a cached, fingerprinted or stale result becomes wrong.

A move flips bits in floating-point inputs in place: the lower mantissa bits, and the sign if the input has negative
values. Values keep their magnitude to within a factor of two, so neither the expected accuracy nor the GPU's power
changes. A full move flips bits everywhere in each input. A step flips an eighth of the values, spread over the whole
input, so no row and no group keeps the same result. This is cheap enough between timed calls.

If no input is floating-point, all inputs are drawn again instead, from seeds derived from the secret.

The parent draws a secret after a backend has been prepared, and the moves follow from it. The judging process makes the
same moves on separate inputs. Flipping bits twice restores them, so no copy is needed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from groupbench.operators.measure.arrays import size_of, tensor_of
from groupbench.operators.measure.deferred import Tensor, torch
from groupbench.operators.measure.given import named_leaves, named_tensors


@dataclass(frozen=True)
class Steps:
    """The tuned numbers of this module: choices between the time of a step and the share of an input changed by it.

    A step is made before each timed call. Around a short call, it takes most of the time.
    """

    cuda: int = 16 << 20  # bytes of an input that a step changes at most: 10 us at an H100's 3.35 TB/s
    cpu: int = 1 << 20  # the same: Limits.move_ms of witness.py
    part: int = 8  # at most one eighth of an input
    # Distances of the places that change, in values. Few sizes are multiples of these, so that each row of a matrix
    # changes in other columns: otherwise a backend could update its last result by the columns that changed.
    strides: tuple[int, ...] = (23, 29, 31, 37, 41)
    inputs: int = 6  # that one step changes at most
    # Inputs that are drawn again, of which the calls of a burst take so many in turns.
    drawn_bytes: int = 256 << 20
    least_drawn: int = 4
    most_drawn: int = 16


STEPS = Steps()

# dtype: (width in bits, sign bit, lower bits of the mantissa without the quiet bit of a NaN)
_BITS = {
    "float16": (16, 0x8000, 0x01FF),
    "bfloat16": (16, 0x8000, 0x003F),
    "float32": (32, 0x8000_0000, 0x003F_FFFF),
    "float64": (64, 1 << 63, (1 << 51) - 1),
    "float8_e4m3fn": (8, 0x80, 0),  # a mantissa of ones may be a NaN
    "float8_e5m2": (8, 0x80, 0),
}


@dataclass
class _Part:
    """An input's memory as integers, and the mask with flippable bits."""

    words: Tensor  # [n], integers as wide as the input's values
    bits: int  # as a signed integer of that width

    @property
    def kind(self) -> tuple[Any, int]:
        """The key for this part's random mask in `Moves._masks`; parts with equal kind share one."""
        return self.words.dtype, self.bits


class Copied(msgspec.Struct, frozen=True):
    """An input's copy in another layout, without values: dtype, sizes, and both strides."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    source_strides: tuple[int, ...]

    def pair(self, most: int) -> tuple[Tensor, Tensor] | None:
        """Return a copy and a source in this layout; None if they need more than `most` bytes, or are not valid."""
        dtype = getattr(torch, self.dtype, None)
        made: list[Tensor] = []
        for strides in (self.strides, self.source_strides):
            if not isinstance(dtype, torch.dtype) or len(strides) != len(self.shape) or min((0, *strides)) < 0:
                return None
            ends = ((size - 1) * stride for size, stride in zip(self.shape, strides, strict=True))
            if min((1, *self.shape)) < 1 or (sum(ends) + 1) * dtype.itemsize > most:
                return None
            made.append(torch.empty_strided(self.shape, strides, dtype=dtype))
        return made[0], made[1]


class Moves:
    """A problem's inputs, with initial values or moved.

    names   inputs that may move, such as `a` or `x.weights`; if empty, all with floating-point values
    copies  pairs (copy, source) of operators/relayout.py; each copy is updated after a move of its source
    draw    returns the inputs of a seed, which move the inputs if none holds floating-point values
    """

    def __init__(
        self,
        inputs: Any,
        names: Collection[str] = (),
        copies: Iterable[tuple[Tensor, Tensor]] = (),
        draw: Callable[[int], Any] | None = None,
    ) -> None:
        self._parts = _parts(inputs, names)
        self._drawn = _Drawn.of(inputs, draw) if draw is not None and not self._parts and not names else None
        moving = {part.words.untyped_storage().data_ptr() for part in self._parts}
        if self._drawn is not None:
            moving = {tensor.untyped_storage().data_ptr() for tensor in self._drawn.tensors}
        self.copies = [pair for pair in copies if pair[1].untyped_storage().data_ptr() in moving]
        versioned = [tensor for _, tensor in named_tensors(inputs) if not tensor.is_inference()]
        self._changing = [tensor for tensor in versioned if tensor.untyped_storage().data_ptr() in moving]
        self._secret: int | None = None
        self._step = 0
        self._masks: dict[tuple[Any, int], Tensor] = {}
        self._random = random.Random()  # replaced by that of a secret
        self._flipped: list[tuple[Tensor, Tensor]] = []  # by the steps: places, and the bits that changed there

    @property
    def copied(self) -> tuple[Copied, ...]:
        """Describe the copies updated after a move."""
        return tuple(
            Copied(str(copy.dtype).removeprefix("torch."), tuple(copy.shape), copy.stride(), source.stride())
            for copy, source in self.copies
        )

    @property
    def any(self) -> bool:
        """Return whether any input can move."""
        return bool(self._parts) or self._drawn is not None

    def set(self, secret: int | None, step: int = 0) -> None:
        """Set the inputs to the full move by `secret` plus `step` steps, or to their initial values if it is None."""
        if secret != self._secret or step < self._step:
            self._undo()
            if secret is not None:
                self._begin(secret)
        while self._step < step:
            self.advance()

    def advance(self) -> None:
        """Make the next step."""
        self._step += 1
        if self._drawn is not None:
            self._drawn.write(self._step)
        else:
            self._flip_places()
        self.refresh()

    def _begin(self, secret: int) -> None:
        """Make a secret's full move: draw one mask for each kind of part, and flip those bits everywhere."""
        self._secret, self._step = secret, 0
        self._random = random.Random(secret)
        if self._drawn is not None:
            self._drawn.begin(secret)
        if self._parts:
            device = self._parts[0].words.device
            generator = torch.Generator(device).manual_seed(secret)
            noise = torch.empty(getattr(STEPS, device.type) // 8, dtype=torch.int64, device=device)
            noise.random_(-(1 << 63), None, generator=generator)  # a number of 8 bytes costs no more than one of 1
            for part in self._parts:
                if part.kind not in self._masks:
                    self._masks[part.kind] = noise.view(part.words.dtype) & part.bits
        self._flip_all()
        self.refresh()

    def _undo(self) -> None:
        if self._secret is None:
            return
        for places, bits in self._flipped:
            places.bitwise_xor_(bits)
        self._flipped.clear()
        if self._drawn is not None:
            self._drawn.restore()
        self._flip_all()
        self._secret, self._step = None, 0
        self._masks.clear()
        self.refresh()

    def _flip_all(self) -> None:
        for part in self._parts:
            mask = self._masks[part.kind]
            whole = len(part.words) // len(mask) * len(mask)
            part.words[:whole].view(-1, len(mask)).bitwise_xor_(mask)
            part.words[whole:].bitwise_xor_(mask[: len(part.words) - whole])

    def _flip_places(self) -> None:
        draw = self._random
        for part in draw.sample(self._parts, min(STEPS.inputs, len(self._parts))):
            mask, total = self._masks[part.kind], len(part.words)
            most = len(mask) // 2
            stride = min(draw.choice(STEPS.strides), total)
            width = max(1, stride // STEPS.part)
            if total // STEPS.part > most:  # too many for one step: change half as many, farther apart, and a window
                most //= 2
                stride *= -(-total // (STEPS.part * most))
                start, offset = draw.randrange(total - most + 1), draw.randrange(len(mask) - most + 1)
                self._flip(part.words[start : start + most], mask[offset : offset + most])
            first = draw.randrange(stride - width + 1)
            size = (total - first - width) // stride + 1, width
            places = part.words.as_strided(size, (stride, 1), first)
            self._flip(places, mask.as_strided(size, (width, 1), draw.randrange(len(mask) - size[0] * width + 1)))

    def _flip(self, places: Tensor, bits: Tensor) -> None:
        places.bitwise_xor_(bits)
        self._flipped.append((places, bits))

    def refresh(self) -> None:
        """Update the copies of inputs, and the version counters of inputs that have changed.

        A backend may take a tensor's version for torch's sign of a change in place. Moves write through another tensor,
        which has a counter of its own.
        """
        if self._changing:
            from torch.autograd.graph import increment_version

            increment_version(self._changing)
        for copy, source in self.copies:
            copy.data.copy_(source.data)  # .data, so that autograd does not reject tensors saved by a forward pass


class _Drawn:
    """Other inputs for the same problem, written into the first's memory in turns."""

    def __init__(self, inputs: Any, draw: Callable[[int], Any]) -> None:
        self.tensors = [tensor for _, tensor in named_tensors(inputs)]
        self._first = [tensor.clone() for tensor in self.tensors]
        self._draw = draw
        self._secret = 0
        self._made: dict[int, list[Tensor]] = {}
        self._turns = max(STEPS.least_drawn, min(STEPS.most_drawn, STEPS.drawn_bytes // max(size_of(self.tensors), 1)))

    @staticmethod
    def of(inputs: Any, draw: Callable[[int], Any]) -> _Drawn | None:
        """Return the inputs made by `draw`; None if they could not be written over the first."""
        alike = _outline(draw(1)) == _outline(inputs)
        return _Drawn(inputs, draw) if alike and list(named_tensors(inputs)) else None

    def begin(self, secret: int) -> None:
        """Draw inputs from this secret from now on. Those on a GPU are made before the first call is queued."""
        self._secret = secret
        self._made.clear()
        if self.tensors[0].is_cuda:
            for turn in range(self._turns):
                self._inputs(turn)
        self.write(0)

    def write(self, step: int) -> None:
        """Write this step's inputs."""
        for tensor, made in zip(self.tensors, self._inputs(step % self._turns), strict=True):
            tensor.copy_(made)

    def restore(self) -> None:
        """Write the first inputs."""
        for tensor, first in zip(self.tensors, self._first, strict=True):
            tensor.copy_(first)

    def _inputs(self, turn: int) -> list[Tensor]:
        if turn not in self._made:
            seed = random.Random(f"{self._secret} {turn}").getrandbits(31)
            self._made[turn] = [tensor for _, tensor in named_tensors(self._draw(seed))]
        return self._made[turn]


def _outline(inputs: Any) -> list[Any]:
    """Return the inputs with tensors by name, shape and dtype."""
    leaves = ((name, tensor_of(value), value) for name, value in named_leaves(inputs))
    return [value if tensor is None else (name, tensor.shape, tensor.dtype) for name, tensor, value in leaves]


def _parts(inputs: Any, names: Collection[str]) -> list[_Part]:
    """Return one part per distinct storage, in input order, which is the same in every process."""
    integers = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
    parts: dict[int, _Part] = {}
    for name, tensor in named_tensors(inputs):
        layout = _BITS.get(str(tensor.dtype).removeprefix("torch."))
        if layout is None or not tensor.numel() or (names and name not in names):
            continue
        width, sign, mantissa = layout
        storage = tensor.untyped_storage()
        if not storage.data_ptr() or storage.data_ptr() in parts:
            continue
        signed = not mantissa or bool((tensor.detach() < 0).any())
        bits = mantissa | (sign if signed else 0)
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        words = memory[: len(memory) // (width // 8) * (width // 8)].view(integers[width])
        parts[storage.data_ptr()] = _Part(words, bits - (1 << width) * (bits >> (width - 1)))
    return list(parts.values())


def within(copies: Sequence[tuple[Any, Any]], inputs: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the pairs (copy, source) with elements. Raises TypeError if one is not an input's copy."""
    addresses = {tensor.untyped_storage().data_ptr() for _, tensor in named_tensors(inputs)}
    pairs = []
    for copy, source in copies:
        plain = type(copy) is torch.Tensor and type(source) is torch.Tensor
        if not plain or copy.shape != source.shape or copy.dtype != source.dtype:
            raise TypeError("laid_out: the copy and the input must be plain tensors of the same shape and dtype")
        if not source.numel():  # as of a group without rows: empty tensors share the address 0
            continue
        if source.untyped_storage().data_ptr() not in addresses or copy.untyped_storage().data_ptr() in addresses:
            raise TypeError("laid_out must copy an input of the operator into memory of its own")
        pairs.append((copy, source))
    return pairs


@contextmanager
def rerouted(operator: Any, shape: Any, inputs: Any, seed: int) -> Iterator[bool]:
    """Change the inputs' routing in place in a context, to another one with the same number of rows.

    Yields whether there is one: the operator may have no routing, and the shape only one.
    """
    if operator.reroute is None:
        yield False
        return
    held = [(t, t.clone()) for _, t in named_tensors(inputs) if not t.is_floating_point()]
    try:
        yield bool(operator.reroute(shape, inputs, seed))
    finally:
        for tensor, before in held:
            tensor.copy_(before)
