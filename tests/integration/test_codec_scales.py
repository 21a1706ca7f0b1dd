"""Scales found on texts with every form that has sign planes, and these forms as one file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import stockpot
import torch
from safetensors import safe_open
from stockpot import Client, RunConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.daemon import Daemon, running
from tests.integration import endpoint
from tests.integration.test_calibration import CALIBRATION, WINDOW, set_calibration
from tests.integration.test_codecs import by_parts, lost, moved
from tests.integration.test_gate import create
from tests.integration.test_path import TOKENS, Weights, push, torch_logprobs
from tests.integration.test_variant_file import export, take

RUN = "scaled"
EMBEDDING = "model.embed_tokens.weight"
AUTO = ["--codec", "auto", "--max-error", 0.12, "--residual-rank", 4]
FORMS: dict[str, list[object]] = {
    "two-planes": ["--codec", "bitdelta", "--planes", 2],
    "residual": ["--codec", "bitdelta", "--residual-rank", 3],
    "auto": AUTO,
}


@pytest.fixture(scope="module")
def weights(daemon: Daemon, base_folder: Path, base_weights: Weights,
            tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Of a run with calibration texts; everything moved, embeddings too."""
    weights = moved(base_weights, 6)
    begin(daemon, base_folder, weights, tmp_path_factory.mktemp("texts"))
    return weights


def begin(daemon: Daemon, base_folder: Path, weights: Weights, folder: Path) -> None:
    endpoint.wait_ready(daemon.url)
    config = RunConfig(merge_every=0, publish="request")
    create(daemon, RUN, config)
    set_calibration(daemon, RUN, folder)
    push(daemon, RUN, base_folder, {5: weights}, config)


def publish(daemon: Daemon, name: str, flags: list[object], alpha: str) -> str:
    """The variant's digest."""
    job = json.loads(daemon.cli("--json", "publish", f"{RUN}@5", *flags, "--alpha", alpha, "--as",
                                name).stdout)
    assert endpoint.wait_model(daemon.url, name)["root"] == job["result"]
    return job["result"]


def parts_of(client: Client, digest: str) -> dict[str, dict[str, bytes]]:
    """Of every tensor with sign planes: its parts by role."""
    return {entry["name"]: {role: b"".join(client.fetch_chunk(bytes.fromhex(chunk))
                                           for chunk in part["chunks"])
                            for role, part in entry["parts"].items()}
            for entry in json.loads(client.fetch_manifest(digest))["tensors"]
            if entry.get("codec") == "bitdelta"}


def planes_of(parts: dict[str, bytes], shape: torch.Size) -> tuple[list[torch.Tensor], np.ndarray]:
    """Signs of each plane, and their scales [planes, d_out]."""
    roles = sorted(role for role in parts if role.startswith("signs"))
    signs = [torch.from_numpy(2.0 * np.unpackbits(
        np.frombuffer(parts[role], "u1").reshape(shape[0], -1), axis=1, count=shape[1],
        bitorder="little") - 1) for role in roles]
    return signs, np.stack([np.frombuffer(parts[role.replace("signs", "alpha")], "<f4")
                            for role in roles]).astype(np.float64)


def residual_of(parts: dict[str, bytes], shape: torch.Size) -> torch.Tensor:
    if "residual_a" not in parts:
        return torch.zeros(shape, dtype=torch.float64)
    a, b = (torch.frombuffer(bytearray(parts[role]), dtype=torch.bfloat16).double()
            for role in ("residual_a", "residual_b"))
    return b.view(shape[0], -1) @ a.view(-1, shape[1])


