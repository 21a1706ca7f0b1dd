"""Pools of adapters over the daemon: added, asked for by task, merged, moved, carried on."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.daemon import Daemon, running
from tests.integration import endpoint
from tests.integration.test_adapters import import_adapter, make_adapter, peft_logprobs
from tests.integration.test_path import TOKENS

NAMES = itertools.count()


@pytest.fixture()
def pool() -> Iterator[str]:
    yield f"pool{next(NAMES)}"


def show(daemon: Daemon, pool: str) -> dict[str, Any]:
    shown = json.loads(daemon.cli("pool", "show", pool, "--json").stdout)
    assert shown["bytes"] <= shown["budget_bytes"], shown
    return shown


def members(daemon: Daemon, pool: str) -> dict[str, str]:
    return {task["task"]: task["member"] for task in show(daemon, pool)["tasks"]}


def similar(folder: Path, other: Path, share: float, seed: int) -> Path:
    """A copy of an adapter whose B is moved a little."""
    other.mkdir()
    (other / "adapter_config.json").write_text((folder / "adapter_config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator)
        tensors[name] = tensor + share * tensor.std() * noise
    save_file(tensors, other / "adapter_model.safetensors")
    return other


def deltas(folder: Path) -> dict[str, np.ndarray]:
    """Scale * B A in float64 by the file alone; plain LoRA, patterns by exact names."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    out = {}
    for name, b in tensors.items():
        if ".lora_B." not in name:
            continue
        a = tensors[name.replace(".lora_B.", ".lora_A.")]
        module = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
        rank = config["rank_pattern"].get(module, config["r"])
        assert rank == a.shape[0]
        alpha = config["alpha_pattern"].get(module, config["lora_alpha"])
        out[module] = alpha / rank * b.double().numpy() @ a.double().numpy()
    return out


def test_tasks_are_served_and_move_with_a_merge(daemon: Daemon, base_folder: Path, tmp_path: Path,
                                                pool: str) -> None:
    first = make_adapter(base_folder, tmp_path / "first", 1)
    second = similar(first, tmp_path / "second", 0.3, 2)
    probe = tmp_path / "probe.txt"
    probe.write_text("Held-out text of the task. " * 4)
    daemon.cli("pool", "create", pool, "--base", "tiny", "--bytes", 400_000, "--method", "mean",
               "--threshold", 0.5, "--quality", 0.01)
    daemon.cli("pool", "add", pool, "mail", first, "--probe", probe)
    mail = f"{pool}/mail"
    endpoint.wait_model(daemon.url, mail)
    assert endpoint.prompt_logprobs(daemon.url, mail, TOKENS) == pytest.approx(
        peft_logprobs(base_folder, first), abs=1e-4)
    names = [m["id"] for m in endpoint.request(f"{daemon.url}/v1/models")[1]["data"]]
    assert mail in names

    answers: list[int] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            answers.append(endpoint.request(f"{daemon.url}/v1/completions", {
                "model": mail, "prompt": TOKENS, "max_tokens": 4, "temperature": 0})[0])

    asker = threading.Thread(target=ask)
    asker.start()
    try:
        daemon.cli("pool", "add", pool, "chat", second, "--probe", probe)
    finally:
        stop.set()
        asker.join()
    assert answers and set(answers) == {200}, "a request failed while the map moved"
    shown = show(daemon, pool)
    assert len(shown["members"]) == 1 and shown["members"][0]["merged"] == 2
    assert all(task["own_loss"] is not None and task["loss"] is not None for task in shown["tasks"])
    assert members(daemon, pool)["mail"] == members(daemon, pool)["chat"]

    daemon.cli("pool", "export", pool, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "pool.json").read_text())
    merged = tmp_path / "out" / index["tasks"]["mail"]
    assert index["tasks"]["chat"] == index["tasks"]["mail"]
    theirs = peft_logprobs(base_folder, merged)
    for task in ("mail", "chat"):
        assert endpoint.prompt_logprobs(daemon.url, f"{pool}/{task}", TOKENS) == pytest.approx(
            theirs, abs=1e-4)
    ours, a, b = deltas(merged), deltas(first), deltas(second)
    for module, matrix in ours.items():  # the mean, cut to the rank of its parts
        u, s, vh = np.linalg.svd((a[module] + b[module]) / 2, full_matrices=False)
        wanted = (u[:, :8] * s[:8]) @ vh[:8]
        assert np.linalg.norm(matrix - wanted) <= 1e-5 * np.linalg.norm(wanted), module

    daemon.cli("pool", "remove", pool, "mail")
    endpoint.wait_gone(daemon.url, mail)
    assert endpoint.prompt_logprobs(daemon.url, f"{pool}/chat", TOKENS) == pytest.approx(
        theirs, abs=1e-4)


