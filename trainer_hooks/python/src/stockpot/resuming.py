"""Training state beside the weights: what a step continues from, bit for bit.

    state = {"optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    resumed = hook.resume(model, state=state)            # None: from the start
    for step in range(resumed.step + 1 if resumed else 1, steps + 1):
        ...
        hook.on_step(step, model, {"loss": loss}, state=state)

A value of `state` is an optimizer, a module (an average of the weights), anything with state_dict()
and load_state_dict() (schedulers, loaders, scalers), a torch.Generator, or plain data (numbers,
strings, lists, dicts, arrays, tensors), which `Resumed.values` gives back. The random generators of
Python, numpy and torch are kept with them.

Stored are JSON and tensors, in the step's group STATE_GROUP (RUN@STEP.optimizer):
    state/shared/KEY/...     optimizers and modules: as one, sharded like the weights
    state/rank-R/KEY/...     tensors of everything else, of each rank its own
    state/rank-R             the rank's JSON document, as bytes
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

from stockpot import sharding
from stockpot import state as trees
from stockpot.client import Client
from stockpot.errors import ErrorCode, StockpotError
from stockpot.loading import Artifact
from stockpot.restoring import Copy, fetch_copies
from stockpot.sharding import Box, Piece, Place

logger = logging.getLogger("stockpot")

STATE_GROUP = "optimizer"
FORMAT = 1

State = Mapping[str, Any]


@dataclass(frozen=True)
class Resumed:
    """Where training continues."""

    step: int  # that was saved; the next one is step + 1
    artifact: str  # hex digest of the checkpoint
    values: dict[str, Any] = field(default_factory=dict)  # plain data of `state`, by key


def unwrap(model: Any) -> Any:
    """The user's module inside DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def pieces_of_state(state: State, model: Any, place: Place, step: int) -> list[Piece]:
    """What this rank stores of the training state, as it is now; the generators included.

    Raises:
        StockpotError: INVALID_ARGUMENT names what cannot be stored.
    """
    shared: dict[str, torch.Tensor] = {}
    own: dict[str, torch.Tensor] = {}
    kept: dict[str, Any] = {}
    for key, value in state.items():
        path = f"state/rank-{place.rank}/{key}"
        if isinstance(value, torch.optim.Optimizer):
            content = {"optimizer": _pack_optimizer(value, model, shared, f"state/shared/{key}")}
        elif isinstance(value, torch.nn.Module):
            tensors = dict(unwrap(value).state_dict())
            content = {"module": trees.pack(tensors, shared, f"state/shared/{key}")}
        elif isinstance(value, torch.Generator):
            content = {"generator": trees.pack(value.get_state(), own, path)}
        elif callable(getattr(value, "state_dict", None)):
            content = {"stateful": trees.pack(value.state_dict(), own, path)}
        else:
            content = {"value": trees.pack(value, own, path)}
        kept[key] = content
    document = {"format": FORMAT, "step": step, "world": place.world, "state": kept,
                "rng": trees.pack(trees.rng_state(), own, f"state/rank-{place.rank}/rng")}
    text = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
    own[f"state/rank-{place.rank}"] = text
    # A tensor of its own is whole and this rank's, whoever else there is.
    return (sharding.pieces_of(shared, place, group=STATE_GROUP, ties={}, shared=shared)
            + sharding.pieces_of(own, Place(), group=STATE_GROUP, ties={}))


def _names_of(model: Any) -> dict[int, str]:
    if not isinstance(model, torch.nn.Module):
        return {}
    return {id(parameter): name for name, parameter in unwrap(model).named_parameters()}


def _parameters(optimizer: torch.optim.Optimizer, model: Any
                ) -> list[list[tuple[str, torch.Tensor]]]:
    """For each group its parameters with their names in the model, or else by position."""
    names = _names_of(model)
    return [[(names.get(id(parameter), f"{group_index}.{index}"), parameter)
             for index, parameter in enumerate(group["params"])]
            for group_index, group in enumerate(optimizer.param_groups)]


