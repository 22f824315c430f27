"""Lockstep: a launch's programs wait for each other, so one DRAM read serves all.

Programs computing neighbouring tiles read the same operand rows and columns. If they read them at about the same time,
one DRAM read serves all. Left alone, programs drift apart by whole tiles. So they wait for each other every few steps:
each adds 1 to a counter in global memory, some steps before it polls the sum.

The wait is a hint, not a barrier. A program polling in vain, since another kernel occupies an SM, goes on and never
waits again in this launch. The counter is never reset: every program of every launch adds ARRIVALS in all, so the sum
of the launches before is known if all of them have the same number of programs. Launches that share a counter at the
same time disturb each other's waits, not their results.

docs/notes/kernels/grouped-gemm.md has the measurements behind it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from groupbench.kernels.grouped_gemm import lockstep_counter

LEAD = gl.constexpr(lockstep_counter.LEAD)
ARRIVALS = gl.constexpr(lockstep_counter.ARRIVALS)
POLLS = gl.constexpr(lockstep_counter.POLLS)


@gluon.jit
def arrivals_before(arrivals_ptr, NUM_PROGRAMS: gl.constexpr):
    """Return all earlier launches' arrivals."""
    LAUNCH: gl.constexpr = ARRIVALS * NUM_PROGRAMS
    return gl.load(arrivals_ptr, volatile=True) // LAUNCH * LAUNCH


@gluon.jit
def keep_step(
    arrivals_ptr,
    reached,  # the sum that the next wait is for, less NUM_PROGRAMS; at first `arrivals_before`
    until,  # steps until the next wait; at first LOCKSTEP
    to_arrive,  # how often this program may still arrive; it must add what is left at its end
    to_wait,  # how often it may still wait
    LOCKSTEP: gl.constexpr,  # steps between two waits
    NUM_PROGRAMS: gl.constexpr,
):
    """Arrive or wait if either is due before this step. Return (reached, until, to_arrive, to_wait)."""
    if (until == LEAD) & (to_arrive > 0):
        gl.atomic_add(arrivals_ptr, 1, sem="relaxed")
        to_arrive -= 1
    if until == 0:
        until = LOCKSTEP
        reached += NUM_PROGRAMS
        polls = 0
        if to_wait > 0:
            while (polls < POLLS) & (gl.load(arrivals_ptr, volatile=True) < reached):
                polls += 1
        to_wait = gl.where(polls < POLLS, to_wait - 1, 0)
    return reached, until - 1, to_arrive, to_wait
