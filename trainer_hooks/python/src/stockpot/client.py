"""The remote calls, one to one with thrift/stockpot.thrift.

Digests are 32 raw bytes where the IDL says `binary` and 64 hex digits where it says `string`. Every
call may raise StockpotError. A Client may be used from several threads; its calls then take turns,
so give each uploading thread a client of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from stockpot.connection import Connection, Security
from stockpot.errors import ErrorCode, StockpotError
from stockpot.rpc.ttypes import (
    Alias,
    AliasMove,
    ArtifactInfo,
    CommitReply,
    DaemonStatus,
    Event,
    Gate,
    Job,
    LogEntry,
    MergeOptions,
    ProbeSet,
    ProbeText,
    PublishOptions,
    ResumePoint,
    Run,
    RunConfig,
    ScrubReply,
    SessionRequest,
    Shard,
    StepKey,
    StepState,
)

# Longer than the longest wait inside a call (watch: 30 s; a commit waits for the disk).
CALL_TIMEOUT_S = 120.0
JOB_POLL_S = 0.2

T = TypeVar("T")


def publish_options(*, alpha: str = "", planes: int = 0, residual_rank: int = 0,
                    max_bytes: int = 0, max_share: float = 0.0,
                    max_error: float = -1.0) -> PublishOptions:
    """How a publish stores its tensors.

    Args:
        alpha: bitdelta, auto: how scales are found: "mean", "closed-form", "distilled" or "auto";
            empty: as the run says.
        planes: bitdelta: sign planes of a matrix; auto: at most. 0: 1, or 4.
        residual_rank: likewise, of the low-rank residual beside them; 0: none.
        max_bytes: auto: of the variant, tensors and files; 0: no limit.
        max_share: auto: likewise, as a share of the full model's bytes, in (0, 1].
        max_error: auto: lost share of the squared update, in [0, 1]; negative: no limit.
    """
    return PublishOptions(alpha, planes=planes, residual_rank=residual_rank, max_bytes=max_bytes,
                          max_share=max_share, max_error=max_error)


class Client:
    """What training loops and loaders call; `lineage` and `control` hold what people call."""

    def __init__(self, address: str, *, timeout_s: float = CALL_TIMEOUT_S,
                 security: Security | None = None) -> None:
        """Connects at the first call, and again after a failure.

        Args:
            address: "host:port", "unix:/path" or "/path".
            timeout_s: of one send or receive, not of a whole call.
            security: token and TLS. None: STOCKPOT_TOKEN_FILE, STOCKPOT_TLS_CA, ..._CERT, ..._KEY.

        Raises:
            StockpotError: INVALID_ARGUMENT if the address cannot be read.
        """
        self._connection = Connection(address, timeout_s, security)
        self.lineage = Lineage(self._connection)
        self.control = Control(self._connection)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.close()

    @property
    def address(self) -> str:
        return str(self._connection.address)

    def close(self) -> None:
        """Closes the connection; the client stays usable."""
        self._connection.close()

    def interrupt(self) -> None:
        """Makes a call of another thread fail now, and every later one. Any thread."""
        self._connection.interrupt()

    def create_run(self, name: str, base: str, config: RunConfig | None = None,
                   tags: Mapping[str, str] | None = None) -> Run:
        """Creates the run or confirms it. `base` is a name or a hex digest.

        Without `config` an existing run keeps its own, and a new one gets the defaults.
        """
        return self._call(lambda c: c.create_run(name, base, config or RunConfig(),
                                                 dict(tags or {}), config is None))

    def open_session(self, request: SessionRequest) -> str:
        """The new session's name. It expires when it is left alone for 10 minutes."""
        return self._call(lambda c: c.open_session(request))

    def have_chunks(self, session: str, digests: Sequence[bytes]) -> list[bool]:
        """For each digest whether the store has its bytes."""
        return self._call(lambda c: c.have_chunks(session, list(digests)))

    def put_chunk(self, session: str, digest: bytes, data: bytes | memoryview) -> None:
        """Sends at most CHUNK_BYTES. A memoryview (of bytes) is sent without a copy."""
        self._call(lambda c: c.put_chunk(session, digest, data))

    def commit_shard(self, session: str, shard: Shard) -> CommitReply:
        """Returns once the artifact is durable and visible."""
        return self._call(lambda c: c.commit_shard(session, shard))

    def step_state(self, key: StepKey, timeout_ms: int = 0) -> StepState:
        """How far the ranks' parts of a checkpoint are; waits up to timeout_ms while it is open."""
        return self._call(lambda c: c.step_state(key, timeout_ms))

    def resume_point(self, run: str, key: str) -> ResumePoint:
        """What to resume from: the same for every caller with this key."""
        return self._call(lambda c: c.resume_point(run, key))

    def abort(self, session: str) -> None:
        """Ends the session without an artifact."""
        self._call(lambda c: c.abort(session))

    def fetch_manifest(self, id: str) -> str:
        """The canonical JSON of an artifact, named by anything Lineage.resolve() takes."""
        return self._call(lambda c: c.fetch_manifest(id))

    def fetch_chunk(self, digest: bytes) -> bytes:
        """The bytes of a chunk, not yet compared with the digest."""
        return self._call(lambda c: c.fetch_chunk(digest))

    def report_eval(self, id: str, task: str, metric: str, value: float, by: str) -> None:
        """Records a result of an artifact; `by` names the evaluator."""
        self._call(lambda c: c.report_eval(id, task, metric, float(value), by))

    def _call(self, function: Callable[[Any], T]) -> T:
        return self._connection.call("checkpoint", function)


