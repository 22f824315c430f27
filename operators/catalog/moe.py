"""Mixture-of-experts problems: shapes, text, and which experts each token goes to.

    T=8192,k=8,G=128,H=2048,F=768,routing=zipf(1.2)    T tokens, each to k of G experts; hidden size H, expert size F
    T=8192,k=8,G=32,H=7168,F=2048,E=256,...            expert parallelism: G of E experts are local; a choice of
                                                       another expert has the id -1 and no row
    T=8192,k=8,G=128,H=2048,routing=balanced           permutations have no F

A token's experts are all different. The ids depend on the text alone: the same text gives the same ids.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

from groupbench.operators.catalog import models
from groupbench.operators.catalog import routing as routings
from groupbench.operators.deferred import Tensor, np, torch
from groupbench.operators.sizes import fields_of, shape_parser, whole, within
from groupbench.operators.suites import Suites

if TYPE_CHECKING:
    from groupbench.tracker.tools.traces import TraceStep

MAX_EXPERTS = 4096
MAX_CHOICES = 1 << 26
"""Limit of T * k. Drawing a choice takes about 30 bytes on the host."""
MAX_SIZE = 1 << 20


@dataclass(frozen=True)
class MoeShape:
    """A layer, or only the permutation if F is 0.

    Attributes:
        T, k: Number of tokens, and of experts per token.
        G, E: Number of local experts, and of all experts.
        H, F: Hidden size, expert size.
        routing: How often each of the E experts is chosen (routing.py); balanced is exact.
    """

    T: int
    k: int
    G: int
    H: int
    F: int = 0
    E: int = 0  # 0: equal to G
    routing: str = "balanced"

    def __post_init__(self) -> None:
        if self.E == self.G:
            object.__setattr__(self, "E", 0)  # one text for one problem
        if not 1 <= self.G <= self.experts <= MAX_EXPERTS:
            raise ValueError(
                f"G={self.G}, E={self.experts}: there must be 1 to {MAX_EXPERTS} experts, and G must be at most E"
            )
        for letter, value in (("H", self.H), ("F", self.F)):
            if not (0 if letter == "F" else 1) <= value <= MAX_SIZE:
                raise ValueError(f"{letter}={value} is out of range: 1 to {MAX_SIZE}")
        if not 1 <= self.k <= self.experts:
            raise ValueError(f"k={self.k} is out of range: a token has 1 to E={self.experts} experts, all different")
        if not 0 <= self.T * self.k <= MAX_CHOICES:
            raise ValueError(f"T={self.T}, k={self.k}: the number of choices, T·k, must be 0 to {MAX_CHOICES}")
        routings.check(self.routing, self.experts)
        if routings.interleaved(self.routing):
            raise ValueError("interleaved rows are an input of grouped_gemm alone")

    @property
    def experts(self) -> int:
        return self.E or self.G

    @property
    def choices(self) -> int:
        """T * k, the allocated rows: only the device knows how many choices have a local expert."""
        return self.T * self.k

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Rows for each of the G experts."""
        ids = choose(self)
        return tuple(int(row) for row in np.bincount(ids[ids >= 0], minlength=self.G))

    @property
    def M(self) -> int:
        """Total rows."""
        return sum(self.rows)

    @property
    def dims(self) -> dict[str, int]:
        sizes = {"T": self.T, "k": self.k, "G": self.G, "H": self.H, "F": self.F, "E": self.E}
        return {letter: size for letter, size in sizes.items() if size or letter == "T"}

    def __str__(self) -> str:
        return ",".join([*(f"{letter}={size}" for letter, size in self.dims.items()), f"routing={self.routing}"])


