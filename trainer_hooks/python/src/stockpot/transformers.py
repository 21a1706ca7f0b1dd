"""StockpotCallback: the hook for Hugging Face's Trainer. Importing this module needs transformers.

from stockpot import CheckpointHook
from stockpot.transformers import StockpotCallback

hook = CheckpointHook("127.0.0.1:7070", run="demo", base="smollm2", every=100)
trainer = Trainer(..., callbacks=[StockpotCallback(hook)])
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stockpot.hook import CheckpointHook, read_files

# What Trainer logs beside metrics of the model.
_NOT_METRICS = ("epoch", "step", "total_flos", "num_input_tokens_seen")
_NOT_METRICS_SUFFIXES = ("_runtime", "_per_second")


class StockpotCallback(TrainerCallback):
    """Saves at the end of every step that is a multiple of hook.every; independent of save_steps.

    Metrics of a save are the ones Trainer logged last ("loss", "learning_rate", ...). Trainer
    evaluates after the step has ended: results of a step that was saved are reported for it
    (task "eval"), results of another step travel with the next save. The tokenizer that Trainer
    holds is stored with every save. At the end of training the last step is saved, if it was not,
    and the upload is waited for.

    With save_state, optimizer, schedule and random numbers go along; a Trainer that starts again
    with resume=True continues from the run's newest checkpoint. It counts on from that step; which
    data it has seen already is the caller's affair.
    """

    def __init__(self, hook: CheckpointHook, *, save_state: bool = False, resume: bool = False,
                 save_last: bool = True, flush_timeout_s: float = 600.0) -> None:
        """The hook stays the caller's: close it after training."""
        self._hook = hook
        self._save_state = save_state
        self._resume = resume
        self._save_last = save_last
        self._flush_timeout_s = flush_timeout_s
        self._logged: dict[str, float] = {}  # as Trainer logged it last
        self._pending: dict[str, float] = {}  # evaluated, and no save to report it for
        self._odd_log = False  # the next one has a loss over steps that this process did not do

    def on_train_begin(self, args: TrainingArguments, state: TrainerState,
                       control: TrainerControl, **kwargs: Any) -> None:
        tokenizer = kwargs.get("processing_class") or kwargs.get("tokenizer")
        if tokenizer is not None and state.is_world_process_zero:
            with tempfile.TemporaryDirectory() as folder:
                tokenizer.save_pretrained(folder)
                self._hook.add_files(read_files(folder))
        if self._resume:
            resumed = self._hook.resume(kwargs["model"], state=self._state_of(kwargs), cast=True)
            if resumed is not None:
                state.global_step = resumed.step
                self._odd_log = True  # Trainer divides its sum by all steps since step 0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
                    **kwargs: Any) -> None:
        if state.global_step % self._hook.every == 0 and not _is_over(state):
            self._save(state.global_step, kwargs)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
               logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        numbers = _numbers(logs or {})  # evaluation results are logged too: they have their own way
        if self._odd_log and "loss" in numbers:
            self._odd_log = False
            del numbers["loss"]
        self._logged.update({k: v for k, v in numbers.items() if not k.startswith("eval_")})

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
                    metrics: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        numbers = _numbers(metrics or {})
        if self._hook.last_step == state.global_step:
            self._hook.report(state.global_step, numbers)
        else:
            self._pending.update(numbers)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
                     **kwargs: Any) -> None:
        if self._save_last and self._hook.last_step != state.global_step and not _is_over(state):
            self._save(state.global_step, kwargs)
        self._hook.flush(self._flush_timeout_s)

    def _state_of(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        if not self._save_state:
            return None
        return {"optimizer": given["optimizer"], "scheduler": given["lr_scheduler"]}

    def _save(self, step: int, given: Mapping[str, Any]) -> None:
        if self._hook.save(step, given["model"], self._logged | self._pending,
                           state=self._state_of(given)):
            self._pending = {}


def _is_over(state: TrainerState) -> bool:
    """Trainer does one step more when a job that had ended is started again."""
    return 0 < state.max_steps < state.global_step


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value) for name, value in values.items()
        if isinstance(value, (int, float)) and name not in _NOT_METRICS
        and not name.endswith(_NOT_METRICS_SUFFIXES)
    }
