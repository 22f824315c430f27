"""Grouped-GEMM problems, their text, and the named suites.

C[rows of g] = A[rows of g] @ B[g] for g in 0..G-1, with A [M, K], B [G, K, N], C [M, N]. M is the sum over all groups'
rows M_g. A shape's text names the whole problem; the database stores this text:

    G=4,M_g=1024,N=1024,K=1024,B=shared           TritonBench's: four equal groups, one B for all
    G=3,M_g=0|1|129,N=96,K=64                     rows listed
    G=8,M=32768,N=4096,K=7168,routing=zipf(1.2),W=nk   rows drawn; weights stored as [G, N, K]
    G=4,M=4096,N=512,K=256,routing=interleaved(128)    rows in whole blocks; block i is of expert i % 4
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from groupbench.operators.catalog import models
from groupbench.operators.catalog import routing as routings
from groupbench.operators.sizes import fields_of, shape_parser, size, whole, within
from groupbench.operators.suites import Suites
from groupbench.tracker.text.wording import counted

if TYPE_CHECKING:
    from groupbench.tracker.tools.traces import TraceStep

MAX_GROUPS = 1_000_000
MAX_SIZE = 2**31 - 1  # offsets are int32
MAX_TEXT = 20_000  # characters, as in the record
HELP = (
    "G,M,N,K with M rows in each of G groups (as TritonBench's --shapes), a shape's full text such as "
    "G=3,M_g=0|1|129,N=96,K=64 or G=8,M=4096,N=512,K=256,routing=zipf(1.2),W=nk, or a name of a suite; with "
    "E=256,rank=3 the G experts of one rank, where M is the rows of all E"
)


@dataclass(frozen=True)
class GroupedShape:
    """One grouped GEMM.

    Attributes:
        G, M, N, K: Groups, total rows, columns, reduction.
        routing: Distribution of rows over groups (routing.py), if `listed` is empty.
        listed: Rows of each group, or () if the routing determines them.
        nk: Weights are stored as [G, N, K], not [G, K, N], and passed on as a transposed view.
        shared: TritonBench's inputs: one B for all groups, uniform values in [0, 1).
    """

    G: int
    M: int
    N: int
    K: int
    routing: str = "balanced"
    listed: tuple[int, ...] = ()
    nk: bool = False
    shared: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.G <= MAX_GROUPS:
            raise ValueError(f"G={self.G} is out of range: 1 to {MAX_GROUPS} groups")
        for letter, value in (("M", self.M), ("N", self.N), ("K", self.K)):
            least = 0 if letter == "M" else 1
            if value < least:
                raise ValueError(f"{letter}={value} is out of range: {least} to {MAX_SIZE}")
            if value > MAX_SIZE:
                raise ValueError(f"{letter} is too large: at most {MAX_SIZE}")
        if 2 * self.M * self.N * self.K >= 2**63:
            raise ValueError("the number of operations does not fit in 64 bits")
        if self.listed and (len(self.listed) != self.G or sum(self.listed) != self.M or min(self.listed) < 0):
            raise ValueError(
                f"M_g lists {len(self.listed)} groups with {sum(self.listed)} rows for G={self.G}, M={self.M}"
            )
        if not self.listed:
            routings.check(self.routing, self.G)
            if self.block and self.shared:
                raise ValueError("interleaved rows need one B per expert")
            if self.block:  # whole blocks: one text for one problem
                object.__setattr__(self, "M", -(-self.M // self.block) * self.block)
        elif self.routing != "balanced":
            raise ValueError("M_g lists the rows: leave routing out")
        if len(str(self)) > MAX_TEXT:
            raise ValueError(f"its text has more than {MAX_TEXT} characters")

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Each group's rows M_g."""
        return self.listed or routings.rows(self.routing, self.G, self.M)

    @property
    def block(self) -> int:
        """Rows of a block, if blocks of rows take the experts in turn; 0 if each expert's rows are together."""
        return routings.interleaved(self.routing)

    @property
    def dims(self) -> dict[str, int]:
        return {"G": self.G, "M": self.M, "N": self.N, "K": self.K}

    def __str__(self) -> str:
        if self.listed:
            alike = len(set(self.listed)) == 1
            parts = [f"G={self.G}", f"M_g={self.listed[0] if alike else '|'.join(map(str, self.listed))}"]
        else:
            parts = [f"G={self.G}", f"M={self.M}"]
        parts += [f"N={self.N}", f"K={self.K}"]
        if not self.listed:
            parts.append(f"routing={self.routing}")
        if self.nk:
            parts.append("W=nk")
        if self.shared:
            parts.append("B=shared")
        return ",".join(parts)