@cache
def choose(shape: MoeShape) -> np.ndarray:  # [T, k] int64, -1 for an expert that is not among the first G
    """Return every token's experts. NEP 19 promises that numpy's legacy generator does not change.

    A token's k experts have the k largest log(load) + Gumbel noise. This chooses in proportion to the loads, without
    replacement. With routing `balanced`, the tokens take the experts in turn, in a random order.
    """
    E, text = shape.experts, f"{shape.routing} {shape.T} {shape.k} {shape.experts}"
    random = np.random.RandomState(zlib.crc32(text.encode()))
    if shape.routing == "balanced":
        places = np.arange(shape.choices).reshape(shape.T, shape.k) % E
        ids = random.permutation(E)[places][random.permutation(shape.T)]
    else:
        loads = np.array(routings.rows(shape.routing, E, 1 << 30), dtype=np.float64)
        ids = np.empty((shape.T, shape.k), dtype=np.int64)
        for start in range(0, shape.T, 4096):
            part = ids[start : start + 4096]
            noise = -np.log(-np.log(random.random_sample((len(part), E)) + 1e-300) + 1e-300)
            # An expert without load comes last, and is chosen only if there are fewer than k others.
            keys = np.log(np.maximum(loads, 1e-20)) + noise
            part[:] = np.argsort(-keys, axis=1, kind="stable")[:, : shape.k]
    ids = np.where(ids < shape.G, ids, -1).astype(np.int64)
    ids.setflags(write=False)
    return ids


def ids_of(shape: MoeShape, device: str) -> Tensor:
    """Return every token's experts, [T, k] int64, as torch.topk does."""
    return torch.from_numpy(choose(shape).copy()).to(device)


def reroute_ids(ids: Tensor, G: int, seed: int) -> bool:
    """Give tokens other experts, in place. Return whether any id changed.

    The number of choices with a local expert stays the same, and the experts of a token stay different. An even seed
    gives an extreme routing, in which all tokens with as many local experts choose the same ones. An odd one gives a
    few tokens another expert.
    """
    generator = torch.Generator().manual_seed(seed)
    before = ids.cpu().clone()
    if seed % 2 == 0:
        local, numbers = before >= 0, torch.randperm(G, generator=generator)
        after = torch.where(local, numbers[local.cumsum(1).clamp_min(1) - 1], -1)
    else:
        after = before.clone()
        for token in torch.randperm(len(before), generator=generator)[:3].tolist():
            others = [g for g in torch.randperm(G, generator=generator).tolist() if g not in before[token].tolist()]
            at = torch.nonzero(before[token] >= 0).flatten().tolist()
            if others and at:
                after[token, at[0]] = others[0]
    ids.copy_(after)
    return not torch.equal(before, after)


def reroute(shape: MoeShape, x: Any, seed: int) -> bool:
    """Reroute the tokens in inputs with a field `ids`, in place. Return whether any id changed."""
    return reroute_ids(x.ids, shape.G, seed)


# --- suites -----------------------------------------------------------------------------------------------------------


# Sizes of public models: Qwen3-30B-A3B, Mixtral 8x7B, gpt-oss-20b, DeepSeek-V3. ep8 has all tokens of its 8 ranks
# (all-gather), ep32 the rows that were sent to it (all-to-all: one expert per row).
def _models() -> dict[str, MoeShape]:
    return {
        "qwen30b": MoeShape(8192, 8, 128, 2048, 768, routing="zipf(1.2)"),
        "qwen30b_4k": MoeShape(4096, 8, 128, 2048, 768, routing="multinomial"),
        "mixtral8x7b": MoeShape(8192, 2, 8, 4096, 14336, routing="multinomial"),
        "gptoss20b": MoeShape(8192, 4, 32, 2880, 2880, routing="zipf(1.2)"),
        "dsv3_ep8": MoeShape(16384, 8, 32, 7168, 2048, E=256, routing="multinomial"),
        "dsv3_ep32": MoeShape(16384, 1, 8, 7168, 2048, routing="uniform(0.7,1.3)"),
    }


def _decode() -> dict[str, MoeShape]:
    return {
        "qwen30b_decode": MoeShape(64, 8, 128, 2048, 768, routing="multinomial"),
        "mixtral8x7b_decode": MoeShape(64, 2, 8, 4096, 14336, routing="multinomial"),
        "gptoss20b_decode": MoeShape(128, 4, 32, 2880, 2880, routing="multinomial"),
        "dsv3_ep8_decode": MoeShape(256, 8, 32, 7168, 2048, E=256, routing="multinomial"),
    }


def on_trace(shape: MoeShape, step: TraceStep) -> MoeShape:
    """Return the shape with a step's token count and loads.

    The number of choices is the step's, but they are drawn again in proportion to the loads, so one token's choices
    differ from the trace. The shape's k is used for a step with loads alone.
    """
    experts = max(shape.experts, len(step.rows), step.experts)
    k = step.k or shape.k
    tokens = step.tokens or round(sum(step.rows) / k)
    loads = "|".join(map(str, step.loads(experts)))
    return MoeShape(tokens, k, shape.G, shape.H, shape.F, experts, f"loads({loads})")