class Lineage:
    """Reading what exists and how it came to be. Shares its Client's connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def runs(self) -> list[Run]:
        """All runs by name."""
        return self._call(lambda c: c.runs())

    def log(self, run: str) -> list[LogEntry]:
        """The steps of a run with what was made of them."""
        return self._call(lambda c: c.log(run))

    def show(self, id: str) -> ArtifactInfo:
        """One artifact."""
        return self._call(lambda c: c.show(id))

    def aliases(self) -> list[Alias]:
        """All aliases by name."""
        return self._call(lambda c: c.aliases())

    def move_alias(self, move: AliasMove) -> Alias:
        """Points a name at an artifact; see AliasMove."""
        return self._call(lambda c: c.move_alias(move))

    def resolve(self, id: str) -> str:
        """The hex digest behind a name.

        A name is a digest, a unique prefix of one, an alias, a base's name, RUN@STEP,
        RUN@STEP.merge, RUN@latest, RUN@best or a route.
        """
        return self._call(lambda c: c.resolve(id))

    def set_probe(self, run: str, texts: Mapping[str, str], by: str) -> ProbeSet:
        """Gives the run held-out texts, by name, in place of its own; none: it has none any more.

        What is published is then measured on them, and "probe/loss" may be the run's best_metric.
        """
        return self._call(lambda c: c.set_probe(
            run, [ProbeText(name=name, text=text) for name, text in texts.items()], by))

    def probe(self, run: str) -> ProbeSet:
        """The run's held-out texts."""
        return self._call(lambda c: c.probe(run))

    def set_calibration(self, run: str, texts: Mapping[str, str], by: str) -> ProbeSet:
        """Gives the run texts on which the scales of its 1-bit variants are found; none: no more.

        They must be others than the held-out ones.
        """
        return self._call(lambda c: c.set_calibration(
            run, [ProbeText(name=name, text=text) for name, text in texts.items()], by))

    def calibration(self, run: str) -> ProbeSet:
        """The run's calibration texts."""
        return self._call(lambda c: c.calibration(run))

    def set_gate(self, run: str, gate: Gate) -> Gate:
        """The limits that a variant of the run must keep to before a name leads to it."""
        return self._call(lambda c: c.set_gate(run, gate))

    def gate(self, run: str) -> Gate:
        """These limits."""
        return self._call(lambda c: c.gate(run))

    def _call(self, function: Callable[[Any], T]) -> T:
        return self._connection.call("lineage", function)


