"""Adapters of other projects' kernels, against packages that record their calls and compute the same on a CPU."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from groupbench.operators import cli, registry
from groupbench.operators.catalog import rivals
from groupbench.operators.catalog.rivals import deep_gemm, package
from groupbench.operators.errors import Unavailable
from groupbench.operators.measure import environment
from groupbench.operators.operator import Target
from groupbench.operators.resume import _alike
from groupbench.tracker.facts.environment import machine_identity, toolchain_differences
from groupbench.tracker.facts.record import Environment

H100 = Target("cuda", "bf16", capability=(9, 0))

FAKES = {
    "quack/__init__.py": "",
    "quack/gemm_interface.py": """
import torch
calls = []
def gemm(A, B, out=None, cu_seqlens_m=None, cu_seqlens_k=None, tuned=True):
    calls.append((cu_seqlens_m, cu_seqlens_k))
    bounds = (cu_seqlens_m if cu_seqlens_m is not None else cu_seqlens_k).tolist()
    pairs = list(zip(bounds, bounds[1:]))
    assert bounds[0] == 0
    if cu_seqlens_m is not None:
        assert B.stride(0), "a batch of matrices, not one that repeats"
        return torch.cat([A[s:e] @ B[g] for g, (s, e) in enumerate(pairs)])
    return torch.stack([A[:, s:e] @ B[s:e] for s, e in pairs])
""",
    "deep_gemm/__init__.py": """
import torch
calls = []
def _experts(layout):
    for start in range(0, len(layout), 128):
        block = layout[start:start + 128]
        real = block[block >= 0]
        assert len(real) == 0 or (block[:len(real)] == real[0]).all(), "one expert a block, padding behind it"
        yield slice(start, start + len(block)), int(block[0])
def m_grouped_bf16_gemm_nt_contiguous(a, b, d, layout):
    calls.append(a.shape[0])
    assert a.shape[0] % 128 == 0 and b.is_contiguous() and layout.dtype == torch.int32
    d.fill_(float("nan"))
    for rows, expert in _experts(layout):
        if expert >= 0:
            d[rows] = a[rows] @ b[expert].t()
def m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout):
    (qa, sa), (qb, sb) = a, b
    wide = lambda s, n, dim: s.repeat_interleave(128, dim).narrow(dim, 0, n)
    fa = qa.float() * wide(sa, qa.shape[1], 1)
    fb = qb.float() * wide(wide(sb, qb.shape[1], 1), qb.shape[2], 2)
    d.fill_(float("nan"))
    for rows, expert in _experts(layout):
        if expert >= 0:
            d[rows] = (fa[rows] @ fb[expert].t()).to(d.dtype)
""",
    "fbgemm_gpu/__init__.py": "",
    "fbgemm_gpu/experimental/__init__.py": "",
    "fbgemm_gpu/experimental/gen_ai/__init__.py": """
import torch
library = torch.library.Library("fbgemm", "FRAGMENT")
def _parts(counts):
    assert counts.dtype == torch.int64
    ends = counts.cumsum(0).tolist()
    return list(zip([0, *ends], ends))
def stacked(X, W, M_sizes):
    assert W.is_contiguous()
    return torch.cat([X[s:e] @ W[g].t() for g, (s, e) in enumerate(_parts(M_sizes))])
def grad(X, W, M_sizes):
    assert W.stride(-2) == 1
    return torch.cat([X[s:e] @ W[g].t() for g, (s, e) in enumerate(_parts(M_sizes))])
def wgrad(X, W, M_sizes):
    return torch.stack([X[s:e].t() @ W[s:e] for s, e in _parts(M_sizes)])
def rowwise(XQ, WQ, x_scale, w_scale, M_sizes):
    a, b = XQ.float() * x_scale[:, None], WQ.float() * w_scale[:, :, None]
    return torch.cat([a[s:e] @ b[g].t() for g, (s, e) in enumerate(_parts(M_sizes))]).bfloat16()
for name, function in (("bf16bf16bf16_grouped_stacked", stacked), ("bf16bf16bf16_grouped_grad", grad),
                       ("bf16bf16bf16_grouped_wgrad", wgrad)):
    library.define(f"{name}(Tensor X, Tensor W, Tensor M_sizes) -> Tensor")
    library.impl(name, function, "CPU")
