"""Writes bitdelta.golden: what torch says about compress and linear, for tests that must not judge
themselves. Run it again only when the rule changes:  python make_golden.py > bitdelta.golden

Format: whitespace-separated tokens. Numbers are hexadecimal bit patterns, so nothing is rounded:
16-bit for bf16 and fp16 weights, 32-bit for float32, 64-bit for float64.
  compress D_OUT D_IN BASE_DTYPE TUNED_DTYPE  base... tuned... sign_bytes... alpha(f32)...
  linear ROWS D_OUT D_IN DTYPE  x(f32)... weight... sign_bytes... alpha(f32)... bias(f32)...
      y(f64)...
"""

import torch

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def hexadecimal(tensor):
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    width = 8 * tensor.element_size()
    values = tensor.contiguous().view(bits).flatten().tolist()
    return " ".join(f"{v % (1 << width):x}" for v in values)


def pack(signs):
    """[d_out, d_in] of bool -> bytes, least significant bit first, rows padded with 0."""
    d_out, d_in = signs.shape
    padded = torch.zeros(d_out, (d_in + 7) // 8 * 8, dtype=torch.int64)
    padded[:, :d_in] = signs
    weights = 2 ** torch.arange(8)
    return (padded.view(d_out, -1, 8) * weights).sum(-1).flatten().tolist()


def byte_text(values):
    return " ".join(f"{v:x}" for v in values)


def compress(d_out, d_in, base_dtype, tuned_dtype, changed):
    base = (0.02 * torch.randn(d_out, d_in)).to(DTYPES[base_dtype])
    noise = 1e-3 * torch.randn(d_out, d_in) * (torch.rand(d_out, d_in) < changed)
    tuned = (base.float() + noise).to(DTYPES[tuned_dtype])
    delta = tuned.float() - base.float()
    alpha = delta.double().abs().mean(1).float()
    print("compress", d_out, d_in, base_dtype, tuned_dtype)
    print(hexadecimal(base), hexadecimal(tuned))
    print(byte_text(pack(delta >= 0)), hexadecimal(alpha))


def linear(rows, d_out, d_in, dtype):
    x = torch.randn(rows, d_in)
    weight = (0.02 * torch.randn(d_out, d_in)).to(DTYPES[dtype])
    positive = torch.rand(d_out, d_in) < 0.5
    alpha = 1e-2 * torch.rand(d_out)
    bias = 0.1 * torch.randn(d_out)
    effective = weight.double() + alpha.double()[:, None] * (2.0 * positive.double() - 1.0)
    y = torch.nn.functional.linear(x.double(), effective, bias.double())
    print("linear", rows, d_out, d_in, dtype)
    print(hexadecimal(x), hexadecimal(weight), byte_text(pack(positive)))
    print(hexadecimal(alpha), hexadecimal(bias), hexadecimal(y))


if __name__ == "__main__":
    torch.manual_seed(20402)
    compress(5, 37, "BF16", "BF16", 1.0)
    compress(3, 64, "BF16", "F32", 0.1)
    compress(4, 33, "F16", "F16", 0.5)
    compress(2, 100, "F32", "F32", 1.0)
    linear(3, 19, 45, "BF16")
    linear(2, 7, 64, "F16")
    linear(1, 17, 33, "F32")
