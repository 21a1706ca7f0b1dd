"""adopt_merge(): merged weights back into the model that trains."""

from __future__ import annotations

import torch

from stockpot import sharding
from stockpot.client import Client
from stockpot.errors import ErrorCode, StockpotError
from stockpot.loading import Artifact
from stockpot.restoring import Copy, fetch_copies
from stockpot.resuming import unwrap
from stockpot.sharding import Place


def adopt_merge(client: Client | str, id: str, model: torch.nn.Module, *, cast: bool = False,
                optimizer: torch.optim.Optimizer | None = None) -> str:
    """Takes an artifact's weights into a live model, whole or not at all.

    Everything is fetched, verified and compared before the first byte is copied. Parameters keep
    their identity, so optimizers and schedulers go on; tied weights stay tied; no gradient sees it.

    With torch.distributed every rank calls it and takes its own part. They agree before they copy
    (two small collectives of the default group; call it where all ranks are at the same step): if
    one of them cannot, none does.

    Args:
        client: a Client or the daemon's address.
        id: RUN@STEP.merge, or any artifact with exactly the model's tensors.
        model: the module, also inside DistributedDataParallel, FSDP2 or torch.compile.
        cast: round to the model's floating-point types where the artifact has others.
        optimizer: whose state is to be dropped: its moments belong to the weights before. None:
            it is left alone.

    Returns:
        The hex digest that was adopted.

    Raises:
        StockpotError: INVALID_ARGUMENT names tensors that are missing, left over, of another shape
            or type, or not finite; NOT_FOUND; CORRUPTION; UNAVAILABLE. The model is as it was.
    """
    if isinstance(client, str):
        with Client(client) as owned:
            return adopt_merge(owned, id, model, cast=cast, optimizer=optimizer)
    place = Place.here()
    failure: StockpotError | None = None
    digest, copies = "", []
    try:
        artifact = Artifact(client, id)
        digest = artifact.digest
        copies = fetch_copies(artifact, unwrap(model).state_dict(), cast=cast)
        _check_finite(id, copies)
    except StockpotError as error:
        failure = error
    if place.world > 1:
        failure = _agree(digest, failure, _device_of(model))
    if failure is not None:
        raise failure
    _apply(copies, optimizer)
    return digest


def _check_finite(id: str, copies: list[Copy]) -> None:
    for copy in copies:
        if copy.values.is_floating_point() and not bool(torch.isfinite(copy.values.float()).all()):
            raise StockpotError(
                ErrorCode.INVALID_ARGUMENT,
                f"{id}: {copy.name} has values that are NaN or infinite: nothing is adopted")


def _apply(copies: list[Copy], optimizer: torch.optim.Optimizer | None) -> None:
    for copy in copies:
        copy.apply()
    if optimizer is not None:
        optimizer.state.clear()


def _device_of(model: torch.nn.Module) -> torch.device:
    for parameter in model.parameters():
        local, _ = sharding.local_of("", parameter.detach())
        return local.device
    return torch.device("cpu")


def _agree(digest: str, failure: StockpotError | None, device: torch.device
           ) -> StockpotError | None:
    """The same verdict on all ranks: every one could, and all mean the same artifact."""
    mine = torch.zeros(33, dtype=torch.int64, device=device)
    if failure is None:
        mine[0] = 1
        mine[1:] = torch.tensor(list(bytes.fromhex(digest)))
    lowest, highest = mine.clone(), mine.clone()
    torch.distributed.all_reduce(lowest, torch.distributed.ReduceOp.MIN)
    torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX)
    if failure is not None:
        return failure
    if not bool(lowest[0]):
        return StockpotError(ErrorCode.UNAVAILABLE, "another rank could not adopt the weights")
    if not bool(torch.equal(lowest, highest)):
        return StockpotError(ErrorCode.UNAVAILABLE,
                             "the name moved while ranks resolved it: call again, or use a digest")
    return None

