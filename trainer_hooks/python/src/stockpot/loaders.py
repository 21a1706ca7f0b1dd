"""ResumableLoader: a DataLoader (or any iterable) whose place in the data is part of the state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch

from stockpot import state

T = TypeVar("T")


class ResumableLoader(Generic[T]):
    """Yields what `loader` yields, and can continue in the middle of an epoch, bit for bit.

    The state is the epoch, how many batches of it were taken, and the generators as they were when
    it began: torch's, numpy's, Python's, and the loader's own (`generator`). To continue, the epoch
    is begun from those again and the batches that were taken are drawn and dropped; this loads them
    once more. Loaders with a state of their own (torchdata's StatefulDataLoader) do not need this:
    give them to the hook as they are.

        loader = ResumableLoader(DataLoader(data, batch_size=8, shuffle=True))
        for epoch in range(loader.epoch, epochs):
            for batch in loader:
                ...
                hook.on_step(step, model, state={"loader": loader, ...})

    A sampler with set_epoch() (DistributedSampler) is told the epoch.
    Not for several threads. One iteration at a time.
    """

    def __init__(self, loader: Iterable[T]) -> None:
        self.loader = loader
        self.epoch = 0  # that is under way or comes next
        self._taken = 0  # batches of this epoch
        self._begun: dict[str, Any] | None = None  # the generators when this epoch began
        self._resume = False  # the next iteration continues this epoch

    def __iter__(self) -> Iterator[T]:
        skip = 0
        if self._resume and self._begun is not None:
            skip, self._resume = self._taken, False
            now = state.rng_state()
            self._set_generators(self._begun)
        else:
            self._taken, self._begun = 0, self._generators()
        sampler = getattr(self.loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.epoch)
        batches = iter(self.loader)
        for _ in range(skip):
            next(batches, None)
        if skip:
            state.set_rng_state(now)
        for batch in batches:
            self._taken += 1
            yield batch
        self.epoch, self._taken, self._begun = self.epoch + 1, 0, None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """What load_state_dict() takes."""
        return {"epoch": self.epoch, "taken": self._taken, "begun": self._begun}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """The next iteration continues where the state was taken."""
        self.epoch, self._taken = int(values["epoch"]), int(values["taken"])
        self._begun = values["begun"]
        self._resume = self._begun is not None

    def _generators(self) -> dict[str, Any]:
        own = {name: generator.get_state() for name, generator in self._own_generators()}
        return {"global": state.rng_state(), "own": own}

    def _set_generators(self, begun: Mapping[str, Any]) -> None:
        state.set_rng_state(begun["global"])
        for name, generator in self._own_generators():
            if name in begun["own"]:
                generator.set_state(begun["own"][name])

    def _own_generators(self) -> list[tuple[str, torch.Generator]]:
        """The loader's and its sampler's, where they are not the global one."""
        holders = {"loader": self.loader, "sampler": getattr(self.loader, "sampler", None)}
        found = [(name, getattr(holder, "generator", None)) for name, holder in holders.items()]
        return [(name, item) for name, item in found if isinstance(item, torch.Generator)]
