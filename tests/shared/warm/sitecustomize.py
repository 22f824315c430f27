"""Let programs that tests start fork their fork servers from a process that has imported torch already.

Python imports this module when a program starts, if its folder is on PYTHONPATH. It starts
start.py instead of a fork server; see there. The program itself is not changed.
"""

import _posixsubprocess
import os

WARM = os.environ.get("GROUPBENCH_TEST_WARM")
START = os.path.join(os.path.dirname(__file__), "start.py")  # noqa: PTH118, PTH120 - pathlib takes a while to import
SERVER = b"from groupbench.operators.measure.fork_server import main;"
FLAGS = {b"-B", b"-P"}


def start(args, executables, *rest):  # type: ignore[no-untyped-def]
    """Start a program as `fork_exec` does, a fork server on a CPU by start.py."""
    words = [os.fsencode(word) for word in args]
    is_server = len(words) > 2 and words[-2] == b"-c" and SERVER in words[-1] and FLAGS.issuperset(words[1:-2])
    if is_server and os.environ.get("TRITON_INTERPRET") == "1":
        args = [words[0], b"-I", b"-S", os.fsencode(START), *words]
    return fork_exec(args, executables, *rest)


if WARM:
    fork_exec = _posixsubprocess.fork_exec
    _posixsubprocess.fork_exec = start