def test_a_refused_add_changes_nothing(daemon: Daemon, base_folder: Path, tmp_path: Path, pool: str
                                       ) -> None:
    small = make_adapter(base_folder, tmp_path / "small", 3, r=2, lora_alpha=4)
    large = make_adapter(base_folder, tmp_path / "large", 4, r=32, lora_alpha=64)
    daemon.cli("pool", "create", pool, "--base", "tiny", "--bytes", 80_000, "--no-evict",
               "--quality", 1)
    daemon.cli("pool", "add", pool, "one", small)
    before, routes = show(daemon, pool), daemon.cli("routes", "--json").stdout
    done = daemon.cli("pool", "add", pool, "two", large, check=False)
    assert done.returncode == 1
    for part in ("80000", str(before["bytes"]), "larger budget"):
        assert part in done.stderr, done.stderr
    assert show(daemon, pool) == before
    assert daemon.cli("routes", "--json").stdout == routes
    events = [json.loads(line) for line in daemon.cli("events", "--json").stdout.splitlines()]
    assert any(e["type"] == "pool_refused" and e["subject"] == pool for e in events)


def test_the_least_requested_goes(daemon: Daemon, base_folder: Path, tmp_path: Path, pool: str
                                  ) -> None:
    folders = [make_adapter(base_folder, tmp_path / str(i), 10 + i) for i in range(3)]
    daemon.cli("pool", "create", pool, "--base", "tiny", "--bytes", 300_000, "--quality", 1,
               "--threshold", 1)
    for task, folder in zip(("a", "b"), folders, strict=False):
        daemon.cli("pool", "add", pool, task, folder)
        endpoint.wait_model(daemon.url, f"{pool}/{task}")
    for _ in range(3):
        endpoint.greedy(daemon.url, f"{pool}/b", TOKENS, 1)
    endpoint.greedy(daemon.url, f"{pool}/a", TOKENS, 1)
    asked = {task["task"]: task["requests"] for task in show(daemon, pool)["tasks"]}
    assert asked == {"a": 1, "b": 3}
    daemon.cli("pool", "evict", pool)
    assert set(members(daemon, pool)) == {"b"}
    endpoint.wait_gone(daemon.url, f"{pool}/a")
    assert endpoint.request(f"{daemon.url}/v1/completions", {
        "model": f"{pool}/a", "prompt": TOKENS, "max_tokens": 1})[0] == 404


def test_a_pool_is_deleted(daemon: Daemon, base_folder: Path, tmp_path: Path, pool: str) -> None:
    adapter = make_adapter(base_folder, tmp_path / "adapter", 7)
    daemon.cli("pool", "create", pool, "--base", "tiny", "--bytes", 400_000)
    daemon.cli("pool", "add", pool, "mail", adapter)
    endpoint.wait_model(daemon.url, f"{pool}/mail")
    [member] = members(daemon, pool).values()
    done = daemon.cli("pool", "delete", pool, check=False)
    assert done.returncode == 1 and "mail" in done.stderr and "--force" in done.stderr, done.stderr
    assert endpoint.prompt_logprobs(daemon.url, f"{pool}/mail", TOKENS)
    done = daemon.cli("pool", "delete", pool, "--force", "--json")
    assert json.loads(done.stdout) == {"pool": pool, "state": "deleted"}
    endpoint.wait_gone(daemon.url, f"{pool}/mail")
    assert endpoint.request(f"{daemon.url}/v1/completions", {
        "model": f"{pool}/mail", "prompt": TOKENS, "max_tokens": 1})[0] == 404
    assert daemon.cli("show", member, check=False).returncode == 1, "its bytes are still there"
    for command in (["show", pool], ["delete", pool, "--force"]):
        done = daemon.cli("pool", *command, check=False)
        assert done.returncode == 1 and f"no pool '{pool}'" in done.stderr, done.stderr
    assert pool not in daemon.cli("pool", "list").stdout


