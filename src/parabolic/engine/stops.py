"""Ctrl-C and SIGTERM, put off until what was learned is whole and can be written down."""

from __future__ import annotations

import signal
import sys
import threading
from types import TracebackType
from typing import Any, Self

__all__ = ["PutOff"]

PATIENCE = 5.0  # seconds


class PutOff:
    """Within it the first SIGINT or SIGTERM waits until it is obeyed.

    A second one is obeyed at once, and so is the first if it has waited for five seconds: whoever sent it may soon send
    one that cannot wait. To obey is to do what would have been done without: to raise KeyboardInterrupt, to end the
    process, or to call the handler that someone has set. A signal that is ignored stays ignored. Signals are the main
    thread's: in any other nothing changes.

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
        self._first: int | None = None  # the signal that waits
        self._handlers: dict[int, Any] = {}  # of before
        self._timer: threading.Timer | None = None

    @property
    def asked(self) -> bool:
        """Whether a signal waits to be obeyed."""
        return self._first is not None

    def obey(self) -> None:
        """Do what the signal that waits, if there is one, would have done."""
        waits, self._first = self._first, None
        if self._timer is not None:
            self._timer.cancel()
        if waits is not None:
            self._give_back()
            signal.raise_signal(waits)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (None, signal.SIG_IGN):  # None: not Python's to give back
                    self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()
        self.obey()

    def _note(self, number: int, _: object) -> None:
        again, self._first = self.asked, number
        if again:
            self.obey()
            return
        self._timer = threading.Timer(PATIENCE, self._remind)
        self._timer.daemon = True
        self._timer.start()

    def _remind(self) -> None:
        """Send the signal that waits once more; to the main thread itself, which may wait for something else."""
        if self._first is not None and sys.platform != "win32":
            signal.pthread_kill(threading.main_thread().ident or 0, self._first)

    def _give_back(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())
