#!/usr/bin/env python3
"""Mean loss of held-out text under each named model, asked through the endpoint.

    python examples/evaluate/heldout_loss.py --endpoint http://127.0.0.1:8080 \\
        --text heldout.jsonl smollm2 pydocs@latest

TEXT is JSONL with a field "text" a line (finetune.py --heldout-out writes it). The loss is the
negative log-likelihood of a token (natural log), averaged over all tokens but the first of each
passage. One model after another, the same token ids for all; needs nothing but Python.

With --base NAME the difference from that model's loss is shown, and with --require-better NAME the
exit status is 1 unless that model's loss is lower than the base's by --margin.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PASSAGES_A_REQUEST = 4
REQUEST_TIMEOUT_S = 600


@dataclass(frozen=True)
class Score:
    """What one model made of the text."""

    loss: float  # mean negative log-likelihood of a token
    tokens: int  # scored
    seconds: float
    digest: str  # of what answered (system_fingerprint)


def post(endpoint: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The reply to a JSON request; SystemExit with the endpoint's message if it is an error."""
    request = urllib.request.Request(
        endpoint + path, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        with contextlib.suppress(ValueError, KeyError, TypeError):  # not ours: as it is
            text = json.loads(text)["error"]["message"]
        sys.exit(f"{endpoint}{path}: HTTP {error.code}: {text}")
    except OSError as error:
        sys.exit(f"{endpoint}{path}: {error}")


def tokenize(endpoint: str, model: str, texts: list[str]) -> list[list[int]]:
    """Token ids as the model's own tokenizer gives them."""
    return [post(endpoint, "/tokenize",
                 {"model": model, "prompt": text, "add_special_tokens": False})["tokens"]
            for text in texts]


def score(endpoint: str, model: str, prompts: list[list[int]]) -> Score:
    """Asks for the log-probabilities of the prompts themselves; nothing is generated."""
    start, total, count, digest = time.monotonic(), 0.0, 0, ""
    for begin in range(0, len(prompts), PASSAGES_A_REQUEST):
        batch = prompts[begin:begin + PASSAGES_A_REQUEST]
        reply = post(endpoint, "/v1/completions",
                     {"model": model, "prompt": batch, "echo": True, "logprobs": 1,
                      "max_tokens": 0, "temperature": 0})
        digest = reply.get("system_fingerprint") or ""
        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        for prompt, choice in zip(batch, choices, strict=True):
            logprobs = choice["logprobs"]["token_logprobs"]
            if len(logprobs) != len(prompt) or logprobs[0] is not None:
                sys.exit(f"{model}: {len(logprobs)} log-probabilities for {len(prompt)} tokens")
            total -= sum(logprobs[1:])
            count += len(prompt) - 1
    return Score(total / count, count, time.monotonic() - start, digest)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="served names")
    add("--endpoint", required=True, metavar="URL", help="like http://127.0.0.1:8080")
    add("--text", type=Path, required=True, metavar="FILE", help="JSONL with a field text")
    add("--passages", type=int, default=16, metavar="N",
        help="use the first N; 0: all (default: %(default)s)")
    add("--base", metavar="MODEL", help="show the difference from this model's loss")
    add("--require-better", metavar="MODEL", help="exit 1 unless it beats the base by the margin")
    add("--margin", type=float, default=0.05, help="in loss (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    args = parser.parse_args()
    if args.require_better and not args.base:
        parser.error("--require-better needs --base")
    return args


def main() -> int:
    args = parse_arguments()
    endpoint = args.endpoint.rstrip("/")
    texts = [json.loads(line)["text"] for line in args.text.read_text().splitlines()]
    texts = texts[:args.passages or None]
    names = list(dict.fromkeys(
        [*([args.base] if args.base else []), *args.models,
         *([args.require_better] if args.require_better else [])]))
    prompts = [ids for ids in tokenize(endpoint, names[0], texts) if len(ids) > 1]
    if not prompts:
        sys.exit(f"{args.text}: no text")
    width = max(map(len, names))
    print(f"{'model':<{width}}   loss    vs base  tokens  tokens/s  answered by")
    scores: dict[str, Score] = {}
    for name in names:
        result = scores[name] = score(endpoint, name, prompts)
        change = f"{result.loss - scores[args.base].loss:+8.4f}" if args.base else " " * 8
        print(f"{name:<{width}}  {result.loss:7.4f}  {change}  {result.tokens:6}  "
              f"{result.tokens / result.seconds:8.0f}  {result.digest[:20]}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(
            {name: {"loss": s.loss, "tokens": s.tokens, "seconds": s.seconds, "digest": s.digest}
             for name, s in scores.items()}, indent=2) + "\n")
    if args.require_better:
        gain = scores[args.base].loss - scores[args.require_better].loss
        if gain < args.margin:
            print(f"{args.require_better} is better than {args.base} by {gain:.4f} only; "
                  f"{args.margin} was asked for", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
