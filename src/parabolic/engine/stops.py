"""Ctrl-C and SIGTERM, deferred until the current step is complete and can be checkpointed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any, Self

__all__ = ["PutOff"]

PATIENCE = 5.0  # seconds that a signal may be deferred


class PutOff:
    """A context in which the first SIGINT or SIGTERM is deferred until `obey` is called or the context ends.

    A second signal takes effect at once, and so does the first after five seconds: its sender may soon follow with
    SIGKILL. But a repeated SIGTERM changes nothing: a cluster sends one to every process of a job, and the grid one to
    its workers. Taking effect means what would have happened otherwise: KeyboardInterrupt is raised, the process ends,
    or the handler installed before, or meanwhile, is called. Ignored signals stay ignored. Only the main thread handles
    signals: in other threads, and in forked processes, nothing changes.

    >>> try:
    ...     with PutOff() as stop:
    ...         signal.raise_signal(signal.SIGINT)
    ...         print("asked to stop:", stop.asked)
    ... except KeyboardInterrupt:
    ...     print("stopped")
    asked to stop: True
    stopped
    """

    def __init__(self) -> None:
        self._deferred: int | None = None  # the deferred signal
        self._handlers: dict[int, Any] = {}  # the previous ones
        self._timer: threading.Timer | None = None
        self._late = False  # whether it has been deferred for long enough
        self._process = os.getpid()

    @property
    def asked(self) -> bool:
        """Whether a signal has been deferred."""
        return self._deferred is not None

    def obey(self) -> None:
        """Let the deferred signal, if any, take effect."""
        deferred, self._deferred = self._deferred, None
        if self._timer is not None:
            self._timer.cancel()
        if deferred is not None:
            self._restore_handlers()
            signal.raise_signal(deferred)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (None, signal.SIG_IGN):  # None: not set by Python, so not restorable
                    self._handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore_handlers()
        self.obey()

    def _handle(self, number: int, _: object) -> None:
        if number == self._deferred == signal.SIGTERM and not self._late:
            return
        is_repeated, self._deferred = self.asked, number
        if is_repeated or os.getpid() != self._process:  # a forked process has no step to finish
            self.obey()
            return
        self._timer = threading.Timer(PATIENCE, self._remind)
        self._timer.daemon = True
        self._timer.start()

    def _remind(self) -> None:
        """Send the deferred signal again, directly to the main thread, which may be blocked in a system call."""
        self._late = True
        if self._deferred is not None and sys.platform != "win32":
            signal.pthread_kill(threading.main_thread().ident or 0, self._deferred)

    def _restore_handlers(self) -> None:
        while self._handlers:
            number, previous = self._handlers.popitem()
            if signal.getsignal(number) == self._handle:  # not one that was installed meanwhile
                signal.signal(number, previous)
