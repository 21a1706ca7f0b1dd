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

import contextlib
import dataclasses
import json
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stockpot.client import Client
from stockpot.connection import Security
from stockpot.errors import ErrorCode, StockpotError
from stockpot.progress import Progress, ProgressMeter
from stockpot.rpc.ttypes import (
    GatherState,
    Kind,
    RunConfig,
    SessionRequest,
    StepKey,
    StepState,
)
from stockpot.sending import ChunkSenders, SaveJob, as_stockpot_error
from stockpot.spool import Spool
from stockpot.staging import StagingBuffer

logger = logging.getLogger("stockpot")

# Limits.
MAX_QUEUED_REPORTS = 1000
SPILL_AFTER_S = 0.1  # queued while the memory is full: an idle uploader has taken it by then
FIRST_RETRY_S = 0.25
LAST_RETRY_S = 15.0
GATHER_POLL_S = 1.0  # how long one question after the other ranks' parts waits
MAX_GATHERS = 100  # checkpoints whose other parts are asked after

FORGOTTEN = "the daemon restarted, and does not have this rank's part any more"


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


@dataclass(frozen=True)
class Target:
    """Where a hook's checkpoints go."""

    address: str
    run: str
    base: str
    config: RunConfig | None  # None: an existing run keeps its own
    tags: dict[str, str]
    security: Security | None = None


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
        self._client = Client(target.address, security=target.security)
        self._meter = ProgressMeter(target.run)
        self._senders = ChunkSenders(target.address, connections, target.security,
                                     self._note_sent, self._meter.known)
        # Of the uploader's thread alone.
        self._run_confirmed = False
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
        self._stats = HookStats()
        self._reported: set[str] = set()  # kinds of failure logged since the last success
        self._unseen_error: StockpotError | None = None
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
        with self._changed:
            failed = self._stats.failed
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
        self._client.interrupt()
        self._senders.interrupt()
        self._thread.join(timeout_s)
        self._spiller.join(timeout_s)

    def progress(self) -> Progress:
        """Of the upload under way, and what waits behind it."""
        with self._changed:
            waiting = sum(isinstance(job, SaveJob) for job in self._jobs)
            spool = self._spool
        return self._meter.progress(waiting, spool.count() if spool else 0,
                                    spool.size() if spool else 0)

    def count(self, **deltas: float) -> None:
        """Adds to counters of the statistics."""
        with self._changed:
            for name, delta in deltas.items():
                setattr(self._stats, name, getattr(self._stats, name) + delta)

    def note(self, **values: object) -> None:
        """Sets fields of the statistics."""
        with self._changed:
            for name, value in values.items():
                setattr(self._stats, name, value)

    def stats(self) -> HookStats:
        """A copy."""
        with self._changed:
            return dataclasses.replace(self._stats)

    def report_failure(self, kind: str, error: Exception, consequence: str) -> None:
        """Counts nothing; logs each loss, and of a kind the first since the last success."""
        with self._changed:
            self._stats.last_error = str(error)
            is_news = kind == "lost" or kind not in self._reported
            self._reported.add(kind)
        if is_news:
            logger.warning("run %s: %s (%s; training goes on)", self._target.run, error,
                           consequence)

    def give_up(self, error: Exception, consequence: str, kind: str = "lost") -> None:
        """A save is lost: counts and reports it, and keeps it for take_error()."""
        self.count(failed=1)
        with self._changed:
            self._unseen_error = as_stockpot_error(error)
        self.report_failure(kind, error, consequence)

    def take_error(self) -> StockpotError | None:
        """The last given-up save's error, once."""
        with self._changed:
            error, self._unseen_error = self._unseen_error, None
        return error

    # --- the uploader's thread ---

    def _work(self) -> None:
        while not self._is_stopping():
            job = self._next()
            try:
                if job is not None:
                    self._finish(job)
            except Exception as error:  # whatever it is, the next job gets its chance
                if isinstance(job, SaveJob):
                    self.give_up(error, f"step {job.step} is not stored")
                else:
                    self.report_failure("report", error, "an evaluation result is not stored")
            finally:
                self._give_back(job)
            self._look_after_others()
            with self._changed:
                self._busy = False
                self._gathering = len(self._gathers)
                self._changed.notify_all()
        self._clear()
        self._senders.stop()
        self._client.close()
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
                self.count(failed=1)
                self.report_failure("lost", closed, f"step {job.step} is not stored")
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
                    self.report_failure("upload", error, "kept in the spool, trying again")
                    return
                if time.monotonic() + delay_s > deadline:
                    raise
                self.report_failure("upload", error, "trying again")
            self.count(retries=1)
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
            self.report_failure("spool", error, f"step {job.step} is not in the spool")
            return False
        self.count(spooled=1)
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
                self.give_up(error, "it is not sent")
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
                self.give_up(error, f"step {entry.contents.step} is not stored")
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
            self.report_failure("upload", error, "trying again")
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
                self.report_failure("report", error, "an evaluation result is not stored")

    # --- one save ---

    def _save(self, job: SaveJob, spooled: Path | None = None) -> bool:
        """`spooled`: the job's entry in the spool. False: other ranks' parts are awaited."""
        if not self._run_confirmed:
            self._confirm_run()
        self._meter.begin(job.step, job.total_bytes())
        try:
            artifact = self._upload(job, spooled)
        except StockpotError as error:
            if error.code == ErrorCode.NOT_FOUND:  # the daemon came back without our session
                self._run_confirmed = False
                raise StockpotError(ErrorCode.UNAVAILABLE, error.message) from error
            if error.code != ErrorCode.ALREADY_EXISTS or job.contents.place.world > 1:
                raise
            # Our own commit whose acknowledgement was lost, or somebody else's checkpoint.
            artifact = self._find_same(job) or ""
            if not artifact:
                raise
        finally:
            self._meter.end()
        if artifact is None:
            return False
        self._succeeded(job.step, artifact)
        return True

    def _confirm_run(self) -> None:
        target = self._target
        try:
            self._client.create_run(target.run, target.base, target.config, target.tags)
        except StockpotError as error:
            # A token, a base that is missing, a policy: somebody can put it right, and what is
            # spooled can wait for that.
            raise StockpotError(error.code, error.message,
                                error.retryable or self._spool is not None) from error
        self._run_confirmed = True

    def _upload(self, job: SaveJob, spooled: Path | None) -> str | None:
        """The artifact in hex; None: this rank's part is there, others are awaited elsewhere."""
        contents = job.contents
        resumed_from = bytes.fromhex(contents.resumed_from) or None
        session = self._client.open_session(SessionRequest(
            kind=Kind.CHECKPOINT, run=self._target.run, step=job.step, rank=contents.place.rank,
            world=contents.place.world, attempt=contents.attempt, resumed_from=resumed_from))
        try:
            self._senders.send_missing(self._client, session, job)
            reply = self._client.commit_shard(session, job.shard())
        except StockpotError as error:
            if error.code != ErrorCode.UNAVAILABLE:  # a session that is left open counts
                with contextlib.suppress(StockpotError):
                    self._client.abort(session)
            raise
        if reply.complete:
            return str(reply.artifact.hex())
        key = StepKey(self._target.run, job.step, contents.place.world, contents.attempt)
        return self._await_ranks(Gather(job.step, key, contents.place.rank, spooled))

    def _await_ranks(self, gather: Gather) -> str | None:
        """Waits for the other ranks as long as there is nothing else to send."""
        while gather.spooled is None:
            state = self._client.step_state(gather.key, int(GATHER_POLL_S * 1000))
            if state.state == GatherState.COMPLETE:
                return str(state.artifact.hex())
            if state.state == GatherState.FAILED:
                raise StockpotError(ErrorCode.UNAVAILABLE, state.why, False)
            if gather.is_forgotten(state):
                raise StockpotError(ErrorCode.UNAVAILABLE, FORGOTTEN)
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
        timeout_ms = int(GATHER_POLL_S * 1000)
        for _ in range(len(self._gathers)):
            with self._changed:
                if self._stopping:
                    return
                timeout_ms = 0 if self._jobs else timeout_ms
            gather = self._gathers.popleft()
            try:
                state = self._client.step_state(gather.key, timeout_ms)
                if gather.is_forgotten(state):
                    raise StockpotError(ErrorCode.NOT_FOUND, FORGOTTEN)
            except StockpotError as error:
                if error.code == ErrorCode.NOT_FOUND and gather.spooled and self._spool:
                    self._spool.hold(gather.spooled, False)  # the daemon restarted: send it again
                elif error.retryable:
                    self._gathers.append(gather)
                    self.report_failure("upload", error, "trying again")
                    self._wait_for_stop(FIRST_RETRY_S)
                else:
                    self._end_gather(gather, error)
                continue
            if state.state == GatherState.COMPLETE:
                self._succeeded(gather.step, state.artifact.hex())
                if gather.spooled and self._spool:
                    self._spool.remove(gather.spooled)
            elif state.state == GatherState.FAILED:
                self._end_gather(gather, StockpotError(ErrorCode.UNAVAILABLE, state.why, False))
            else:
                self._gathers.append(gather)
            timeout_ms = 0

    def _end_gather(self, gather: Gather, error: StockpotError) -> None:
        self.give_up(error, f"step {gather.step} is not stored")
        if gather.spooled and self._spool:
            self._spool.set_aside(gather.spooled, "refused")

    def _note_sent(self, size: int) -> None:
        self._meter.sent(size)
        self.count(sent_bytes=size)

    def _succeeded(self, step: int, artifact: str) -> None:
        self.count(committed=1)
        with self._changed:
            self._stats.last_committed_step = max(step, self._stats.last_committed_step)
            self._stats.last_artifact = artifact
            was_failing = "upload" in self._reported
            self._reported.clear()
        logger.info("run %s: step %d is stored as %s", self._target.run, step, artifact[:12])
        if was_failing:
            logger.warning("run %s: uploads work again", self._target.run)

    def _find_same(self, job: SaveJob) -> str | None:
        """The digest of RUN@STEP if it holds exactly this job's weights and files."""
        name = f"{self._target.run}@{job.step}"
        manifest = json.loads(self._client.fetch_manifest(name))
        for _ in job.named_chunks():  # the session may have been refused before any was hashed
            pass
        shard = job.shard()

        def parts_of(chunks_of_part: list[bytes]) -> list[str]:
            return [chunk.hex() for chunk in chunks_of_part]

        ours = {t.name: (t.dtype, t.shape, t.alias_of, parts_of(t.data.chunks))
                for t in shard.tensors if not t.group}  # states are artifacts of their own
        theirs = {t["name"]: (t["dtype"], t["shape"], t.get("alias_of", ""),
                              t.get("parts", {}).get("data", {}).get("chunks", []))
                  for t in manifest["tensors"]}
        our_files = {name: parts_of(part.chunks) for name, part in shard.files.items()}
        their_files = {name: part["chunks"] for name, part in manifest["files"].items()}
        same_files = all(their_files.get(name) == digests for name, digests in our_files.items())
        return self._client.lineage.resolve(name) if ours == theirs and same_files else None

    def _report(self, job: ReportJob) -> None:
        self._client.report_eval(f"{self._target.run}@{job.step}", job.task, job.metric,
                                 job.value, job.by)
        self.count(reports=1)
