"""A Python for the shell scripts that starts with everything imported: a client that asks a server to fork.

The server is a child of the fork server. `CLIENT`, an executable script, sends its arguments, environment, working
directory and standard streams, passes signals on and ends as the program does: `python [-u] -m MODULE`, `FILE` or `-`.
What such a program starts by `sys.executable` or by multiprocessing's `spawn` is PYTHON_EXEC, where that is set, as it is
for torchrun; `spawn` has pipes of its own (`python -c CODE --multiprocessing-fork`), which are sent along.
"""

import fcntl
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import traceback

import torch

CLIENT = """\
#!{python} -IS
import json, os, signal, socket, sys
if "-c" in sys.argv and "--multiprocessing-fork" not in sys.argv:  # what watches over processes
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
opened = [file for file in range(256) if os.path.exists(f"/proc/self/fd/{{file}}") and os.get_inheritable(file)]
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
request = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "directory": os.getcwd(), "files": opened}}
socket.send_fds(server, [b"-"], opened)
server.sendall(json.dumps(request).encode() + b"\\n")
answers = server.makefile()
pid = int(answers.readline())
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
status = int(answers.readline())
sys.exit(status if status >= 0 else 128 - status)
"""


def serve(path):
    """Answer clients until killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that answer
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}.new")
        listener.listen(16)
        os.rename(f"{path}.new", path)  # who sees it is answered
        while True:
            client = listener.accept()[0]
            if os.fork() == 0:
                listener.close()
                try:
                    _answer(client)
                finally:
                    os._exit(0)
            client.close()


def _answer(client):
    """Run what a client asks for and tell it the process and its status. A client that is gone ends its program."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, _, _ = socket.recv_fds(client, 1, 64)
    request = json.loads(client.makefile().readline())
    pid = os.fork()
    if pid == 0:
        client.close()
        _become(request, files)
    client.sendall(b"%d\n" % pid)
    ended = os.pidfd_open(pid)
    if ended not in select.select([ended, client], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    client.sendall(b"%d\n" % status)


def _become(request, files):
    """This process is the program from here to its end."""
    apart = [fcntl.fcntl(file, fcntl.F_DUPFD, 256) for file in files]  # beyond all numbers that are asked for
    for file in files:
        os.close(file)
    for other, number in zip(apart, request["files"], strict=True):
        os.dup2(other, number)
        os.close(other)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.executable = os.environ.get("PYTHON_EXEC", sys.executable)
    multiprocessing.set_executable(sys.executable)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    status = 1
    try:
        _run([argument for argument in request["arguments"] if argument != "-u"])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(arguments):
    if "-c" in arguments:
        code = arguments.index("-c")
        sys.argv = arguments[code::2]  # -c --multiprocessing-fork
        exec(arguments[code + 1], {"__name__": "__main__"})  # noqa: S102 - what python -c does
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        if arguments[0] == "-":
            exec(compile(sys.stdin.read(), "<stdin>", "exec"), {"__name__": "__main__"})  # noqa: S102 - what python - does
        else:
            runpy.run_path(arguments[0], run_name="__main__")
