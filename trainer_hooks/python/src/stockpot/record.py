"""What a hook did so far: its counters, and the failures that it tells of once."""

from __future__ import annotations

import dataclasses
import logging
import threading
from dataclasses import dataclass

from stockpot.errors import StockpotError
from stockpot.sending import as_stockpot_error

logger = logging.getLogger("stockpot")


@dataclass
class HookStats:
    """What a hook did so far. Counters only grow; bytes are logical ones of checkpoints."""

    staged: int = 0  # saves that were copied
    committed: int = 0  # saves that the daemon acknowledged as durable, all ranks' parts
    skipped: int = 0  # saves left out because every staging buffer was busy
    failed: int = 0  # saves given up: refused, too old, not stageable, or a rank never came
    spooled: int = 0  # saves that went to the spool first
    retries: int = 0
    staged_bytes: int = 0
    sent_bytes: int = 0  # payload that travelled; the rest was in the store already
    reports: int = 0  # evaluation results that the daemon took
    last_stall_s: float = 0.0  # of the last call that staged: what training waited
    total_stall_s: float = 0.0
    last_committed_step: int = -1
    last_artifact: str = ""  # hex digest of the last commit
    last_error: str = ""  # of the last failure; stays after recovery


class HookRecord:
    """Keeps the statistics of one run's hook and logs its failures. Any thread may call."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._stats = HookStats()  # guarded by _lock, as all below
        self._reported: set[str] = set()  # kinds of failure logged since the last success
        self._unseen_error: StockpotError | None = None

    def count(self, **deltas: float) -> None:
        """Adds to counters of the statistics."""
        with self._lock:
            for name, delta in deltas.items():
                setattr(self._stats, name, getattr(self._stats, name) + delta)

    def note(self, **values: object) -> None:
        """Sets fields of the statistics."""
        with self._lock:
            for name, value in values.items():
                setattr(self._stats, name, value)

    def stats(self) -> HookStats:
        """A copy."""
        with self._lock:
            return dataclasses.replace(self._stats)

    def succeeded(self, step: int, artifact: str) -> None:
        """A checkpoint is stored: counts it, and says so if uploads failed before."""
        with self._lock:
            self._stats.committed += 1
            self._stats.last_committed_step = max(step, self._stats.last_committed_step)
            self._stats.last_artifact = artifact
            was_failing = "upload" in self._reported
            self._reported.clear()
        logger.info("run %s: step %d is stored as %s", self._run, step, artifact[:12])
        if was_failing:
            logger.warning("run %s: uploads work again", self._run)

    def report_failure(self, kind: str, error: Exception, consequence: str) -> None:
        """Counts nothing; logs each loss, and of a kind the first since the last success."""
        with self._lock:
            self._stats.last_error = str(error)
            is_news = kind == "lost" or kind not in self._reported
            self._reported.add(kind)
        if is_news:
            logger.warning("run %s: %s (%s; training goes on)", self._run, error, consequence)

    def give_up(self, error: Exception, consequence: str, kind: str = "lost") -> None:
        """A save is lost: counts and reports it, and keeps it for take_error()."""
        with self._lock:
            self._stats.failed += 1
            self._unseen_error = as_stockpot_error(error)
        self.report_failure(kind, error, consequence)

    def take_error(self) -> StockpotError | None:
        """The last given-up save's error, once."""
        with self._lock:
            error, self._unseen_error = self._unseen_error, None
        return error
