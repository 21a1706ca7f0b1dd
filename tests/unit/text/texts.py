"""Texts that tokenizers trip over, and random ones."""

# The data is the point of this file: long lines, look-alike characters.
# ruff: noqa: E501, RUF001

from __future__ import annotations

import random

TEXTS = [
    "", " ", "  ", "a", " a", "a ", "\n", "\r\n", "\t\t x", "\x00", "a\x00b\x00\x00c",
    "Hello world! I'm sure we've seen they'll, he'd, it's; WE'RE SHE'S 'tis o'clock",
    "The quick brown fox jumps over 13 lazy dogs, 1234567890 times; 3.14159, 1,000,000 and ½ ² Ⅳ ٣٤",
    "   leading and trailing   ", "many     spaces   \n\n\n   and \r\n\r\n lines \t\t tabs\t",
    "def f(x):\n    if x > 0:\n        return x**2  # comment\n\telse:\n\t\treturn -x\n",
    "#include <vector>\nint main() { std::vector<int> v{1,2,3}; return v[0] == 1 ? 0 : 1; }\n",
    '{"key": [1, 2.5, null, true], "nested": {"a": "b\\n"}}',
    "naïve café résumé Ångström — “quotes” … ‘single’ – dashes",
    "e\u0301 a\u0308 o\u0302\u0323 n\u0303 \u1e69 s\u0323\u0307 \u0344 \u212b \ufb01 \u2460 \uff21",
    "Привет, мир! Как дела?", "Γειά σου Κόσμε", "שלום עולם", "مرحبا بالعالم", "नमस्ते दुनिया",
    "สวัสดีชาวโลก", "こんにちは世界、カタカナ", "你好，世界！今天天气很好。", "안녕하세요 세계",
    "한글 자모", "வணக்கம்", "Xin chào thế giới", "ⴰⵣⵓⵍ", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟘𝟙𝟚", "𠜎𠜱𡿺",
    "😀 😃😄 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 ❤️‍🔥 1️⃣ ☠️", "\u200b\u200c\u200d\u2060\ufeff \u00a0\u2003\u3000\u1680\u180e\u0085x",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "<|endoftext|>", "a<|im_end|>b",
    "<|im_start|><|im_start|> <|im_end|>", "<|im_start", "im_start|>", "<s>[INST] hi [/INST]</s>",
    "<s> x </s> y <unk>", "▁already▁there", "<0x41><0x0A>", "Ġhello Ċ", "ſ's 'ſ 'S 'K\u212a",
    "<tool_call>{\"name\": 1}</tool_call>", "x<tool_call>y", " <mask> a<mask>b <mask>  ",
    "word wordy words sword word. WORD", "\u2028line\u2029para", "tail\u0301", "\u0301head",
    "http://example.com/a?b=c&d=e#f user@example.org", "$100 €5 £3 ¥7 50% + − × ÷ = ≠ ≤ ≥ ∞ ∑ √",
    "!!!???...,,,;;;---___***", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "\u0378\u0379",
    "\U0010ffff\ue000\ufffe\ufffd", "Ⰰ ⅷ ㉈ ㊿ ꙮ ﷽", "'", "''", "'s", " 's", "s's's", "0", "00 000 0000",
]  # fmt: skip

# Bytes that are no UTF-8: encoded as Python decodes them with errors="replace".
INVALID = [
    b"\xff", b"a\x80b", b"\xc3", b"\xe2\x82", b"\xe2\x82\xe2\x82\xac", b"\xf0\x9f\x98", b"\xf0\x9f\x98 x",
    b"\xed\xa0\x80", b"\xc0\x80", b"\xf5\x80\x80\x80", b"\xf4\x90\x80\x80", b"ok \xe4\xbd bad \xe4\xbd\xa0",
    b"\xf8\x88\x80\x80\x80", b"\xfe\xfe\xff\xff", bytes(range(256)),
]  # fmt: skip

# (weight, ranges of code points) of random characters.
ALPHABETS = [
    (30, [(0x20, 0x7E)]),
    (6, [(0x30, 0x39)]),
    (8, [(0x20, 0x20), (0x09, 0x0D)]),
    (4, [(0xA0, 0x24F)]),
    (3, [(0x300, 0x36F)]),
    (3, [(0x370, 0x5FF)]),
    (3, [(0x600, 0x10FF)]),
    (3, [(0x1100, 0x206F)]),
    (3, [(0x2070, 0x2FFF)]),
    (3, [(0x3000, 0x30FF), (0xAC00, 0xAC80)]),
    (3, [(0x4E00, 0x4FFF)]),
    (3, [(0x1F300, 0x1F6FF), (0x200D, 0x200D), (0xFE0F, 0xFE0F)]),
    (2, [(0, 0x1F), (0x7F, 0x9F)]),
    (2, [(1, 0xD7FF), (0xE000, 0x10FFFF)]),
    # Assigned in Unicode 15 and 16, and marks younger than Unicode 9.
    (2, [(0x1FA75, 0x1FAF8), (0x2EBF0, 0x2EE5D), (0x31350, 0x323AF), (0x11F00, 0x11F59), (0x1E4D0, 0x1E4F9)]),
    (2, [(0x897, 0x897), (0x1C89, 0x1C8A), (0x10D40, 0x10D8F), (0x1CCF0, 0x1CCF9), (0x1D2C0, 0x1D2D3)]),
    (2, [(0x1AB0, 0x1ACE), (0x1DF0, 0x1DFF), (0x11938, 0x11943), (0x300, 0x330), (0xFB00, 0xFB06)]),
]


def random_text(rng: random.Random, snippets: list[str], longest: int = 60) -> str:
    parts = []
    weights = [weight for weight, _ in ALPHABETS]
    for _ in range(rng.randint(1, 6)):
        if rng.random() < 0.15:
            parts.append(rng.choice(snippets))
        ranges = rng.choices(ALPHABETS, weights)[0][1] if rng.random() < 0.7 else None
        for _ in range(rng.randint(1, max(1, longest // 6))):
            low, high = rng.choice(ranges or rng.choices(ALPHABETS, weights)[0][1])
            parts.append(chr(rng.randint(low, high)))
    return "".join(parts)


def long_texts() -> list[str]:
    """About 100 KB each: ordinary text, one word, spaces, one character, mixed scripts."""
    prose = " ".join(TEXTS)
    return [
        (prose * (100_000 // len(prose) + 1))[:100_000],
        "a" * 100_000,
        "ab" * 50_000,
        " " * 100_000,
        "x" + " \n" * 50_000,
        "你好" * 17_000,
        "0123456789" * 10_000,
    ]