library.define("f8f8bf16_rowwise_grouped_stacked(Tensor XQ, Tensor WQ, Tensor xs, Tensor ws, Tensor M_sizes) -> Tensor")
library.impl("f8f8bf16_rowwise_grouped_stacked", rowwise, "CPU")
def int4(X, WQ, w_scale, w_zero, M_sizes):
    assert M_sizes.dtype == torch.int32
    codes = torch.stack((WQ.int() << 28 >> 28, WQ.int() >> 4), -1).flatten(-2)
    w = codes * w_scale.float().mT.repeat_interleave(128, -1)
    return torch.cat([X[s:e].float() @ w[g].t() for g, (s, e) in enumerate(_parts(M_sizes.long()))]).to(X.dtype)
library.define("preshuffle_i4(Tensor WQ, Tensor w_scale) -> (Tensor, Tensor)")
library.impl("preshuffle_i4", lambda WQ, w_scale: (WQ.clone(), w_scale.clone()), "CPU")
library.define("bf16i4bf16_shuffled_grouped(Tensor X, Tensor WQ, Tensor s, Tensor z, Tensor M_sizes) -> Tensor")
library.impl("bf16i4bf16_shuffled_grouped", int4, "CPU")
""",
    "triton_kernels/__init__.py": "",
    "humming/__init__.py": "",
    "humming/layer.py": """
import torch
from groupbench.kernels.four_bit.formats import MXFP4, Format, Weights, grouped_gemm_w4_reference
class HummingLayer:
    def __init__(self, n, k, weight_config, input_config, num_experts, has_bias, torch_dtype):
        self.k, self.config, self.quantised = k, weight_config, input_config is not None
    def cuda(self):
        return self
    def load_from_tensors(self, tensors):
        self.tensors = tensors
    def transform(self):
        codes = self.tensors.get("weight", self.tensors.get("weight_packed")).view(torch.uint8)
        fmt = MXFP4 if self.config["quant_method"] == "mxfp4" else Format("int4", self.config["group_size"])
        self.weights = Weights(fmt, self.k, codes, self.tensors["weight_scale"])
    def __call__(self, a, input_scale, expert_layout, compute_config):
        assert compute_config == {"gemm_type": "grouped_contiguous"} and expert_layout[0] == 0
        assert self.quantised == (input_scale is not None)
        scale = None if input_scale is None else input_scale[:, 0]
        return grouped_gemm_w4_reference(a, scale, self.weights, expert_layout[1:]).bfloat16()
""",
    "triton_kernels/matmul.py": """
import torch
from groupbench.kernels.four_bit.formats import MXFP4, Weights, dequantize
class PrecisionConfig:
    def __init__(self, b_mx_scale, b_microblock_size):
        self.scale = b_mx_scale
        assert b_microblock_size == 32
def matmul(a, b, bias, a_ragged_metadata=None, precision_config=None):
    if precision_config is not None:
        codes, scales = (x.transpose(1, 2).contiguous() for x in (b, precision_config.scale))
        b = dequantize(Weights(MXFP4, a.shape[1], codes, scales), torch.float32).transpose(1, 2).to(a.dtype)
    counts, rows = a_ragged_metadata
    assert bias is None and counts.dtype == torch.int32 and rows == a.shape[0]
    ends = counts.cumsum(0).tolist()
    return torch.cat([a[s:e] @ b[g] for g, (s, e) in enumerate(zip([0, *ends], ends))])
""",
    "triton_kernels/tensor.py": "FP4 = 4\ndef wrap_torch_tensor(x, dtype=None): return x\n"
    "def convert_layout(x, layout): return x if layout == -2 else None\n",
    "triton_kernels/tensor_details/__init__.py": "",
    "triton_kernels/tensor_details/layout.py": "def make_default_matmul_mxfp4_w_layout(mx_axis): return mx_axis\n"
    "def make_default_matmul_mxfp4_w_scale_layout(mx_axis): return mx_axis\n",
    "triton_kernels/tensor_details/ragged_tensor.py": "def make_ragged_tensor_metadata(s, n): return s, n",
    "flashinfer/__init__.py": "",
    "flashinfer/grouped_mm.py": """
