"""Run trials of Megatron's settings in forks of one process that has imported torch and Megatron's classes.

Importing torch takes a trial several seconds of processor time and is most of it. `check` starts
``python trial_server.py ask SOCKET`` here, which passes its request to ``trial_server.py serve SOCKET`` and
prints the answer. The server ends when its standard input is closed.
"""

from __future__ import annotations

import os
import socket
import sys


def ask(path: str) -> None:
    """Send this folder and standard input to the server; copy its answer to standard output."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(os.fsencode(os.getcwd()) + b"\n" + sys.stdin.buffer.read())
        # The server reads until the end of the request.
        connection.shutdown(socket.SHUT_WR)
        answer = received(connection)
    sys.stdout.buffer.write(answer)
    # A trial that raised has sent no answer; its traceback is in the server's standard error.
    sys.exit(not answer)


def serve(path: str) -> None:
    """Import, then fork a process for each request until standard input is closed."""
    import select
    import signal
    import warnings

    from megatron_rl.megatron import trial

    warnings.simplefilter("ignore")
    # Without any role it imports all that a trial imports.
    trial.collect_refusals([])
    # The kernel reaps the forked processes, for which nothing waits.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        # Standard input becomes readable when the fixture closes it.
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            connection = listener.accept()[0]
            if os.fork() == 0:
                answer_one(connection)
            connection.close()


def answer_one(connection: socket.socket) -> None:
    """Answer one request as the process of a trial does, then end this process."""
    import json
    import traceback

    from megatron_rl.megatron import trial

    try:
        folder, _, roles = received(connection).partition(b"\n")
        os.chdir(folder)
        connection.sendall(json.dumps(trial.collect_refusals(json.loads(roles))).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        # Without the interpreter's shutdown, which would run the server's exit handlers.
        os._exit(0)


def received(connection: socket.socket) -> bytes:
    """Return all bytes until the sender shuts the connection down."""
    chunks = []
    while chunk := connection.recv(2**16):
        chunks.append(chunk)
    return b"".join(chunks)


if __name__ == "__main__":
    {"ask": ask, "serve": serve}[sys.argv[1]](sys.argv[2])
