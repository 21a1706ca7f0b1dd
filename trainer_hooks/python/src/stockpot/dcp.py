"""torch.distributed.checkpoint over Stockpot: a StorageWriter and a StorageReader.

    import torch.distributed.checkpoint as dcp
    from stockpot.dcp import StockpotReader, StockpotWriter

    writer = StockpotWriter("127.0.0.1:7070", run="demo", base="smollm2", weights="model")
    dcp.save(state, checkpoint_id="demo@300", storage_writer=writer)        # or async_save
    reader = StockpotReader("127.0.0.1:7070", weights="model")
    dcp.load(state, checkpoint_id="demo@latest", storage_reader=reader)

Every rank sends its own shards; the checkpoint becomes visible when the coordinator commits the
last part, after DCP has heard that all ranks wrote theirs. It is stored as whole tensors, so it can
be loaded with any other sharding, and with stockpot.load(). What is under `weights` in the state
dict is stored as the model, under the model's own names; everything else as training state, in the
group STATE_GROUP (RUN@STEP.optimizer).

Values that are no tensors travel as JSON (state.py), never as pickles. DCP's planners hand them
over and take them back pickled: that happens in this process, with bytes made in this process.
"""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from stockpot import sharding
from stockpot import state as trees
from stockpot.client import Client
from stockpot.connection import Security
from stockpot.errors import ErrorCode, StockpotError
from stockpot.hook import agree_on_attempt, read_files
from stockpot.loading import Artifact
from stockpot.resuming import STATE_GROUP
from stockpot.rpc.ttypes import Kind, RunConfig, SessionRequest
from stockpot.sending import ChunkSenders, SaveJob
from stockpot.sharding import Box, Piece, Place
from stockpot.spool import Contents
from stockpot.staging import Layout

logger = logging.getLogger("stockpot")

DOCUMENT = "dcp"  # the tensor that holds the JSON of what is no tensor
FORMAT = 1
_STEP_NAME = re.compile(r"(?P<run>[A-Za-z0-9][A-Za-z0-9._-]{0,127})@(?P<step>\d{1,18})$")
Id = str | os.PathLike  # type: ignore[type-arg]