def uniform(G: int, M_g: int, N: int, K: int, **options: Any) -> GroupedShape:
    """Return a shape with G groups and M_g rows each."""
    return GroupedShape(G, G * M_g, N, K, listed=(M_g,) * min(G, MAX_GROUPS), **options)


def listed(rows: tuple[int, ...], N: int, K: int, **options: Any) -> GroupedShape:
    """Return a shape with these rows per group."""
    return GroupedShape(len(rows), sum(rows), N, K, listed=rows, **options)


def of_rank(G: int, E: int, rank: int, M: int, N: int, K: int, routing: str, **options: Any) -> GroupedShape:
    """Return one rank's shape out of E / G, with G experts. The routing spreads M rows over all E experts."""
    if E % G or not 1 <= G <= E <= MAX_GROUPS:
        raise ValueError(f"E={E}: the number of all experts must be a multiple of G={G}, at most {MAX_GROUPS}")
    if not 0 <= rank < E // G:
        raise ValueError(f"rank={rank} is out of range: 0 to {E // G - 1}")
    return listed(routings.rows(routing, E, M)[rank * G : (rank + 1) * G], N, K, **options)


def on_trace(shape: GroupedShape, step: TraceStep) -> GroupedShape:
    """Return the shape with the rows for a step's first G experts: one rank's, if the trace has more experts.

    Raises ValueError if the shape has one B for all groups.
    """
    if shape.shared:
        raise ValueError("TritonBench's shapes have one B for all groups; a routing trace needs one per expert")
    rows = step.loads(max(shape.G, len(step.rows)))[: shape.G]
    return listed(rows, shape.N, shape.K, nk=shape.nk)


def _moe(G: int, M: int, N: int, K: int, routing: str) -> GroupedShape:
    return GroupedShape(G, M, N, K, routing=routing, nk=True)


# Expert counts and sizes of public models: `gu` is the gate-up and `dn` the down projection, ep64 one rank's share
# of 256 experts over 64 ranks. Sources: DeepSeek-V3, Mixtral, Qwen3-MoE, Llama 4, gpt-oss model cards; DeepGEMM's test
# shapes (dg_*); SonicMoE's default; torchtitan's contiguous grouped GEMM (titan).
def _models() -> dict[str, GroupedShape]:
    return {
        "dsv3_gu_ep64": _moe(4, 32768, 4096, 7168, "uniform(0.7,1.3)"),
        "dsv3_dn_ep64": _moe(4, 32768, 7168, 2048, "uniform(0.7,1.3)"),
        "dsv3_gu_ep32": _moe(8, 32768, 4096, 7168, "balanced"),
        "dsv3_dn_ep32": _moe(8, 32768, 7168, 2048, "balanced"),
        "dsv3_gu_ep32_zipf": _moe(8, 32768, 4096, 7168, "zipf(1.2)"),
        "dsv3_dn_ep32_zipf": _moe(8, 32768, 7168, 2048, "zipf(1.2)"),
        "dsv3_decode": _moe(256, 1024, 4096, 7168, "multinomial"),
        "dsv3_full_gu": _moe(256, 65536, 4096, 7168, "zipf(1.2)+empty(0.1)"),
        "dg_a": _moe(4, 32768, 6144, 7168, "uniform(0.7,1.3)"),
        "dg_c": _moe(4, 32768, 7168, 3072, "uniform(0.7,1.3)"),
        "dg_e": _moe(4, 32768, 4096, 4096, "uniform(0.7,1.3)"),
        "mixtral8x7b_gu": _moe(8, 16384, 28672, 4096, "zipf(1.2)"),
        "mixtral8x7b_dn": _moe(8, 16384, 4096, 14336, "balanced"),
        "qwen30b_gu": _moe(128, 65536, 1536, 2048, "balanced"),
        "qwen30b_dn": _moe(128, 65536, 2048, 768, "zipf(1.2)"),
        "qwen30b_decode": _moe(128, 512, 1536, 2048, "multinomial"),
        "qwen235b_gu": _moe(128, 65536, 3072, 4096, "zipf(1.2)"),
        "llama4_scout_gu": _moe(16, 32768, 16384, 5120, "balanced+empty(0.125)"),
        "llama4_mav_gu": _moe(128, 32768, 16384, 5120, "zipf(1.2)"),
        "gptoss20b_gu": _moe(32, 32768, 5760, 2880, "zipf(1.2)"),
        "gptoss120b_dn": _moe(128, 32768, 2880, 2880, "zipf(1.2)"),
        "sonic_gu": _moe(128, 262144, 2048, 4096, "multinomial"),
        "titan_cg": uniform(8, 4096, 7168, 2048, nk=True),
    }


