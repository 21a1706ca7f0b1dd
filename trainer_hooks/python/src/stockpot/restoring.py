"""Putting stored values into what lives: a model's tensors, whole or not at all.

Everything is fetched, verified and compared first; only then is the first byte copied. A rank takes
its own boxes of sharded tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stockpot import sharding
from stockpot.errors import ErrorCode, StockpotError
from stockpot.loading import Artifact

MAX_NAMED = 5  # tensors that one message names


@dataclass(frozen=True)
class Copy:
    """New values for one live tensor (on this rank)."""

    name: str
    target: torch.Tensor
    values: torch.Tensor

    def apply(self) -> None:
        """Copies. Cannot fail but for a broken device."""
        with torch.no_grad():
            self.target.copy_(self.values)


def fetch_copies(artifact: Artifact, targets: Mapping[str, torch.Tensor], *, cast: bool = False
                 ) -> list[Copy]:
    """Fetches the values of `targets`, which are left alone.

    Args:
        artifact: its tensors must be exactly `targets`, by name; of names that are tied in the
            model one is enough.
        targets: a model's state dict: tensors and DTensors.
        cast: accept another floating-point type and round to the target's.

    Raises:
        StockpotError: INVALID_ARGUMENT names tensors that are missing, left over, or of another
            shape or type, or tied here and different there; CORRUPTION; UNAVAILABLE.
    """
    ties = sharding.ties_of(targets)
    stored = _stored_names(artifact, targets, ties)
    copies = []
    for name, target in targets.items():
        source = stored[name]
        _check_like(artifact, name, source, target, cast)
        root = ties.get(name)
        if root is None:
            local, box = sharding.local_of(name, target.detach())
            if box.elements:
                copies.append(Copy(name, local, artifact.tensor(source, box)))
        elif artifact.content(stored[root]) != artifact.content(source):
            raise _mismatch(f"{root} and {name} are one tensor in the model, and two that "
                            f"differ in {artifact.digest[:12]}")
    return copies


def _stored_names(artifact: Artifact, targets: Mapping[str, torch.Tensor],
                  ties: Mapping[str, str]) -> dict[str, str]:
    """For each target the name of its values in the artifact: its own, or one it is tied to."""
    names: dict[str, str] = {}
    by_root: dict[str, str] = {}
    for name in targets:
        if name in artifact:
            names[name] = name
            by_root.setdefault(ties.get(name, name), name)
    for name in targets:
        root = ties.get(name, name)
        if name not in names and root in by_root:
            names[name] = by_root[root]
    _check_names(artifact, [name for name in targets if name not in names], "lacks")
    _check_names(artifact, [name for name in artifact if name not in targets],
                 "has, and the model lacks,")
    return names


def _check_names(artifact: Artifact, names: list[str], what: str) -> None:
    if not names:
        return
    listed = ", ".join(names[:MAX_NAMED])
    if len(names) > MAX_NAMED:
        listed += f" and {len(names) - MAX_NAMED} more"
    raise _mismatch(f"{artifact.digest[:12]} {what} {listed}")


def _check_like(artifact: Artifact, name: str, source: str, target: torch.Tensor, cast: bool
                ) -> None:
    if not isinstance(target, torch.Tensor):
        raise _mismatch(f"{name} is a {type(target).__name__}, not a tensor")
    stored = artifact.shape(source)
    if stored != tuple(target.shape):
        raise _mismatch(f"{name} is {list(stored)} in {artifact.digest[:12]}, "
                        f"{list(target.shape)} in the model")
    dtype = artifact.dtype(source)
    may_cast = cast and dtype.is_floating_point and target.is_floating_point()
    if dtype != target.dtype and not may_cast:
        raise _mismatch(f"{name} is {dtype} in {artifact.digest[:12]}, {target.dtype} in the model"
                        + ("" if cast else " (cast=True rounds)"))


def _mismatch(message: str) -> StockpotError:
    return StockpotError(ErrorCode.INVALID_ARGUMENT, message)
