"""Real clients on the real base model: lm-evaluation-harness and the OpenAI client, unmodified."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import load_file
from stockpot import CheckpointHook

from tests.daemon import Daemon, running
from tests.integration import endpoint

EVALUATE = Path(__file__).resolve().parents[2] / "examples" / "evaluate"
HOW_TO = "set STOCKPOT_SMOLLM2 to the folder that examples/base_model/fetch.sh prints"


@pytest.fixture(scope="module")
def smollm2() -> Path:
    folder = os.environ.get("STOCKPOT_SMOLLM2")
    assert folder, HOW_TO
    return Path(folder)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Daemon]:
    """SmolLM2 with one published step of the run `tuned`."""
    with running(tmp_path_factory.mktemp("smollm2") / "data", "smollm2") as daemon:
        daemon.cli("import-base", "smollm2", smollm2)
        weights = load_file(smollm2 / "model.safetensors")
        generator = torch.Generator().manual_seed(0)
        for name, tensor in weights.items():
            if "embed" not in name:
                noise = 1e-3 * torch.randn(tensor.shape, generator=generator)
                weights[name] = (tensor.float() + noise).to(tensor.dtype)
        with CheckpointHook(daemon.thrift, run="tuned", base="smollm2", every=1,
                            files=smollm2) as hook:
            hook.save(1, weights, {"loss": 1.0})
            assert hook.flush(120) and hook.stats.failed == 0, hook.stats
        endpoint.wait_ready(daemon.url)
        endpoint.wait_model(daemon.url, "tuned@latest")
        yield daemon


def run_script(name: str, *args: object) -> str:
    done = subprocess.run([sys.executable, EVALUATE / name, *map(str, args)],
                          capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_lm_eval_gets_the_numbers_of_its_own_hf_model(served: Daemon, smollm2: Path) -> None:
    out = run_script("compare_with_hf.py", "--endpoint", served.url, "--model", "smollm2",
                     "--weights", smollm2, "--tolerance", 1e-3)
    print(out)
    assert "largest difference" in out


def test_lm_eval_scores_a_fresh_variant(served: Daemon, smollm2: Path) -> None:
    environment = os.environ | {"STOCKPOT_PYTHON": sys.executable}
    done = subprocess.run([EVALUATE / "evaluate.sh", served.url, "tuned@latest", smollm2],
                          capture_output=True, text=True, timeout=800, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "stockpot_choice" in done.stdout, done.stdout


def test_the_openai_client_streams_a_chat(served: Daemon) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    arguments = {"model": "tuned@latest", "messages": question, "temperature": 0, "max_tokens": 24}
    pieces, fingerprints, usage = [], set(), None
    for chunk in client.chat.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}):
        fingerprints.add(chunk.system_fingerprint)
        usage = chunk.usage or usage
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    whole = client.chat.completions.create(**arguments)
    assert "".join(pieces) == whole.choices[0].message.content
    assert len([p for p in pieces if p]) > 3
    assert fingerprints == {whole.system_fingerprint}
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens
    assert "Paris" in "".join(pieces)
    assert {m.id for m in client.models.list()} >= {"smollm2", "tuned@1", "tuned@latest"}
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**(arguments | {"model": "tuned@2"}))


def test_logprobs_of_a_chat(served: Daemon) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0)
    reply = client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": "Say hello."}], temperature=0,
        max_tokens=5, logprobs=True, top_logprobs=3)
    content = reply.choices[0].logprobs.content
    assert len(content) == reply.usage.completion_tokens
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(top.logprob for top in token.top_logprobs)