def _ragged() -> dict[str, GroupedShape]:
    return {
        "empty_group": listed((384, 0, 640, 256), 2048, 1024),
        "one_row": listed((512, 1, 255, 512), 2048, 1024),
        "one_past_tile": listed((129, 257, 641, 1), 2048, 1024),
        "one_owner": listed((0, 0, 1024, 0, 0, 0, 0, 0), 2048, 1024),
        "one_group": listed((1000,), 2048, 1024),
        "odd_n_and_k": listed((100, 37, 300), 1000, 360, nk=True),
    }


def _smoke() -> dict[str, GroupedShape]:
    return {
        "even": uniform(4, 64, 64, 64, shared=True),
        "ragged": listed((33, 0, 1, 65), 96, 80),
        "odd": listed((5, 130), 45, 33, nk=True),
        "single": listed((17,), 32, 48),
    }


def _seed() -> dict[str, GroupedShape]:
    """Return the problems of Helion's example (one B for all) and of gpu-mode's lesson 5, packed and interleaved."""
    lesson = {
        f"lesson5_g{G}_n{N}_{name}": GroupedShape(G, G * rows, N, K, routing=routing, nk=True)
        for G, rows in ((4, 8192), (8, 4096))
        for N, K in ((4096, 7168), (7168, 2048))
        for name, routing in (("packed", "balanced"), ("interleaved", "interleaved(128)"))
    }
    return {"helion_example": listed((64, 128, 192, 256), 128, 256, shared=True), **lesson}


def _phase(name: str) -> dict[str, GroupedShape]:
    """Return one step for each model: the first rank's gate-up (`gu`) and down (`dn`) projections."""
    phase = models.PHASES[name]
    by_name = {}
    for model in models.MODELS:
        rows = phase.tokens * model.ranks * model.k
        for part, N, K in (("gu", 2 * model.F, model.H), ("dn", model.H, model.F)):
            shape = of_rank(model.local, model.experts, 0, rows, N, K, phase.routing, nk=True)
            by_name[f"{model.name}_{name}_{part}"] = shape
    return by_name


SUITES: Suites[dict[str, GroupedShape]] = Suites(
    {
        "tritonbench": lambda: {f"n{n}": uniform(4, n, n, n, shared=True) for n in (1024, 2048, 4096, 8192)},
        "ragged": _ragged,
        "moe": _models,
        "smoke": _smoke,
        **{name: partial(_phase, name) for name in models.PHASES},
        # Qwen3-30B's gate-up projection for 1 to 65,536 tokens; for 4096, from balanced to most rows on one expert.
        "sweep_batch": lambda: {f"tokens{T}": _moe(128, 8 * T, 1536, 2048, "multinomial") for T in models.SWEEP_TOKENS},
        "sweep_skew": lambda: {f"skew_{loads}": _moe(128, 32768, 1536, 2048, loads) for loads in models.SWEEP_SKEW},
        "seed": _seed,
    }
)
"""Shapes by suite and name. A name contains no `=` and is no number, unlike a shape's full and short text."""


