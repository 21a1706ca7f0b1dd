"""A daemon for the length of a `with` block, and what is asked of it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WINDOW = 512  # tokens of a request
START_TIMEOUT_S = 300.0
POLL_S = 0.1


class Served:
    """One daemon with the base "base", and its endpoint."""

    def __init__(self, binaries: Path, data: Path, addresses: dict[str, str]) -> None:
        self._binaries = binaries
        self._server = addresses["thrift"]
        self.data = data
        self.url = f"http://{addresses['http']}"

    def cli(self, *arguments: object) -> str:
        """What `stockpot --json ...` prints; SystemExit with its message if it fails."""
        text, error = self.try_cli(*arguments)
        if error:
            sys.exit(f"stockpot {' '.join(map(str, arguments))}: {error}")
        return text

    def try_cli(self, *arguments: object) -> tuple[str, str]:
        """What it prints, and why it failed ("": it did not)."""
        done = subprocess.run(
            [self._binaries / "stockpot", "--json", "--quiet", *map(str, arguments)], text=True,
            env=os.environ | {"STOCKPOT_SERVER": self._server}, capture_output=True)
        failed = done.returncode != 0
        return done.stdout, (done.stderr.strip() or "it failed") if failed else ""

    def wait(self, path: str) -> None:
        """Until a GET of the endpoint answers 200."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError):
                if urllib.request.urlopen(self.url + path).status == 200:
                    return
            if time.monotonic() > deadline:
                sys.exit(f"{path} does not answer")
            time.sleep(POLL_S)

    def logprobs(self, model: str, tokens: list[int]) -> list[float]:
        """Of every token but the first, in windows of WINDOW tokens."""
        found: list[float] = []
        for begin in range(0, len(tokens), WINDOW):
            window = tokens[begin:begin + WINDOW]
            if len(window) > 1:
                found += self._logprobs(model, window)
        return found

    def loss(self, model: str, tokens: list[int]) -> float:
        """Mean nats a token."""
        found = self.logprobs(model, tokens)
        return -sum(found) / len(found)

    def _logprobs(self, model: str, window: list[int]) -> list[float]:
        body = {"model": model, "prompt": window, "max_tokens": 0, "echo": True, "logprobs": 1,
                "temperature": 0}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(),
                                         {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request) as reply:
                answer: Any = json.load(reply)
        except urllib.error.HTTPError as error:
            sys.exit(f"{model}: {error.read().decode(errors='replace')}")
        return answer["choices"][0]["logprobs"]["token_logprobs"][1:]


@contextlib.contextmanager
def daemon(binaries: Path, data: Path, base: Path) -> Iterator[Served]:
    """Over a data folder that is made if it does not exist, serving `base`."""
    (data / "addresses.json").unlink(missing_ok=True)
    with data.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(
            [binaries / "stockpotd", "--data", data, "--base", "base", "--http", "127.0.0.1:0",
             "--thrift", "127.0.0.1:0"], stdout=log, stderr=log)
    try:
        while not (data / "addresses.json").exists():
            if process.poll() is not None:
                sys.exit(f"stockpotd did not start: {data.with_suffix('.log')}")
            time.sleep(POLL_S)
        served = Served(binaries, data, json.loads((data / "addresses.json").read_text()))
        served.cli("import-base", "base", base)
        served.wait("/ready")
        yield served
    finally:
        process.terminate()
        process.wait()
