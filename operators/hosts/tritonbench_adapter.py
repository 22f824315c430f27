"""Every touch of TritonBench's internals (commit 10b14473).

Our backends go into its operators, our operators into its list, and every cell into a record. A test fails when one of
the names used here is gone.

With our launcher this module runs as the child process. With TritonBench's own run.py, `plugin` is the way in:

    python run.py --op grouped_gemm --plugin groupbench.operators.hosts.tritonbench_adapter.plugin
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import pickle
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import msgspec
import torch
from torch.utils._pytree import tree_map_only

try:
    from tritonbench.components.do_bench import Latency as TritonBenchLatency
    from tritonbench.operators import op as operator_list
    from tritonbench.utils import run_utils, triton_op
except ImportError as error:
    sys.exit(f"TritonBench does not import here: {error}; install what it needs, or give --host builtin")

from groupbench.kernels.device import cuda_capability
from groupbench.operators.dtypes import dtype_name
from groupbench.operators.errors import GroupbenchError, Incomplete, Unavailable, UsageError
from groupbench.operators.hosts import foreign
from groupbench.operators.hosts.journal import Event, Finished, Setup
from groupbench.operators.measure import accuracy, compiled
from groupbench.operators.measure.cell import describe, is_oom
from groupbench.operators.measure.given import Given
from groupbench.operators.measure.protocol import CpuTimer, GpuTimer
from groupbench.operators.measure.selection import why_unavailable
from groupbench.operators.measure.texts import one_line
from groupbench.operators.operator import Backend, Example, Operator, Target
from groupbench.operators.registry import get_operator, load_plugin, operator_names
from groupbench.tracker.exits import ExitCode
from groupbench.tracker.record import Accuracy, Cell, Latency, Timing

PACKAGE = "tritonbench.operators"
TIMED = {"latency", "tflops", "gbps", "speedup", "compile_time"}
"""Metrics for which TritonBench takes latencies."""

OUTPUTS = (triton_op.Mode.FWD, triton_op.Mode.FWD_NO_GRAD)
"""Modes in which a backend's function returns its output."""

NO_BASELINE = "no baseline was measured beside it"
UNLIKE_ITSELF = "the baseline's own runs differ by more than the tolerance"

TIMER = (
    *("cudagraph", "skip_cache_clearing", "warmup", "rep", "repcnt", "entropy_criterion", "entropy_max_angle"),
    *("entropy_min_r2", "entropy_window_size", "entropy_max_samples"),
)
"""TritonBench's arguments that say how it times; our operators are timed by our protocol."""

LEVEL = (
    *("sleep", "gpu_lockdown", "gpu_lock_clock_mhz", "allow_tf32", "helion_backend", "autotune_warmup"),
    *("autotune_rep", "test_only"),
)
"""Its other arguments that shift the level of what is timed."""


def plugin() -> None:
    """Add our backends to those of TritonBench's operators that we have backends for."""
    for name in operator_names():
        module = sys.modules.get(f"{PACKAGE}.{name}")
        if module is not None:
            add_backends(module.Operator, name, get_operator(name))


def add_backends(cls: type, tb_name: str, operator: Operator, own: bool = False) -> None:
    """Register the operator's backends as methods of a TritonBench operator class.

    own: the class is ours, so that the operator's baseline is the baseline there too, and its mode may be bwd.
    """
    for backend in operator.backends:
        triton_op.register_benchmark(
            operator_name=tb_name,
            func_name=backend.name,
            baseline=own and backend.name == operator.baseline,
            fwd_only=not own,  # ours are in the mode asked for already
            cls=cls,
        )(_method(operator, backend))


def _target(dtype: str) -> Target:
    cuda = torch.cuda.is_available()
    return Target(
        device="cuda" if cuda else "cpu",
        dtype=dtype,
        interpreted=_interpreted(),
        capability=cuda_capability() if cuda else None,
    )


def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


def _method(operator: Operator, backend: Backend) -> Any:
    def prepare(self: Any, *example_inputs: Any) -> Any:
        example = _example(operator, example_inputs)
        reason = why_unavailable(operator, backend.name, _target(example.dtype))
        if reason is not None:
            raise NotImplementedError(reason)  # what TritonBench shows in the cell and goes on after
        try:
            return backend.prepare(example.inputs)
        except Unavailable as unavailable:
            raise NotImplementedError(str(unavailable)) from unavailable

    prepare.__name__ = backend.name
    return prepare


