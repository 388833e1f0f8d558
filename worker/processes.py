"""Starts children of the supervisor: the first is a copy of this process, later ones are its program started anew."""

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress

SUPERVISED = "V4FLASH_SUPERVISED"
"""Which file descriptor of a fresh child is its end of the line."""


class PidProcess:
    """A child of this process, watched and ended by its descriptor, so that no other process can be meant."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    async def wait(self) -> int:
        """May be awaited once."""
        ended = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._fd, ended.set_result, None)
        try:
            await ended
        finally:
            asyncio.get_running_loop().remove_reader(self._fd)
        _, status = os.waitpid(self.pid, 0)  # noqa: ASYNC222  it has ended, so nothing is waited for
        return os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)


def fork() -> tuple[PidProcess | None, socket.socket]:
    """Split this process, which may not have threads yet, so that what it has imported is there at once. The parent
    gets the child and its own end of the line; the child gets None and the other end."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        return None, theirs
    theirs.close()
    return PidProcess(pid), ours


def spawn() -> tuple[PidProcess, socket.socket]:
    """Start the program of this process again with its arguments: the child reads settings and code anew."""
    ours, theirs = socket.socketpair()
    theirs.set_inheritable(True)
    environ = {**os.environ, SUPERVISED: str(theirs.fileno())}
    pid = os.posix_spawn(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)
    theirs.close()
    return PidProcess(pid), ours


def inherited() -> socket.socket | None:
    """The line to the supervisor of a process that was spawned; None in one that a user started."""
    number = os.environ.pop(SUPERVISED, None)
    if number is None:
        return None
    line = socket.socket(fileno=int(number))
    line.set_inheritable(False)
    return line


def reap_orphans(ours: frozenset[int]) -> None:
    """Take leave of ended processes that are ours only because their parents have gone, as process 1 has to."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in ours:
                return  # whoever waits for it takes leave of it, and calls again
            os.waitpid(ended.si_pid, 0)
