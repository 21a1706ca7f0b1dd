"""The background half of a hook: hashes staged checkpoints and sends what the daemon lacks.

Threads: one uploader, which asks and commits over a connection of its own, and one sender per data
connection. All are daemon threads: they never keep a process alive, and they still run while
`atexit` handlers do. Nothing here raises into the training thread.

A save is tried until it is committed, refused for good, or older than the retry time. A retry opens
a new session; chunks that arrived are not sent again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from stockpot import chunks, dtypes
from stockpot.client import Client
from stockpot.errors import ErrorCode, StockpotError
from stockpot.rpc.ttypes import Kind, Part, RunConfig, SessionRequest, Shard, Tensor
from stockpot.staging import Layout, StagingBuffer

logger = logging.getLogger("stockpot")

# Limits.
CHUNKS_PER_QUERY = 32  # 128 MiB hashed before the first of them is sent
QUEUED_CHUNKS_PER_SENDER = 2
MAX_QUEUED_REPORTS = 1000
FIRST_RETRY_S = 0.25
LAST_RETRY_S = 15.0


@dataclass
class HookStats:
    """What a hook did so far. Counters only grow; bytes are logical ones of checkpoints."""

    staged: int = 0  # saves that were copied
    committed: int = 0  # saves that the daemon acknowledged as durable
    skipped: int = 0  # saves left out because every staging buffer was busy
    failed: int = 0  # saves given up: refused, too old, or not stageable
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
    config: RunConfig
    tags: dict[str, str]


@dataclass
class SaveJob:
    """One staged checkpoint. Owns its buffer until it is finished."""

    step: int
    layout: Layout
    buffer: StagingBuffer
    files: dict[str, bytes]
    metrics: dict[str, float]
    digests: dict[str, list[bytes]] = field(default_factory=dict)  # by key; kept for retries

    def runs(self) -> Iterator[tuple[str, memoryview]]:
        """Every run of bytes with its key: tensors that are no aliases, then files."""
        for slot in self.layout.slots:
            if not slot.alias_of:
                yield f"tensor/{slot.name}", self.buffer.view(slot)
        for name, data in self.files.items():
            yield f"file/{name}", memoryview(data)

    def named_chunks(self) -> Iterator[tuple[bytes, memoryview]]:
        """Every chunk with its digest, hashed the first time it is asked for."""
        for key, data in self.runs():
            known = self.digests.setdefault(key, [])
            for index, chunk in enumerate(chunks.cut(data)):
                if index == len(known):
                    known.append(chunks.digest_of(chunk))
                yield known[index], chunk

    def shard(self) -> Shard:
        """What is committed. REQUIRES: named_chunks() ran to its end."""
        tensors = [
            Tensor(name=slot.name, dtype=dtypes.name_of(slot.dtype), shape=list(slot.shape),
                   alias_of=slot.alias_of,
                   data=Part(bytes=slot.size, chunks=self.digests.get(f"tensor/{slot.name}", [])))
            for slot in self.layout.slots
        ]
        files = {name: Part(bytes=len(data), chunks=self.digests[f"file/{name}"])
                 for name, data in self.files.items()}
        return Shard(tensors=tensors, files=files, metrics=self.metrics)


@dataclass(frozen=True)
class ReportJob:
    """One evaluation result of a step that was saved."""

    step: int
    task: str
    metric: str
    value: float
    by: str


class ChunkSenders:
    """Sends chunks over several connections. Used by one thread; the senders are its own."""

    def __init__(self, address: str, connections: int) -> None:
        self._queue: queue.Queue[tuple[str, bytes, memoryview] | None] = queue.Queue(
            connections * QUEUED_CHUNKS_PER_SENDER)
        self._lock = threading.Lock()
        self._error: StockpotError | None = None  # guarded by _lock, as is _sent
        self._sent = 0
        self._threads = [
            threading.Thread(target=self._send, args=(Client(address),), daemon=True,
                             name=f"stockpot-sender-{index}")
            for index in range(connections)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, session: str, digest: bytes, data: memoryview) -> None:
        """Queues a chunk; waits while the queue is full. Raises the first error of a sender."""
        with self._lock:
            if self._error is not None:
                raise self._error
        self._queue.put((session, digest, data))

    def drain(self) -> tuple[int, StockpotError | None]:
        """Waits for all chunks; nobody looks at their memory then.

        Returns the bytes sent and the first error since the last call.
        """
        self._queue.join()
        with self._lock:
            sent, error = self._sent, self._error
            self._sent, self._error = 0, None
        return sent, error

    def stop(self) -> None:
        """Ends the threads after what is queued."""
        for _ in self._threads:
            self._queue.put(None)

    def _send(self, client: Client) -> None:
        while (item := self._queue.get()) is not None:
            try:
                with self._lock:
                    failed = self._error is not None
                if not failed:
                    client.put_chunk(*item)
                    with self._lock:
                        self._sent += len(item[2])
            except Exception as error:  # a sender must not die: drain() would wait for ever
                with self._lock:
                    self._error = self._error or as_stockpot_error(error)
            finally:
                del item  # the chunk's memory goes back before drain() returns
                self._queue.task_done()
        client.close()


def as_stockpot_error(error: Exception) -> StockpotError:
    """Any exception as ours; a foreign one is INTERNAL."""
    if isinstance(error, StockpotError):
        return error
    return StockpotError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")


class Uploader:
    """Takes jobs in order and finishes each. Any thread may call."""

    def __init__(self, target: Target, connections: int, retry_for_s: float,
                 release: Callable[[StagingBuffer], None]) -> None:
        """`release` gets every buffer back, from the uploader's thread."""
        self._target = target
        self._retry_for_s = retry_for_s
        self._release = release
        self._client = Client(target.address)
        self._senders = ChunkSenders(target.address, connections)
        self._run_confirmed = False  # of the uploader's thread alone

        self._changed = threading.Condition()
        self._jobs: deque[SaveJob | ReportJob] = deque()  # guarded by _changed, as all below
        self._busy = False
        self._stopping = False
        self._stats = HookStats()
        self._reported: set[str] = set()  # kinds of failure logged since the last success
        self._unseen_error: StockpotError | None = None

        self._thread = threading.Thread(target=self._work, daemon=True, name="stockpot-uploader")
        self._thread.start()

    def submit(self, job: SaveJob | ReportJob) -> bool:
        """Queues a job. False: it is stopping, or too many reports wait; a buffer is released."""
        with self._changed:
            is_save = isinstance(job, SaveJob)
            accepted = not self._stopping and (is_save or len(self._jobs) < MAX_QUEUED_REPORTS)
            if accepted:
                self._jobs.append(job)
                self._changed.notify_all()
        if not accepted and isinstance(job, SaveJob):
            self._release(job.buffer)
        return accepted

    def flush(self, timeout_s: float) -> bool:
        """Waits until nothing is queued or under way. False: not within timeout_s."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._busy, timeout_s)

    def stop(self) -> None:
        """Drops what is queued, lets the call under way end, and ends the threads."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

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
        """Counts nothing; logs the first failure of its kind since the last success."""
        with self._changed:
            self._stats.last_error = str(error)
            is_first = kind not in self._reported
            self._reported.add(kind)
        if is_first:
            logger.warning("run %s: %s (%s; training goes on)", self._target.run, error,
                           consequence)

    def give_up(self, error: Exception, consequence: str) -> None:
        """A save is lost: counts and reports it, and keeps it for take_error()."""
        self.count(failed=1)
        with self._changed:
            self._unseen_error = as_stockpot_error(error)
        self.report_failure("lost", error, consequence)

    def take_error(self) -> StockpotError | None:
        """The last given-up save's error, once."""
        with self._changed:
            error, self._unseen_error = self._unseen_error, None
        return error

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._finish(job)
            except Exception as error:  # whatever it is, the next job gets its chance
                if isinstance(job, SaveJob):
                    self.give_up(error, f"step {job.step} is not stored")
                else:
                    self.report_failure("report", error, "an evaluation result is not stored")
            finally:
                if isinstance(job, SaveJob):
                    self._release(job.buffer)
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
        self._senders.stop()
        self._client.close()

    def _next(self) -> SaveJob | ReportJob | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._jobs)
            if not self._stopping:
                self._busy = True
                return self._jobs.popleft()
            dropped = [job for job in self._jobs if isinstance(job, SaveJob)]
            self._jobs.clear()
            self._stats.failed += len(dropped)
            self._changed.notify_all()
        for job in dropped:
            closed = StockpotError(ErrorCode.UNAVAILABLE, "the hook was closed before the upload")
            self.report_failure("lost", closed, f"step {job.step} is not stored")
            self._release(job.buffer)
        return None

    def _finish(self, job: SaveJob | ReportJob) -> None:
        """Tries until it is done. Raises the last error when it gives up."""
        deadline = time.monotonic() + self._retry_for_s
        delay_s = FIRST_RETRY_S
        while True:
            try:
                if isinstance(job, SaveJob):
                    self._save(job)
                else:
                    self._report(job)
                return
            except StockpotError as error:
                if not error.retryable or time.monotonic() + delay_s > deadline:
                    raise
                self.report_failure("upload", error, "trying again")
            self.count(retries=1)
            # Jitter, so that many ranks do not come back at the same moment.
            if self._wait_for_stop(delay_s * random.uniform(0.5, 1.0)):
                raise StockpotError(ErrorCode.UNAVAILABLE, "the hook was closed before the upload")
            delay_s = min(2 * delay_s, LAST_RETRY_S)

    def _wait_for_stop(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._stopping, timeout_s)

    def _save(self, job: SaveJob) -> None:
        if not self._run_confirmed:
            target = self._target
            self._client.create_run(target.run, target.base, target.config, target.tags)
            self._run_confirmed = True
        try:
            session = self._client.open_session(
                SessionRequest(kind=Kind.CHECKPOINT, run=self._target.run, step=job.step))
            self._send_missing(session, job)
            reply = self._client.commit_shard(session, job.shard())
            artifact = reply.artifact.hex()
        except StockpotError as error:
            if error.code == ErrorCode.NOT_FOUND:  # the daemon came back without our session
                self._run_confirmed = False
                raise StockpotError(ErrorCode.UNAVAILABLE, error.message) from error
            if error.code != ErrorCode.ALREADY_EXISTS:
                raise
            # Our own commit whose acknowledgement was lost, or somebody else's checkpoint.
            artifact = self._find_same(job) or ""
            if not artifact:
                raise
        self._succeeded(job, artifact)

    def _succeeded(self, job: SaveJob, artifact: str) -> None:
        self.count(committed=1)
        self.note(last_committed_step=job.step, last_artifact=artifact)
        with self._changed:
            was_failing = bool(self._reported)
            self._reported.clear()
        logger.info("run %s: step %d is stored as %s", self._target.run, job.step, artifact[:12])
        if was_failing:
            logger.warning("run %s: uploads work again", self._target.run)

    def _send_missing(self, session: str, job: SaveJob) -> None:
        """Sends every chunk that the store lacks, each once. Hashing and sending overlap."""
        try:
            self._put_all(session, job)
        finally:
            sent, error = self._senders.drain()  # the buffer is nobody's from here on
            self.count(sent_bytes=sent)
        if error is not None:
            raise error

    def _put_all(self, session: str, job: SaveJob) -> None:
        asked: set[bytes] = set()
        batch: dict[bytes, memoryview] = {}
        for digest, data in job.named_chunks():
            if digest in asked:
                continue
            asked.add(digest)
            batch[digest] = data
            if len(batch) == CHUNKS_PER_QUERY:
                self._put_missing(session, batch)
                batch = {}
        self._put_missing(session, batch)

    def _put_missing(self, session: str, batch: dict[bytes, memoryview]) -> None:
        if not batch:
            return
        present = self._client.have_chunks(session, list(batch))
        for (digest, data), is_present in zip(batch.items(), present, strict=True):
            if not is_present:
                self._senders.put(session, digest, data)

    def _find_same(self, job: SaveJob) -> str | None:
        """The digest of RUN@STEP if it holds exactly this job's tensors and files."""
        name = f"{self._target.run}@{job.step}"
        manifest = json.loads(self._client.fetch_manifest(name))
        for _ in job.named_chunks():  # the session may have been refused before any was hashed
            pass
        shard = job.shard()

        def parts_of(chunks_of_part: list[bytes]) -> list[str]:
            return [chunk.hex() for chunk in chunks_of_part]

        ours = {t.name: (t.dtype, t.shape, t.alias_of, parts_of(t.data.chunks))
                for t in shard.tensors}
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