# --- operators of ours ------------------------------------------------------------------------------------------------


def own_operator(setup: Setup, operator: Operator) -> type:
    """A TritonBench operator class that runs one of ours on the suites chosen."""

    class Own(triton_op.BenchmarkOperator):
        DEFAULT_PRECISION = operator.dtypes[0]
        DEFAULT_METRICS = ["latency", "speedup", "accuracy", "tflops"]  # noqa: RUF012 - TritonBench's spelling
        FWD_ONLY = operator.modes == ("fwd",)
        mode: Any

        def get_bwd_fn(self, fwd_fn: Any) -> Any:
            """What a backend of ours has prepared in mode bwd is the backward; TritonBench would derive one."""
            return fwd_fn

        def _get_bm_func(self, bm_func_name: str) -> Any:
            """What it has prepared in mode fwd_bwd is both; TritonBench would run it as one and as the other."""
            if self.mode != triton_op.Mode.FWD_BWD:
                return super()._get_bm_func(bm_func_name)
            self.mode = triton_op.Mode.BWD
            try:
                return super()._get_bm_func(bm_func_name)
            finally:
                self.mode = triton_op.Mode.FWD_BWD

        def get_input_iter(self) -> Any:
            for text in setup.shapes:
                yield self.groupbench_inputs(operator.parse_shape(text))

        def groupbench_inputs(self, shape: Any) -> tuple[Any]:
            """As a function, which TritonBench hands on untouched; it refuses types that it does not know."""
            dtype = _dtype(self)
            example = Example(shape, dtype, operator.make_inputs(shape, dtype, self.device, setup.seed))
            return (lambda: example,)

        def get_available_num_inputs(self) -> int:
            return len(setup.shapes)

        def get_x_val(self, example_inputs: Any) -> str:
            return str(_example(operator, example_inputs).shape)

        def tflops(self, fn_name: str, example_inputs: Any, metrics: Any) -> float:
            return operator.flops(_example(operator, example_inputs).shape) / metrics.latency / 1e9

        def accuracy(self, fn: Any, baseline_fn: Any) -> bool:
            """Against the reference in higher precision, not against another backend."""
            return self.groupbench_accuracy(fn)[1] is None

        def _measure_latency(self, fn: Any, warmup: Any, rep: Any, repcnt: Any) -> Any:
            """Cooled bursts; outliers stay in. None where Triton interprets: what that took is the record's alone."""
            protocol = setup.protocol
            interpreted = _interpreted() and operator.backend(self._cur_backend_name).kind != "torch"
            timer = GpuTimer(fn, protocol) if self.device == "cuda" else CpuTimer(fn, protocol, interpreted)
            self.groupbench_enqueue_ms = timer.enqueue_ms
            self.groupbench_bursts = []
            for _ in range(1 if interpreted else protocol.bursts):
                if self.device == "cuda":
                    time.sleep(protocol.idle_s)
                self.groupbench_bursts.append(tuple(timer.burst()))
            if interpreted:
                return None
            times = [ms for burst in self.groupbench_bursts for ms in burst]
            return TritonBenchLatency(times, remove_outliers=False)

    return _in_module(Own, setup.op)


def _in_module(cls: type, tb_name: str) -> type:
    """TritonBench finds an operator's name in its class's module path."""
    cls.__module__ = f"{PACKAGE}.{tb_name}"
    cls.__qualname__ = cls.__name__ = "Operator"
    return cls


def add_operator(tb_name: str, cls: type) -> None:
    """Make `--op tb_name` find the class: a module below tritonbench.operators, and a name in the list of operators."""
    module = ModuleType(f"{PACKAGE}.{tb_name}")
    module.Operator = cls  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    setattr(sys.modules[PACKAGE], tb_name, module)
    listed = operator_list._list_opbench_paths
    # TritonBench takes the last part of each path as the operator's name, and no two may be equal.
    operator_list._list_opbench_paths = lambda: [*(path for path in listed() if Path(path).name != tb_name), tb_name]


