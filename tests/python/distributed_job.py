"""Jobs of several Gloo processes for test_distributed.py: python distributed_job.py SETTINGS_JSON

Imports once, then forks the ranks of one world after the other, so that a world costs no imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stockpot
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from stockpot import CheckpointHook, RunConfig, StockpotError
from stockpot.dcp import StockpotReader, StockpotWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

QUIET = RunConfig(merge_every=0, publish="request")
JOB_TIMEOUT_S = 300
KINDS = ("ddp", "fsdp", "hsdp")


@dataclass
class Settings:
    address: str
    folder: Path  # where files of the test go
    base: Path  # the base's folder
    cli: str  # the program `stockpot`


class Model(torch.nn.Module):
    """Odd sizes, a tied head, a buffer that differs between ranks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(11, 6)
        self.blocks = torch.nn.Sequential(
            torch.nn.Linear(6, 13), torch.nn.GELU(), torch.nn.Linear(13, 6, bias=False))
        self.norm = torch.nn.LayerNorm(6)
        self.scale = torch.nn.Parameter(torch.ones(3))  # fewer elements than ranks
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("rank_note", torch.full((5,), float(dist.get_rank())))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(ids)))) * self.scale.sum()


def build(kind: str, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model: torch.nn.Module = Model(seed)
    if kind == "ddp":
        model = DistributedDataParallel(model, broadcast_buffers=False)
    else:
        shape = (2, dist.get_world_size() // 2) if kind == "hsdp" else (dist.get_world_size(),)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape):])
        fully_shard(model.blocks, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        ids = torch.randint(0, 11, (4, 3), generator=torch.Generator().manual_seed(
            100 * step + dist.get_rank()))
        model(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(value: Any) -> Any:
    """A copy, gathered."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return value


def picture(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that must come back, independent of the sharding. Rank 0's buffer counts."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    weights = {name: whole(value) for name, value in inner.state_dict().items()}
    names = {id(parameter): name for name, parameter in inner.named_parameters()}
    moments = {names[id(parameter)]: {key: whole(value) for key, value in slots.items()}
               for parameter, slots in optimizer.state.items()}
    options = [{key: value for key, value in group.items() if key != "params"}
               for group in optimizer.param_groups]
    return {"weights": weights, "moments": moments, "options": options}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def make_hook(settings: Settings, run: str) -> CheckpointHook:
    return CheckpointHook(settings.address, run, "tiny", every=1, config=QUIET,
                          files=settings.base, when_full="wait")


def save(settings: Settings, kind: str) -> None:
    """C3 and C11: what is stored are the values at the call, of every rank's part."""
    world = dist.get_world_size()
    run = f"{kind}{world}"
    model, optimizer = build(kind, seed=1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    state = {"optimizer": optimizer, "schedule": schedule, "rank": dist.get_rank()}
    with make_hook(settings, run) as hook:
        assert hook.resume(model) is None
        for step in (1, 2):
            train(model, optimizer, 2)
            schedule.step()
            expected = picture(model, optimizer)
            assert hook.on_step(step, model, {"loss": step}, state=state)
            train(model, optimizer, 1)  # at once
        assert hook.flush(60), hook.stats
        assert hook.stats.committed == 2 and hook.stats.failed == 0, hook.stats
        staged = torch.tensor([hook.stats.staged_bytes])
    if dist.get_rank() == 0:
        torch.save(expected, settings.folder / f"{run}.pt")
    if kind == "ddp":
        mine = staged.clone()
        dist.all_reduce(staged)
        print(run, "rank", dist.get_rank(), "staged", int(mine), "of", int(staged), flush=True)
        # The whole model and optimizer once: nobody holds more than half of it.
        assert 2 * int(mine) <= int(staged) + 20000, (mine, staged)


def load(settings: Settings, run: str, kind: str) -> None:
    """Another number of ranks, another kind of sharding: bit for bit, decided once (C16)."""
    model, optimizer = build(kind, seed=dist.get_rank() + 7)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    state = {"optimizer": optimizer, "schedule": schedule, "rank": -1}
    expected = torch.load(settings.folder / f"{run}.pt", weights_only=False)
    with make_hook(settings, run) as hook:
        resumed = hook.resume(model, state=state)
        assert resumed is not None and resumed.step == 2
        saved_world = int(run[-1])
        assert resumed.values == {"rank": dist.get_rank() % saved_world}
    assert schedule.last_epoch == 2
    now = picture(model, optimizer)
    for part in now:
        assert same(now[part], expected[part]), (run, kind, part)
    inner = model.module if kind == "ddp" else model
    assert inner.head.weight is inner.embed.weight
    train(model, optimizer, 1)  # it can go on


def decide_once(settings: Settings, run: str) -> None:
    """C16: a checkpoint that comes while ranks ask changes nobody's answer."""
    rank = dist.get_rank()
    for turn in range(dist.get_world_size()):
        if turn == rank:
            with stockpot.Client(settings.address) as client:
                point = client.resume_point(run, "the next start")
            assert point.step == 2, point
        dist.barrier()
        if turn == 0 and rank == 0:
            subprocess.run([settings.cli, "push", run, "9", settings.base, "--base", "tiny"],
                           check=True, env=os.environ | {"STOCKPOT_SERVER": settings.address})
        dist.barrier()


def adopt(settings: Settings, run: str, kind: str) -> None:
    model, optimizer = build(kind, seed=5)
    before = picture(model, optimizer)
    wrong = "nobody@1" if dist.get_rank() == 1 else f"{run}@2"
    try:
        stockpot.adopt_merge(settings.address, wrong, model)
        raise AssertionError("one rank could not, and the others did")
    except StockpotError:
        assert same(picture(model, optimizer), before)
    stockpot.adopt_merge(settings.address, f"{run}@2", model)
    expected = torch.load(settings.folder / f"{run}.pt", weights_only=False)
    assert same(picture(model, optimizer)["weights"], expected["weights"])


def dcp_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model),
            "optim": get_optimizer_state_dict(model, optimizer)}


def save_dcp(settings: Settings, kind: str) -> None:
    world = dist.get_world_size()
    run = f"dcp-{kind}{world}"
    model, optimizer = build(kind, seed=1)
    writer = StockpotWriter(settings.address, run, "tiny", config=QUIET, files=settings.base)
    train(model, optimizer, 2)
    extra = {"epoch": 3, "notes": {"names": ["a", ("b", 2.5)], "none": None}}
    expected = picture(model, optimizer)
    dcp.save(dcp_state(model, optimizer) | extra, checkpoint_id=f"{run}@1", storage_writer=writer)
    # Of its own: DCP's collectives run beside those of training.
    future = dcp.async_save(dcp_state(model, optimizer) | extra, checkpoint_id="2",
                            storage_writer=writer, process_group=dist.new_group())
    train(model, optimizer, 1)
    future.result()
    if dist.get_rank() == 0:
        assert writer.artifact
        torch.save(expected, settings.folder / f"{run}.pt")


def load_dcp(settings: Settings, run: str, kind: str) -> None:
    model, optimizer = build(kind, seed=dist.get_rank() + 7)
    train(model, optimizer, 1)
    expected = torch.load(settings.folder / f"{run}.pt", weights_only=False)
    for step in (1, 2):
        state = dcp_state(model, optimizer) | {"epoch": 0, "notes": {"names": [], "none": 1}}
        dcp.load(state, checkpoint_id=f"{run}@{step}",
                 storage_reader=StockpotReader(settings.address))
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"])
        now = picture(model, optimizer)
        now["weights"].pop("rank_note"), (want := dict(expected["weights"])).pop("rank_note")
        assert same(now["weights"], want), (run, kind, step)
        assert same(now["moments"], expected["moments"]), (run, kind, step)
        assert state["epoch"] == 3
        train(model, optimizer, 1)


def in_world(world: int, settings: Settings, job: Callable[[Settings], None]) -> None:
    """Runs `job` in `world` forked processes; raises if one of them fails."""
    import socket
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(world):
        child = os.fork()
        if child:
            children.append(child)
            continue
        status = 1
        try:
            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                                    world_size=world)
            job(settings)
            dist.barrier()
            dist.destroy_process_group()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(codes), f"world of {world}: exit codes {codes}"


def save_four(settings: Settings) -> None:
    for kind in KINDS:
        save(settings, kind)
    save_dcp(settings, "fsdp")


def load_and_save_two(settings: Settings) -> None:
    for run, kind in (("ddp4", "fsdp"), ("fsdp4", "ddp"), ("hsdp4", "fsdp"), ("fsdp4", "fsdp")):
        load(settings, run, kind)
    load_dcp(settings, "dcp-fsdp4", "fsdp")
    adopt(settings, "fsdp4", "fsdp")
    adopt(settings, "fsdp4", "ddp")
    for kind in ("ddp", "fsdp"):
        save(settings, kind)
        save_dcp(settings, kind)
    decide_once(settings, "ddp2")


def load_four(settings: Settings) -> None:
    for run, kind in (("fsdp2", "fsdp"), ("fsdp2", "hsdp"), ("ddp4", "ddp")):
        load(settings, run, kind)
    load_dcp(settings, "dcp-fsdp2", "fsdp")
    load_dcp(settings, "dcp-ddp2", "fsdp")


def main() -> None:
    given = json.loads(sys.argv[1])
    settings = Settings(given["address"], Path(given["folder"]), Path(given["base"]), given["cli"])
    for world, job in ((4, save_four), (2, load_and_save_two), (4, load_four)):
        in_world(world, settings, job)
        print("done:", job.__name__, flush=True)


if __name__ == "__main__":
    main()
