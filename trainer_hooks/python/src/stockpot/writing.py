"""Writes a run's checkpoints to the daemon, one rank's part after the other."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass

from stockpot.client import Client
from stockpot.connection import Security
from stockpot.errors import ErrorCode, StockpotError
from stockpot.progress import ProgressMeter
from stockpot.record import HookRecord
from stockpot.rpc.ttypes import Kind, RunConfig, SessionRequest, StepKey, StepState
from stockpot.sending import ChunkSenders, SaveJob


@dataclass(frozen=True)
class Target:
    """Where a hook's checkpoints go."""

    address: str
    run: str
    base: str
    config: RunConfig | None  # None: an existing run keeps its own
    tags: dict[str, str]
    security: Security | None = None

    def artifact_at(self, step: int) -> str:
        """The name that the step's checkpoint gets."""
        return f"{self.run}@{step}"


class RunWriter:
    """Makes the run where it does not exist, and sends parts of its checkpoints.

    Used by one thread, but for interrupt(). `client` is the connection that asks and commits.
    """

    def __init__(self, target: Target, connections: int, record: HookRecord) -> None:
        self._target = target
        self._record = record
        self._run_confirmed = False
        self.client = Client(target.address, security=target.security)
        self.meter = ProgressMeter(target.run)
        self._senders = ChunkSenders(target.address, connections, target.security,
                                     self._note_sent, self.meter.known)

    def interrupt(self) -> None:
        """Ends what is under way with an error. Any thread may call."""
        self.client.interrupt()
        self._senders.interrupt()

    def close(self) -> None:
        """Ends the senders' threads."""
        self._senders.stop()
        self.client.close()

    def key_of(self, job: SaveJob) -> StepKey:
        """What the parts of the job's checkpoint have in common."""
        return StepKey(self._target.run, job.step, job.contents.place.world, job.contents.attempt)

    def step_state(self, key: StepKey, timeout_s: float) -> StepState | None:
        """What became of a checkpoint's parts; waits so long for the last. None: not known.

        Then the daemon restarted, and may not know the run either.
        """
        try:
            return self.client.step_state(key, int(timeout_s * 1000))
        except StockpotError as error:
            if error.code != ErrorCode.NOT_FOUND:
                raise
            self._run_confirmed = False
            return None

    def write(self, job: SaveJob, keep_trying: bool) -> str | None:
        """Sends what the daemon lacks of a part, and commits it.

        Args:
            job: of this run.
            keep_trying: whether a run that is refused now may be asked for again later.

        Returns:
            The artifact's digest in hex, or None: the part is there, other ranks' are awaited.

        Raises:
            StockpotError: the daemon's, or UNAVAILABLE.
        """
        if not self._run_confirmed:
            self._confirm_run(keep_trying)
        self.meter.begin(job.step, job.total_bytes())
        try:
            return self._upload(job)
        except StockpotError as error:
            if error.code == ErrorCode.NOT_FOUND:  # the daemon came back without our session
                self._run_confirmed = False
                raise StockpotError(ErrorCode.UNAVAILABLE, error.message) from error
            if error.code != ErrorCode.ALREADY_EXISTS or job.contents.place.world > 1:
                raise
            # Our own commit whose acknowledgement was lost, or somebody else's checkpoint.
            if artifact := self._find_same(job):
                return artifact
            raise
        finally:
            self.meter.end()

    def _confirm_run(self, keep_trying: bool) -> None:
        target = self._target
        try:
            self.client.create_run(target.run, target.base, target.config, target.tags)
        except StockpotError as error:
            # A token, a base that is missing, a policy: somebody can put it right.
            raise StockpotError(error.code, error.message,
                                error.retryable or keep_trying) from error
        self._run_confirmed = True

    def _upload(self, job: SaveJob) -> str | None:
        contents = job.contents
        resumed_from = bytes.fromhex(contents.resumed_from) or None
        session = self.client.open_session(SessionRequest(
            kind=Kind.CHECKPOINT, run=self._target.run, step=job.step, rank=contents.place.rank,
            world=contents.place.world, attempt=contents.attempt, resumed_from=resumed_from))
        try:
            self._senders.send_missing(self.client, session, job)
            reply = self.client.commit_shard(session, job.shard())
        except StockpotError as error:
            if error.code != ErrorCode.UNAVAILABLE:  # a session that is left open counts
                with contextlib.suppress(StockpotError):
                    self.client.abort(session)
            raise
        return str(reply.artifact.hex()) if reply.complete else None

    def _find_same(self, job: SaveJob) -> str | None:
        """The digest of RUN@STEP if it holds exactly this job's weights and files."""
        name = self._target.artifact_at(job.step)
        manifest = json.loads(self.client.fetch_manifest(name))
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
        return self.client.lineage.resolve(name) if ours == theirs and same_files else None

    def _note_sent(self, size: int) -> None:
        self.meter.sent(size)
        self._record.count(sent_bytes=size)