# --- records ----------------------------------------------------------------------------------------------------------


def recording(base: Any, setup: Setup, ours: Operator | None) -> type:
    """A subclass of a TritonBench operator that tells the parent of each cell, and survives a backend that raises."""
    finished = {(done.input_id, done.backend): done for done in setup.finished}
    metrics = base.DEFAULT_METRICS
    # A record is of a latency, which launch_latency, for one, measures where it is asked to.
    wanted = [*metrics] if TIMED & {*metrics} else [*metrics, "latency"]

    class Recording(base):
        DEFAULT_METRICS = wanted
        groupbench_bursts: list[tuple[float, ...]] | None = None
        groupbench_enqueue_ms: float | None = None
        groupbench_interpreted = False
        example_inputs: Any
        _groupbench_reference: tuple[int | None, Any] = (None, None)
        # The input's number, what is known of it, and the backend that had it last.
        _groupbench_given: tuple[int | None, Given, str] | None = None

        def __init__(self, tb_args: Any = None, extra_args: Any = None) -> None:
            if tb_args.output_dir:  # TritonBench finds out that there is none when it has measured
                Path(tb_args.output_dir).mkdir(parents=True, exist_ok=True)
            self.groupbench_names: Counter[str] = Counter()
            self.groupbench_told: set[tuple[str, str]] = set()
            self.groupbench_protocol = _protocol(tb_args, setup)
            with _parsed(extra_args) as (self.groupbench_options, unknown):
                super().__init__(tb_args=tb_args, extra_args=extra_args)
            if unknown:
                raise UsageError(f"unknown option or argument: {' '.join(unknown)}")

        def __post__init__(self) -> None:
            try:
                super().__post__init__()
            except Exception as error:  # of which the loader's text does not say what it is about
                if self.tb_args.input_loader:
                    raise UsageError(f"--input-loader {self.tb_args.input_loader}: {describe(error)}") from error
                raise
            _check_inputs(self)
            _check_backends(self, setup)

        def run(self, *args: Any, **kwargs: Any) -> None:
            try:
                super().run(*args, **kwargs)
            except Exception as error:  # which TritonBench drops when it has shown the table so far
                _tell(setup, Event(refused=describe(error)))
                raise

        def get_example_inputs(self) -> Any:
            """Gives each input its name; two of one name, whichever of them are measured, are told apart."""
            inputs = super().get_example_inputs()
            if inputs is not None:
                if ours is not None:
                    name = str(_example(ours, inputs).shape)
                else:
                    name = foreign.shape_text(self.get_x_val(inputs), inputs, self.groupbench_options)
                self.groupbench_names[name] += 1
                number = self.groupbench_names[name]
                self.groupbench_name = name if number == 1 else f"{name} #{number}"
            return inputs

        def _get_bm_func(self, bm_func_name: str) -> Any:
            if ours is not None:
                self._groupbench_look(bm_func_name)
            start = time.perf_counter()
            # Watched here and not while TritonBench times: looking at a kernel takes longer than running it.
            with compiled.watched() as self.groupbench_kernels, compiled.interpreted() as launched:
                fn = super()._get_bm_func(bm_func_name)
                fn()
            self.groupbench_interpreted = bool(launched)
            if self.device == "cuda":
                torch.cuda.synchronize()
            self.groupbench_prepare_ms = 1e3 * (time.perf_counter() - start)
            self.groupbench_fn = fn
            return fn

        def _groupbench_look(self, backend: str) -> None:
            """At the inputs, which TritonBench hands to all backends: one may have changed what the next is to have."""
            assert ours is not None
            key, given, before = self._groupbench_given or (None, None, "")
            if given is None or key != self._cur_input_id:
                given = Given(_inputs(self.example_inputs))
            elif given.misuse():
                if not setup.own:
                    raise RuntimeError(f"not measured: {before} has changed the inputs, which are those of all")
                self.example_inputs = self.groupbench_inputs(_example(ours, self.example_inputs).shape)
                self._groupbench_reference = (None, None)
                given = Given(_inputs(self.example_inputs))
            self._groupbench_given = (self._cur_input_id, given, backend)

        def _do_bench(self, input_id: int, fn_name: str, *args: Any, **kwargs: Any) -> Any:
            baseline = bool(kwargs.get("baseline"))
            done = finished.get((input_id, fn_name))
            if done is not None and (done.metrics is None or not baseline):
                return _restored(done)
            left = len(self._input_ids) - self._input_ids.index(input_id) - 1
            event = Event(input_id, fn_name, left=left, baseline=baseline, begun=_cell(self, fn_name, setup, ours))
            _tell(setup, event)
            start = time.perf_counter()
            self.groupbench_bursts = self.groupbench_fn = None
            self.groupbench_kernels = []
            facts: dict[str, Any] = {}
            try:
                metrics = super()._do_bench(input_id, fn_name, *args, **kwargs)
            except Exception as error:
                metrics = triton_op.BenchmarkOperatorMetrics(error_msg=describe(error), extra_metrics={})
                facts = {"status": "oom" if is_oom(error) else "error", "message": describe(error)}
            if not facts:
                facts = self._groupbench_facts(metrics, baseline)
            if done is not None:  # a baseline run again for its output has its record already
                _tell(setup, msgspec.structs.replace(event, begun=None))
            else:
                _tell(
                    setup,
                    msgspec.structs.replace(
                        event,
                        begun=None,
                        cell=event.begun,
                        kernels=tuple(self.groupbench_kernels),
                        duration_s=round(time.perf_counter() - start, 3),
                        metrics=_pickled(metrics),
                        **facts,
                    ),
                )
            return metrics

        def _groupbench_facts(self, metrics: Any, baseline: bool) -> dict[str, Any]:
            latency = _latency(self, metrics, ours)
            if metrics.error_msg:
                status = "oom" if "OOM" in metrics.error_msg else "unavailable"
                return {"status": status, "message": one_line(metrics.error_msg) or status, "latency": latency}
            measured, problem = None, None
            if ours is not None and self.groupbench_fn is not None:
                try:
                    measured, problem = self.groupbench_accuracy(self.groupbench_fn)
                except Exception as error:
                    return {"status": "error", "message": describe(error), "latency": latency}
            elif ours is None:
                measured, problem = self._groupbench_compared()
                problem = problem or (None if baseline else self._groupbench_judged(metrics.accuracy, measured))
            if problem is None and latency is None and measured is None:
                return {"status": "error", "message": "TritonBench measured neither latency nor accuracy"}
            status = "ok" if problem is None else "wrong"
            return {"status": status, "message": problem, "latency": latency, "accuracy": measured}

        def _groupbench_compared(self) -> tuple[Accuracy | None, str | None]:
            """A backend of TritonBench's own operator against its baseline, where the mode returns outputs."""
            if self.mode not in OUTPUTS or self.groupbench_fn is None:
                return None, None
            kept = getattr(self, "_groupbench_baseline", None)
            try:
                if kept is None or kept[0] != self._cur_input_id:
                    baseline = getattr(self, "baseline_fn", None)
                    # The baseline is measured first, and this is it, unless there is none.
                    kept = (self._cur_input_id, foreign.tensors(baseline()) if baseline else None)
                    self._groupbench_baseline = kept
                return foreign.compare_outputs(self.groupbench_fn, kept[1])[:2]
            except Exception as error:  # what cannot be compared is no fault of the backend
                print(f"groupbench: {self._cur_backend_name} is not compared: {describe(error)}", file=sys.stderr)
                return None, None

        def _groupbench_judged(self, right: bool | None, measured: Accuracy | None) -> str | None:
            """What is wrong with a backend's output, whichever columns are shown; why nobody can say is told once.

            By TritonBench's check, whose result is `right` where its column is shown, if its author or the user chose a
            tolerance: torch's own for elements that are to be equal says nothing of a sum in another order.
            """
            args = self.tb_args
            checked = type(self).accuracy != triton_op.BenchmarkOperator.accuracy or "accuracy" in metrics
            try:
                if checked or args.bitwise or args.rtol is not None or args.atol is not None:
                    return self._groupbench_checked(right)
                return self._groupbench_distant(measured)
            except Unavailable as reason:
                why = str(reason)
            except Exception as error:
                why = describe(error)
            if (self._cur_backend_name, why) not in self.groupbench_told:
                self.groupbench_told.add((self._cur_backend_name, why))
                print(f"groupbench: {self._cur_backend_name} is not judged: {why}", file=sys.stderr)
            return None

        def _groupbench_checked(self, right: bool | None) -> str | None:
            fn, baseline = self.groupbench_fn, getattr(self, "baseline_fn", None)
            if fn is None or baseline is None:
                raise Unavailable(NO_BASELINE)
            if self.mode in OUTPUTS:  # the check writes NaN into an output, which may share memory with the inputs
                fn, baseline = _copying(fn), _copying(baseline)
            if right is None:
                right = self.accuracy(fn, baseline)
            if right:
                return None
            if not self.accuracy(baseline, baseline):
                raise Unavailable(UNLIKE_ITSELF)
            return "its output differs from the baseline's by more than TritonBench's tolerance"

        def _groupbench_distant(self, measured: Accuracy | None) -> str | None:
            if self.mode in OUTPUTS and getattr(self, "baseline_fn", None) is None:
                raise Unavailable(NO_BASELINE)
            if measured is None or measured.mismatch is None:
                raise Unavailable("TritonBench has no tolerance for it: --rtol and --atol give one")
            if not foreign.is_distant(measured, _dtype(self)):
                return None
            itself = foreign.compare_outputs(self.baseline_fn, self._groupbench_baseline[1])[0]
            if itself is None or foreign.is_distant(itself, _dtype(self)):
                raise Unavailable(UNLIKE_ITSELF)
            return f"its output is not the baseline's: relative RMS error {measured.rms or math.nan:.2g}"

        def groupbench_accuracy(self, fn: Any) -> tuple[Accuracy, str | None]:
            assert ours is not None
            key = self._cur_input_id
            if self._groupbench_reference[0] != key:
                self._groupbench_reference = (key, ours.reference(_example(ours, self.example_inputs).inputs))
            backend, args = self._cur_backend_name, self.tb_args
            given = self._groupbench_given[1] if self._groupbench_given else None
            return accuracy.check_backend(
                fn, self._groupbench_reference[1], ours, backend, _dtype(self), args.rtol, args.atol, given=given
            )

    return _in_module(Recording, setup.op)


