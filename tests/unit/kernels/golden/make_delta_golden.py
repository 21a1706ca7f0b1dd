"""Writes deltas.golden: what torch says about the sparse and the low-rank delta, for tests that do
not judge themselves. Run it again only when a rule changes:
    python make_delta_golden.py > deltas.golden

Format: as make_golden.py; y is what was in y before the call, z what is there after it.
  sparse ROWS D_OUT D_IN BASE_DTYPE TUNED_DTYPE  x(f32)... base... tuned... y(f32)... z(f64)...
  lora ROWS D_OUT D_IN RANK A_DTYPE B_DTYPE  scale(f32) x(f32)... a... b... y(f32)... z(f64)...
"""

import torch
from make_golden import DTYPES, hexadecimal


def sparse(rows, d_out, d_in, base_dtype, tuned_dtype, share):
    x = torch.randn(rows, d_in)
    base = (0.02 * torch.randn(d_out, d_in)).to(DTYPES[base_dtype])
    noise = 1e-2 * torch.randn(d_out, d_in) * (torch.rand(d_out, d_in) < share)
    tuned = (base.float() + noise).to(DTYPES[tuned_dtype])
    y = torch.randn(rows, d_out)
    z = y.double() + torch.nn.functional.linear(x.double(), tuned.double() - base.double())
    print("sparse", rows, d_out, d_in, base_dtype, tuned_dtype)
    print(hexadecimal(x), hexadecimal(base), hexadecimal(tuned), hexadecimal(y), hexadecimal(z))


def lora(rows, d_out, d_in, rank, a_dtype, b_dtype, scale):
    x = torch.randn(rows, d_in)
    a = (d_in**-0.5 * torch.randn(rank, d_in)).to(DTYPES[a_dtype])
    b = (0.1 * torch.randn(d_out, rank)).to(DTYPES[b_dtype])
    scale = torch.tensor([scale])
    y = torch.randn(rows, d_out)
    hidden = torch.nn.functional.linear(x.double(), a.double())
    z = y.double() + scale.double() * torch.nn.functional.linear(hidden, b.double())
    print("lora", rows, d_out, d_in, rank, a_dtype, b_dtype)
    print(hexadecimal(scale), hexadecimal(x), hexadecimal(a), hexadecimal(b))
    print(hexadecimal(y), hexadecimal(z))


if __name__ == "__main__":
    torch.manual_seed(20402)
    sparse(3, 19, 45, "BF16", "BF16", 0.1)
    sparse(9, 7, 64, "F16", "F16", 0.5)
    sparse(2, 17, 33, "BF16", "F32", 0.05)
    lora(3, 19, 45, 4, "BF16", "BF16", 2.0)
    lora(2, 33, 64, 1, "F16", "BF16", 16 / 3)
    lora(5, 17, 33, 16, "F32", "F32", 0.25)
