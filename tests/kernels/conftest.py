"""Cases, inputs and checks of the kernel tests. Without a GPU the kernels run in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from hashlib import md5
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from forks import start_server
from torch import Tensor

if not torch.cuda.is_available():
    # Read when triton is imported: before any test module imports a kernel.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A kernel that no longer compiles must not pass for a slower one.
os.environ.setdefault("GROUPBENCH_FALLBACK", "off")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave cases with Helion to --exhaustive that it compiles for: a second for each dtype, N and K.

    Also skip CUDA graphs under compute-sanitizer (ci/sanitize.sh), which runs without torch's caching allocator.
    """
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if "case" in params and "helion" in item.nodeid:
            names = set(item.callspec.id.split("-"))
            covered = names.intersection(COVERED_WITH_HELION)
            ones = "n_and_k_of_one" in names and "helion_wgrad" not in names  # one kernel has them
            if covered or ones or params.get("dtype", torch.float16) != torch.float16:
                item.add_marker("exhaustive")
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        skip = pytest.mark.skip(reason="NOT TESTED: CUDA graphs. A capture needs torch's caching allocator")
        for item in items:
            if "graph" in item.nodeid:
                item.add_marker(skip)


# For kernels of which Helion masks M, N and K alike, tiles that are not full are in "ragged_n_and_k". The configs of
# GPUs have tests of their own in fp32, and the other kernels run all of these.
COVERED_WITH_HELION = (
    *("k_below_a_tile", "n_below_a_tile", "one_row_and_one_column"),
    *("many_tiles", "strided_rows", "weights_shared"),
)

DTYPES = (torch.float16, torch.float32, *([torch.bfloat16] if DEVICE.type == "cuda" else []))

# (relative RMS, largest error over the reference's RMS beyond one rounding of the element itself). Both allow
# for another order of the sum.
TOLERANCES = {
    torch.float32: (1e-5, 1e-4),
    torch.float16: (1e-3, 5e-3),
    torch.bfloat16: (5e-3, 4e-2),
}