@torch.no_grad()
def layer_inputs(folder: Path, weights: Weights) -> dict[str, torch.Tensor]:
    """What goes into each linear layer of the full checkpoint on the calibration texts."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64,
                                                 attn_implementation="eager")
    model.load_state_dict({k: v.double() for k, v in weights.items()}, strict=False)
    rows: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            module.register_forward_pre_hook(
                lambda _, args, name=name: rows.setdefault(f"{name}.weight", []).append(args[0][0]))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in CALIBRATION:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        for begin in range(0, len(ids), WINDOW):
            model(torch.tensor([ids[begin:begin + WINDOW]]))
    return {name: torch.cat(found) for name, found in rows.items()}


def least_squares(x: torch.Tensor, wanted: torch.Tensor, signs: list[torch.Tensor],
                  mean: np.ndarray) -> np.ndarray:
    """[planes, d_out]: of a row's planes the normal equations; the mean's where one is not > 0."""
    targets = x @ wanted.T
    outputs = torch.stack([x @ sign.double().T for sign in signs])
    gram = torch.einsum("pti,qti->ipq", outputs, outputs)
    found = torch.linalg.solve(gram, torch.einsum("pti,ti->ip", outputs, targets)).T.numpy()
    return np.where((found > 0).all(0), found, mean)


@pytest.mark.parametrize("form", FORMS)
def test_scales_of_planes_are_the_least_squares_of_the_outputs(
        daemon: Daemon, base_folder: Path, base_weights: Weights, weights: Weights, form: str
        ) -> None:
    mean = publish(daemon, f"{form}-mean", FORMS[form], "mean")
    found = publish(daemon, f"{form}-closed", FORMS[form], "closed-form")
    with Client(daemon.thrift) as client:
        before, after = parts_of(client, mean), parts_of(client, found)
        shown = {digest: client.lineage.show(digest) for digest in (mean, found)}
        stored = {digest: by_parts(client, digest, base_weights) for digest in (mean, found)}
    assert shown[mean].stored_bytes == pytest.approx(shown[found].stored_bytes, abs=2)
    assert json.loads(shown[found].attributes["alpha"])["method"] == "closed-form"
    assert after.keys() == before.keys()
    inputs = layer_inputs(base_folder, weights)
    assert sum(name in inputs for name in after) >= 8, "no sign planes: no test"
    several = with_residual = 0
    for name, parts in after.items():
        same = {role for role in parts if parts[role] == before[name][role]}
        shape = weights[name].shape
        signs, alpha = planes_of(parts, shape)
        if name not in inputs:  # a table: what goes into it is no row of numbers
            assert same == set(parts), f"{name}: only layers have scales found on texts"
            continue
        assert {role for role in parts if not role.startswith("alpha")} <= same, name
        several += len(signs) > 1
        with_residual += "residual_a" in parts
        wanted = (weights[name].double() - base_weights[name].double()
                  - residual_of(parts, shape))
        oracle = least_squares(inputs[name], wanted, signs, planes_of(before[name], shape)[1])
        # Rows whose equations are nearly singular, or at the border of the rule, may differ.
        close = np.isclose(alpha, oracle, rtol=2e-3).all(0)
        assert close.mean() > 0.98, (name, close.mean())
        facts = json.loads(shown[found].attributes[f"tensor/{name}"])
        assert facts["output_error"] < facts["output_error_mean"], name
    assert several > 0 or form == "residual"
    assert with_residual > 0 or form != "residual"
    # What the error of the weights was measured with stays what it says.
    assert shown[found].attributes["update_error"] == shown[mean].attributes["update_error"]
    errors = {digest: lost(base_weights, weights, stored[digest]) for digest in stored}
    assert float(shown[mean].attributes["update_error"]) == pytest.approx(errors[mean], abs=1e-3)
    assert errors[found] >= errors[mean] - 1e-6, "least squares of the weights are the mean's"
    for name, digest in ((f"{form}-mean", mean), (f"{form}-closed", found)):
        ours = endpoint.prompt_logprobs(daemon.url, name, TOKENS)
        theirs = torch_logprobs({n: t.float() for n, t in stored[digest].items()}, base_folder,
                                TOKENS)
        assert ours == pytest.approx(theirs, abs=1e-4), name


def test_auto_keeps_tables_in_planes_and_distils_the_rest(
        base_folder: Path, weights: Weights, tmp_path: Path) -> None:
    with running(tmp_path / "data", "tiny", "--distill-steps", "10") as daemon:
        daemon.cli("import-base", "tiny", base_folder)
        begin(daemon, base_folder, weights, tmp_path)
        mean = publish(daemon, "auto-mean", AUTO, "mean")
        found = publish(daemon, "auto-distilled", AUTO, "distilled")
        with Client(daemon.thrift) as client:
            before, after = parts_of(client, mean), parts_of(client, found)
            shown = client.lineage.show(found)
    report = json.loads(shown.attributes["alpha"])
    assert report["method"] == "distilled" or report["asked"] == "distilled", report
    assert report["steps"] == 10 and report["loss"] <= report["loss_before"], report
    assert EMBEDDING in after, "the embeddings have no planes: no test"
    assert after[EMBEDDING] == before[EMBEDDING]
    other = [name for name in after if after[name] != before[name]]
    assert len(other) >= 8 and EMBEDDING not in other
    assert shown.attributes["codec"] == "auto"


def test_scales_are_refused_where_there_are_no_planes(daemon: Daemon, weights: Weights) -> None:
    for codec in ("sparse", "dense"):
        for alpha in ("closed-form", "distilled"):
            done = daemon.cli("publish", f"{RUN}@5", "--codec", codec, "--alpha", alpha,
                              check=False)
            assert done.returncode == 1, (codec, alpha)
            assert "alpha" in done.stderr and codec in done.stderr, done.stderr


@pytest.mark.parametrize("form", FORMS)
def test_every_form_travels_as_one_file(
        daemon: Daemon, base_folder: Path, base_weights: Weights, weights: Weights, tmp_path: Path,
        form: str) -> None:
    name = f"{form}-travels"
    digest = publish(daemon, name, FORMS[form], "closed-form")
    file = tmp_path / "variant.safetensors"
    assert export(daemon, name, file) == digest
    with Client(daemon.thrift) as client:
        stored = by_parts(client, digest, base_weights)
    read = stockpot.read_variant(file, base_folder)
    assert set(stored) <= set(read)
    for tensor, value in stored.items():
        torch.testing.assert_close(read[tensor].double(), value, rtol=1e-5, atol=1e-7, msg=tensor)
    with safe_open(file, "pt") as opened:
        roles = {key.rsplit(".", 1)[-1] for key in opened.keys()}  # noqa: SIM118
    assert {"signs", "alpha"} <= roles
    assert ("signs/1" in roles and "alpha/1" in roles) or form == "residual", roles
    assert {"residual_a", "residual_b"} <= roles or form != "residual", roles

    ours = endpoint.prompt_logprobs(daemon.url, name, TOKENS)
    with running(tmp_path / "data", "tiny") as other:
        other.cli("import-base", "tiny", base_folder)
        assert take(other, file, "taken") == digest
        assert endpoint.wait_model(other.url, "taken")["root"] == digest
        assert endpoint.prompt_logprobs(other.url, "taken", TOKENS) == ours
        again = tmp_path / "again.safetensors"
        assert export(other, "taken", again) == digest
        assert again.read_bytes() == file.read_bytes()
