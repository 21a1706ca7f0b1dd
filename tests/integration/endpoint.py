"""Plain HTTP against the endpoint, as curl would do it."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any


def request(url: str, body: Any = None, *, raw: bytes | None = None, timeout_s: float = 60.0
            ) -> tuple[int, Any]:
    """Status and decoded JSON (or text) of a GET, or of a POST if there is a body."""
    data = raw if raw is not None else (json.dumps(body).encode() if body is not None else None)
    headers = {"content-type": "application/json"} if data is not None else {}
    call = urllib.request.Request(url, data=data, headers=headers)
    try:
        with urllib.request.urlopen(call, timeout=timeout_s) as reply:
            return reply.status, _decode(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, _decode(error.read())


def _decode(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")


def wait_ready(url: str, timeout_s: float = 60.0) -> None:
    """Until /ready answers 200."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            status, body = request(f"{url}/ready")
        except OSError as error:
            status, body = 0, error
        if status == 200:
            return
        assert time.monotonic() < deadline, f"not ready after {timeout_s} s: {status} {body}"
        time.sleep(0.05)


def wait_model(url: str, model: str, timeout_s: float = 60.0) -> dict[str, Any]:
    """Until /v1/models/MODEL answers 200."""
    deadline = time.monotonic() + timeout_s
    while True:
        status, body = request(f"{url}/v1/models/{model}")
        if status == 200:
            return body
        assert time.monotonic() < deadline, f"{model}: {status} {body}"
        time.sleep(0.05)


def wait_gone(url: str, model: str, timeout_s: float = 60.0) -> None:
    """Until /v1/models/MODEL answers 404."""
    deadline = time.monotonic() + timeout_s
    while (status := request(f"{url}/v1/models/{model}")[0]) != 404:
        assert time.monotonic() < deadline, f"{model}: {status}"
        time.sleep(0.05)


def prompt_logprobs(url: str, model: str, tokens: list[int]) -> list[float]:
    """Log-probability of every token but the first, as lm-evaluation-harness asks for them."""
    status, body = request(f"{url}/v1/completions", {
        "model": model, "prompt": tokens, "max_tokens": 0, "echo": True, "logprobs": 1,
        "temperature": 0})
    assert status == 200, body
    return body["choices"][0]["logprobs"]["token_logprobs"][1:]


def greedy(url: str, model: str, tokens: list[int], count: int) -> str:
    """Greedy text."""
    status, body = request(f"{url}/v1/completions", {
        "model": model, "prompt": tokens, "max_tokens": count, "temperature": 0})
    assert status == 200, body
    return body["choices"][0]["text"]