class StockpotWriter(StorageWriter):
    """Writes one checkpoint after the other. Of one rank; as many threads as DCP uses: one."""

    def __init__(self, address: str, run: str, base: str, *, step: int | None = None,
                 weights: str = "model", config: RunConfig | None = None,
                 files: Id | Mapping[str, bytes] | None = None,
                 metrics: Mapping[str, float] | None = None, connections: int = 2,
                 security: Security | None = None) -> None:
        """Does not connect.

        Args:
            address: of the daemon.
            run: the run's name; created at the first save if it does not exist.
            base: name or digest of the base model that the run started from.
            step: of a save without a checkpoint_id. A checkpoint_id is "RUN@STEP" or "STEP".
            weights: key of the state dict under which the model is; "": all of it is the model.
            config: policy of the run. None: an existing run keeps its own.
            files: config and tokenizer, as CheckpointHook takes them.
            metrics: stored with the step; set the attribute before each save.
            connections: that carry data.
            security: token and TLS. None: from the environment.

        Raises:
            StockpotError: INVALID_ARGUMENT; OSError: `files` cannot be read.
        """
        self.address = address
        self.run = run
        self.base = base
        self.step = step
        self.weights = weights
        self.config = config
        self.files = read_files(files)  # type: ignore[arg-type]
        self.metrics = dict(metrics or {})
        self.connections = connections
        self.security = security
        self.artifact = ""  # hex digest of the last finished save, on the coordinator
        self._is_coordinator = False
        self._saves = 0
        self._open: _Upload | None = None  # the coordinator's, between write_data() and finish()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Id) -> bool:
        """Whether it is RUN@STEP."""
        return _STEP_NAME.match(os.fspath(checkpoint_id)) is not None

    def reset(self, checkpoint_id: Id | None = None) -> None:
        """A save to RUN@STEP, or to STEP of this writer's run, begins."""
        if checkpoint_id is None:
            return
        text = os.fspath(checkpoint_id)
        match = _STEP_NAME.match(text)
        if match and match["run"] == self.run:
            self.step = int(match["step"])
        elif text.isdigit():
            self.step = int(text)
        else:
            raise _invalid(f"checkpoint_id {text!r} is neither {self.run}@STEP nor STEP")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by DCP on every rank when a save begins."""
        if not kwargs.get("use_collectives", True):
            raise _invalid("use_collectives=False is not supported: ranks would not agree")
        if self.step is None:
            raise _invalid("give checkpoint_id='RUN@STEP' to the save, or step to the writer")
        self._is_coordinator = is_coordinator
        self._saves += 1
        self._close()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tells each rank its number and how many there are."""
        return [dataclasses.replace(plan, storage_data=Place(rank, len(plans)))
                for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Sends this rank's part; the coordinator's is committed by finish()."""
        place: Place = plan.storage_data
        pieces, document = self._resolve(plan, planner, place)
        upload = _Upload(self, [*pieces, _text_piece(f"{DOCUMENT}/rank-{place.rank}", document)],
                         place)
        try:
            upload.send()
            if self._is_coordinator:
                self._open = upload
            else:
                upload.commit()
        finally:
            if self._open is not upload:
                upload.close()
        sizes = {piece.name: piece.tensor.nbytes for piece in pieces}
        results = [WriteResult(index=item.index,
                               size_in_bytes=sizes.get(self._name_of(item.index.fqn)[0], 0),
                               storage_data=None) for item in plan.items]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the last part: now the checkpoint exists."""
        upload = self._open
        if upload is None:
            raise StockpotError(ErrorCode.INTERNAL, "finish() without write_data()")
        tensors: dict[str, torch.Tensor] = {}
        document = {"format": FORMAT, "world": upload.place.world, "weights": self.weights,
                    "planner_data": trees.pack(metadata.planner_data, tensors, DOCUMENT)}
        try:
            upload.add(_text_piece(DOCUMENT, document))
            self.artifact = upload.commit()
        finally:
            self._close()

    def __getstate__(self) -> dict[str, Any]:
        """For DCP's background process: everything but an open upload."""
        return self.__dict__ | {"_open": None}

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _name_of(self, fqn: str) -> tuple[str, str]:
        """The stored name and group of a key of the state dict."""
        if not self.weights:
            return fqn, ""
        prefix = self.weights + "."
        return (fqn[len(prefix):], "") if fqn.startswith(prefix) else (fqn, STATE_GROUP)

    def _resolve(self, plan: SavePlan, planner: SavePlanner, place: Place
                 ) -> tuple[list[Piece], dict[str, Any]]:
        """The tensors of the plan, and the JSON of its other values."""
        items: dict[str, list[tuple[WriteItem, torch.Tensor]]] = {}
        pieces: list[Piece] = []
        values: dict[str, Any] = {}
        extra: dict[str, torch.Tensor] = {}
        for item in plan.items:
            data = planner.resolve_data(item)
            fqn = item.index.fqn
            if item.type == WriteItemType.BYTE_IO:
                data.seek(0)
                value = torch.load(data, weights_only=False)  # written a moment ago, right here
                values[fqn] = trees.pack(value, extra, f"{DOCUMENT}/rank-{place.rank}/{fqn}")
                continue
            items.setdefault(fqn, []).append((item, data.detach()))
        whole = {fqn: parts[0][1] for fqn, parts in items.items() if len(parts) == 1}
        ties = {name: root for name, root in sharding.ties_of(whole).items()
                if self._name_of(name)[1] == self._name_of(root)[1]
                and items[name][0][0].tensor_data.chunk == items[root][0][0].tensor_data.chunk}
        for fqn, parts in items.items():
            name, group = self._name_of(fqn)
            root = self._name_of(ties[fqn])[0] if fqn in ties else ""
            for item, tensor in parts:
                chunk = item.tensor_data.chunk
                if not tensor.numel() and math.prod(item.tensor_data.size):
                    continue  # a box without elements is nobody's
                pieces.append(Piece(name, tensor, tuple(item.tensor_data.size),
                                    Box(tuple(chunk.offsets), tuple(chunk.sizes)), group, root))
        pieces += [Piece(name, tensor, tuple(tensor.shape), Box.whole(tuple(tensor.shape)),
                         STATE_GROUP) for name, tensor in extra.items()]
        return pieces, {"format": FORMAT, "values": values}


class _Upload:
    """One rank's part on its way: an open session and the connections it uses."""

    def __init__(self, writer: StockpotWriter, pieces: list[Piece], place: Place) -> None:
        self.place = place
        self._writer = writer
        self._pieces = pieces
        self._digests: dict[str, list[bytes]] = {}
        self._client = Client(writer.address, security=writer.security)
        self._senders = ChunkSenders(writer.address, writer.connections, writer.security)
        self._session = ""
        self._job: SaveJob | None = None

    def add(self, piece: Piece) -> None:
        """One more tensor before the commit."""
        self._pieces.append(piece)
        self.send()

    def send(self) -> None:
        """Sends the chunks that are not in the store yet."""
        writer = self._writer
        assert writer.step is not None
        if not self._session:
            self._client.create_run(writer.run, writer.base, writer.config, {})
            attempt = agree_on_attempt(writer.run) if self.place.world > 1 else ""
            self._session = self._client.open_session(SessionRequest(
                kind=Kind.CHECKPOINT, run=writer.run, step=writer.step, rank=self.place.rank,
                world=self.place.world,
                attempt=f"{attempt}-dcp-{writer._saves}" if attempt else ""))
        self._job = self._make_job(writer.step)
        self._senders.send_missing(self._client, self._session, self._job)

    def commit(self) -> str:
        """The artifact in hex; empty if other ranks' parts are missing."""
        assert self._job is not None
        reply = self._client.commit_shard(self._session, self._job.shard())
        return str(reply.artifact.hex()) if reply.complete else ""

    def close(self) -> None:
        """Ends the connections. What was not committed expires."""
        self._senders.stop()
        self._client.close()

    def _make_job(self, step: int) -> SaveJob:
        layout = Layout.plan(self._pieces, None)
        views = {slot.key: _bytes_of(piece.tensor)
                 for slot, piece in zip(layout.slots, self._pieces, strict=True)}
        is_first = self.place.rank == 0
        contents = Contents(step, layout, views, self._writer.files if is_first else {},
                            self._writer.metrics, self.place)
        return SaveJob(contents, None, self._digests)


class StockpotReader(StorageReader):
    """Reads checkpoints, also those that hooks saved, into any sharding. One thread."""

    def __init__(self, address: str, id: str = "", *, weights: str = "model", cast: bool = False,
                 security: Security | None = None) -> None:
        """Does not connect.

        Args:
            address: of the daemon.
            id: what a load without a checkpoint_id reads: RUN@STEP, RUN@latest, a digest, ...
            weights: key of the state dict under which the model is; "": all of it is the model.
            cast: let floating-point values be rounded to the type of what they are loaded into.
            security: token and TLS. None: from the environment.
        """
        self.address = address
        self.id = id
        self.weights = weights
        self._cast = cast
        self._security = security
        self._where: dict[str, tuple[Artifact, str]] = {}  # key -> artifact, name in it
        self._values: dict[str, tuple[Artifact, Any]] = {}  # key -> its JSON, and its tensors' home

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Id) -> bool:
        """Whether it looks like the name of a step or of an artifact."""
        return "@" in os.fspath(checkpoint_id) and "/" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: Id | None = None) -> None:
        """A load begins."""
        if checkpoint_id is not None:
            self.id = os.fspath(checkpoint_id)

    def read_metadata(self) -> Metadata:
        """What the checkpoint holds. DCP hides this call's errors: they are logged as well."""
        try:
            return self._read_metadata()
        except StockpotError as error:
            logger.error("loading %s: %s", self.id, error)
            raise

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any,
                              **kwargs: Any) -> None:
        """Called by DCP on every rank after read_metadata()."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fetches and verifies this rank's boxes and hands them to the planner."""
        for item in plan.items:
            fqn = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                home, document = self._values[fqn]
                data = io.BytesIO()
                torch.save(trees.unpack(document, home.tensor), data)
                data.seek(0)
                planner.load_bytes(item, data)
                continue
            artifact, name = self._where[fqn]
            values = artifact.tensor(name, Box(tuple(item.storage_offsets), tuple(item.lengths)))
            target = planner.resolve_tensor(item).detach()
            may_cast = self._cast and values.is_floating_point() and target.is_floating_point()
            if values.dtype != target.dtype and not may_cast:
                raise _invalid(f"{fqn} is {values.dtype} in {self.id}, {target.dtype} here "
                               "(cast=True rounds)")
            target.copy_(values)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_metadata(self) -> Metadata:
        client = Client(self.address, security=self._security)
        weights = Artifact(client, self.id)
        prefix = f"{self.weights}." if self.weights else ""
        self._where = {prefix + name: (weights, name) for name in weights}
        self._values = {}
        planner_data = None
        try:
            state: Artifact | None = Artifact(client, f"{weights.digest}.{STATE_GROUP}")
        except StockpotError as error:
            if error.code != ErrorCode.NOT_FOUND:
                raise
            state = None
        if state is not None:
            self._where |= {name: (state, name) for name in state
                            if name != DOCUMENT and not name.startswith(DOCUMENT + "/")}
            if DOCUMENT in state:
                planner_data = self._read_documents(state)
        entries: dict[str, Any] = {key: _metadata_of(artifact, name)
                                   for key, (artifact, name) in self._where.items()}
        entries |= {key: BytesStorageMetadata() for key in self._values}
        return Metadata(state_dict_metadata=entries, planner_data=planner_data)

    def _read_documents(self, state: Artifact) -> Any:
        first = _read_text(state, DOCUMENT)
        for rank in range(int(first["world"])):
            values = _read_text(state, f"{DOCUMENT}/rank-{rank}")["values"]
            self._values |= {key: (state, document) for key, document in values.items()}
        if first["weights"] != self.weights:
            raise _invalid(f"{self.id} was saved with weights={first['weights']!r}")
        return trees.unpack(first["planner_data"], state.tensor)


def _metadata_of(artifact: Artifact, name: str) -> TensorStorageMetadata:
    size = torch.Size(artifact.shape(name))
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(TensorProperties(dtype=artifact.dtype(name)), size, [chunk])


def _text_piece(name: str, document: Mapping[str, Any]) -> Piece:
    text = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
    return Piece(name, text, tuple(text.shape), Box.whole(tuple(text.shape)), STATE_GROUP)


def _read_text(state: Artifact, name: str) -> dict[str, Any]:
    document = json.loads(bytes(state.tensor(name).numpy()))
    if document.get("format") != FORMAT:
        raise StockpotError(ErrorCode.CORRUPTION, f"{state.digest[:12]}: {name} is of format "
                            f"{document.get('format')!r}")
    return dict(document)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    local = tensor.cpu().contiguous()
    return memoryview(local.flatten().view(torch.uint8).numpy() if local.numel() else b"")


def _invalid(message: str) -> StockpotError:
    return StockpotError(ErrorCode.INVALID_ARGUMENT, message)