class Control:
    """Causing merges and publishes, and watching the daemon. Shares its Client's connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def merge(self, ids: Sequence[str], run: str = "", step: int = -1, *,
              method: str = "monosoup", energy: float = 0.95, rank: int = 0, force: bool = False,
              weights: Sequence[float] = (), spectral: float = 0.0, last: int = 0) -> Job:
        """Queues a merge.

        Args:
            ids: checkpoints and merges of one base; with `last` one run, or one checkpoint.
            run: the run of the result; empty: the first parent's.
            step: the step of the result; -1: the newest parent's.
            method: "monosoup", "monosoup-spectral", "mean" or "model-stock".
            energy: monosoup: share of each delta's energy that is kept.
            rank: monosoup: fixed rank instead of that floor; refused below it unless `force`.
            force: accept a rank that keeps less.
            weights: mean: one an id, in their order; empty: equal ones.
            spectral: monosoup-spectral: 0 goes by the effective rank, else the share R in (0, 1].
            last: merge the newest so many checkpoints of the run, or those up to the named one; the
                oldest first.
        """
        options = MergeOptions(method, list(weights), spectral, last)
        return self._call(lambda c: c.merge(list(ids), run, step, energy, rank, force, options))

    def publish(self, id: str, *, codec: str = "bitdelta", name: str = "", **options: Any) -> Job:
        """Queues a publish.

        Args:
            id: a checkpoint or merge.
            codec: "bitdelta", "dense", "auto" or "sparse"; empty: the run's, and its options but
                for those given here.
            name: of the route; empty: the default routes.
            options: those of publish_options.
        """
        how = publish_options(**options)
        return self._call(lambda c: c.publish(id, codec, name, how))

    def publish_forced(self, id: str, *, why: str, by: str, codec: str = "bitdelta",
                       name: str = "", **options: Any) -> Job:
        """Queues a publish that the run's gate measures and does not stop; `why` is recorded."""
        how = publish_options(**options)
        return self._call(lambda c: c.publish_forced(id, codec, name, why, by, how))

    def score(self, id: str) -> Job:
        """Queues the measuring of the held-out loss on the run's texts."""
        return self._call(lambda c: c.score(id))

    def job(self, key: str) -> Job:
        """The state of one job."""
        return self._call(lambda c: c.job(key))

    def wait_job(self, key: str, timeout_s: float) -> Job:
        """Waits until the job is done and returns it.

        Raises:
            StockpotError: INTERNAL if the job failed, UNAVAILABLE if it is not done in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            job = self.job(key)
            if job.state == "done":
                return job
            if job.state == "failed":
                raise StockpotError(ErrorCode.INTERNAL, f"job {key} failed: {job.error}")
            if time.monotonic() >= deadline:
                raise StockpotError(
                    ErrorCode.UNAVAILABLE, f"job {key} is {job.state} after {timeout_s:g} s")
            time.sleep(JOB_POLL_S)

    def jobs(self) -> list[Job]:
        """All jobs by age."""
        return self._call(lambda c: c.jobs())

    def unpublish(self, name: str) -> None:
        """Removes a route."""
        self._call(lambda c: c.unpublish(name))

    def routes(self) -> list[Alias]:
        """All routes by name."""
        return self._call(lambda c: c.routes())

    def status(self) -> DaemonStatus:
        """What the daemon is doing."""
        return self._call(lambda c: c.status())

    def watch(self, since: int, *, limit: int = 1000, timeout_s: float = 30.0) -> list[Event]:
        """Events after number `since`; waits up to timeout_s (at most 30) for the first."""
        return self._call(lambda c: c.watch(since, limit, int(timeout_s * 1000)))

    def scrub(self, repair_from: str = "") -> ScrubReply:
        """Reads and verifies everything that is stored. Takes as long as that takes."""
        return self._call(lambda c: c.scrub(repair_from))

    def _call(self, function: Callable[[Any], T]) -> T:
        return self._connection.call("control", function)