import torch
def grouped_mm_bf16(a, b, m_indptr, out=None, out_dtype=torch.bfloat16):
    assert m_indptr.dtype == torch.int32 and len(m_indptr) == len(b) + 1 and b.is_contiguous()
    bounds = m_indptr.tolist()
    return torch.cat([a[s:e] @ b[g].t() for g, (s, e) in enumerate(zip(bounds, bounds[1:]))]).to(out_dtype)
""",
    "liger_kernel/__init__.py": "",
    "liger_kernel/ops/__init__.py": "",
    "liger_kernel/ops/fused_moe.py": """
import torch
class LigerFusedMoEFunction:
    @staticmethod
    def apply(x, gate_up_proj, down_proj, top_k_index, top_k_weights):
        assert top_k_index.dtype == torch.int32
        out = torch.zeros_like(x)
        for j in range(top_k_index.shape[1]):
            w = gate_up_proj[top_k_index[:, j].long()]
            gate, up = torch.einsum("th,tfh->tf", x, w).chunk(2, -1)
            y = torch.nn.functional.silu(gate) * up
            y = torch.einsum("tf,thf->th", y, down_proj[top_k_index[:, j].long()])
            out = out + top_k_weights[:, j, None] * y
        return out
""",
}
TOPS = {name.split("/")[0] for name in FAKES}


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with a fake of every rival's package, which computes on a CPU."""
    folder = tmp_path_factory.mktemp("packages")
    for name, text in FAKES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] in TOPS]:
        del sys.modules[name]


@pytest.fixture
def installed(fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(fakes))


@pytest.fixture
def none_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "importable", lambda module: False)


BACKENDS = {(b.operator, b.name): b for b in rivals.backends()}
SHAPES = {
    "ragged": "G=4,M_g=33|0|1|130,N=128,K=256",
    "as stored by layers": "G=3,M_g=5|130|64,N=128,K=128,W=nk",
    "one group": "G=1,M_g=17,N=128,K=128",
    "aligned": "G=3,M_g=128|0|256,N=128,K=128",
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "key", [key for key in BACKENDS if key[0] != "moe_layer" and key[1] != "flashinfer"], ids="-".join
)
def test_adapter_computes_the_operator_and_follows_new_routing(
    installed: None, key: tuple[str, str], shape: str
) -> None:
    operator, backend = registry.catalog_operator(key[0]), BACKENDS[key]
    problem = operator.parse_shape(shape + ",fmt=int4(128)" * (key == ("grouped_gemm_w4a16", "fbgemm")))
    x = operator.make_inputs(problem, "fp8" if "fp8" in key[0] or "w4a8" in key[0] else "fp32", "cpu", 0)
    if key[1].endswith("_product") and any(rows % 128 for rows in problem.rows):
        with pytest.raises(Unavailable, match="multiples of 128"):
            backend.prepare(x)
        return
    run = backend.prepare(x)
    for turn in range(2):
        if turn:
            if key[1].endswith("_product"):
                return
            operator.reroute(problem, x, 1)
        out, expected = run(), operator.reference(x)
        assert isinstance(expected, torch.Tensor)
        assert out.shape == expected.shape
        torch.testing.assert_close(out.float(), expected.float(), rtol=1e-2, atol=2e-2)


def test_other_formats_of_four_bits(installed: None) -> None:
    operator = registry.catalog_operator("grouped_gemm_w4a16")
    x = operator.make_inputs(operator.parse_shape("G=2,M_g=3,N=64,K=64,fmt=int4(32)"), "bf16", "cpu", 0)
    out, expected = BACKENDS["grouped_gemm_w4a16", "humming"].prepare(x)(), operator.reference(x)
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(out.float(), expected.float(), rtol=1e-2, atol=2e-2)
    with pytest.raises(Unavailable, match="every 128 of K"):
        BACKENDS["grouped_gemm_w4a16", "fbgemm"].prepare(x)
    with pytest.raises(Unavailable, match="are mxfp4"):
        BACKENDS["grouped_gemm_w4a16", "triton_kernels"].prepare(x)
    x = operator.make_inputs(operator.parse_shape("G=2,M_g=3,N=64,K=64,fmt=int4(32,zp)"), "bf16", "cpu", 0)
    with pytest.raises(Unavailable, match="zero points"):
        BACKENDS["grouped_gemm_w4a16", "humming"].prepare(x)
    with pytest.raises(Unavailable, match="whole layer"):
        BACKENDS["grouped_gemm_w4a16", "flashinfer"].prepare(x)