def test_names_of_a_pool_are_its_own(daemon: Daemon, base_folder: Path, tmp_path: Path, pool: str
                                     ) -> None:
    adapter = make_adapter(base_folder, tmp_path / "adapter", 5)
    import_adapter(daemon, f"{pool}-named", adapter)
    daemon.cli("pool", "create", pool, "--base", "tiny", "--bytes", 1_000_000)
    daemon.cli("pool", "add", pool, "task", f"{pool}-named")
    assert daemon.cli("unpublish", f"{pool}/task", check=False).returncode == 1
    assert daemon.cli("pool", "add", pool, "task", adapter, check=False).returncode == 0, (
        "the same adapter again is no error")
    other = make_adapter(base_folder, tmp_path / "other", 6)
    done = daemon.cli("pool", "add", pool, "task", other, check=False)
    assert done.returncode == 1 and "remove it first" in done.stderr, done.stderr
    daemon.cli("pool", "remove", pool, "task")
    endpoint.wait_model(daemon.url, f"{pool}-named")  # an adapter with a name of its own stays
    for bad in (["create", pool, "--base", "tiny", "--bytes", 1_000_000],
                ["create", "x y", "--base", "tiny", "--bytes", 1_000_000],
                ["create", "none", "--base", "nobody", "--bytes", 1_000_000],
                ["create", "none", "--base", "tiny", "--bytes", 10],
                ["add", "nobody", "task", str(adapter)], ["add", pool, "a/b", str(adapter)],
                ["add", pool, "task", "tiny"], ["show", "nobody"], ["remove", pool, "task"]):
        done = daemon.cli("pool", *bad, check=False)
        assert done.returncode == 1 and done.stderr, bad


def test_when_a_pool_merges_unless_told(daemon: Daemon, pool: str) -> None:
    for name, flags, threshold, quality in (
            (pool, [], 1, 0.75), (f"{pool}-q", ["--quantile", 0.5, "--quality", 0.95], None, 0.95),
            (f"{pool}-t", ["--threshold", 0.25], 0.25, 0.75)):
        daemon.cli("pool", "create", name, "--base", "tiny", "--bytes", 400_000, *flags)
        shown = show(daemon, name)
        assert (shown["threshold"], shown["quality"]) == (threshold, quality), name
    done = daemon.cli("pool", "create", f"{pool}-both", "--base", "tiny", "--bytes", 400_000,
                      "--threshold", 0.5, "--quantile", 0.5, check=False)
    assert done.returncode == 2 and "--quantile" in done.stderr


def test_a_pool_travels_to_a_device(daemon: Daemon, base_folder: Path, tmp_path: Path, pool: str
                                    ) -> None:
    folders = [make_adapter(base_folder, tmp_path / str(i), 20 + i) for i in range(2)]
    daemon.cli("pool", "create", pool, "--base", "tiny", "--bytes", 400_000)
    for task, folder in zip(("a", "b"), folders, strict=False):
        daemon.cli("pool", "add", pool, task, folder)
    daemon.cli("pool", "export", pool, tmp_path / "bundle")
    with running(tmp_path / "device", "tiny") as device:
        device.cli("import-base", "tiny", base_folder)
        device.cli("pool", "import", tmp_path / "bundle")
        assert set(members(device, pool)) == {"a", "b"}
        for task, folder in zip(("a", "b"), folders, strict=False):
            endpoint.wait_model(device.url, f"{pool}/{task}")
            assert endpoint.prompt_logprobs(device.url, f"{pool}/{task}", TOKENS) == pytest.approx(
                peft_logprobs(base_folder, folder), abs=1e-4)
        index = json.loads((tmp_path / "bundle" / "pool.json").read_text())
        index["members"] = {"../../evil": next(iter(index["members"].values()))}
        (tmp_path / "bundle" / "pool.json").write_text(json.dumps(index))
        done = device.cli("pool", "import", tmp_path / "bundle", "--name", "evil", check=False)
        assert done.returncode == 1 and "no name of a member" in done.stderr
