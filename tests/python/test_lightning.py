"""StockpotCallback in a real Lightning Trainer."""

from __future__ import annotations

import warnings
from pathlib import Path

import stockpot
import torch
from stockpot import CheckpointHook, Client, RunConfig

from tests.daemon import Daemon, free_port

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import pytorch_lightning as pl
    from stockpot.lightning import StockpotCallback

QUIET = RunConfig(merge_every=0, publish="request", best_metric="val_loss")


class Module(pl.LightningModule):
    """Two layers and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 8))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = (self.model(batch) - batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val_loss", (self.model(batch) - batch).square().mean())

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": {
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}}


def fit(hook: CheckpointHook, folder: Path, steps: int, **options: object) -> Module:
    data = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    pl.seed_everything(3, verbose=False)
    module = Module()
    trainer = pl.Trainer(
        max_steps=steps, callbacks=[StockpotCallback(hook, select=lambda m: m.model, **options)],
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accumulate_grad_batches=2, val_check_interval=4,
        default_root_dir=folder, num_sanity_val_steps=1)
    trainer.fit(module, loader, loader)
    assert trainer.global_step == steps
    return module


def make_hook(address: str, folder: Path, **options: object) -> CheckpointHook:
    given = {"run": "pl", "base": "tiny", "every": 2, "files": folder, "config": QUIET,
             "when_full": "wait"} | options
    return CheckpointHook(address, **given)


def test_lightning(daemon: Daemon, client: Client, tiny_base: Path, tmp_path: Path) -> None:
    """Saved, reported, and a second trainer continues where the first one stopped."""
    with make_hook(daemon.thrift, tiny_base) as hook:
        first = fit(hook, tmp_path, 5, save_state=True)
        assert hook.stats.committed == 3, hook.stats
    log = {entry.step.step: entry for entry in client.lineage.log("pl")}
    assert list(log) == [2, 4, 5]
    assert "loss" in log[4].step.metrics
    assert {e.metric for e in log[4].artifact.evals} >= {"val_loss"}
    stored = stockpot.load(client, "pl@5")
    weights = {name: stored[name] for name in first.model.state_dict()}
    assert all(torch.equal(v, weights[n]) for n, v in first.model.state_dict().items())

    with make_hook(daemon.thrift, tiny_base) as hook:
        second = fit(hook, tmp_path, 8, save_state=True, resume=True)
        assert hook.stats.committed == 2, hook.stats  # 6, 8
    assert [e.step.step for e in client.lineage.log("pl")] == [2, 4, 5, 6, 8]
    (optimizer,) = second.trainer.optimizers
    assert int(optimizer.state[second.model[0].weight]["step"]) == 8
    assert second.trainer.lr_scheduler_configs[0].scheduler.last_epoch == 8


def test_lightning_without_a_daemon(tiny_base: Path, tmp_path: Path) -> None:
    with make_hook(f"127.0.0.1:{free_port()}", tiny_base, retry_for_s=0.1) as hook:
        module = fit(hook, tmp_path, 3)
        assert hook.flush(30) and hook.stats.committed == 0 and hook.stats.failed >= 1
    assert module.trainer.callback_metrics["stockpot_failed"] >= 0