def test_shared_weights_are_a_matrix_for_each_group(installed: None) -> None:
    operator = registry.catalog_operator("grouped_gemm")
    x = operator.make_inputs(operator.parse_shape("G=2,M_g=8,N=16,K=16,B=shared"), "fp32", "cpu", 0)
    for name in ("quack", "fbgemm", "flashinfer_cudnn", "deep_gemm", "triton_kernels"):
        out = BACKENDS["grouped_gemm", name].prepare(x)()
        torch.testing.assert_close(out.double(), operator.reference(x).double(), rtol=1e-4, atol=1e-4)  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ["fwd", "bwd", "fwd_bwd"])
def test_liger_layer(installed: None, mode: str) -> None:
    operator = registry.catalog_operator("moe_layer").with_backends((BACKENDS["moe_layer", "liger"],)).in_mode(mode)
    x = operator.make_inputs(operator.parse_shape("T=19,k=2,G=6,H=64,F=48,routing=zipf(1.2)"), "fp32", "cpu", 0)
    outputs, expected = operator.backend("liger").prepare(x)(), operator.reference(x)
    actual = operator.decode(outputs) if operator.decode else outputs
    wanted = list(expected.values()) if isinstance(expected, dict) else [expected]
    for out, right in zip(actual if isinstance(actual, tuple) else [actual], wanted, strict=True):
        torch.testing.assert_close(out.double(), right.double(), rtol=1e-3, atol=1e-4)


def test_liger_takes_no_experts_elsewhere(installed: None) -> None:
    operator = registry.catalog_operator("moe_layer")
    x = operator.make_inputs(operator.parse_shape("T=21,k=3,G=3,H=48,F=40,E=8,routing=multinomial"), "fp32", "cpu", 0)
    with pytest.raises(Unavailable, match="on other ranks"):
        BACKENDS["moe_layer", "liger"].prepare(x)


def test_sizes_that_a_rival_does_not_take_are_its_reason(installed: None) -> None:
    operator = registry.catalog_operator("grouped_gemm")
    x = operator.make_inputs(operator.parse_shape("G=2,M_g=8,N=45,K=16"), "fp32", "cpu", 0)
    with pytest.raises(Unavailable, match="N to be a multiple of 8, not 45"):
        BACKENDS["grouped_gemm", "quack"].prepare(x)


def test_a_missing_package_says_how_to_install_it(none_installed: None) -> None:
    for backend in rivals.backends():
        reason = backend.unavailable(H100)
        assert reason and "pip install 'groupbench[rivals-" in reason, backend.name
    assert set(rivals.not_installed(["moe_layer"])) == {"liger"}


def options(**changed: Any) -> dict[str, Any]:
    plain = {"only": (), "skip": (), "baseline": None, "rivals": None, "plugins": (), "ops": ("grouped_gemm",)}
    return {**plain, "list_backends": False, **changed}


def test_a_plain_run_knows_no_rivals(none_installed: None) -> None:
    assert cli._rivals(options()) == {}
    assert "quack" not in [backend.name for backend in registry.get_operator("grouped_gemm").backends]


def test_rivals_that_are_not_installed_are_named_once_and_add_no_cells(
    none_installed: None, capsys: pytest.CaptureFixture[str]
) -> None:
    selected = cli._rivals(options(rivals="installed", ops=("grouped_gemm", "vector_add")))
    assert selected["plugins"] == (rivals.PLUGIN,)
    assert set(selected["skip"]) == {name for operator, name in BACKENDS if operator == "grouped_gemm"}
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 5 and all("pip install 'groupbench[rivals-" in line for line in printed)