# Bytes per thread that a Triton release spills to local memory, by test case. Other kernels and releases do not spill.
SPILLED = {
    (3, 6): {"pointers_decode": 76},
    (3, 8): {
        "flat_specialized_192": 8,
        "flat_specialized_192_nk": 4,
        "flat_specialized_192_columns": 12,
        "flat_specialized_192_columns_nk": 8,
        "fp8_specialized_blockwise": 28,
        "fp8_specialized_blockwise_256": 24,
    },
    (3, 9): {
        "flat_specialized_192_nk": 44,
        "flat_specialized_192_columns_nk": 36,
        "fp8_specialized_blockwise": 48,
        "outer_k_fp32": 8,
        "mul_ragged": 64,
        "fp32_ragged": 20,
    },
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        from grouped import CASES

        metafunc.parametrize("case", CASES.values(), ids=CASES)
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", DTYPES, ids=[str(dtype).removeprefix("torch.") for dtype in DTYPES])


@pytest.fixture
def no_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Helion's autotuner fail: a kernel is tuned only if that is requested."""
    from helion.runtime.kernel import BoundKernel

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("autotuning started")

    monkeypatch.setattr(BoundKernel, "autotune", refuse)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return DEVICE


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which new memory of torch is NaN, so that elements that no kernel writes show."""

    @contextmanager
    def poison() -> Iterator[None]:
        def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def nan(*args: object, **kwargs: object) -> Tensor:
                out = make(*args, **kwargs)
                return out.fill_(float("nan")) if out.is_floating_point() else out

            return nan

        with monkeypatch.context() as patch:
            for name in ("empty", "empty_strided"):
                patch.setattr(torch, name, filled(getattr(torch, name)))
            yield

    return poison


@pytest.fixture(scope="session")
def check() -> Callable[[Tensor, Tensor, torch.dtype], None]:
    """Return a function that compares an output with the reference and names the worst element if they differ."""

    def compare(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
        assert out.dtype == dtype
        assert out.shape == expected.shape
        if out.numel() == 0:
            return
        error = (out.double() - expected.double()).abs()
        bad = (~error.isfinite()).nonzero()
        assert len(bad) == 0, f"{len(bad)} elements are not finite, the first at {bad[0].tolist()}"
        scale = expected.double().square().mean().sqrt().clamp_min(1e-30)
        rms = (error.square().mean().sqrt() / scale).item()
        error -= torch.finfo(dtype).eps / 2 * expected.double().abs()  # products of two normals have long tails
        worst = (error.max() / scale).item()
        at = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
        limit_rms, limit_worst = TOLERANCES[dtype]
        assert rms < limit_rms, f"relative RMS error {rms:.2e}, the worst element is {at}"
        assert worst < limit_worst, f"largest error {worst:.2e} of the RMS, at {at}"

    return compare


@pytest.fixture
def check_run(poisoned: Any, check: Any) -> Callable[[Callable[[], Tensor], Tensor, torch.dtype], Tensor]:
    """Return a function that checks a call's output, its unwritten elements included, and returns it."""

    def compare(run: Callable[[], Tensor], expected: Tensor, dtype: torch.dtype) -> Tensor:
        with poisoned():
            out = run()
        check(out, expected, dtype)
        return out

    return compare


@pytest.fixture
def check_calls(check_run: Any) -> Callable[[Callable[[], Tensor], Tensor, torch.dtype], None]:
    """Return a function that checks a call's output as `check_run` does, and that later calls repeat it.

    A stage of shared memory that is read too late, or given back too early, need not show the first time.
    """

    def compare(run: Callable[[], Tensor], expected: Tensor, dtype: torch.dtype) -> None:
        out = check_run(run, expected, dtype)
        for _ in range(5):
            assert torch.equal(run(), out)

    return compare


@pytest.fixture(scope="session")
def replays() -> Callable[..., list[Tensor]]:
    """Return a function that captures a call at the first routing as a graph, and returns its outputs for each."""

    def replay(run: Callable[[], Tensor], change: Callable[[int], None], turns: int) -> list[Tensor]:
        change(0)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # compiles
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        outputs = []
        for turn in range(turns):
            change(turn)
            graph.replay()
            outputs.append(out.clone())
        return outputs

    return replay


@pytest.fixture(scope="session")
def spills() -> dict[str, int]:
    """Return the bytes per thread that the installed Triton may spill, by test case."""
    from groupbench.kernels.grouped_gemm.support import TRITON

    return SPILLED.get(TRITON, {})


@pytest.fixture(scope="session")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a test file as a script that does not interpret kernels: see scripts.py."""
    here, folder = Path(__file__).parent, Path(os.environ["GROUPBENCH_TEST_WARM"])
    path, out_and_err = f"{here.parent / 'shared'}{os.pathsep}", tmp_path_factory.mktemp("scripts")
    path += os.environ.get("PYTHONPATH", "")
    out, err = out_and_err / "out", out_and_err / "err"

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        start_server(folder, "scripts", [str(here / "scripts.py")], os.environ | {"PYTHONPATH": path})
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(folder / "scripts"))
            connection.sendall(json.dumps({"args": args, "out": str(out), "err": str(err)}).encode() + b"\n")
            code = int(connection.recv(16))
        return subprocess.CompletedProcess(args, code, out.read_text(), err.read_text())

    return run


@pytest.fixture(scope="session")
def compile_for_hopper(run_script: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., Any]:
    """Return a function that runs a test file as a script and parses the JSON that it prints.

    This process interprets kernels; the script compiles them. All test processes share the output.
    """
    folder = Path(os.environ["GROUPBENCH_TEST_WARM"])
    folder.mkdir(mode=0o700, exist_ok=True)

    def run(*args: str) -> Any:
        if importlib.util.find_spec("triton.backends.nvidia") is None:
            pytest.skip("NOT TESTED: compiling for sm_90. This Triton has no NVIDIA backend")
        output = folder / f"{md5(repr(args).encode()).hexdigest()}.json"
        with FileLock(f"{output}.lock"):
            if not output.exists():
                done = run_script(*args)
                assert done.returncode == 0, done.stderr
                output.write_text(done.stdout)
            return json.loads(output.read_text())

    return run
