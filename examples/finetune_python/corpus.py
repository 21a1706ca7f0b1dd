"""Real English text that ships with Python: the language reference, as `help("topic")` shows it.

`pydoc_data.topics` holds about 480 KB of documentation in some 80 topics. Topics, not lines, are
split into training and held-out text, by a hash of their names: the split is the same everywhere,
and no held-out passage stands next to a training passage. Topics overlap (the one on compound
statements contains the one on `class`), so paragraphs of held-out topics are taken out of the
training topics.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import PreTrainedTokenizerBase

HELDOUT_SHARE = 8  # every n-th topic, by hash
PASSAGE_CHARACTERS = 1000  # of a held-out passage, about 250 tokens
MIN_PASSAGE_CHARACTERS = 200


def is_heldout(topic: str) -> bool:
    """Whether a topic is kept out of training."""
    return hashlib.sha256(topic.encode()).digest()[0] % HELDOUT_SHARE == 0


def paragraph_key(paragraph: str) -> str:
    """The same for paragraphs that differ in line breaks and indentation alone."""
    return " ".join(paragraph.split())


def training_text() -> str:
    """All training topics in a fixed order, without what the held-out ones contain as well."""
    heldout = {paragraph_key(paragraph) for name, text in topics.items() if is_heldout(name)
               for paragraph in text.split("\n\n")}
    return "\n\n".join(
        paragraph for name, text in sorted(topics.items()) if not is_heldout(name)
        for paragraph in text.strip().split("\n\n") if paragraph_key(paragraph) not in heldout)


def heldout_passages() -> list[dict[str, str]]:
    """Passages of whole paragraphs from the held-out topics: {"id": "topic/0", "text": ...}."""
    passages = []
    for topic, text in sorted(topics.items()):
        if not is_heldout(topic):
            continue
        parts, part = [], ""
        for paragraph in text.strip().split("\n\n"):
            if part and len(part) + len(paragraph) > PASSAGE_CHARACTERS:
                parts.append(part)
                part = ""
            part += ("\n\n" if part else "") + paragraph
        parts.append(part)
        passages += [{"id": f"{topic}/{index}", "text": text[:2 * PASSAGE_CHARACTERS]}
                     for index, text in enumerate(parts) if len(text) >= MIN_PASSAGE_CHARACTERS]
    # A fixed shuffle, so that the first n are a fair sample of all topics.
    return sorted(passages, key=lambda p: hashlib.sha256(p["id"].encode()).digest())


def calibration_texts(count: int) -> list[str]:
    """Passages of the training text, evenly spread."""
    text = training_text()
    return [text[len(text) * index // count:][:PASSAGE_CHARACTERS] for index in range(count)]


def write_jsonl(path: Path, items: list[dict[str, str]]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(item) + "\n" for item in items))


def training_blocks(tokenizer: PreTrainedTokenizerBase, length: int) -> torch.Tensor:
    """The training text as token ids, [blocks, length]; a rest shorter than a block is left out."""
    ids = torch.tensor(tokenizer(training_text(), verbose=False)["input_ids"])
    return ids[:len(ids) // length * length].view(-1, length)