def test_rivals_that_are_installed_are_measured(installed: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._rivals(options(rivals="installed"))["skip"] == ()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("changed", [{"only": ("quack",)}, {"baseline": "quack"}, {"rivals": "all"}], ids=str)
def test_a_rival_that_is_named_is_measured_or_unavailable(none_installed: None, changed: dict[str, Any]) -> None:
    assert cli._rivals(options(**changed)) == {"plugins": (rivals.PLUGIN,)}


def test_the_list_says_how_to_install_them(none_installed: None) -> None:
    listed = CliRunner().invoke(cli.command, ["--op", "grouped_gemm", "--list-backends", "--rivals"])
    (line,) = [line for line in listed.output.splitlines() if line.startswith("  quack: ")]
    assert line.endswith("(quack-kernels is not installed: pip install 'groupbench[rivals-quack]')")


def test_every_extra_is_declared() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    for rival in rivals._RIVALS:
        assert f'\n{rival.PACKAGE.extra} = ["{rival.PACKAGE.distribution}>=' in text


def test_an_installed_package_is_available_where_its_gpu_and_dtype_are(installed: None) -> None:
    assert rivals.not_installed(["grouped_gemm"]) == {}
    quack = BACKENDS["grouped_gemm", "quack"]
    assert quack.unavailable(H100) is None
    assert quack.unavailable(Target("cpu", "bf16")) == "it needs an NVIDIA GPU"
    assert "not fp32" in (quack.unavailable(Target("cuda", "fp32", capability=(9, 0))) or "")
    assert "9.0 or newer" in (
        BACKENDS["grouped_gemm", "fbgemm"].unavailable(Target("cuda", "bf16", False, (8, 0))) or ""
    )
    blockwise = BACKENDS["grouped_gemm_fp8_blockwise", "deep_gemm"]
    assert "below 10.0" in (blockwise.unavailable(Target("cuda", "fp8", False, (10, 0))) or "")


def test_looking_for_a_package_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loud").mkdir()
    (tmp_path / "loud" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "loud" / "part.py").write_text("")
    (tmp_path / "loud" / "bare" / "part").mkdir(parents=True)
    (tmp_path / "loud" / "bare" / "part" / "inner.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert package.importable("loud.part")
    assert package.importable("loud.bare.part.inner")
    assert not package.importable("loud.bare.other")
    assert not package.importable("loud.other")
    assert not package.importable("loud.part.below")
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured" / "quiet.py").touch()
    assert not package.importable("quiet")
    monkeypatch.setenv("GROUPBENCH_FOLDERS", str(tmp_path / "measured"))  # where cells find it
    assert package.importable("quiet")
    assert "loud" not in sys.modules


def test_listing_rivals_imports_neither_torch_nor_them() -> None:
    code = "import sys; from groupbench.operators.catalog import rivals; rivals.not_installed(['grouped_gemm']); "
    loaded = subprocess.run(
        [sys.executable, "-c", code + "print('torch' in sys.modules)"], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "False"


@given(st.lists(st.integers(0, 300), min_size=1, max_size=9), st.sampled_from([1, 16, 128]))
def test_padded_layout(rows: list[int], alignment: int) -> None:
    layout = deep_gemm.pad(torch.tensor(rows, dtype=torch.int32), sum(rows), alignment)
    groups = [g for g, count in enumerate(rows) for _ in range(count)]
    assert layout.expert[layout.place].tolist() == groups  # each row is at a place of its own group
    assert len(set(layout.place.tolist())) == sum(rows)
    assert int((layout.expert >= 0).sum()) == sum(rows)
    for start in range(0, len(layout.expert), alignment):
        block = layout.expert[start : start + alignment]
        assert len(set(block[block >= 0].tolist())) <= 1
        assert block[0] >= 0 or (block < 0).all()


def test_a_rivals_records_name_its_version_and_others_do_not() -> None:
    here = Environment(device="cpu", settings={"TRITON_X": "1"})
    extended = environment.with_packages(here, ("numpy", "no-such-package"))
    assert list(extended.settings) == ["TRITON_X", "package numpy"]
    assert environment.with_packages(here, ()) is here
    assert environment.without_packages(extended) == here
    assert _alike(extended) == _alike(here)


def test_a_new_version_of_a_rival_is_a_new_toolchain_on_the_same_machine() -> None:
    old, new = (Environment(device="cpu", settings={"package quack-kernels": v}) for v in ("0.6.5", "0.7.0"))
    assert machine_identity(old) == machine_identity(new)
    assert toolchain_differences(old, new) == ("setting package quack-kernels 0.6.5 → 0.7.0",)


def test_the_plugin_is_where_plans_name_it() -> None:
    module, _, name = rivals.PLUGIN.rpartition(".")
    assert getattr(importlib.import_module(module), name) is rivals.backends
    operator: Any = registry.get_operator("grouped_gemm", (rivals.PLUGIN,))
    assert operator.backend("quack").packages == ("quack-kernels",)
