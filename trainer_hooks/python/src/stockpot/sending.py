"""One staged checkpoint as chunks, and the threads that send those the store lacks.

Hashing and sending overlap; chunks travel over several connections at once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from stockpot import chunks, dtypes
from stockpot.client import Client
from stockpot.connection import Security
from stockpot.errors import ErrorCode, StockpotError
from stockpot.rpc.ttypes import Part, Shard, Tensor
from stockpot.spool import Contents
from stockpot.staging import Slot, StagingBuffer

# Limits.
CHUNKS_PER_QUERY = 32  # 128 MiB hashed before the first of them is sent
QUEUED_CHUNKS_PER_SENDER = 2


@dataclass
class SaveJob:
    """One staged or spooled checkpoint. Owns its buffer until it is finished."""

    contents: Contents
    buffer: StagingBuffer | None  # None: it comes from the spool
    digests: dict[str, list[bytes]] = field(default_factory=dict)  # by key; kept for retries

    @property
    def step(self) -> int:
        return self.contents.step

    def runs(self) -> Iterator[tuple[str, memoryview]]:
        """Every run of bytes with its key: tensors that are no aliases, then files."""
        for slot in self.contents.layout.slots:
            if not slot.alias_of:
                yield f"tensor/{slot.key}", self.contents.bytes_of[slot.key]
        for name, data in self.contents.files.items():
            yield f"file/{name}", memoryview(data)

    def total_bytes(self) -> int:
        """Of all runs together."""
        return sum(len(data) for _, data in self.runs())

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
        files = {name: Part(bytes=len(data), chunks=self.digests[f"file/{name}"])
                 for name, data in self.contents.files.items()}
        return Shard(tensors=[self._tensor(slot) for slot in self.contents.layout.slots],
                     files=files, metrics=dict(self.contents.metrics))

    def _tensor(self, slot: Slot) -> Tensor:
        data = Part(bytes=slot.size, chunks=self.digests.get(f"tensor/{slot.key}", []))
        return Tensor(name=slot.name, dtype=dtypes.name_of(slot.dtype), shape=list(slot.shape),
                      alias_of=slot.alias_of, data=data, group=slot.group,
                      global_shape=list(slot.global_shape), offsets=list(slot.begin))


class ChunkSenders:
    """Sends chunks over several connections. Used by one thread; the senders are its own."""

    def __init__(self, address: str, connections: int, security: Security | None = None,
                 sent: Callable[[int], None] = lambda size: None,
                 known: Callable[[int], None] = lambda size: None) -> None:
        """`sent` hears of the bytes of every chunk that arrived, from the senders' threads; `known`
        of those that need not be sent.
        """
        self._report_sent = sent
        self._report_known = known
        self._clients = [Client(address, security=security) for _ in range(connections)]
        self._queue: queue.Queue[tuple[str, bytes, memoryview] | None] = queue.Queue(
            connections * QUEUED_CHUNKS_PER_SENDER)
        self._lock = threading.Lock()
        self._error: StockpotError | None = None  # guarded by _lock
        self._threads = [
            threading.Thread(target=self._send, args=(client,), daemon=True,
                             name=f"stockpot-sender-{index}")
            for index, client in enumerate(self._clients)
        ]
        for thread in self._threads:
            thread.start()

    def send_missing(self, client: Client, session: str, job: SaveJob) -> None:
        """Sends every chunk that the store lacks, each once. Hashing and sending overlap.

        When it returns or raises, nobody looks at the job's memory any more.
        """
        try:
            self._put_all(client, session, job)
        finally:
            error = self._drain()
        if error is not None:
            raise error

    def _put_all(self, client: Client, session: str, job: SaveJob) -> None:
        asked: set[bytes] = set()
        batch: dict[bytes, memoryview] = {}
        for digest, data in job.named_chunks():
            if digest in asked:
                self._report_known(len(data))
                continue
            asked.add(digest)
            batch[digest] = data
            if len(batch) == CHUNKS_PER_QUERY:
                self._put_missing(client, session, batch)
                batch = {}
        self._put_missing(client, session, batch)

    def _put_missing(self, client: Client, session: str, batch: dict[bytes, memoryview]) -> None:
        if not batch:
            return
        present = client.have_chunks(session, list(batch))
        for (digest, data), is_present in zip(batch.items(), present, strict=True):
            if is_present:
                self._report_known(len(data))
                continue
            with self._lock:
                if self._error is not None:
                    raise self._error
            self._queue.put((session, digest, data))  # waits while the queue is full

    def _drain(self) -> StockpotError | None:
        """Waits for all chunks. Returns the first error since the last call."""
        self._queue.join()
        with self._lock:
            error, self._error = self._error, None
        return error

    def interrupt(self) -> None:
        """Makes calls that are under way fail now."""
        for client in self._clients:
            client.interrupt()

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
                    self._report_sent(len(item[2]))
            except Exception as error:  # a sender must not die: _drain() would wait for ever
                with self._lock:
                    self._error = self._error or as_stockpot_error(error)
            finally:
                del item  # the chunk's memory goes back before _drain() returns
                self._queue.task_done()
        client.close()


def as_stockpot_error(error: Exception) -> StockpotError:
    """Any exception as ours; a foreign one is INTERNAL."""
    if isinstance(error, StockpotError):
        return error
    return StockpotError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
