"""The background half of a hook: hashes staged checkpoints and sends what the daemon lacks.

Threads: one uploader, which asks and commits over a connection of its own, and one sender per data
connection. All are daemon threads: they never keep a process alive, and they still run while
`atexit` handlers do. Nothing here raises into the training thread.

A save is tried until it is committed, refused for good, or older than the retry time. A retry opens
a new session; chunks that arrived are not sent again. With a spool, a save that cannot be sent now
goes to disk instead, and everything is sent in the order of its steps when the daemon is back.

Where several ranks make one checkpoint, a save is committed when the last rank's part is in. This
rank's part waits for that only while there is nothing else to send; it is asked after later. What
came from the spool stays there until then.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stockpot.errors import ErrorCode, StockpotError
from stockpot.progress import Progress
from stockpot.record import HookRecord
from stockpot.rpc.ttypes import GatherState, StepKey, StepState
from stockpot.sending import SaveJob
from stockpot.spool import Spool
from stockpot.staging import StagingBuffer
from stockpot.writing import RunWriter, Target

logger = logging.getLogger("stockpot")

# Limits.
MAX_QUEUED_REPORTS = 1000
SPILL_AFTER_S = 0.1  # queued while the memory is full: an idle uploader has taken it by then
FIRST_RETRY_S = 0.25
LAST_RETRY_S = 15.0
GATHER_POLL_S = 1.0  # how long one question after the other ranks' parts waits
MAX_GATHERS = 100  # checkpoints whose other parts are asked after

FORGOTTEN = "the daemon restarted, and does not have this rank's part any more"


@dataclass(frozen=True)
class ReportJob:
    """One evaluation result of a step that was saved."""

    step: int
    task: str
    metric: str
    value: float
    by: str


@dataclass(frozen=True)
class Gather:
    """A part that was sent, of a checkpoint whose other parts are awaited."""

    step: int
    key: StepKey
    rank: int
    spooled: Path | None  # its entry in the spool

    def is_forgotten(self, state: StepState) -> bool:
        """The daemon restarted without this part, and another rank was there before it."""
        return state.state == GatherState.OPEN and self.rank in state.missing


class Uploader:
    """Takes jobs in order and finishes each. Any thread may call."""

    def __init__(self, target: Target, connections: int, retry_for_s: float,
                 release: Callable[[StagingBuffer], None]) -> None:
        """`release` gets every buffer back, from the uploader's thread."""
        self._target = target
        self._retry_for_s = retry_for_s
        self._release = release
        self.record = HookRecord(target.run)
        self._writer = RunWriter(target, connections, self.record)
        # Of the uploader's thread alone.
        self._spool_delay_s = FIRST_RETRY_S
        self._spool_due = 0.0  # monotonic: when sending what is spooled is tried next
        self._deferred: deque[ReportJob] = deque()  # of steps that are still in the spool
        self._gathers: deque[Gather] = deque()  # other ranks' parts are awaited

        self._changed = threading.Condition()
        self._jobs: deque[SaveJob | ReportJob] = deque()  # guarded by _changed, as all below
        self._spool: Spool | None = None
        self._spool_is_new = False  # not looked into yet
        self._busy = False
        self._gathering = 0
        self._stopping = False
        self._spill_wanted = False
        self._spilling = 0
        self._spool_failed = False  # the last try to send what is spooled

        self._spiller = threading.Thread(target=self._spill, daemon=True, name="stockpot-spiller")
        self._spiller.start()
        self._thread = threading.Thread(target=self._work, daemon=True, name="stockpot-uploader")
        self._thread.start()

    def use_spool(self, spool: Spool) -> None:
        """From now on; what waits in it is sent as soon as possible. The uploader closes it."""
        with self._changed:
            self._spool = spool
            self._spool_is_new = True
            self._changed.notify_all()

    def wait_for_spool(self, timeout_s: float) -> bool:
        """Waits until the spool is empty. False: it is not within timeout_s."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._spool is None or not self._spool.count(), timeout_s)

    def submit(self, job: SaveJob | ReportJob) -> bool:
        """Queues a job. False: it is stopping, or too many reports wait; a buffer is released."""
        with self._changed:
            is_save = isinstance(job, SaveJob)
            accepted = not self._stopping and (is_save or len(self._jobs) < MAX_QUEUED_REPORTS)
            if accepted:
                self._jobs.append(job)
                self._changed.notify_all()
        if not accepted:
            self._give_back(job)
        return accepted

    def spill(self) -> None:
        """The memory for copies is full: what is queued goes to the spool, if there is one."""
        with self._changed:
            self._spill_wanted = True
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Waits until nothing is queued or under way, nor spooled while that gets sent.

        False: not within timeout_s.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._jobs and not self._busy and not self._gathering
                and not self._spilling
                and (self._spool_failed or self._spool is None or not self._spool.unsent()),
                timeout_s)

    def is_all_stored(self) -> bool:
        """Whether nothing was given up and nothing waits in the spool; else the log says where."""
        failed = self.record.stats().failed
        with self._changed:
            waiting = self._spool.count() if self._spool is not None else 0
        if waiting and self._spool is not None:
            logger.warning("run %s: %d checkpoints wait in %s for the daemon; the next hook of the "
                           "run that has this spool sends them", self._target.run, waiting,
                           self._spool.folder)
        return not failed and not waiting

    def stop(self, timeout_s: float) -> None:
        """Ends the threads. What is queued goes to the spool, or is dropped and counted.

        Waits up to timeout_s for that.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._writer.interrupt()
        self._thread.join(timeout_s)
        self._spiller.join(timeout_s)

    def progress(self) -> Progress:
        """Of the upload under way, and what waits behind it."""
        with self._changed:
            waiting = sum(isinstance(job, SaveJob) for job in self._jobs)
            spool = self._spool
        return self._writer.meter.progress(waiting, spool.count() if spool else 0,
                                    spool.size() if spool else 0)

    # --- the uploader's thread ---

    def _work(self) -> None:
        while not self._is_stopping():
            job = self._next()
            try:
                if job is not None:
                    self._finish(job)
            except Exception as error:  # whatever it is, the next job gets its chance
                if isinstance(job, SaveJob):
                    self.record.give_up(error, f"step {job.step} is not stored")
                else:
                    self.record.report_failure("report", error,
                                               "an evaluation result is not stored")
            finally:
                self._give_back(job)
            self._look_after_others()
            with self._changed:
                self._busy = False
                self._gathering = len(self._gathers)
                self._changed.notify_all()
        self._clear()
        self._writer.close()
        if self._spool is not None:
            self._spool.close()

    def _is_stopping(self) -> bool:
        with self._changed:
            return self._stopping

    def _give_back(self, job: SaveJob | ReportJob | None) -> None:
        if isinstance(job, SaveJob) and job.buffer is not None:
            self._release(job.buffer)

    def _next(self) -> SaveJob | ReportJob | None:
        """The next job, or None when something else is to be looked after, or it is stopping."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._jobs or self._spool_is_new,
                                   self._idle_s())
            self._spool_is_new = False
            if self._stopping or not self._jobs:
                return None
            self._busy = True
            return self._jobs.popleft()

    def _idle_s(self) -> float | None:
        """How long there is nothing to do but wait for jobs. None: for ever."""
        if self._gathers:
            return 0.0
        if self._deferred or (self._spool is not None and self._spool.unsent()):
            return max(0.0, self._spool_due - time.monotonic())
        return None

    def _clear(self) -> None:
        """At the end: what is queued goes to the spool or is dropped."""
        with self._changed:
            self._changed.wait_for(lambda: not self._spilling)
            left = [job for job in self._jobs if isinstance(job, SaveJob)]
            self._jobs.clear()
        closed = StockpotError(ErrorCode.UNAVAILABLE, "the hook was closed before the upload")
        for job in left:
            if not self._to_spool(job):
                self.record.count(failed=1)
                self.record.report_failure("lost", closed, f"step {job.step} is not stored")
            self._give_back(job)
        with self._changed:
            self._changed.notify_all()

    def _finish(self, job: SaveJob | ReportJob) -> None:
        """Tries until it is done. Raises the last error when it gives up."""
        # Older ones come first, and sending them may take long.
        if self._spool is not None and self._spool.unsent() and self._put_off(job):
            return
        deadline = time.monotonic() + self._retry_for_s
        delay_s = FIRST_RETRY_S
        while True:
            try:
                self._send_spooled()
                if isinstance(job, SaveJob):
                    self._save(job)
                else:
                    self._report(job)
                return
            except StockpotError as error:
                if not error.retryable:
                    raise
                if self._put_off(job):
                    self.record.report_failure("upload", error, "kept in the spool, trying again")
                    return
                if time.monotonic() + delay_s > deadline:
                    raise
                self.record.report_failure("upload", error, "trying again")
            self.record.count(retries=1)
            # Jitter, so that many ranks do not come back at the same moment.
            if self._wait_for_stop(delay_s * random.uniform(0.5, 1.0)):
                if self._put_off(job):
                    return
                raise StockpotError(ErrorCode.UNAVAILABLE, "the hook was closed before the upload")
            delay_s = min(2 * delay_s, LAST_RETRY_S)

    def _wait_for_stop(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._stopping, timeout_s)

    # --- the spool ---

    def _spill(self) -> None:
        """The spiller's thread: moves what is queued to the disk when the memory is full.

        The upload under way may be held up for minutes, by a daemon that does not answer or by many
        spooled checkpoints that come first.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._spill_wanted)
                if self._stopping:
                    return
                self._spill_wanted = False
                self._changed.wait_for(lambda: self._stopping or not self._jobs, SPILL_AFTER_S)
                job = next((job for job in self._jobs if isinstance(job, SaveJob)), None)
                if job is None or self._spool is None or self._stopping:
                    continue
                self._jobs.remove(job)
                self._spilling += 1
            if self._to_spool(job):
                self._give_back(job)
            else:
                with self._changed:
                    self._jobs.appendleft(job)
            with self._changed:
                self._spilling -= 1
                self._changed.notify_all()

    def _put_off(self, job: SaveJob | ReportJob) -> bool:
        """Instead of waiting with the job in memory. False: it cannot be put off."""
        if self._spool is None:
            return False
        if isinstance(job, SaveJob):
            return self._to_spool(job)
        if len(self._deferred) == MAX_QUEUED_REPORTS:
            return False
        self._deferred.append(job)
        return True

    def _to_spool(self, job: SaveJob) -> bool:
        if self._spool is None:
            return False
        target = self._target
        header = {"run": target.run, "base": target.base, "tags": target.tags}
        if target.config is not None:
            header["config"] = vars(target.config)
        try:
            self._spool.add(job.contents, header)
        except (StockpotError, OSError) as error:
            self.record.report_failure("spool", error, f"step {job.step} is not in the spool")
            return False
        self.record.count(spooled=1)
        return True

    def _send_spooled(self) -> None:
        """Sends what is in the spool, the oldest first.

        Raises a retryable StockpotError if something is left in it.
        """
        spool = self._spool
        if spool is None or not spool.unsent():
            return
        if time.monotonic() < self._spool_due:
            raise StockpotError(ErrorCode.UNAVAILABLE, "older checkpoints wait in the spool")
        while spool.unsent() and not self._is_stopping():
            if len(self._gathers) >= MAX_GATHERS:
                self._put_off_spool()
                raise StockpotError(ErrorCode.UNAVAILABLE,
                                    f"the other ranks are {MAX_GATHERS} checkpoints behind")
            try:
                entry = spool.first()
            except StockpotError as error:  # a damaged one, set aside
                self.record.give_up(error, "it is not sent")
                continue
            if entry is None:
                break
            try:
                is_complete = self._save(SaveJob(entry.contents, None), entry.folder)
            except StockpotError as error:
                entry.close()
                if error.retryable:
                    self._put_off_spool()
                    raise
                self.record.give_up(error, f"step {entry.contents.step} is not stored")
                spool.set_aside(entry.folder, "refused")
                continue
            entry.close()
            if is_complete:
                spool.remove(entry.folder)
        self._spool_delay_s = FIRST_RETRY_S
        with self._changed:
            self._spool_failed = False

    def _put_off_spool(self) -> None:
        with self._changed:
            self._spool_failed = True
            self._changed.notify_all()
        self._spool_due = time.monotonic() + self._spool_delay_s * random.uniform(0.5, 1.0)
        self._spool_delay_s = min(2 * self._spool_delay_s, LAST_RETRY_S)

    def _look_after_others(self) -> None:
        """What is left to do between jobs: spooled saves, put-off reports, other ranks' parts."""
        try:
            if time.monotonic() >= self._spool_due:
                self._send_spooled()
                self._send_deferred()
            self._ask_after_gathers()
        except Exception as error:
            self.record.report_failure("upload", error, "trying again")
            self._wait_for_stop(FIRST_RETRY_S)

    def _send_deferred(self) -> None:
        while self._deferred and not self._is_stopping():
            job = self._deferred.popleft()
            try:
                self._report(job)
            except StockpotError as error:
                if error.retryable:
                    self._deferred.appendleft(job)
                    self._put_off_spool()
                    raise
                self.record.report_failure("report", error, "an evaluation result is not stored")

    # --- one save ---

    def _save(self, job: SaveJob, spooled: Path | None = None) -> bool:
        """`spooled`: the job's entry in the spool. False: other ranks' parts are awaited."""
        artifact = self._writer.write(job, keep_trying=self._spool is not None)
        if artifact is None:
            artifact = self._await_ranks(Gather(job.step, self._writer.key_of(job),
                                                job.contents.place.rank, spooled))
        if artifact is None:
            return False
        self.record.succeeded(job.step, artifact)
        return True

    def _await_ranks(self, gather: Gather) -> str | None:
        """Waits for the other ranks as long as there is nothing else to send. None: not in yet."""
        while gather.spooled is None:
            state = self._writer.step_state(gather.key, GATHER_POLL_S)
            if state is None or gather.is_forgotten(state):
                raise StockpotError(ErrorCode.UNAVAILABLE, FORGOTTEN)
            if state.state == GatherState.COMPLETE:
                return str(state.artifact.hex())
            if state.state == GatherState.FAILED:
                raise StockpotError(ErrorCode.UNAVAILABLE, state.why, False)
            with self._changed:
                if self._jobs or self._stopping:
                    break
        if gather.spooled is not None and self._spool is not None:
            self._spool.hold(gather.spooled)
        self._gathers.append(gather)
        if len(self._gathers) > MAX_GATHERS:
            self._end_gather(self._gathers.popleft(), StockpotError(
                ErrorCode.UNAVAILABLE, f"the other ranks are over {MAX_GATHERS} steps behind"))
        return None

    def _ask_after_gathers(self) -> None:
        """Once for each; waits a little for the first if there is nothing else to do."""
        timeout_s = GATHER_POLL_S
        for _ in range(len(self._gathers)):
            with self._changed:
                if self._stopping:
                    return
                timeout_s = 0.0 if self._jobs else timeout_s
            gather = self._gathers.popleft()
            try:
                state = self._writer.step_state(gather.key, timeout_s)
            except StockpotError as error:
                if error.retryable:
                    self._gathers.append(gather)
                    self.record.report_failure("upload", error, "trying again")
                    self._wait_for_stop(FIRST_RETRY_S)
                else:
                    self._end_gather(gather, error)
                continue
            if state is None or gather.is_forgotten(state):
                self._send_again(gather)
                continue
            if state.state == GatherState.COMPLETE:
                self.record.succeeded(gather.step, state.artifact.hex())
                if gather.spooled and self._spool:
                    self._spool.remove(gather.spooled)
            elif state.state == GatherState.FAILED:
                self._end_gather(gather, StockpotError(ErrorCode.UNAVAILABLE, state.why, False))
            else:
                self._gathers.append(gather)
            timeout_s = 0.0

    def _send_again(self, gather: Gather) -> None:
        """The daemon restarted without this part: what is on the disk is unsent once more."""
        if gather.spooled and self._spool:
            self._spool.hold(gather.spooled, False)
        else:
            self._end_gather(gather, StockpotError(ErrorCode.NOT_FOUND, FORGOTTEN))

    def _end_gather(self, gather: Gather, error: StockpotError) -> None:
        self.record.give_up(error, f"step {gather.step} is not stored")
        if gather.spooled and self._spool:
            self._spool.set_aside(gather.spooled, "refused")

    def _report(self, job: ReportJob) -> None:
        self._writer.client.report_eval(self._target.artifact_at(job.step), job.task, job.metric,
                                 job.value, job.by)
        self.record.count(reports=1)
