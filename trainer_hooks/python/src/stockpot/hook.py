"""CheckpointHook: the one object a training loop talks to."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch

from stockpot import dtypes, resuming, sharding, spool
from stockpot.client import Client
from stockpot.connection import Address, Security
from stockpot.errors import ErrorCode, StockpotError
from stockpot.progress import Progress
from stockpot.record import HookStats
from stockpot.resuming import Resumed, State, unwrap
from stockpot.rpc.ttypes import RunConfig
from stockpot.sending import SaveJob
from stockpot.sharding import Piece, Place
from stockpot.staging import MAX_COPY_THREADS, CopyThreads, Layout, Planner, StagingPool
from stockpot.uploader import ReportJob, Uploader, logger
from stockpot.writing import Target

# What belongs to a model beside its weights, by name in a Hugging Face folder.
MODEL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "tokenizer.model", "chat_template.jinja", "chat_template.json",
)
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# What is waited at the end of a process whose hook was not closed.
ATEXIT_TIMEOUT_S = 30.0
# What is waited for the threads after a close: writing the spool, or a connection attempt.
STOP_TIMEOUT_S = 60.0

Model = torch.nn.Module | Mapping[str, torch.Tensor]


class CheckpointHook:
    """Copies a model's values at a step, returns, and uploads them in the background.

    on_step() and save() return after one copy of the tensors; nothing the daemon does or fails to
    do makes them slower (except the wait that when_full="wait" asks for) and they raise nothing,
    unless raise_errors asks for it. What goes wrong is logged once through `logging` (logger
    "stockpot") until uploads work again, and counted in `stats`.

    The stored values are those at the call, also if the optimizer runs right afterwards. Tied
    weights are stored once; non-contiguous tensors as their logical content; types as they are.

    With torch.distributed every rank calls it, with the same steps, and sends its own part; no rank
    waits for another and nothing is gathered. FSDP2: its shards. DistributedDataParallel, where all
    have the same: some of the parameters each, so that a step waits for a copy of 1 / world of the
    model. The checkpoint exists when the last part is in; a rank that never comes costs it, and the
    others report that rank. `replicas="first"` lets rank 0 send all that is not sharded.

    Threads: one thread calls on_step() and save(); the rest may be called from any.
    """

    def __init__(
        self,
        address: str,
        run: str,
        base: str,
        *,
        every: int = 100,
        config: RunConfig | None = None,
        tags: Mapping[str, str] | None = None,
        files: str | Path | Mapping[str, bytes] | None = None,
        cast_to: torch.dtype | None = None,
        staging_bytes: int | None = None,
        when_full: Literal["skip", "wait"] = "skip",
        max_wait_s: float = 60.0,
        connections: int = 2,
        retry_for_s: float = 600.0,
        raise_errors: bool = False,
        spool_dir: str | Path | None = None,
        spool_bytes: int = spool.BYTES_BY_DEFAULT,
        replicas: Literal["split", "first"] = "split",
        attempt: str = "",
        security: Security | None = None,
    ) -> None:
        """Starts the upload threads. Does not connect: the daemon may come later.

        Args:
            address: of the daemon: "host:port", "unix:/path" or "/path".
            run: the run's name; created at the first save if it does not exist.
            base: name or digest of the base model that the run started from.
            every: on_step() saves when step is a multiple of it.
            config: policy of the run (merge_every, publish, best_metric, ...). None: an existing
                run keeps its own, a new one gets the defaults.
            tags: free facts about the run.
            files: config and tokenizer: a folder (its MODEL_FILES are sent) or name -> content.
                They win over what model.config gives.
            cast_to: store floating-point tensors in this type, rounded while they are copied;
                for fp32 master weights over a bf16 base. None: as they are.
            staging_bytes: limit of the copies that wait for upload. None: two checkpoints.
            when_full: "skip" the save and count it, or "wait" up to max_wait_s for a buffer.
            max_wait_s: longest stall that "wait" allows.
            connections: that carry data; one more asks and commits.
            retry_for_s: a save that could not be uploaded for so long is given up.
            raise_errors: raise the error of a save that was given up at the next call.
            spool_dir: where saves are kept while the daemon is away (trainer_hooks/SPOOL.md), also
                those that are left when the process ends; this process or the next one of the run
                sends them, in order. None: they wait in memory for retry_for_s.
            spool_bytes: limit of this rank's part of the spool; what does not fit is not spooled.
            replicas: who sends plain parameters in a job of several ranks (see above).
            attempt: one start of the job, the same on all its ranks and never used again. Empty:
                agreed on through torch.distributed's store.
            security: token and TLS. None: STOCKPOT_TOKEN_FILE, STOCKPOT_TLS_CA, ..._CERT, ..._KEY.

        Raises:
            StockpotError: INVALID_ARGUMENT if an argument cannot work.
            OSError: `files` cannot be read.
        """
        if every < 1 or connections < 1 or when_full not in ("skip", "wait") or not run:
            raise StockpotError(
                ErrorCode.INVALID_ARGUMENT,
                "every and connections are at least 1, when_full is skip or wait, run has a name")
        if replicas not in ("split", "first"):
            raise StockpotError(ErrorCode.INVALID_ARGUMENT, "replicas is split or first")
        if not RUN_NAME.fullmatch(run):
            raise StockpotError(
                ErrorCode.INVALID_ARGUMENT, f"{run!r} is no run name: letters, digits, '.', '_', "
                "'-', at most 128, the first a letter or digit")
        self._security = security or Security.from_environment()
        self._security.check(Address.parse(address))
        self.address = address
        self.run = run
        self.every = every
        self._files = read_files(files)
        self._cast_to = cast_to
        self._wait_s = max_wait_s if when_full == "wait" else 0.0
        self._raise_errors = raise_errors
        self._warned_dtype = False
        self._closed = False
        self._ended_well = False
        self._last_step = -1
        self._split = replicas == "split"
        self._spool_dir = Path(spool_dir) if spool_dir is not None else None
        self._spool_bytes = spool_bytes
        self._attempt = attempt
        self._place: Place | None = None
        self._resumed_from = ""
        self._pool = StagingPool(staging_bytes)
        self._planner = Planner(cast_to)
        self._odd_metrics: set[str] = set()  # that a warning named
        self._copy_threads = CopyThreads(min(MAX_COPY_THREADS, os.cpu_count() or 1))
        self._uploader = Uploader(
            Target(address, run, base, config, dict(tags or {}),
                   self._security),
            connections, retry_for_s, self._pool.release)
        self._record = self._uploader.record
        atexit.register(self.close, ATEXIT_TIMEOUT_S)  # a process that ends keeps what it staged
        is_initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
        if is_initialized or int(os.environ.get("WORLD_SIZE", "1")) == 1:
            self._locate()

    def __enter__(self) -> CheckpointHook:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.close()

    @property
    def stats(self) -> HookStats:
        """Counters so far, as a copy."""
        return self._record.stats()

    @property
    def last_step(self) -> int:
        """The last step that was staged; -1: none."""
        return self._last_step

    def add_files(self, files: Mapping[str, bytes]) -> None:
        """Adds files to those sent with every later save; given ones keep their content."""
        self._files = dict(files) | self._files

    def on_step(self, step: int, model: Model, metrics: Mapping[str, Any] | None = None, *,
                state: State | None = None) -> bool:
        """Saves if `step` is a multiple of `every`. True: the values were copied.

        Args:
            step: optimizer steps so far, >= 0.
            model: a module (its state dict is stored) or name -> tensor.
            metrics: name -> number, stored with the step; the run's best_metric decides RUN@best.
            state: what training continues from beside the weights (resuming.py): optimizer,
                scheduler, loader, ... The random generators are stored with it. None: nothing.
        """
        return self.save(step, model, metrics, state=state) if step % self.every == 0 else False

    def save(self, step: int, model: Model, metrics: Mapping[str, Any] | None = None, *,
             state: State | None = None) -> bool:
        """Saves now. Otherwise as on_step()."""
        if self._raise_errors:
            self._raise_pending()
        if self._closed:
            return False
        try:
            return self._stage(step, model, metrics or {}, state)
        except Exception as error:
            self._record.give_up(error, f"step {step} is not stored", "not staged")
            if self._raise_errors:
                self._raise_pending()
            return False

    def resume(self, model: Model, *, state: State | None = None, at: str = "",
               cast: bool = False, spool_timeout_s: float = 600.0) -> Resumed | None:
        """Puts model and state back to where this start of the job continues; None: at the base.

        The daemon decides once for all ranks of this attempt: the run's newest checkpoint. What an
        earlier process left in the spool is sent first, up to spool_timeout_s. The checkpoint
        becomes a parent of those that are saved from now on. Otherwise as stockpot.resume().
        """
        place = self._locate()
        if not self._uploader.wait_for_spool(spool_timeout_s):
            logger.warning("run %s: resuming although older checkpoints are still in the spool",
                           self.run)
        with Client(self.address, security=self._security) as client:
            resumed = resuming.resume(client, self.run, model, state=state, key=self._attempt,
                                      at=at, place=place, cast=cast)
        self._resumed_from = resumed.artifact if resumed else ""
        if resumed and at:
            self._warn_of_newer_steps(resumed.step)
        return resumed

    def _warn_of_newer_steps(self, step: int) -> None:
        """A step that exists is never replaced, so whoever goes back needs another run."""
        with contextlib.suppress(StockpotError), \
                Client(self.address, security=self._security) as client:
            steps = [entry.step.step for entry in client.lineage.log(self.run)]
            if any(taken > step for taken in steps):
                logger.warning(
                    "run %s: training goes back to step %d, but the run has steps up to %d: those "
                    "are kept, and others of the same number refused. Give the hook another run "
                    "name to branch off; the lineage shows where from", self.run, step, max(steps))

    def progress(self) -> Progress:
        """Of the upload under way, and what waits behind it. Any thread."""
        return self._uploader.progress()

    def report(self, step: int, metrics: Mapping[str, Any], *, task: str = "eval",
               by: str = "trainer") -> bool:
        """Sends evaluation results of a saved step after its upload. False: not accepted."""
        accepted = self._locate().rank == 0
        try:
            for name, value in self._numbers(metrics, f"task {task}").items():
                job = ReportJob(step, task, name, value, by)
                accepted = accepted and self._uploader.submit(job)
        except Exception as error:
            self._record.report_failure("report", error, "an evaluation result is not stored")
            return False
        return accepted

    def flush(self, timeout_s: float = 600.0) -> bool:
        """Waits until all that is staged is stored, given up, or spooled with the daemon away.

        False: not within timeout_s. `stats` tells what became of it.
        """
        return self._uploader.flush(timeout_s)

    def close(self, timeout_s: float = 600.0) -> bool:
        """Flushes, then stops the threads. What is not uploaded by then goes to the spool, or is
        dropped and counted where there is none.

        True: all that was staged is stored. False: something was given up, waits in the spool (a
        line in the log says where), or took longer. A closed hook ignores further saves.
        """
        if self._closed:
            return self._ended_well
        self._closed = True
        atexit.unregister(self.close)
        finished = self._uploader.flush(timeout_s)
        self._uploader.stop(STOP_TIMEOUT_S)
        self._copy_threads.stop()
        self._ended_well = finished and self._uploader.is_all_stored()
        return self._ended_well

    def _locate(self) -> Place:
        """Where this process is in its job; found once, when it is known."""
        if self._place is None:
            place = Place.here()
            self._attempt = self._attempt or agree_on_attempt(self.run)
            self._place = place
            if self._spool_dir is not None:
                self._open_spool(self._spool_dir, place)
        return self._place

    def _open_spool(self, folder: Path, place: Place) -> None:
        try:
            self._uploader.use_spool(spool.Spool(folder, self.run, place, self._spool_bytes))
        except (StockpotError, OSError) as error:
            self._record.report_failure("spool", error, "there is no spool")
            if self._raise_errors:
                raise

    def _stage(self, step: int, model: Model, metrics: Mapping[str, Any], state: State | None
               ) -> bool:
        start = time.monotonic()
        place = self._locate()
        pieces = self._pieces_of_model(model, place)
        if state is not None:
            pieces += resuming.pieces_of_state(state, model, place, step)
        layout = self._planner.plan(pieces)
        files = _files_of(model, self._cast_to) | self._files
        self._check_dtype(layout, files)
        numbers = self._numbers(metrics, f"step {step}")
        pinned = any(piece.tensor.is_cuda for piece in pieces)
        buffer = self._pool.acquire(layout.size, pinned, self._wait_s)
        if buffer is None:
            self._record.count(skipped=1)
            full = StockpotError(ErrorCode.RESOURCE_EXHAUSTED, "all staging buffers are in use")
            self._record.report_failure("skip", full, f"step {step} is skipped")
            return False
        try:
            buffer.fill(layout, pieces, self._copy_threads)
        except BaseException:
            self._pool.release(buffer)
            raise
        contents = spool.Contents(
            step, layout, buffer.views(layout),
            files if place.rank == 0 else {}, numbers, place,
            self._attempt if place.world > 1 else "", self._resumed_from)
        if not self._uploader.submit(SaveJob(contents, buffer)):
            return False
        if self._pool.is_full(layout.size):
            self._uploader.spill()
        stall_s = time.monotonic() - start
        self._last_step = step
        self._record.count(staged=1, staged_bytes=sum(slot.size for slot in layout.slots),
                             total_stall_s=stall_s)
        self._record.note(last_stall_s=stall_s)
        return True

    def _pieces_of_model(self, model: Model, place: Place) -> list[Piece]:
        if not isinstance(model, torch.nn.Module):
            return sharding.pieces_of(model, place)
        module = unwrap(model)
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        return sharding.pieces_of(module.state_dict(), place, ties=sharding.ties_of_module(module),
                                  shared=names if self._split else ())

    def _numbers(self, metrics: Mapping[str, Any], of: str) -> dict[str, float]:
        """What is a number; anything else is named and left out: no checkpoint is lost for it."""
        numbers = {}
        for name, value in metrics.items():
            try:
                numbers[name] = _number(value)
            except (TypeError, ValueError, RuntimeError):
                if name not in self._odd_metrics:
                    logger.warning("run %s: metric %r of %s is no number (%.60r): left out",
                                   self.run, name, of, value)
                self._odd_metrics.add(name)
        return numbers

    def _raise_pending(self) -> None:
        error = self._record.take_error()
        if error is not None:
            raise error

    def _check_dtype(self, layout: Layout, files: Mapping[str, bytes]) -> None:
        """Warns once if the weights are of another type than their config.json says."""
        if self._warned_dtype or "config.json" not in files:
            return
        self._warned_dtype = True
        config = json.loads(files["config.json"])
        stated = config.get("dtype") or config.get("torch_dtype")
        stored = {str(slot.dtype).removeprefix("torch.") for slot in layout.slots
                  if slot.dtype.is_floating_point}
        if stated and stored and stated not in stored:
            logger.warning("run %s: config.json says %s, the weights are %s; stored as they are",
                           self.run, stated, ", ".join(sorted(stored)))


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def agree_on_attempt(run: str) -> str:
    """A name for this start of the job, the same on all its ranks, without any waiting.

    Whoever asks torch.distributed's key-value store first names it.
    """
    mine = uuid.uuid4().hex
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return mine
    store = distributed.distributed_c10d._get_default_store()
    return str(store.compare_set(f"stockpot/attempt/{run}", "", mine).decode())


def _files_of(model: Model, cast_to: torch.dtype | None) -> dict[str, bytes]:
    """config.json and generation_config.json of a transformers model; empty for any other."""
    files = {}
    if not isinstance(model, torch.nn.Module):
        return files
    for attribute, name in (("config", "config.json"),
                            ("generation_config", "generation_config.json")):
        config = getattr(unwrap(model), attribute, None)
        if not hasattr(config, "to_json_string"):
            continue
        values = json.loads(config.to_json_string())
        if cast_to is not None and name == "config.json":
            dtypes.name_of(cast_to)
            values["dtype"] = str(cast_to).removeprefix("torch.")
            values.pop("torch_dtype", None)
        files[name] = (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()
    return files


def read_files(files: str | Path | Mapping[str, bytes] | None) -> dict[str, bytes]:
    """The MODEL_FILES that a folder has, or a mapping as it is."""
    if files is None:
        return {}
    if isinstance(files, Mapping):
        return {name: bytes(content) for name, content in files.items()}
    folder = Path(files)
    if not folder.is_dir():
        raise StockpotError(ErrorCode.INVALID_ARGUMENT, f"{folder} is not a folder")
    return {name: (folder / name).read_bytes() for name in MODEL_FILES
            if (folder / name).is_file()}