def _copying(fn: Any) -> Any:
    return lambda: tree_map_only(torch.Tensor, torch.clone, fn())


def _example(ours: Operator, example_inputs: Any) -> Example:
    """The inputs as our backends take them: our own operator's, or TritonBench's converted."""
    if callable(example_inputs[0]):
        return example_inputs[0]()
    assert ours.from_tritonbench is not None
    return ours.from_tritonbench(*example_inputs)


def _inputs(example_inputs: Any) -> Any:
    """What a backend may change: our operator's inputs, or TritonBench's, which are those of all its backends."""
    return example_inputs[0]().inputs if callable(example_inputs[0]) else example_inputs


NO_PRECISION = "bypass"
"""What TritonBench says of an operator that names none, nor its user."""


def _dtype(op: Any) -> str:
    """The name of an operator's precision, else of what its inputs are; TritonBench has no torch dtype for fp8."""
    precision: str = op.tb_args.precision
    if precision == NO_PRECISION:
        return foreign.input_dtype(op.example_inputs) or precision
    return dtype_name(op.dtype) or precision


def _cell(op: Any, backend: str, setup: Setup, ours: Operator | None) -> Cell:
    dtype = _dtype(op)
    facts: dict[str, Any] = {}
    if ours is not None:
        shape = _example(ours, op.example_inputs).shape
        facts = {"dims": shape.dims, "flops": ours.flops(shape), "min_bytes": ours.min_bytes(shape, dtype)}
    return Cell(
        operator=setup.op,
        backend=backend,
        shape=op.groupbench_name,
        dtype=dtype,
        mode=op.mode.value,
        host="tritonbench",
        protocol=op.groupbench_protocol,
        seed=setup.seed,
        **facts,
    )


