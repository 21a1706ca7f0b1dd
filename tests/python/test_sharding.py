"""Who sends what: every byte once, about the same for every rank, decided without talking."""

from __future__ import annotations

import pytest
import torch
from stockpot.sharding import Box, Place, pieces_of, ties_of, ties_of_module


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_replicated_parameters_are_dealt_out(world: int, seed: int) -> None:
    tensors = {f"t{i}": torch.empty(int(torch.randint(1, 5000, ()))) for i in range(40)}
    tensors["tied"] = tensors["t3"]
    tensors["buffer"] = torch.empty(9)
    shared = tensors.keys() - {"buffer"}
    sent = [pieces_of(tensors, Place(rank, world), shared=shared) for rank in range(world)]
    names = sorted(piece.name for pieces in sent for piece in pieces)
    assert names == sorted(tensors)
    assert "buffer" in {piece.name for piece in sent[0]}
    for pieces in sent:
        held = {piece.name: piece.alias_of for piece in pieces}
        assert all(not alias or alias in held for alias in held.values())
        assert all(piece.box == Box.whole(piece.shape) for piece in pieces)
    loads = [sum(p.tensor.nbytes for p in pieces if not p.alias_of) for pieces in sent]
    assert max(loads) - min(loads) <= max(t.nbytes for t in tensors.values())


def test_what_may_differ_between_ranks_is_the_first_ones() -> None:
    tensors = {"a": torch.empty(3), "b": torch.empty(3)}
    assert len(pieces_of(tensors, Place(0, 2))) == 2
    assert pieces_of(tensors, Place(1, 2)) == []


def test_ties_by_address_and_by_identity() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(3, 3)
            self.b = torch.nn.Linear(3, 3)
            self.b.weight = self.a.weight
            self.none = torch.nn.Parameter(torch.empty(0, 3))
            self.register_buffer("c", torch.ones(2))
            self.d = self.none

    model = Model()
    assert ties_of(model.state_dict()) == {"b.weight": "a.weight"}
    assert ties_of_module(model) == {"b.weight": "a.weight", "d": "none"}