def _phase(name: str) -> dict[str, MoeShape]:
    """Return one step for each published model, on a rank with all ranks' tokens."""
    phase = models.PHASES[name]
    return {
        f"{m.name}_{name}": MoeShape(phase.tokens * m.ranks, m.k, m.local, m.H, m.F, E=m.experts, routing=phase.routing)
        for m in models.MODELS
    }


def _sweep_batch() -> dict[str, MoeShape]:
    return {f"tokens{T}": MoeShape(T, 8, 128, 2048, 768, routing="multinomial") for T in models.SWEEP_TOKENS}


def _sweep_skew() -> dict[str, MoeShape]:
    return {f"skew_{routing}": MoeShape(4096, 8, 128, 2048, 768, routing=routing) for routing in models.SWEEP_SKEW}


def _smoke() -> dict[str, MoeShape]:
    return {
        "even": MoeShape(24, 2, 4, 64, 32),
        "empty_experts": MoeShape(19, 2, 6, 64, 48, routing="zipf(1.2)+empty(0.5)"),
        "one_owner": MoeShape(33, 1, 4, 32, 32, routing="multinomial+empty(0.75)"),
        "elsewhere": MoeShape(21, 3, 3, 48, 40, E=8, routing="multinomial"),
        "odd": MoeShape(9, 2, 5, 45, 33, routing="multinomial"),
        "one_token": MoeShape(1, 1, 1, 64, 48),
        "no_token": MoeShape(0, 2, 4, 64, 48),
        "for_fp8": MoeShape(21, 2, 4, 128, 128, routing="multinomial+empty(0.25)"),
    }


def without_f(shapes: Mapping[str, MoeShape]) -> dict[str, MoeShape]:
    """Return the layers' permutations, each once."""
    permutations: dict[str, MoeShape] = {}
    for name, shape in shapes.items():
        permutation = MoeShape(shape.T, shape.k, shape.G, shape.H, E=shape.E, routing=shape.routing)
        if permutation not in permutations.values():
            permutations[name] = permutation
    return permutations


LAYER_SUITES: Suites[dict[str, MoeShape]] = Suites(
    {
        "moe": _models,
        "decode": lambda: _decode() | _phase("decode"),
        "smoke": _smoke,
        **{name: partial(_phase, name) for name in models.PHASES if name != "decode"},
        "sweep_batch": _sweep_batch,
        "sweep_skew": _sweep_skew,
    }
)
PERMUTE_SUITES = LAYER_SUITES.each(without_f)


def shape_fields(layer: bool) -> dict[str, Any]:
    """Return an Operator's fields for shapes: layers, or permutations."""
    return {
        "suites": (LAYER_SUITES if layer else PERMUTE_SUITES).each(lambda suite: tuple(suite.values())),
        "parse_shape": partial(parse, layer=layer),
        "shapes_help": help_text(layer),
        "on_trace": on_trace,
    }


def help_text(layer: bool) -> str:
    form = "T=TOKENS,k=CHOICES,G=EXPERTS,H=HIDDEN" + (",F=EXPERT_SIZE" if layer else "")
    return f"{form}[,E=EXPERTS_IN_ALL][,routing=ROUTING], or a name of a suite; a routing is {routings.HELP}"


def parse(text: str, layer: bool) -> MoeShape:
    """Parse a shape's text or name. Raises ValueError with the fault and the right form."""
    return shape_parser(help_text(layer))(partial(_parse, layer=layer))(text)


def _parse(text: str, layer: bool) -> MoeShape:
    for suite in (LAYER_SUITES if layer else PERMUTE_SUITES).values() if "=" not in text else ():
        if text in suite:
            return suite[text]
    fields = fields_of(text, "T k G H F" if layer else "T k G H", "E routing")
    routing = fields.pop("routing", "") or "balanced"
    sizes = {letter: whole(letter, value) for letter, value in fields.items()}
    if layer:
        within("F", sizes["F"], MAX_SIZE)
    return MoeShape(**sizes, routing=routing)