def _latency(op: Any, metrics: Any, ours: Operator | None) -> Latency | None:
    times = getattr(metrics.latency, "times", None)
    bursts = op.groupbench_bursts or (times and [tuple(max(float(ms), 1e-6) for ms in times)])
    if not bursts:
        return None
    kind = next((b.kind for b in ours.backends if b.name == op._cur_backend_name), None) if ours else None
    interpreted = _interpreted() and kind != "torch" if kind else op.groupbench_interpreted
    timing: Timing = "gpu" if op.device == "cuda" else "interpreted" if interpreted else "cpu"
    return Latency(
        timing=timing,
        bursts_ms=tuple(bursts),
        prepare_ms=op.groupbench_prepare_ms,
        enqueue_ms=op.groupbench_enqueue_ms,
    )


def _restored(done: Finished) -> Any:
    if done.metrics is not None:
        return pickle.loads(done.metrics)  # written by this user's own process a moment ago
    return triton_op.BenchmarkOperatorMetrics(error_msg=done.message, extra_metrics={})


def _pickled(metrics: Any) -> bytes | None:
    with contextlib.suppress(Exception):
        return pickle.dumps(metrics)
    return None


def _tell(setup: Setup, event: Event) -> None:
    with Path(setup.journal).open("ab") as file:
        file.write(msgspec.json.encode(event) + b"\n")


