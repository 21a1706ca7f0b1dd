"""StockpotCallback: the hook for Lightning's Trainer. Importing this module needs lightning or
pytorch_lightning; the one that the program uses is taken.

from stockpot import CheckpointHook
from stockpot.lightning import StockpotCallback

hook = CheckpointHook("127.0.0.1:7070", run="demo", base="smollm2", every=100)
trainer = Trainer(..., callbacks=[StockpotCallback(hook)])
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from stockpot.hook import CheckpointHook

if TYPE_CHECKING or "pytorch_lightning" in sys.modules or "lightning" not in sys.modules:
    try:
        from pytorch_lightning import Callback, LightningModule, Trainer
    except ImportError:
        from lightning import Callback, LightningModule, Trainer
else:
    from lightning import Callback, LightningModule, Trainer


def model_in(module: LightningModule) -> torch.nn.Module:
    """The default of `select`: the one transformers model in the LightningModule, or all of it.

    A base's tensors have the model's own names, without the attribute that holds it in front.
    """
    models = [child for child in module.children()
              if hasattr(getattr(child, "config", None), "to_json_string")]
    return models[0] if len(models) == 1 else module


class StockpotCallback(Callback):
    """Saves at the end of every optimizer step that is a multiple of hook.every.

    Metrics of a save are what was logged so far (trainer.callback_metrics). A validation that runs
    after a step was saved is reported for it (task "eval"). With save_state, optimizers, schedulers
    and random numbers go along, and a trainer that starts again with resume=True continues from the
    run's newest checkpoint: the weights before the first step, the rest when it is set up.

    Failures show in the hook's log and as the metrics stockpot_failed and stockpot_committed.
    The hook stays the caller's: close it after training.
    """

    def __init__(self, hook: CheckpointHook, *,
                 select: Callable[[LightningModule], torch.nn.Module] = model_in,
                 save_state: bool = False, resume: bool = False, save_last: bool = True,
                 flush_timeout_s: float = 600.0) -> None:
        """`select` picks the model to store out of the LightningModule (`lambda m: m.model`)."""
        self._hook = hook
        self._select = select
        self._save_state = save_state
        self._resume = resume
        self._save_last = save_last
        self._flush_timeout_s = flush_timeout_s
        self._seen_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resumes, if that was asked for."""
        self._seen_step = trainer.global_step
        if not self._resume:
            return
        state = self._state_of(trainer) if self._save_state else None
        resumed = self._hook.resume(self._model_of(pl_module), state=state)
        if resumed is not None:
            self._set_progress(trainer, resumed.step)
            self._seen_step = resumed.step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any,
                           batch: Any, batch_idx: int) -> None:
        """Saves after the batch that ended an optimizer step (not while gradients accumulate)."""
        step = trainer.global_step
        if step == self._seen_step:
            return
        self._seen_step = step
        if step % self._hook.every == 0:
            self._save(trainer, pl_module, step)
        stats = self._hook.stats
        pl_module.log_dict({"stockpot_committed": float(stats.committed),
                            "stockpot_failed": float(stats.failed + stats.skipped)},
                           on_step=True, on_epoch=False, rank_zero_only=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reports results that belong to a step that was saved."""
        if trainer.sanity_checking or self._hook.last_step != trainer.global_step:
            return
        known = set(getattr(trainer, "logged_metrics", {}))
        results = {name: value for name, value in _numbers(trainer.callback_metrics).items()
                   if name.startswith("val") or name not in known}
        self._hook.report(trainer.global_step, results)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the last step, if it was not, and waits for the upload."""
        if self._save_last and self._hook.last_step != trainer.global_step:
            self._save(trainer, pl_module, trainer.global_step)
        self._hook.flush(self._flush_timeout_s)

    def _save(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        state = self._state_of(trainer) if self._save_state else None
        self._hook.save(step, self._model_of(pl_module), _numbers(trainer.callback_metrics),
                        state=state)

    def _model_of(self, pl_module: LightningModule) -> torch.nn.Module:
        return self._select(pl_module)

    @staticmethod
    def _state_of(trainer: Trainer) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for index, optimizer in enumerate(trainer.optimizers):
            state[f"optimizer{index}"] = optimizer
        for index, config in enumerate(trainer.lr_scheduler_configs):
            state[f"scheduler{index}"] = config.scheduler
        return state

    @staticmethod
    def _set_progress(trainer: Trainer, step: int) -> None:
        """Tells the trainer's loop how many optimizer steps were done."""
        loop = trainer.fit_loop.epoch_loop
        loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step
        loop.manual_optimization.optim_step_progress.total.completed = step


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {}
    for name, value in values.items():
        is_number = isinstance(value, (int, float)) or (
            isinstance(value, torch.Tensor) and value.numel() == 1)
        if is_number and not name.startswith("stockpot_"):
            number = float(value)
            if math.isfinite(number):
                numbers[name] = number
    return numbers
