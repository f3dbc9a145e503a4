"""fsync, at once or beside the writer: on a shared disk one takes longer than many steps."""

import os
import threading
import time


class Syncs:
    """Makes what was written to one descriptor durable; what fails beside its writer is raised by the next call."""

    def __init__(self, descriptor: int, every_s: float) -> None:
        self._descriptor, self._every_s = descriptor, every_s
        self._begun_at = time.monotonic()
        self._thread: threading.Thread | None = None
        self._failure: OSError | None = None

    def soon(self) -> None:
        """Begin where the last one began ``every_s`` ago; a disk that takes longer than that is waited for."""
        self._raise()
        if time.monotonic() - self._begun_at > self._every_s:
            self._wait()
            self._begun_at = time.monotonic()
            self._thread = threading.Thread(target=self._beside, name="sync", daemon=True)
            self._thread.start()

    def now(self) -> None:
        """Return when all that was written is on disk."""
        self._raise()
        self._begun_at = time.monotonic()
        os.fsync(self._descriptor)

    def end(self) -> None:
        """The same, and the descriptor may be closed."""
        self._wait()
        self.now()

    def _beside(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self._failure = error

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise()

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure
