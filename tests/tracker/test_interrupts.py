"""A program that is interrupted reports this in one line, at any moment of its life, with what it kept."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
import click
from groupbench.tracker.tools import shell, signals

moment, name = sys.argv[1:3]
def at(here):
    if here == moment:
        os.kill(os.getpid(), signal.Signals[name])
        raise AssertionError("not interrupted")
signals.report_and_end("program")
at("imports")
@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def command():
    at("command")
    with signals.keeping(lambda: "2 cells kept"), signals.keeping(lambda: "inner"):
        at("work")
        if moment == "child":
            raise KeyboardInterrupt
shell.run("program", command, RuntimeError)
"""


@pytest.mark.parametrize(
    ("moment", "name", "code", "line"),
    [
        ("imports", "SIGTERM", -15, "program: interrupted"),
        ("imports", "SIGINT", -2, "program: interrupted"),
        ("command", "SIGHUP", 130, "program: interrupted"),
        ("work", "SIGTERM", 130, "program: interrupted; 2 cells kept"),
        ("child", "SIGINT", 130, "program: interrupted; 2 cells kept"),
    ],
)
def test_an_interrupt_is_reported_once(moment: str, name: str, code: int, line: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, moment, name], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, f"{line}\n")


STARTS = """
import os, signal, sys
from groupbench.tracker.facts.programs import own_program
from groupbench.tracker.tools import signals

signals.report_and_end("first")
signal.signal(signal.SIGINT, signal.default_int_handler)
really = os.execvpe
def start(*arguments):
    os.kill(os.getpid(), signal.SIGINT)
    really(*arguments)
os.execvpe = start
signals.become(own_program("groupbench.tracker", "--help"), os.environ)
"""


def test_a_program_of_ours_that_starts_takes_an_interrupt_of_its_first_moment() -> None:
    done = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-2, "groupbench: interrupted\n")


def test_no_handler_is_left_when_a_program_starts() -> None:
    """Otherwise, a thread could take a signal just before `exec`, and the new program would not learn of it."""
    start = "def start(*arguments):\n    print([signal.getsignal(number) is signal.SIG_DFL for number in (1, 2, 15)])\n"
    a, _, b = STARTS.partition("def start")
    program = f"{a}{start}{b[b.index('os.execvpe = ') :]}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[True, True, True]\n", done.stderr