# --- what was asked for -----------------------------------------------------------------------------------------------


def _protocol(tb_args: Any, setup: Setup) -> str:
    """How latency is taken, as a record says it: with the arguments that move it, where they are not the default."""
    defaults = run_utils.get_parser().parse_args([])

    def given(names: tuple[str, ...]) -> Iterator[str]:
        for name in names:
            value = getattr(tb_args, name)
            if value != getattr(defaults, name):
                yield name if value is True else f"{name}={value}"

    timer = list(given(TIMER))
    mode = tb_args.latency_measure_mode
    if not setup.own:
        return "+".join([f"tritonbench:{mode}", *timer, *given(LEVEL)])
    timer += given(("latency_measure_mode",))
    if timer:
        flag = timer[0].split("=")[0].replace("_", "-")
        raise UsageError(f"--{flag} is for TritonBench's own operators: this one has --protocol, --bursts, --samples")
    return "+".join([setup.protocol.label, *given(LEVEL)])


@contextlib.contextmanager
def _parsed(arguments: list[str] | None) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """(options unlike their defaults, what no parser knew) of an operator's arguments, which it parses for itself."""
    options: dict[str, Any] = {}
    unknown = list(arguments or ())
    real = argparse.ArgumentParser.parse_known_args

    def parse(parser: Any, args: Any = None, namespace: Any = None) -> Any:
        found, rest = real(parser, args, namespace)
        if args is not None and list(args) == list(arguments or ()):
            defaults = vars(real(parser, [])[0])
            options.update({name: value for name, value in vars(found).items() if value != defaults.get(name)})
            unknown[:] = [text for text in unknown if text in rest]
        return found, rest

    argparse.ArgumentParser.parse_known_args = parse  # type: ignore[assignment,method-assign]
    try:
        yield options, unknown
    finally:
        argparse.ArgumentParser.parse_known_args = real  # type: ignore[method-assign]


def _check_inputs(op: Any) -> None:
    """TritonBench passes over an input that there is not."""
    count = op._available_num_inputs
    for number in map(int, op.tb_args.input_id.split(",")):
        if count and not 0 <= number < count:
            raise UsageError(f"--input-id {number}: there are inputs 0 to {count - 1}")


def _check_backends(op: Any, setup: Setup) -> None:
    """TritonBench passes over backends that it does not know."""
    known = list(triton_op.REGISTERED_BENCHMARKS.get(op.name, ()))
    there_are = f"there are: {', '.join(known)}"
    prefixes = op.tb_args.only_match_mode != "exact"
    only, skip = op._only or [], op._skip or []
    baselines = op.tb_args.baseline.split(",") if op.tb_args.baseline else []
    strays = [name for name in [*only, *skip] if name not in known]
    if prefixes:
        strays = [name for name in strays if name in skip or not any(text.startswith(name) for text in known)]
    wrong = [name for name in baselines if name not in known] + (strays if setup.alone else [])
    _tell(setup, Event(strays=tuple(strays)))
    if wrong:
        raise UsageError(f"no backend {wrong[0]!r}; {there_are}")
    if only and not set(only) - set(strays):
        raise UsageError(f"none of the backends of --only; {there_are}")
    if not set(only or known) - set(skip):
        raise UsageError("--only and --skip leave no backend")


