"""Which part of a model this rank holds and sends. No communication: every rank computes the same.

A DTensor (FSDP2, tensor parallelism) is a box of a larger tensor: each rank sends its own; of
replicas along a mesh dimension one sends, another one for each tensor in turn. A plain tensor is
whole on every rank. Where it is a parameter of a module (DistributedDataParallel keeps them equal),
the ranks share the work: each sends some tensors, about the same number of bytes, so that the copy
that training waits for and the memory for it are a world-th of the model. Buffers, which may
differ between ranks, and plain tensors of a dict, which other ranks may not have, are rank 0's.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stockpot.errors import ErrorCode, StockpotError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """One process of a job."""

    rank: int = 0
    world: int = 1

    @classmethod
    def here(cls) -> Place:
        """The calling process in torch.distributed's default group; alone where there is none."""
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return cls()
        return cls(distributed.get_rank(), distributed.get_world_size())


@dataclass(frozen=True)
class Box:
    """A part of a tensor: `sizes` elements from `offsets` on, a number for each dimension."""

    offsets: Shape
    sizes: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Piece:
    """What this rank sends of one tensor."""

    name: str
    tensor: torch.Tensor  # the local values, of box.sizes
    shape: Shape  # of the whole tensor
    box: Box
    group: str = ""
    alias_of: str = ""  # not empty: tied to that tensor


def is_sharded(value: object) -> bool:
    """Whether it is a DTensor."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):  # at once: there are thousands
        return False
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh") \
        and hasattr(value, "placements")


def local_of(name: str, value: Any) -> tuple[torch.Tensor, Box]:
    """The values of a tensor on this rank, and where they belong in the whole.

    Raises:
        StockpotError: INVALID_ARGUMENT for what is no tensor, or a DTensor of unsummed parts.
    """
    if not isinstance(value, torch.Tensor):
        raise StockpotError(
            ErrorCode.INVALID_ARGUMENT, f"{name} is a {type(value).__name__}, not a tensor")
    if not is_sharded(value):
        return value, Box.whole(tuple(value.shape))
    if any(placement.is_partial() for placement in value.placements):
        raise StockpotError(ErrorCode.INVALID_ARGUMENT, f"{name} is a DTensor of partial sums")
    local = value.detach().to_local()
    if value.device_mesh.get_coordinate() is None:
        return local, Box((0,) * value.dim(), (0,) * value.dim())
    chunk = value.__create_chunk_list__()[0]
    return local, Box(tuple(chunk.offsets), tuple(chunk.sizes))


def pieces_of(tensors: Mapping[str, torch.Tensor], place: Place, *, group: str = "",
              ties: Mapping[str, str] | None = None, shared: Collection[str] = ()
              ) -> list[Piece]:
    """What this rank sends of `tensors`.

    Args:
        tensors: name -> tensor or DTensor, the same names on all ranks (but see above).
        place: of this rank.
        group: in which the tensors are stored.
        ties: name -> the tensor it shares all its memory with. None: found by address.
        shared: names of plain tensors that are equal on all ranks and may be sent by any.
    """
    ties = ties_of(tensors) if ties is None else ties
    owners = _owners({name: tensors[name] for name in tensors
                      if name in shared and name not in ties and not is_sharded(tensors[name])},
                     place.world)
    pieces = []
    order = {name: index for index, name in enumerate(tensors)}
    for name, tensor in tensors.items():
        root = ties.get(name, "")
        if is_sharded(tensor):
            sends = _is_sending_replica(tensor, order.get(root, order[name]))
        else:
            sends = owners.get(root or name, 0) == place.rank
        if not sends:
            continue
        local, box = local_of(name, tensor)
        shape = tuple(tensor.shape)
        if box.elements or not math.prod(shape):  # a box without elements is nobody's
            pieces.append(Piece(name, local, shape, box, group, root))
    return pieces


def ties_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Names of tensors that are another one's memory, and that other's name: the first of them."""
    ties: dict[str, str] = {}
    roots: dict[int, list[tuple[str, torch.Tensor, torch.Tensor]]] = {}  # by address
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.numel():
            continue
        local = tensor.detach().to_local() if is_sharded(tensor) else tensor
        if not local.numel() or local.is_meta or local.layout != torch.strided:
            continue
        here = roots.setdefault(local.data_ptr(), [])
        memory = _memory_of(local, tensor) if here else ()
        root = next((root for root, *of_root in here if _memory_of(*of_root) == memory), "")
        if root:
            ties[name] = root
        else:
            here.append((name, local, tensor))
    return ties


def _memory_of(local: torch.Tensor, whole: torch.Tensor) -> tuple[Any, ...]:
    return local.device, local.dtype, local.shape, local.stride(), whole.shape


def ties_of_module(module: torch.nn.Module) -> dict[str, str]:
    """The same for a module's parameters and buffers; by identity, so the same on every rank."""
    ties: dict[str, str] = {}
    roots: dict[int, str] = {}
    for items in (module.named_parameters(remove_duplicate=False),
                  module.named_buffers(remove_duplicate=False)):
        for name, value in items:
            root = roots.setdefault(id(value), name)
            if root != name:
                ties[name] = root
    return ties


def _owners(tensors: Mapping[str, torch.Tensor], world: int) -> dict[str, int]:
    """Name -> rank, so that the ranks have about the same bytes: largest first to the least."""
    loads = [0] * world
    owners = {}
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


def _is_sending_replica(tensor: Any, index: int) -> bool:
    """Whether this rank sends its box; `index` of the tensor deals the work out to replicas."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    replica, replicas = 0, 1
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            size = tensor.device_mesh.size(dim)
            replica, replicas = replica * size + coordinate[dim], replicas * size
    return replica == index % replicas