def _pack_optimizer(optimizer: torch.optim.Optimizer, model: Any,
                    tensors: MutableMapping[str, torch.Tensor], path: str) -> dict[str, Any]:
    groups, slots = [], {}
    for index, parameters in enumerate(_parameters(optimizer, model)):
        options = {key: value for key, value in optimizer.param_groups[index].items()
                   if key not in ("params", "param_names")}
        groups.append({"params": [name for name, _ in parameters],
                       "options": trees.pack(options, tensors, f"{path}/group-{index}")})
        for name, parameter in parameters:
            if parameter in optimizer.state:
                slots[name] = trees.pack(dict(optimizer.state[parameter]), tensors,
                                         f"{path}/{name}")
    return {"groups": groups, "slots": slots}


def resume(client: Client | str, run: str, model: Any, *, state: State | None = None,
           key: str = "", at: str = "", place: Place | None = None, cast: bool = False,
           ) -> Resumed | None:
    """Puts the model and the training state back to a checkpoint; None: the run has none.

    Everything is fetched and verified before anything is changed. On several ranks each calls it
    with the same `key` and takes its own part; the number of ranks may differ from the one that
    saved (the random numbers of the ranks then cannot be the same, and a warning says so).

    Args:
        client: a Client or the daemon's address.
        run: the run's name.
        model: the module (or its state dict) to fill; also the one `state`'s optimizers train.
        state: what was given to the hook, under the same names. None: the weights alone.
        key: names this start of the job, equal on all its ranks: the daemon decides once for it
            which checkpoint that is. Empty: the newest one at this moment.
        at: resume from this artifact instead (RUN@STEP, a digest, ...).
        place: of this rank. None: torch.distributed's default group.
        cast: let weights of another floating-point type than the model's be rounded.

    Raises:
        StockpotError: the daemon cannot be reached, or what is stored does not fit; nothing was
            changed then.
    """
    if isinstance(client, str):
        with Client(client) as owned:
            return resume(owned, run, model, state=state, key=key, at=at, place=place, cast=cast)
    id = at or _newest(client, run, key)
    if not id:
        return None
    weights = Artifact(client, id)
    place = place or Place.here()
    module = unwrap(model)
    targets = module.state_dict() if isinstance(module, torch.nn.Module) else module
    values: dict[str, Any] = {}
    try:
        steps: list[Callable[[], Any]] = [
            copy.apply for copy in fetch_copies(weights, targets, cast=cast)]
        if state is not None:
            steps += _plan(_state_of(client, weights), state, model, place, values)
    except StockpotError as error:
        if error.code != ErrorCode.CORRUPTION:
            raise
        raise StockpotError(
            error.code, f"{run}@{weights.step} is damaged ({error.message}): repair it with "
            "`stockpot scrub --repair-from BACKUP`, or resume from an older step with "
            f"at=\"{run}@STEP\"") from error
    for apply in steps:
        apply()
    return Resumed(weights.step, weights.digest, values)


def _newest(client: Client, run: str, key: str) -> str:
    """The digest to resume from; empty: none."""
    try:
        if key:
            return client.resume_point(run, key).artifact.hex()
        return client.lineage.resolve(f"{run}@latest")
    except StockpotError as error:
        if error.code == ErrorCode.NOT_FOUND:
            return ""
        raise


def _state_of(client: Client, weights: Artifact) -> Artifact:
    try:
        return Artifact(client, f"{weights.digest}.{STATE_GROUP}")
    except StockpotError as error:
        if error.code != ErrorCode.NOT_FOUND:
            raise
        raise StockpotError(
            ErrorCode.NOT_FOUND,
            f"{weights.digest[:12]} has no training state: none was given to the hook, or it was "
            "deleted; state=None resumes the weights alone") from error


def _plan(stored: Artifact, state: State, model: Any, place: Place, values: dict[str, Any]
          ) -> list[Callable[[], Any]]:
    """Fetches what is stored of `state`; the result puts it in place, in this order."""
    document = _document(stored, place)
    missing = [key for key in state if key not in document["state"]]
    if missing:
        raise StockpotError(ErrorCode.INVALID_ARGUMENT,
                            f"{stored.digest[:12]} has no state called {', '.join(missing)}")
    steps: list[Callable[[], Any]] = []
    for key, value in state.items():
        ((form, content),) = document["state"][key].items()
        if form == "optimizer" and isinstance(value, torch.optim.Optimizer):
            steps += _plan_optimizer(stored, key, content, value, model)
        elif form == "module" and isinstance(value, torch.nn.Module):
            steps += [copy.apply for copy in _plan_module(stored, key, content, value)]
        elif form == "generator" and isinstance(value, torch.Generator):
            steps.append(_later(value.set_state, trees.unpack(content, stored.tensor)))
        elif form == "stateful" and callable(getattr(value, "load_state_dict", None)):
            steps.append(_later(value.load_state_dict, trees.unpack(content, stored.tensor)))
        elif form == "value":
            values[key] = trees.unpack(content, stored.tensor)
        else:
            raise StockpotError(ErrorCode.INVALID_ARGUMENT,
                                f"state {key} was a {form}, it is a {type(value).__name__} now")
    if place.rank < document["world"]:
        # Last: what runs before may draw.
        steps.append(_later(trees.set_rng_state, trees.unpack(document["rng"], stored.tensor)))
    return steps


