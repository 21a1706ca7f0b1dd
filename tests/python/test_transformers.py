"""StockpotCallback in a real Trainer."""

from __future__ import annotations

import json
from pathlib import Path

import stockpot
import torch
from stockpot import CheckpointHook, Client, RunConfig
from stockpot.transformers import StockpotCallback
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from tests.daemon import Daemon, free_port


class Blocks(torch.utils.data.Dataset):
    """Fixed random token blocks, [16, 24]."""

    def __init__(self) -> None:
        self.ids = torch.randint(3, 259, (16, 24), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def make_trainer(folder: Path, out: Path, hook: CheckpointHook, steps: int = 7, **options: bool
                 ) -> Trainer:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=2, learning_rate=1e-3,
        logging_steps=1, eval_strategy="steps", eval_steps=3, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, seed=1)
    return Trainer(model=model, args=arguments, train_dataset=Blocks(), eval_dataset=Blocks(),
                   processing_class=AutoTokenizer.from_pretrained(folder),
                   callbacks=[StockpotCallback(hook, **options)])


def test_trainer(daemon: Daemon, client: Client, tiny_base: Path, tmp_path: Path) -> None:
    with CheckpointHook(daemon.thrift, "hf", "tiny", every=2, cast_to=torch.bfloat16,
                        config=RunConfig(merge_every=0, publish="request", best_metric="eval_loss"),
                        when_full="wait") as hook:
        trainer = make_trainer(tiny_base, tmp_path / "out", hook)
        trainer.train()
        assert hook.stats.committed == 4, hook.stats
    log = {entry.step.step: entry for entry in client.lineage.log("hf")}
    assert list(log) == [2, 4, 6, 7]  # every second, and the last
    # Trainer evaluated after steps 3 and 6: step 3 was not saved, so step 4 carries it.
    assert "loss" in log[4].step.metrics and "eval_loss" in log[4].step.metrics
    assert "eval_loss" not in log[2].step.metrics
    assert [(e.task, e.metric) for e in log[6].artifact.evals] == [("eval", "eval_loss")]

    stored = stockpot.load(client, "hf@7")
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(stored[name], value.to(torch.bfloat16)), name
    manifest = json.loads(client.fetch_manifest("hf@7"))
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= manifest["files"].keys()
    config = manifest["files"]["config.json"]["chunks"][0]
    assert json.loads(client.fetch_chunk(bytes.fromhex(config)))["dtype"] == "bfloat16"


def test_a_trainer_that_continues(daemon: Daemon, client: Client, tiny_base: Path, tmp_path: Path
                                  ) -> None:
    given = {"every": 2, "when_full": "wait",
             "config": RunConfig(merge_every=0, publish="request", best_metric="eval_loss")}
    for steps, saved in ((4, 2), (6, 1)):
        with CheckpointHook(daemon.thrift, "hf", "tiny", **given) as hook:
            trainer = make_trainer(tiny_base, tmp_path / "out", hook, steps, save_state=True,
                                   resume=True)
            trainer.train()
            assert trainer.state.global_step == steps
            assert hook.stats.committed == saved and hook.stats.failed == 0, hook.stats
    entries = client.lineage.log("hf")
    assert [entry.step.step for entry in entries] == [2, 4, 6]
    # Trainer's own mean is over all steps, of which this process did the last two.
    losses = [entry.step.metrics["loss"] for entry in entries if "loss" in entry.step.metrics]
    assert losses and min(losses) > 0.9 * max(losses), losses
    slots = next(iter(trainer.optimizer.state.values()))
    assert int(slots["step"]) == 6
    assert trainer.lr_scheduler.last_epoch == 6
    # Started once more, though it had ended: nothing is added.
    with CheckpointHook(daemon.thrift, "hf", "tiny", **given) as hook:
        make_trainer(tiny_base, tmp_path / "out", hook, 6, save_state=True, resume=True).train()
    assert [entry.step.step for entry in client.lineage.log("hf")] == [2, 4, 6]


def test_trainer_without_a_daemon(tiny_base: Path, tmp_path: Path) -> None:
    with CheckpointHook(f"127.0.0.1:{free_port()}", "hf", "tiny", every=2,
                        retry_for_s=0.1) as hook:
        trainer = make_trainer(tiny_base, tmp_path / "out", hook)
        trainer.train()
        assert trainer.state.global_step == 7
    assert hook.stats.committed == 0 and hook.stats.failed >= 2
