"""How far an upload is: for a progress bar, a log line, a dashboard."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

logger = logging.getLogger("stockpot")

LOG_EVERY_S = 10.0  # at most one line of an upload in this time


@dataclass(frozen=True)
class Progress:
    """The upload under way, and what waits behind it. Bytes are logical ones of this rank."""

    step: int = -1  # being uploaded; -1: none
    total_bytes: int = 0  # of it
    done_bytes: int = 0  # that are in the store: sent, or there already
    sent_bytes: int = 0  # of these, that travelled
    seconds: float = 0.0  # since it began
    bytes_per_second: float = 0.0  # done_bytes over seconds
    waiting: int = 0  # staged saves behind it
    spooled: int = 0  # checkpoints on the local disk
    spooled_bytes: int = 0

    @property
    def share(self) -> float:
        """Done of the upload under way, 0..1."""
        return self.done_bytes / self.total_bytes if self.total_bytes else 0.0


class ProgressMeter:
    """Counts one upload at a time and logs it at a bounded rate. Any thread."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._step = -1  # guarded by _lock, as all below
        self._total = self._done = self._sent = 0
        self._begun = self._logged = 0.0

    def begin(self, step: int, total_bytes: int) -> None:
        """An upload begins, or begins again."""
        with self._lock:
            self._step, self._total, self._done, self._sent = step, total_bytes, 0, 0
            self._begun = self._logged = time.monotonic()

    def known(self, size: int) -> None:
        """So many bytes were in the store already."""
        self._add(size, 0)

    def sent(self, size: int) -> None:
        """So many bytes travelled."""
        self._add(size, size)

    def end(self) -> None:
        """No upload is under way."""
        with self._lock:
            self._step, self._total, self._done, self._sent = -1, 0, 0, 0

    def progress(self, waiting: int, spooled: int, spooled_bytes: int) -> Progress:
        """As it is now."""
        with self._lock:
            return self._now(waiting, spooled, spooled_bytes)

    def _now(self, waiting: int = 0, spooled: int = 0, spooled_bytes: int = 0) -> Progress:
        if self._step < 0:
            return Progress(waiting=waiting, spooled=spooled, spooled_bytes=spooled_bytes)
        seconds = time.monotonic() - self._begun
        return Progress(self._step, self._total, self._done, self._sent, seconds,
                        self._done / seconds if seconds > 0 else 0.0, waiting, spooled,
                        spooled_bytes)

    def _add(self, done: int, sent: int) -> None:
        with self._lock:
            self._done += done
            self._sent += sent
            is_due = time.monotonic() - self._logged >= LOG_EVERY_S
            if is_due:
                self._logged = time.monotonic()
            now = self._now()
        if is_due and now.step >= 0:
            logger.info("run %s: step %d: %.0f %% of %.1f MB, %.1f MB/s", self._run, now.step,
                        100 * now.share, now.total_bytes / 1e6, now.bytes_per_second / 1e6)