def _later(function: Callable[[Any], Any], argument: Any) -> Callable[[], Any]:
    return lambda: function(argument)


def _document(stored: Artifact, place: Place) -> dict[str, Any]:
    first = _read_document(stored, 0)
    if first["world"] == place.world:
        return first if place.rank == 0 else _read_document(stored, place.rank)
    logger.warning(
        "%s was saved by %d ranks and is resumed by %d: weights and optimizer are exact, random "
        "numbers and places in the data are not", stored.digest[:12], first["world"], place.world)
    return _read_document(stored, place.rank % first["world"]) | {"world": first["world"]}


def _read_document(stored: Artifact, rank: int) -> dict[str, Any]:
    document = json.loads(bytes(stored.tensor(f"state/rank-{rank}").numpy()))
    if document.get("format") != FORMAT:
        raise StockpotError(ErrorCode.CORRUPTION, f"{stored.digest[:12]} holds training state of "
                            f"format {document.get('format')!r}")
    return dict(document)


def _plan_module(stored: Artifact, key: str, content: Mapping[str, Any], module: torch.nn.Module
                 ) -> list[Copy]:
    targets = unwrap(module).state_dict()
    if targets.keys() != content.keys():
        raise StockpotError(ErrorCode.INVALID_ARGUMENT,
                            f"the tensors of state {key} are not those that were stored")
    copies = []
    for name, target in targets.items():
        local, box = sharding.local_of(name, target.detach())

        def fetch(stored_name: str, box: Box = box) -> torch.Tensor:
            return stored.tensor(stored_name, box)

        copies.append(Copy(name, local, trees.unpack(content[name], fetch)))
    return copies


def _plan_optimizer(stored: Artifact, key: str, content: Mapping[str, Any],
                    optimizer: torch.optim.Optimizer, model: Any) -> list[Callable[[], Any]]:
    parameters = _parameters(optimizer, model)
    names = [[name for name, _ in group] for group in parameters]
    if names != [group["params"] for group in content["groups"]]:
        raise StockpotError(ErrorCode.INVALID_ARGUMENT,
                            f"the parameters of state {key} are not those that were stored")
    steps: list[Callable[[], Any]] = [optimizer.state.clear]
    for group, saved in zip(optimizer.param_groups, content["groups"], strict=True):
        options = trees.unpack(saved["options"], stored.tensor)
        steps.append(lambda group=group, options=options: _set_options(group, options))
    for name, parameter in (item for group in parameters for item in group):
        if name not in content["slots"]:
            continue

        def fetch(stored_name: str, parameter: torch.Tensor = parameter) -> torch.Tensor:
            return _like_parameter(stored, stored_name, parameter)

        slots = trees.unpack(content["slots"][name], fetch)
        steps.append(lambda parameter=parameter, slots=slots:
                     optimizer.state.__setitem__(parameter, slots))
    return steps


def _set_options(group: MutableMapping[str, Any], options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if isinstance(group.get(name), torch.Tensor) and isinstance(value, torch.Tensor):
            with torch.no_grad():
                group[name].copy_(value)
        else:
            group[name] = value


def _like_parameter(stored: Artifact, name: str, parameter: Any) -> torch.Tensor:
    """A tensor of an optimizer's state on the parameter's device, sharded as the parameter is."""
    if not sharding.is_sharded(parameter) or stored.shape(name) != tuple(parameter.shape):
        return stored.tensor(name).to(parameter.device)
    _, box = sharding.local_of(name, parameter.detach())
    local = stored.tensor(name, box).to(parameter.device)
    return type(parameter.data).from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride())
