"""TritonBench's operators with a record of each cell."""

from __future__ import annotations

import contextlib
import math
import pickle
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.utils._pytree import tree_map_only

from groupbench.operators.errors import Unavailable, UsageError
from groupbench.operators.hosts import foreign
from groupbench.operators.hosts.adapter.arguments import check_backends, check_inputs, parsed, protocol_name
from groupbench.operators.hosts.adapter.internals import triton_op
from groupbench.operators.hosts.adapter.own import (
    OperatorContext,
    derived,
    dtype_of,
    example_of,
    inputs_of,
    interpreted_here,
)
from groupbench.operators.hosts.journal import Event, Finished, Setup, send
from groupbench.operators.measure import accuracy, compiled
from groupbench.operators.measure.faults import describe, is_oom, located
from groupbench.operators.measure.given import Given
from groupbench.operators.measure.loaded import watch
from groupbench.operators.measure.protocol import timing_of
from groupbench.operators.measure.texts import one_line
from groupbench.operators.operator import Operator
from groupbench.tracker.facts.record import Accuracy, Cell, Code, Latency

if TYPE_CHECKING:
    Base = Any
else:
    Base = object

TIMED = {"latency", "tflops", "gbps", "speedup", "compile_time"}
"""Metrics for which TritonBench takes latencies."""

OUTPUTS = (triton_op.Mode.FWD, triton_op.Mode.FWD_NO_GRAD)
"""Modes in which a backend's function returns its output."""

NO_BASELINE = "no baseline was measured with it"
UNLIKE_ITSELF = "two runs of the baseline differ by more than the tolerance"


class SpoiltInputs(RuntimeError):
    """Another backend has changed the inputs. No line in this backend is at fault, so the record does not name one."""


def recording(base: Any, setup: Setup, ours: Operator | None) -> type:
    """Return a subclass of a TritonBench operator that reports each cell to the parent."""
    metrics = tuple(base.DEFAULT_METRICS)
    # A record needs a latency, which the default metrics of launch_latency, for one, lack.
    wanted = [*metrics] if TIMED & {*metrics} else [*metrics, "latency"]
    finished = {(done.input_id, done.backend): done for done in setup.finished}
    context = OperatorContext(setup, ours, metrics, finished)
    return derived(setup.op, (Recording, base), {"DEFAULT_METRICS": wanted, "groupbench": context})


