"""Run the command in this script's arguments, a fork server, in a fork of the server in server.py.

This process stands for the fork server: it has its parent, and ends when the fork server does, with its exit code. If
this process is killed, so is the fork server. Without a server, the command itself is run.
"""

import array
import json
import os
import signal
import socket
import sys

ARGUMENTS = sys.argv[1:]


def is_inherited(number: int) -> bool:
    """Return whether a file was open before this process started."""
    try:
        return os.get_inheritable(number)
    except OSError:  # the listing itself
        return False


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a fork server does
    kept = [int(name) for name in os.listdir("/proc/self/fd") if is_inherited(int(name))]  # noqa: PTH208
    try:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(os.environ["GROUPBENCH_TEST_WARM"] + "/socket")
    except OSError:
        os.execv(ARGUMENTS[0], ARGUMENTS)
    body = {"argv": ARGUMENTS, "environment": dict(os.environ), "folder": os.getcwd(), "descriptors": kept}  # noqa: PTH109
    message = json.dumps(body).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", kept))]
    connection.sendmsg([len(message).to_bytes(8, "big")], rights)
    connection.sendall(message)
    for number in kept:
        os.close(number)
    answer = connection.recv(16)
    code = int(answer or b"1")
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
