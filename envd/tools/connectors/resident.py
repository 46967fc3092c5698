"""The interpreter of the tool `python`: a process that runs the code of one call after another in one module.

`python3 -c SOURCE ADDRESS` listens on an abstract socket, which is private to the sandbox. A call is one connection:
the code with the descriptor that takes the output, then, from here, one byte when the code begins and one when it has
ended (b"1": no exception). A caller that ends its side, or dies, interrupts the code; one that has gone before it
begins prevents it.
"""

from __future__ import annotations

import sys

if sys.path[:1] == [""]:
    del sys.path[0]  # no file of the workspace takes the place of a module below

import ast
import fcntl
import linecache
import os
import signal
import socket
import struct
import threading
import traceback
import types
from typing import Any

MOST = 1 << 20
"""Bytes of code."""
CREDENTIALS = struct.Struct("3i")
running = False
"""Whether code of a call runs."""
left = False
"""Whether the caller has ended its side."""
opened: list[socket.socket] = []
"""Sockets, which no child of the code may keep: its caller would wait for it."""


def main(address: str) -> None:
    """Serve calls until the sandbox ends."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + address)
    listener.listen()
    opened[:] = [listener]
    os.register_at_fork(after_in_child=_close_all)
    sys.path.insert(0, "")
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    home, count = os.getpid(), 0
    while True:
        connection = listener.accept()[0]
        count += 1
        opened[1:] = [connection]
        with connection:
            if CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1] == os.getuid():
                _serve(connection, module, f"<call {count}>", home)


def _serve(connection: socket.socket, module: types.ModuleType, name: str, home: int) -> None:
    global left
    size, descriptors, _, _ = socket.recv_fds(connection, 4, 1)
    if len(size) != 4 or not descriptors:
        return  # the caller died
    code = b""
    while len(code) < min(int.from_bytes(size, "big"), MOST) and (data := connection.recv(65536)):
        code += data
    try:
        connection.sendall(b"+")
    except OSError:
        os.close(descriptors[0])
        return  # the caller has gone
    _redirect(descriptors[0])
    left = False
    watch = threading.Thread(target=_interrupt_at_end, args=(connection,), daemon=True)
    signal.signal(signal.SIGINT, _interrupted)
    watch.start()
    passed = False
    try:
        passed = _execute(code.decode("utf-8", "surrogateescape"), module, name)
    finally:
        if os.getpid() != home:
            os._exit(0)  # a child that the code forked
    _redirect(os.open(os.devnull, os.O_RDWR))
    _flush()  # what could not be written is not the next call's
    try:
        connection.sendall(b"1" if passed else b"0")
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the caller has gone
    watch.join()


def _close_all() -> None:
    for each in opened:
        each.close()


def _redirect(descriptor: int) -> None:
    """Make a descriptor, which is closed, standard output and error, also if the code has closed these."""
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    for number in (1, 2):
        os.dup2(high, number)
    os.close(high)


def _interrupt_at_end(connection: socket.socket) -> None:
    global left
    connection.recv(1)
    left = True
    if running:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _interrupted(*_: Any) -> None:
    if running:
        raise KeyboardInterrupt


def _execute(code: str, module: types.ModuleType, name: str) -> bool:
    """Run code and print the last expression's value; whether it raised nothing."""
    global running
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    try:
        try:
            running = True
            if left:
                raise KeyboardInterrupt
            body = ast.parse(code, name).body
            last = [body.pop()] if body and isinstance(body[-1], ast.Expr) else []
            exec(compile(ast.Module(body, []), name, "exec", dont_inherit=True), module.__dict__)
            exec(compile(ast.Interactive(last), name, "single", dont_inherit=True), module.__dict__)  # prints its value
        finally:
            running = False
        words, passed = "", True
    except BaseException as error:  # noqa: BLE001 - whatever the code raises is its answer
        told = traceback.TracebackException.from_exception(error)
        told.stack[:] = [each for each in told.stack if each.filename != "<string>"]  # without this module
        words, passed = "".join(told.format()), False
    _flush(words)
    return passed


def _flush(words: str = "") -> None:
    for stream, text in ((sys.stdout, ""), (sys.stderr, words)):
        try:
            stream.write(text)
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # the code closed it, or its reader has gone


if __name__ == "__main__":
    main(sys.argv[1])