class Recording(Base):
    """A cell of a TritonBench operator, reported to the parent as a record; it survives a backend that raises."""

    groupbench: OperatorContext
    groupbench_bursts: list[tuple[float, ...]] | None = None
    groupbench_enqueue_ms: float | None = None
    groupbench_code: dict[str, Code]
    groupbench_interpreted = False
    example_inputs: Any
    _groupbench_reference: tuple[int | None, Any] = (None, None)
    # The input's number, its checksums, and the last backend that had it.
    _groupbench_inputs_seen: tuple[int | None, Given, str] | None = None

    def __init__(self, tb_args: Any = None, extra_args: Any = None) -> None:
        if tb_args.output_dir:  # TritonBench misses it only after measuring
            Path(tb_args.output_dir).mkdir(parents=True, exist_ok=True)
        self.groupbench_names: Counter[str] = Counter()
        self.groupbench_reported: set[tuple[str, str]] = set()
        self.groupbench_protocol = protocol_name(tb_args, self.groupbench.setup)
        with parsed(extra_args) as (self.groupbench_options, unknown):
            super().__init__(tb_args=tb_args, extra_args=extra_args)
        if unknown:
            raise UsageError(f"unknown option or argument: {' '.join(unknown)}")

    def __post__init__(self) -> None:
        try:
            super().__post__init__()
        except Exception as error:  # the loader's message does not name the option
            if self.tb_args.input_loader:
                raise UsageError(f"--input-loader {self.tb_args.input_loader}: {describe(error)}") from error
            raise
        check_inputs(self)
        check_backends(self, self.groupbench.setup)

    def run(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().run(*args, **kwargs)
        except Exception as error:  # TritonBench shows its table and drops the error
            send(self.groupbench.setup, Event(refused=describe(error)))
            raise

    def get_example_inputs(self) -> Any:
        """Name each input. Inputs with equal names are numbered, whichever of them are measured."""
        inputs = super().get_example_inputs()
        if inputs is not None:
            if self.groupbench.ours is not None:
                name = str(example_of(self.groupbench.operator, inputs).shape)
            else:
                name = foreign.shape_text(self.get_x_val(inputs), inputs, self.groupbench_options)
            self.groupbench_names[name] += 1
            number = self.groupbench_names[name]
            self.groupbench_name = name if number == 1 else f"{name} #{number}"
        return inputs

    def _get_bm_func(self, bm_func_name: str) -> Any:
        if self.groupbench.ours is not None:
            self._groupbench_check_inputs(bm_func_name)
        start = time.perf_counter()
        # Not while TritonBench times: describing a kernel takes longer than running it.
        self.groupbench_code = {}
        with compiled.watched(self.groupbench_code) as self.groupbench_kernels, compiled.interpreted() as launched:
            fn = super()._get_bm_func(bm_func_name)
            fn()
        self.groupbench_interpreted = bool(launched)
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.groupbench_prepare_ms = 1e3 * (time.perf_counter() - start)
        self.groupbench_fn = fn
        return fn

    def _groupbench_check_inputs(self, backend: str) -> None:
        """Check that no backend changed the inputs, which TritonBench passes to all of them; make ours again."""
        key, checksums, before = self._groupbench_inputs_seen or (None, None, "")
        if checksums is None or key != self._cur_input_id:
            checksums = Given(inputs_of(self.example_inputs))
        elif checksums.misuse():
            if not self.groupbench.setup.own:
                raise SpoiltInputs(f"not measured: {before} has changed the inputs, which all backends share")
            self.example_inputs = self.groupbench_inputs(
                example_of(self.groupbench.operator, self.example_inputs).shape
            )
            self._groupbench_reference = (None, None)
            checksums = Given(inputs_of(self.example_inputs))
        self._groupbench_inputs_seen = (self._cur_input_id, checksums, backend)

    def _do_bench(self, input_id: int, fn_name: str, *args: Any, **kwargs: Any) -> Any:
        baseline = bool(kwargs.get("baseline"))
        done = self.groupbench.finished.get((input_id, fn_name))
        if done is not None and (done.metrics is None or not baseline):
            return _restored(done)
        left = len(self._input_ids) - self._input_ids.index(input_id) - 1
        event = Event(input_id, fn_name, left=left, baseline=baseline, begun=_cell(self, fn_name))
        send(self.groupbench.setup, event)
        start = time.perf_counter()
        self.groupbench_bursts = self.groupbench_fn = None
        self.groupbench_kernels, self.groupbench_code = [], {}
        facts: dict[str, Any] = {}
        try:
            metrics = super()._do_bench(input_id, fn_name, *args, **kwargs)
        except Exception as error:
            traceback.print_exc()
            metrics = triton_op.BenchmarkOperatorMetrics(error_msg=describe(error), extra_metrics={})
            message = str(error) if isinstance(error, SpoiltInputs) else located(error)
            facts = {"status": "oom" if is_oom(error) else "error", "message": message}
        if not facts:
            facts = self._groupbench_facts(metrics, baseline)
        if done is not None:  # a baseline that ran again for its output already has a record
            send(self.groupbench.setup, msgspec.structs.replace(event, begun=None))
        else:
            send(
                self.groupbench.setup,
                msgspec.structs.replace(
                    event,
                    begun=None,
                    cell=event.begun,
                    kernels=tuple(self.groupbench_kernels),
                    code=tuple(self.groupbench_code.values()),
                    duration_s=round(time.perf_counter() - start, 3),
                    metrics=_pickled(metrics),
                    seen=watch().loaded(),
                    **facts,
                ),
            )
        return metrics

    def _groupbench_facts(self, metrics: Any, baseline: bool) -> dict[str, Any]:
        latency = _latency(self, metrics)
        if metrics.error_msg:
            status = "oom" if "OOM" in metrics.error_msg else "unavailable"
            return {"status": status, "message": one_line(metrics.error_msg) or status, "latency": latency}
        measured, problem = None, None
        if self.groupbench.ours is not None and self.groupbench_fn is not None:
            try:
                measured, problem = self.groupbench_accuracy(self.groupbench_fn)
            except Exception as error:
                return {"status": "error", "message": describe(error), "latency": latency}
        elif self.groupbench.ours is None:
            measured, problem = self._groupbench_compared()
            problem = problem or (None if baseline else self._groupbench_judged(metrics.accuracy, measured))
        if problem is None and latency is None and measured is None:
            return {"status": "error", "message": "TritonBench measured neither latency nor accuracy"}
        status = "ok" if problem is None else "wrong"
        return {"status": status, "message": problem, "latency": latency, "accuracy": measured}

    def _groupbench_compared(self) -> tuple[Accuracy | None, str | None]:
        """Compare a backend on TritonBench's operator with the baseline, in modes with outputs."""
        if self.mode not in OUTPUTS or self.groupbench_fn is None:
            return None, None
        kept = getattr(self, "_groupbench_baseline", None)
        try:
            if kept is None or kept[0] != self._cur_input_id:
                baseline = getattr(self, "baseline_fn", None)
                # The baseline is measured first, so this function is it, unless the operator lacks a baseline.
                kept = (self._cur_input_id, foreign.tensors(baseline()) if baseline else None)
                self._groupbench_baseline = kept
            return foreign.compare_outputs(self.groupbench_fn, kept[1])[:2]
        except Exception as error:  # outputs that cannot be compared are not the backend's fault
            print(f"groupbench: {self._cur_backend_name} is not compared: {describe(error)}", file=sys.stderr)
            return None, None

    def _groupbench_judged(self, right: bool | None, measured: Accuracy | None) -> str | None:
        """Return why a backend's output is wrong, or None. Print once why it cannot be judged.

        If the operator's author or the user chose a tolerance, TritonBench's check decides; `right` is the result if
        the column is shown. Without one, torch's default tolerance would apply, which is for elements that should be
        equal and fails sums in another order. So the output's distance from the baseline's decides then.
        """
        args = self.tb_args
        checked = type(self).accuracy != triton_op.BenchmarkOperator.accuracy or "accuracy" in self.groupbench.metrics
        try:
            if checked or args.bitwise or args.rtol is not None or args.atol is not None:
                return self._groupbench_checked(right)
            return self._groupbench_distant(measured)
        except Unavailable as reason:
            why = str(reason)
        except Exception as error:
            why = describe(error)
        if (self._cur_backend_name, why) not in self.groupbench_reported:
            self.groupbench_reported.add((self._cur_backend_name, why))
            print(f"groupbench: {self._cur_backend_name} is not judged: {why}", file=sys.stderr)
        return None

    def _groupbench_checked(self, right: bool | None) -> str | None:
        fn, baseline = self.groupbench_fn, getattr(self, "baseline_fn", None)
        if fn is None or baseline is None:
            raise Unavailable(NO_BASELINE)
        if self.mode in OUTPUTS:  # the check writes NaN to outputs, which may share memory with the inputs
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
        if measured is None or measured.unwritten is None:
            raise Unavailable("TritonBench has no tolerance for it: --rtol and --atol give one")
        if not foreign.is_distant(measured, dtype_of(self)):
            return None
        itself = foreign.compare_outputs(self.baseline_fn, self._groupbench_baseline[1])[0]
        if itself is None or foreign.is_distant(itself, dtype_of(self)):
            raise Unavailable(UNLIKE_ITSELF)
        return f"its output is not the baseline's: relative RMS error {measured.rms or math.nan:.2g}"

    def groupbench_accuracy(self, fn: Any) -> tuple[Accuracy, str | None]:
        key = self._cur_input_id
        if self._groupbench_reference[0] != key:
            self._groupbench_reference = (
                key,
                self.groupbench.operator.reference(example_of(self.groupbench.operator, self.example_inputs).inputs),
            )
        backend, args = self._cur_backend_name, self.tb_args
        return accuracy.check_backend(
            fn,
            self._groupbench_reference[1],
            self.groupbench.operator,
            backend,
            dtype_of(self),
            args.rtol,
            args.atol,
            given=self._groupbench_inputs_seen[1] if self._groupbench_inputs_seen else None,
        )


def _copying(fn: Any) -> Any:
    return lambda: tree_map_only(torch.Tensor, torch.clone, fn())


def _cell(op: Any, backend: str) -> Cell:
    setup, ours = op.groupbench.setup, op.groupbench.ours
    dtype = dtype_of(op)
    facts: dict[str, Any] = {}
    if ours is not None:
        shape = example_of(ours, op.example_inputs).shape
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


def _latency(op: Any, metrics: Any) -> Latency | None:
    ours = op.groupbench.ours
    times = getattr(metrics.latency, "times", None)
    bursts = op.groupbench_bursts or (times and [tuple(max(float(ms), 1e-6) for ms in times)])
    if not bursts:
        return None
    kind = next((b.kind for b in ours.backends if b.name == op._cur_backend_name), None) if ours else None
    interpreted = interpreted_here() and kind != "torch" if kind else op.groupbench_interpreted
    return Latency(
        timing=timing_of(op.device, interpreted),
        bursts_ms=tuple(bursts),
        prepare_ms=op.groupbench_prepare_ms,
        enqueue_ms=op.groupbench_enqueue_ms,
    )


def _restored(done: Finished) -> Any:
    if done.metrics is not None:
        return pickle.loads(done.metrics)  # noqa: S301 # written by this user's own process a moment ago
    return triton_op.BenchmarkOperatorMetrics(error_msg=done.message, extra_metrics={})


def _pickled(metrics: Any) -> bytes | None:
    with contextlib.suppress(Exception):
        return pickle.dumps(metrics)
    return None
