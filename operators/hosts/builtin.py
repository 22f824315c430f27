"""The built-in host: measures operators with nothing but groupbench installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from groupbench.operators import executor, plan, resume
from groupbench.operators.errors import UsageError
from groupbench.operators.measure.cell import Job
from groupbench.operators.plan import Selection
from groupbench.operators.session import Session


def resolve_device(asked: str) -> str:
    """ "cuda" or "cpu" of what the user asked, "auto" included; sets up Triton's interpreter for a CPU.

    Raises UsageError where TRITON_INTERPRET contradicts the device.
    """
    device = asked
    if asked == "auto":
        device = "cuda" if _gpu_driver() and _torch_sees_gpu() else "cpu"
    if device == "cpu":
        # Read when kernels are defined, so before anything imports Triton, the fork server included.
        os.environ["TRITON_INTERPRET"] = "1"
    elif os.environ.get("TRITON_INTERPRET", "0").lower() not in ("", "0", "false", "off", "no"):
        raise UsageError("TRITON_INTERPRET is set: interpreted kernels run with --device cpu; unset it to use the GPU")
    return device


def _gpu_driver() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0") != "" and (
        Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    )


def _torch_sees_gpu() -> bool:
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def list_jobs(selections: list[Selection], device: str) -> list[Job]:
    """Every cell of the selections, each once."""
    jobs = [job for selection in selections for job in plan.jobs(selection, device, interpreted=device == "cpu")]
    return list(dict.fromkeys(jobs))


def measure(selections: list[Selection], device: str, session: Session) -> int:
    """Measure, show and write the selections. Returns the exit code."""
    jobs = list_jobs(selections, device)
    late = resume.left_out(session.previous) if session.previous is not None else frozenset()
    jobs = executor.first_of(jobs, lambda job: resume.key_of_job(job) in late)
    machine = executor.probe(device)
    session.open("built-in host", machine.environment)
    jobs = resume.not_done(jobs, session.records)
    return session.collect(
        lambda run, progress: executor.execute(jobs, machine, run, session.timeout_s, progress, session.budget_s),
        len(jobs),
    )
