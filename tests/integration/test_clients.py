"""The OpenAI client, unmodified, on the real base (lm_eval: tests/python/test_examples.py)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import load_file
from stockpot import CheckpointHook

from tests.daemon import Daemon, running
from tests.integration import endpoint

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