def _known_metrics(op: str) -> list[str]:
    return sorted(triton_op.BUILTIN_METRICS | {*triton_op.REGISTERED_METRICS.get(op, ())})


def _check_metrics(setup: Setup, arguments: list[str]) -> None:
    """A metric that TritonBench has not would leave its column blank."""
    asked = arguments[arguments.index("--metrics") + 1].split(",") if "--metrics" in arguments else []
    known = _known_metrics(setup.op)
    for name in asked:
        if name not in known:
            raise UsageError(
                f"TritonBench has no metric {name!r}; it has: {', '.join(known)}. --host builtin has others, "
                "which records hold in any case"
            )


def _list(setup: Setup, cls: Any) -> None:
    """Print what there is of an operator of TritonBench's."""
    op = setup.op
    if "operators" in setup.lists:
        modes = "fwd" if cls.FWD_ONLY else "fwd, bwd, fwd_bwd"
        precision = "its inputs' precision" if cls.DEFAULT_PRECISION == NO_PRECISION else cls.DEFAULT_PRECISION
        print(f"{op}: TritonBench's; modes {modes}; {precision} unless --precision says another")
    if "backends" in setup.lists:
        print(f"{op}:")
        for name, backend in triton_op.REGISTERED_BENCHMARKS.get(op, {}).items():
            mark = " (baseline)" if backend.baseline else ""
            print(f"  {name}{mark}: TritonBench's{'' if backend.enabled else ', not installed here'}")
    if "metrics" in setup.lists:
        for name in _known_metrics(op):
            print(name)


def _refuse_arguments(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """In place of a page of usage."""
    raise UsageError(message)


def _run(setup: Setup, arguments: list[str]) -> None:
    """Prepare TritonBench's operator, or ours as one of its own, and run it."""
    name = setup.op
    is_ours = name in operator_names()
    loaded = [] if is_ours else [load_plugin(path) for path in setup.plugins]
    for path, function in zip(setup.plugins, loaded, strict=False):
        if not callable(function):
            raise UsageError(
                f"plugin {path!r}: {name} is TritonBench's, for which a plugin is a function that registers its "
                f"backends with TritonBench: {function!r}"
            )
        function()
    ours = get_operator(name, setup.plugins).in_mode(setup.mode) if is_ours else None
    if setup.own:
        assert ours is not None
        cls = own_operator(setup, ours)
        add_backends(cls, name, ours, own=True)
        add_operator(name, recording(cls, setup, ours))
    elif not name.startswith("aten::"):
        try:
            module = importlib.import_module(f"{PACKAGE}.{name}")
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name == f"{PACKAGE}.{name}":
                theirs = ", ".join(sorted(Path(path).name for path in operator_list._list_opbench_paths()))
                raise UsageError(
                    f"no operator {name!r}; there are: {', '.join(operator_names())}; TritonBench's: {theirs}"
                ) from error
            raise UsageError(f"TritonBench's operator {name} does not import here: {describe(error)}") from error
        base: Any = module.Operator
        if ours is not None:
            add_backends(base, name, ours)
        if setup.lists:
            _list(setup, base)
            return
        setattr(module, "Operator", recording(base, setup, ours))  # noqa: B010 - a module has no such attribute by type
    _check_metrics(setup, arguments)
    sys.argv = ["run.py", *arguments]
    try:
        run_utils.tritonbench_run(arguments)
    except OSError as error:
        files = [value for flag, value in pairwise(arguments) if flag in ("--output", "--output-json")]
        wrote = " and ".join(["its table", *files])
        raise Incomplete(f"TritonBench, which writes {wrote}: {describe(error)}") from error


def main() -> None:
    """Run TritonBench on the arguments behind the setup file's name; what ends it is told in a line."""
    setup = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Setup)
    argparse.ArgumentParser.error = _refuse_arguments  # type: ignore[assignment,method-assign]
    try:
        _run(setup, sys.argv[2:])
    except Exception as error:
        _tell(setup, Event(refused=str(error) if isinstance(error, GroupbenchError) else describe(error)))
        sys.exit(ExitCode.USAGE)


if __name__ == "__main__":
    main()
