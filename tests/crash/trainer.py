"""The training loop of the crash test: its weights at a step are a function of the step alone.

    trainer.py ADDRESS RUN BASE_FOLDER ACKNOWLEDGED STOP

Writes a line "step artifact" to ACKNOWLEDGED for the newest commit that the hook saw acknowledged
(one that another follows at once may have no line), and
the step it has reached to ACKNOWLEDGED.steps; ends when the file STOP exists.
"""

import os
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from stockpot import CheckpointHook, RunConfig

STEP_S = 0.05
PUSH_EVERY = 2
MERGE_EVERY = 8


def weights_at(base: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """The base plus noise seeded by the step."""
    generator = torch.Generator().manual_seed(step)
    return {name: (tensor.float() + 1e-2 * torch.randn(tensor.shape, generator=generator)).to(
        tensor.dtype) for name, tensor in base.items()}


def main(address: str, run: str, folder: str, acknowledged: str, stop: str) -> None:
    base = load_file(Path(folder) / "model.safetensors")
    config = RunConfig(merge_every=MERGE_EVERY, publish="every")
    step = 0
    seen = -1

    def note_commit() -> None:
        nonlocal seen
        stats = hook.stats
        if stats.last_committed_step != seen:
            seen = stats.last_committed_step
            log.write(f"{seen} {stats.last_artifact}\n")
            log.flush()

    def note_step(step: int) -> None:  # whole or not at all: another process reads it meanwhile
        Path(acknowledged + ".steps.new").write_text(str(step))
        os.replace(acknowledged + ".steps.new", acknowledged + ".steps")

    with (CheckpointHook(address, run=run, base="tiny", every=PUSH_EVERY, config=config,
                         files=folder) as hook,
          open(acknowledged, "a") as log):
        while not Path(stop).exists():
            step += 1
            hook.on_step(step, weights_at(base, step), {"loss": 1.0 / step})
            deadline = time.monotonic() + STEP_S
            while time.monotonic() < deadline:
                note_commit()
                time.sleep(0.002)
            note_step(step)
        hook.flush(60)
        note_commit()


if __name__ == "__main__":
    main(*sys.argv[1:])
