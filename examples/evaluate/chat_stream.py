#!/usr/bin/env python3
"""A chat with the newest checkpoint of a run, streamed by the OpenAI client.

    python examples/evaluate/chat_stream.py --endpoint http://127.0.0.1:8080 \\
        --model pydocs@latest "What does the with statement do?"

Prints the text as it arrives, then which digest answered, the time to the first token and the
speed. Exit status 1 if the stream brought no text.
"""

from __future__ import annotations

import argparse
import sys
import time

from openai import OpenAI


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="What does Python's with statement do?")
    parser.add_argument("--endpoint", required=True, metavar="URL")
    parser.add_argument("--model", required=True, help="a served name, like RUN@latest")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    client = OpenAI(base_url=args.endpoint.rstrip("/") + "/v1", api_key="unused")
    start = time.monotonic()
    stream = client.chat.completions.create(
        model=args.model, messages=[{"role": "user", "content": args.prompt}], temperature=0,
        max_tokens=args.max_tokens, stream=True, stream_options={"include_usage": True})
    first_s, digest, tokens, text = None, None, 0, ""
    for chunk in stream:
        digest = chunk.system_fingerprint or digest
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        for choice in chunk.choices:
            if choice.delta.content:
                if first_s is None:
                    first_s = time.monotonic() - start
                text += choice.delta.content
                print(choice.delta.content, end="", flush=True)
    print()
    if first_s is None:
        print("the stream brought no text", file=sys.stderr)
        return 1
    print(f"-- {args.model} = {digest}, {tokens} tokens, first after {1000 * first_s:.0f} ms, "
          f"all after {time.monotonic() - start:.1f} s")
    return 0 if text else 1


if __name__ == "__main__":
    sys.exit(main())
