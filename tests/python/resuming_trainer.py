"""A training job that a test kills and starts again.

    resuming_trainer.py ADDRESS RUN BASE_FOLDER STEPS OUT KILL_AT

Trains from where the daemon says to STEPS with dropout, AdamW, a schedule and a shuffled loader,
saving every second step, and writes the weights of the end to OUT. At step KILL_AT (0: never) it
waits until what it saved is durable, trains one more step and kills itself with SIGKILL.
"""

import os
import random
import signal
import sys

import numpy as np
import torch
from stockpot import CheckpointHook, ResumableLoader, RunConfig

QUIET = RunConfig(merge_every=0, publish="request")


def make_model() -> torch.nn.Module:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.3), torch.nn.GELU(),
                               torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 16))


def main(address: str, run: str, folder: str, steps: int, out: str, kill_at: int) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 3e-3}, {"params": model[4].parameters()},
         {"params": model[3].parameters(), "weight_decay": 0.0}], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 8])], milestones=[3])
    data = torch.randn(22, 16, generator=torch.Generator().manual_seed(2))
    loader = ResumableLoader(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
    notes = {"seen": 0, "history": []}
    state = {"optimizer": optimizer, "scheduler": scheduler, "loader": loader, "notes": notes}
    with CheckpointHook(address, run, "tiny", every=2, config=QUIET, files=folder,
                        when_full="wait") as hook:
        resumed = hook.resume(model, state=state)
        if resumed:
            notes.update(resumed.values["notes"])
        step = resumed.step if resumed else 0
        print("resumed", step, flush=True)
        while step < steps:
            for batch in loader:
                step += 1
                noisy = batch + 0.1 * torch.randn(batch.shape) * random.random() * np.random.rand()
                loss = (model(noisy) - batch).square().mean()
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                notes["seen"] += len(batch)
                notes["history"].append(float(loss))
                hook.on_step(step, model, {"loss": loss}, state=state)
                if step == kill_at:
                    assert hook.flush(60) and hook.stats.committed, hook.stats
                if step == kill_at + 1 and kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step == steps:
                    break
        assert hook.flush(60) and hook.stats.failed == 0, hook.stats
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(), "notes": notes,
                "next": [random.random(), np.random.rand(), torch.rand(()).item()]}, out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5], int(sys.argv[6]))