# A gradient of the weights is compared with its reference in fp32, which takes 35 bytes per element in total. Larger
# gradients do not fit on a GPU of 80 GB, so the suites that compute them leave these shapes out.
MAX_WEIGHTS = 2_000_000_000


def _with_checked_gradient(suite: dict[str, GroupedShape]) -> tuple[GroupedShape, ...]:
    packed = (shape for shape in suite.values() if not shape.block)
    return tuple(shape for shape in packed if shape.G * shape.K * shape.N <= MAX_WEIGHTS)


def packed_suites() -> Suites[tuple[GroupedShape, ...]]:
    """Return the suites without shapes whose rows are interleaved."""
    return SUITES.each(lambda suite: tuple(shape for shape in suite.values() if not shape.block))


def weight_gradient_suites() -> Suites[tuple[GroupedShape, ...]]:
    """Return the suites without the shapes whose weights' gradient is too large to check."""
    return SUITES.each(_with_checked_gradient)


@shape_parser(HELP)
def parse(text: str) -> GroupedShape:
    """Parse a shape as in HELP. Raises ValueError with the fault and the right form."""
    if "=" in text:
        return _parse_fields(text)
    numbers = text.split(",")
    odd = [number for number in numbers if not number.strip().lstrip("-").isdecimal()]
    if odd:  # only then make the suites, for which NumPy draws loads
        for suite in SUITES.values():
            if text in suite:
                return suite[text]
        raise ValueError(f"{odd[0]!r} is neither the name of a shape nor a whole number")
    if len(numbers) != 4:
        raise ValueError(f"has {counted(len(numbers), 'number')}, not 4")
    G, M_g, N, K = map(int, numbers)
    return uniform(G, within("M", M_g, MAX_SIZE, 0), N, K)


def parse_packed(text: str) -> GroupedShape:
    """Parse a shape as `parse` does, with the rows of an expert together. Raises ValueError."""
    shape = parse(text)
    if shape.block:
        raise ValueError(f"shape {text!r}: interleaved rows are an input of grouped_gemm alone")
    return shape


def _parse_fields(text: str) -> GroupedShape:
    fields = fields_of(text, "G N K", "M M_g routing W B E rank")
    if ("M" in fields) == ("M_g" in fields):
        raise ValueError("it needs either M or M_g")
    options: dict[str, Any] = {
        "nk": _choice(fields, "W", {"nk": True, "kn": False}),
        "shared": _choice(fields, "B", {"shared": True}),
    }
    G, N, K = (whole(letter, fields[letter]) for letter in "GNK")
    if "E" in fields or "rank" in fields:
        if not {"E", "rank", "M"} <= fields.keys():
            raise ValueError("a shape of one rank's experts needs E, rank, and M: the rows of all E experts")
        E, rank, M = (whole(name, fields[name]) for name in ("E", "rank", "M"))
        return of_rank(G, E, rank, within("M", M, MAX_SIZE, 0), N, K, fields.get("routing", "balanced"), **options)
    if "M" in fields:
        return GroupedShape(G, whole("M", fields["M"]), N, K, routing=fields.get("routing", "balanced"), **options)
    if "routing" in fields:
        raise ValueError("M_g lists the rows: leave routing out")
    rows = _listed_rows(fields["M_g"], G)
    return GroupedShape(G, sum(rows), N, K, listed=rows, **options)


def _listed_rows(text: str, G: int) -> tuple[int, ...]:
    """Return each group's rows in M_g: one number is every group's. Raises ValueError."""
    rows = tuple(size("M_g", row, MAX_SIZE, least=0) for row in text.split("|"))
    if len(rows) not in (1, G):
        raise ValueError(f"M_g lists {len(rows)} groups, and G is {G}")
    return rows * G if len(rows) == 1 and 1 <= G <= MAX_GROUPS else rows


def _choice(fields: dict[str, str], key: str, values: dict[str, bool]) -> bool:
    if key not in fields:
        return False
    if fields[key] not in values:
        raise ValueError(f"{key}={fields[key]} is not one of {', '.join(values)}")
    return values[fields[key]]
