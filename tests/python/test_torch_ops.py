"""torch.ops.stockpot.* against dense computations of torch in float64."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import stockpot
import torch
from stockpot.ops import LIBRARY

from tests.python.conftest import REPOSITORY

OPS = torch.ops.stockpot
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def library() -> Path:
    """Built beside the programs; STOCKPOT_BIN_DIR as for the daemon (tests/daemon.py)."""
    if os.environ.get("STOCKPOT_LIB_DIR"):
        return Path(os.environ["STOCKPOT_LIB_DIR"]) / LIBRARY
    programs = os.environ.get("STOCKPOT_BIN_DIR", REPOSITORY / "build/release/bin")
    return Path(programs).parent / "lib" / LIBRARY


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    assert stockpot.load_ops(library()) == stockpot.load_ops()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pack(delta: torch.Tensor) -> torch.Tensor:
    """Canonical signs of a [..., d_in] delta, by arithmetic."""
    d_in = delta.shape[-1]
    padded = torch.zeros(*delta.shape[:-1], -(-d_in // 8) * 8, dtype=torch.int64)
    padded[..., :d_in] = delta >= 0
    return (padded.unflatten(-1, (-1, 8)) * 2 ** torch.arange(8)).sum(-1).to(torch.uint8)


def unpack(signs: torch.Tensor, d_in: int) -> torch.Tensor:
    """+1 / -1 in float64."""
    bits = (signs.long().unsqueeze(-1) // 2 ** torch.arange(8)) % 2
    return bits.flatten(-2)[..., :d_in].double() * 2 - 1


def dense(x, base, signs, alpha, variant_of_row=None, bias=None) -> torch.Tensor:
    """The operator in float64 from effective weights, row by row."""
    while signs.dim() < 4:
        signs, alpha = signs.unsqueeze(0), alpha.unsqueeze(0)
    planes = alpha.double().unsqueeze(-1) * unpack(signs, base.shape[1])
    weights = base.double() + planes.sum(1)  # [variants, d_out, d_in]
    rows = x.double().reshape(-1, x.shape[-1])
    index = torch.zeros(len(rows), dtype=torch.long) if variant_of_row is None else variant_of_row
    y = torch.stack([row @ (base.double() if v < 0 else weights[v]).T
                     for row, v in zip(rows, index.tolist(), strict=True)]) if len(rows) else (
        torch.zeros(0, base.shape[0], dtype=torch.float64))
    if bias is not None:
        y = y + bias.double()
    return y.reshape(*x.shape[:-1], base.shape[0])


def bound(x, base, alpha, d_in: int) -> float:
    """float32 sums of d_in products, then one rounding to x's dtype (its epsilon times |y|)."""
    scale = x.double().norm(dim=-1).max() * (
        base.double().norm(dim=-1).max() + alpha.double().abs().sum() / max(1, alpha.shape[-1])
        * d_in**0.5 * 4)
    return float(scale * (torch.finfo(x.dtype).eps + 1e-5)) if x.numel() else 0.0


def case(d_out=11, d_in=37, rows=5, x_dtype=torch.float32, base_dtype=torch.bfloat16, stack=()):
    x = torch.randn(rows, d_in).to(x_dtype)
    base = torch.randn(d_out, d_in).to(base_dtype)
    signs = pack(torch.randn(*stack, d_out, d_in))
    alpha = torch.rand(*stack, d_out)
    return x, base, signs, alpha


@pytest.mark.parametrize("tuned_dtype", DTYPES)
@pytest.mark.parametrize("base_dtype", DTYPES)
@pytest.mark.parametrize(("d_out", "d_in"), [(1, 1), (7, 13), (5, 64), (0, 8), (3, 0)])
def test_compress_equals_torch(d_out, d_in, base_dtype, tuned_dtype):
    base = torch.randn(d_out, d_in).to(base_dtype)
    tuned = torch.randn(d_out, d_in).to(tuned_dtype)
    if d_out > 1 and d_in > 0:
        tuned[0], base[0] = 0, 0  # sign(0) = +1
    signs, alpha, stats = OPS.bitdelta_compress(base, tuned)
    delta = tuned.float() - base.float()
    assert torch.equal(signs, pack(delta))
    wanted = delta.double().abs().mean(1) if d_in else torch.zeros(d_out).double()
    torch.testing.assert_close(alpha.double(), wanted, rtol=1e-6, atol=0)
    moments = [delta.numel(), (delta != 0).sum(), 0, delta.double().abs().sum(),
               delta.double().square().sum(), delta.abs().max() if delta.numel() else 0]
    torch.testing.assert_close(stats[:6], torch.tensor(moments, dtype=torch.float64))


def test_compress_counts_what_is_not_finite_on_either_side():
    nan, inf = float("nan"), float("inf")
    base = torch.zeros(2, 45)
    tuned = torch.full((2, 45), 0.5)
    base[1, :4] = torch.tensor([nan, inf, -3e38, inf])
    tuned[1, 2:5] = torch.tensor([3e38, inf, nan])
    _, alpha, stats = OPS.bitdelta_compress(base, tuned)
    assert stats[1:3].tolist() == [90, 5]
    torch.testing.assert_close(alpha, torch.tensor([0.5, 40 * 0.5 / 45]))
    for lost in (nan, -3e38):
        _, alpha, stats = OPS.bitdelta_compress(torch.full((1, 8), lost), torch.full((1, 8), 3e38))
        assert alpha.item() == 0 and stats[:3].tolist() == [8, 8, 8]


@pytest.mark.parametrize("base_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("stack", [(), (1,), (2,), (3, 1), (3, 2)])
def test_linear_equals_dense_in_float64(stack, x_dtype, base_dtype):
    x, base, signs, alpha = case(x_dtype=x_dtype, base_dtype=base_dtype, stack=stack)
    rows = torch.tensor([2, -1, 0, 2, 1]) if len(stack) == 2 else None
    for bias in (None, torch.randn(base.shape[0])):
        wanted = dense(x, base, signs, alpha, rows, bias)
        for folded in (False, True):
            y = OPS.bitdelta_linear(x, base, signs, alpha, rows, bias, folded)
            assert y.dtype == x_dtype and y.shape == wanted.shape
            assert (y.double() - wanted).abs().max() <= bound(x, base, alpha, base.shape[1])
    if rows is not None:
        again = OPS.bitdelta_linear(x, base, signs, alpha, rows.int())
        assert torch.equal(again, OPS.bitdelta_linear(x, base, signs, alpha, rows))


@pytest.mark.parametrize("x_dtype", [*DTYPES, torch.float64])
def test_variants_that_no_row_uses_change_nothing(x_dtype):
    x, base, signs, alpha = case(x_dtype=x_dtype, stack=(6, 2))
    rows = torch.tensor([4, -1, 1, 4, -1])
    wanted = OPS.bitdelta_linear(x, base, signs[[1, 4]], alpha[[1, 4]],
                                 torch.tensor([1, -1, 0, 1, -1]))
    assert torch.equal(OPS.bitdelta_linear(x, base, signs, alpha, rows), wanted)
    unused = torch.full((5,), -1)
    alone = OPS.bitdelta_linear(x, base, signs, alpha, unused)
    assert torch.equal(alone[1], wanted[1]) and torch.equal(alone[4], wanted[4])
    assert torch.equal(alone, OPS.bitdelta_linear(x, base, signs[:0], alpha[:0], unused))


def test_variants_that_no_row_uses_cost_nothing():
    """Of 2**31 variants, over 100 GB if they were packed."""
    x, base, signs, alpha = case()
    many = 2**31 - 1
    got = OPS.bitdelta_linear(x, base, signs.expand(many, 1, -1, -1), alpha.expand(many, 1, -1),
                              torch.tensor([many - 1, -1, 0, 7, many - 1]))
    wanted = OPS.bitdelta_linear(x, base, signs[None, None], alpha[None, None],
                                 torch.tensor([0, -1, 0, 0, 0]))
    assert torch.equal(got, wanted)
    a, b = torch.randn(3, 37), torch.randn(4, 3)
    rows = torch.tensor([2, -1, 0, 2, 9])
    got = OPS.lora_linear(x, a.expand(many, -1, -1), b.expand(many, -1, -1), 0.5, rows)
    assert torch.equal(got, OPS.lora_linear(x, a[None], b[None], 0.5, rows.clamp(max=0)))


@pytest.mark.parametrize(("d_out", "d_in"), [(1, 1), (17, 8), (16, 129), (257, 300)])
def test_linear_of_other_shapes(d_out, d_in):
    x, base, signs, alpha = case(d_out, d_in)
    y = OPS.bitdelta_linear(x, base, signs, alpha)
    assert (y - dense(x, base, signs, alpha)).abs().max() <= bound(x, base, alpha, d_in)
    vector = OPS.bitdelta_linear(x[0], base, signs, alpha)  # one dimension
    assert torch.equal(vector, y[0])
    cube = OPS.bitdelta_linear(x[:4].reshape(2, 2, d_in), base, signs, alpha)
    assert torch.equal(cube, y[:4].reshape(2, 2, d_out))


def test_strided_inputs_give_the_same_bits():
    x, base, signs, alpha = case(stack=(2, 2))
    rows = torch.tensor([0, 1, -1, 1, 0])
    wanted = OPS.bitdelta_linear(x, base, signs, alpha, rows)

    def spread(t):  # the same values, every stride doubled, and not aligned
        wide = torch.zeros([2 * n + 1 for n in t.shape], dtype=t.dtype)
        view = wide[tuple(slice(1, None, 2) for _ in t.shape)]
        return view.copy_(t)

    def turned(t):  # the same values, the last two dimensions exchanged in memory
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)

    got = OPS.bitdelta_linear(spread(x), spread(base), spread(signs), spread(alpha), spread(rows))
    assert torch.equal(got, wanted)
    assert torch.equal(OPS.bitdelta_linear(turned(x), turned(base), turned(signs), turned(alpha),
                                           rows), wanted)
    assert torch.equal(OPS.bitdelta_linear(x[:1].expand(3, -1), base, signs[:1], alpha[:1]),
                       OPS.bitdelta_linear(x[:1], base, signs[:1], alpha[:1]).expand(3, -1))
    tuned = torch.randn_like(base)
    assert all(map(torch.equal, OPS.bitdelta_compress(turned(base), spread(tuned)),
                   OPS.bitdelta_compress(base, tuned)))


@pytest.mark.parametrize(("d_out", "d_in", "rows"), [(0, 5, 3), (5, 0, 3), (5, 9, 0)])
def test_empty_sizes(d_out, d_in, rows):
    x, base, signs, alpha = case(d_out, d_in, rows)
    y = OPS.bitdelta_linear(x, base, signs, alpha, None, torch.ones(d_out))
    assert torch.equal(y, torch.ones(rows, d_out))


@pytest.mark.parametrize("stack", [(), (2,), (2, 2)])
def test_gradcheck(stack):
    """x, alpha and bias in float64, which the operator computes in float64."""
    x, base, signs, alpha = case(5, 9, 3, torch.float64, torch.float64, stack)
    alpha = alpha.double()
    rows = torch.tensor([1, -1, 0]) if len(stack) == 2 else None
    bias = torch.randn(5, dtype=torch.float64)
    for t in (x, alpha, bias):
        t.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *t: OPS.bitdelta_linear(t[0], base, signs, t[1], rows, t[2]), (x, alpha, bias))


@pytest.mark.parametrize("x_dtype", DTYPES)
def test_gradients_equal_those_of_the_dense_computation(x_dtype):
    x, base, signs, alpha = case(x_dtype=x_dtype, stack=(3, 2))
    rows = torch.tensor([2, -1, 0, 2, 2])
    bias = torch.randn(base.shape[0])
    grad = torch.randn(5, base.shape[0]).to(x_dtype)
    ours = [t.clone().requires_grad_() for t in (x, alpha, bias)]
    OPS.bitdelta_linear(ours[0], base, signs, ours[1], rows, ours[2]).backward(grad)
    theirs = [t.double().requires_grad_() for t in (x, alpha, bias)]
    dense(theirs[0], base, signs, theirs[1], rows, theirs[2]).backward(grad.double())
    for got, wanted, t in zip(ours, theirs, (x, alpha, bias), strict=True):
        assert got.grad.dtype == t.dtype
        scale = wanted.grad.abs().max()
        eps = torch.finfo(t.dtype).eps if t is not bias else torch.finfo(x_dtype).eps
        assert (got.grad.double() - wanted.grad).abs().max() <= (2 * eps + 1e-5) * scale
    assert torch.count_nonzero(ours[1].grad[1]) == 0  # no row uses variant 1


def test_training_alpha_lowers_the_loss():
    """What scale distillation does: gradient steps on alpha alone."""
    x, base, signs, _ = case(16, 32, 64)
    target = torch.randn(16, 32) * 0.1 + base.float()
    alpha = torch.zeros(16, requires_grad=True)
    optimizer = torch.optim.SGD([alpha], lr=0.05)
    losses = []
    signs = pack(target - base.float())
    for _ in range(20):
        optimizer.zero_grad()
        loss = (OPS.bitdelta_linear(x, base, signs, alpha) - x @ target.T).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_base_that_wants_a_gradient_is_refused():
    x, base, signs, alpha = case(base_dtype=torch.float32)
    wanted = OPS.bitdelta_linear(x, base, signs, alpha)
    parameter = torch.nn.Parameter(base)
    with pytest.raises(ValueError, match="base: requires a gradient"):
        OPS.bitdelta_linear(x, parameter, signs, alpha)
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            assert torch.equal(OPS.bitdelta_linear(x, parameter, signs, alpha), wanted)
    parameter.requires_grad_(False)
    assert torch.equal(OPS.bitdelta_linear(x, parameter, signs, alpha), wanted)


CHANGED = torch.tensor([0, 2, 2, 3])


def sparse_case():
    """Three outputs: elements (0, 1), (0, 4), (2, 0); a second delta without (0, 4)."""
    offsets = torch.stack([CHANGED, torch.tensor([3, 4, 4, 5])])
    columns = torch.tensor([1, 4, 0, 1, 0], dtype=torch.int32)
    values = torch.tensor([1.0, -2.0, 3.0, 0.5, 0.25])
    return torch.randn(4, 5), offsets, columns, values


def test_sparse_delta_equals_dense():
    x, offsets, columns, values = sparse_case()
    both = torch.zeros(2, 3, 5, dtype=torch.float64)
    both[0, 0, 1], both[0, 0, 4], both[0, 2, 0] = 1, -2, 3
    both[1, 0, 1], both[1, 2, 0] = 0.5, 0.25
    rows = torch.tensor([0, 1, -1, 0])
    got = OPS.sparse_delta_linear(x, offsets, columns, values, rows)
    wanted = torch.stack([both[v] @ row if v >= 0 else torch.zeros(3, dtype=torch.float64)
                          for row, v in zip(x.double(), rows.tolist(), strict=True)])
    torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-6)
    one = OPS.sparse_delta_linear(x.bfloat16(), offsets[0], columns, values)
    assert one.dtype == torch.bfloat16
    torch.testing.assert_close(one.double(), x.bfloat16().double() @ both[0].T, rtol=0.01,
                               atol=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lora_equals_dense(dtype):
    x = torch.randn(6, 20)
    a, b = torch.randn(2, 3, 20).to(dtype), torch.randn(2, 7, 3).to(dtype)
    rows = torch.tensor([1, 0, -1, 1, 1, 0])
    got = OPS.lora_linear(x, a, b, 0.5, rows)
    wanted = torch.stack([0.5 * b[v].double() @ (a[v].double() @ row) if v >= 0
                          else torch.zeros(7, dtype=torch.float64)
                          for row, v in zip(x.double(), rows.tolist(), strict=True)])
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(OPS.lora_linear(x, a[0], b[0], 2.0).double(),
                               2 * x.double() @ (b[0].double() @ a[0].double()).T,
                               rtol=1e-5, atol=1e-4)


def test_truncated_svd_equals_torch_in_float64():
    left = torch.linalg.qr(torch.randn(60, 40, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(40, 40, dtype=torch.float64))[0]
    delta = left * 0.6 ** torch.arange(40) @ right.T
    base = torch.randn(60, 40)
    tuned = (base.double() + delta).float()
    exact = tuned.double() - base.double()
    u, s, v, report = OPS.truncated_svd(tuned, base, 8, 8, 4, 3, "layer.weight")
    want_u, want_s, want_vh = torch.linalg.svd(exact)
    torch.testing.assert_close(s.double(), want_s[:8], rtol=1e-5, atol=1e-6)
    best = (want_u[:, :8] * want_s[:8]) @ want_vh[:8]
    torch.testing.assert_close((u * s).double() @ v.double().T, best, rtol=0, atol=1e-5)
    energy = exact.square().sum()
    torch.testing.assert_close(report, torch.stack(
        [energy, want_s[:8].square().sum() / energy, (exact - best).norm() / exact.norm()]),
        rtol=1e-4, atol=1e-5)
    assert (u.gather(0, u.abs().argmax(0, keepdim=True)) > 0).all()  # signs are fixed
    again = OPS.truncated_svd(tuned, base, 8, 8, 4, 3, "layer.weight")
    assert all(map(torch.equal, (u, s, v, report), again))
    alone = OPS.truncated_svd(tuned, None, 8, 8, 4)
    torch.testing.assert_close(alone[1].double(), torch.linalg.svdvals(tuned.double())[:8],
                               rtol=1e-2, atol=0)


def opcheck_cases():
    x, base, signs, alpha = case(stack=(3, 2))
    rows = torch.tensor([2, -1, 0, 2, 1])
    with_grad = (x.clone().requires_grad_(), base, signs, alpha.clone().requires_grad_(), rows,
                 torch.randn(base.shape[0], requires_grad=True))
    return [
        (OPS.bitdelta_compress, (base, torch.randn_like(base))),
        (OPS.bitdelta_linear, with_grad),
        (OPS.bitdelta_linear, (x.bfloat16(), base, signs[0, 0], alpha[0, 0])),
        (OPS.bitdelta_linear_backward, (torch.randn(5, base.shape[0]), x, base, signs, alpha,
                                        rows)),
        (OPS.sparse_delta_linear, (*sparse_case(), torch.tensor([0, 1, -1, 0]))),
        (OPS.lora_linear, (x, torch.randn(3, 37), torch.randn(4, 3), 0.5)),
        (OPS.truncated_svd, (torch.randn(12, 9), None, 4)),
    ]


@pytest.mark.parametrize("index", range(7))
def test_opcheck(index):
    """Schema, autograd registration, shapes under FakeTensor, and AOT tracing, dynamic too."""
    op, args = opcheck_cases()[index]
    torch.library.opcheck(op.default, args)


def test_shapes_under_fake_tensors():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(2, 3, 40, dtype=torch.bfloat16)
        base = torch.empty(24, 40, dtype=torch.bfloat16)
        y = OPS.bitdelta_linear(x, base, torch.empty(24, 5, dtype=torch.uint8), torch.empty(24))
        assert y.shape == (2, 3, 24) and y.dtype == torch.bfloat16
        signs, alpha, stats = OPS.bitdelta_compress(base, base)
        assert signs.shape == (24, 5) and alpha.shape == (24,) and stats.shape == (7,)
        u, s, v, report = OPS.truncated_svd(base, None, 6)
        assert (u.shape, s.shape, v.shape) == ((24, 6), (6,), (40, 6)) and report.shape == (3,)
        with pytest.raises(ValueError, match="signs:"):
            OPS.bitdelta_linear(x, base, torch.empty(24, 6, dtype=torch.uint8), torch.empty(24))


def bad_linear_arguments():
    x, base, signs, alpha = case(stack=(2, 1))
    rows = torch.zeros(5, dtype=torch.long)
    good = {"x": x, "base": base, "signs": signs, "alpha": alpha, "variant_of_row": rows,
            "bias": torch.zeros(11)}
    changes = [
        ("x", x[:, :-1], ValueError), ("x", x.long(), TypeError), ("x", x[0, 0], ValueError),
        ("base", base[0], ValueError), ("base", base.double(), TypeError),
        ("base", base.to(torch.int8), TypeError),
        ("signs", signs[..., :-1], ValueError), ("signs", signs.to(torch.int8), TypeError),
        ("signs", signs[:, :, :-1], ValueError), ("signs", signs[0, 0, 0], ValueError),
        ("alpha", alpha[:1], ValueError), ("alpha", alpha[0], ValueError),
        ("alpha", alpha.long(), TypeError), ("bias", torch.zeros(10), ValueError),
        ("bias", torch.zeros(11, dtype=torch.long), TypeError),
        ("variant_of_row", None, ValueError), ("variant_of_row", rows[:-1], ValueError),
        ("variant_of_row", rows.float(), TypeError), ("variant_of_row", rows + 2, ValueError),
        ("variant_of_row", rows - 2, ValueError), ("variant_of_row", rows + 2**40, ValueError),
        ("alpha", torch.empty(2, 1, 11, device="meta"), ValueError),
    ]
    return [(name, {**good, name: value}, error) for name, value, error in changes]


@pytest.mark.parametrize("index", range(22))
def test_bad_arguments_name_themselves(index):
    name, arguments, error = bad_linear_arguments()[index]
    with pytest.raises(error, match=f"bitdelta_linear: {name}: "):
        OPS.bitdelta_linear(**arguments)


def test_bad_arguments_of_the_others():
    x, offsets, columns, values = sparse_case()
    with pytest.raises(ValueError, match="fine_tuned: has shape"):
        OPS.bitdelta_compress(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(TypeError, match="base: has dtype"):
        OPS.bitdelta_compress(torch.zeros(2, 3).long(), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="columns"):
        OPS.sparse_delta_linear(x, offsets[0], columns + 5, values)
    with pytest.raises(ValueError, match="columns"):
        OPS.sparse_delta_linear(x, offsets[0], columns - 2, values)
    with pytest.raises(ValueError, match="row_offsets: delta 0"):
        OPS.sparse_delta_linear(x, offsets[0] + 3, columns, values)
    with pytest.raises(ValueError, match="row_offsets: delta 0"):
        OPS.sparse_delta_linear(x, offsets[0] - 1, columns, values)
    with pytest.raises(ValueError, match="b: has shape"):
        OPS.lora_linear(x, torch.zeros(2, 5), torch.zeros(4, 3), 1.0)
    for rank in (-1, 4):
        with pytest.raises(ValueError, match=f"rank: {rank} is not in"):
            OPS.truncated_svd(torch.zeros(3, 5), None, rank)
    with pytest.raises(ValueError, match="iterations: 0"):
        OPS.truncated_svd(torch.zeros(3, 5), None, 2, 8, 0)
    bad = torch.zeros(3, 5)
    bad[1, 2] = float("nan")
    with pytest.raises(ValueError, match=r"tensor 'h': fine_tuned\[1, 2\] is NaN"):
        OPS.truncated_svd(bad, None, 2, 8, 2, 0, "h")


@pytest.mark.parametrize("planes", [0, 9])
@pytest.mark.parametrize("path", ["float32", "float64", "meta", "no rows", "no outputs"])
def test_every_path_checks_the_planes(path, planes):
    x, base, signs, alpha = case(d_out=0 if path == "no outputs" else 11,
                                 rows=0 if path == "no rows" else 5, stack=(planes,))
    arguments = [x.double() if path == "float64" else x, base, signs, alpha]
    if path == "meta":
        arguments = [t.to("meta") for t in arguments]
    message = f"bitdelta_linear: signs: has {planes} planes, takes 1 to 8"
    with pytest.raises(ValueError, match=message):
        OPS.bitdelta_linear(*arguments)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_path_checks_the_numbers_of_an_svd(device):
    a = torch.zeros(3, 5, device=device)
    for iterations in (0, 65, 2**40):
        with pytest.raises(ValueError, match=rf"iterations: {iterations} is not in \[1, 64\]"):
            OPS.truncated_svd(a, None, 2, 8, iterations)
    with pytest.raises(ValueError, match="oversampling: -1 is negative"):
        OPS.truncated_svd(a, None, 2, -1)


@pytest.mark.parametrize("index", [2**40, 2**32, 2**32 + 1, -2**40, -2, 3])
@pytest.mark.parametrize("path", ["float32", "float64", "no outputs"])
def test_an_index_out_of_range_is_named(path, index):
    x, base, signs, alpha = case(d_out=0 if path == "no outputs" else 11, stack=(3, 1))
    x = x.double() if path == "float64" else x
    rows = torch.tensor([0, -1, index, 2, 5])
    where = rf"row 2 has index {index}, takes 0 to 2, or -1 "
    with pytest.raises(ValueError, match=rf"variant_of_row: {where}\(the base alone\)"):
        OPS.bitdelta_linear(x, base, signs, alpha, rows)
    a, b = torch.zeros(3, 2, 37), torch.zeros(3, 4, 2)
    with pytest.raises(ValueError, match=rf"lora_linear: delta_of_row: {where}\(no delta\)"):
        OPS.lora_linear(x.float(), a, b, 1.0, rows)
    offsets, none = torch.zeros(3, 5, dtype=torch.long), torch.zeros(0)
    with pytest.raises(ValueError, match=rf"sparse_delta_linear: delta_of_row: {where}"):
        OPS.sparse_delta_linear(x.float(), offsets, none.int(), none, rows)


def bad_calls():
    x, base, signs, alpha = case()
    sparse = sparse_case()
    columns = sparse[2].clone()
    columns[2] = -5
    huge = torch.full((4, 4), 3e38)
    return {
        "signs: has dtype int8, takes uint8": lambda: OPS.bitdelta_linear(
            x, base, signs.to(torch.int8), alpha),
        "x: has dtype int64, takes float32, float16 or bfloat16, or float64$": lambda: (
            OPS.bitdelta_linear(x.long(), base, signs, alpha)),
        "alpha: has dtype float64, takes float32, float16 or bfloat16, or float64 where x is "
        "float64": lambda: OPS.bitdelta_linear(x, base, signs, alpha.double()),
        "variant_of_row: has dtype float32, takes int32 or int64": lambda: OPS.bitdelta_linear(
            x, base, signs, alpha, torch.zeros(5)),
        "x: has dtype float64, takes float32, float16 or bfloat16$": lambda: OPS.lora_linear(
            x.double(), x, x, 1.0),
        "bias: has 0 dimensions, takes 1$": lambda: OPS.bitdelta_linear(
            x, base, signs, alpha, None, torch.tensor(0.0)),
        "base: has 1 dimension, takes 2$": lambda: OPS.bitdelta_linear(x, base[0], signs, alpha),
        "columns: row 2 of delta 0 has column -5 of 5": lambda: OPS.sparse_delta_linear(
            sparse[0], sparse[1], columns, sparse[3], torch.zeros(4, dtype=torch.long)),
        r"truncated_svd: fine_tuned\[0, 0\] is NaN": lambda: OPS.truncated_svd(
            torch.full((3, 3), float("nan")), None, 1),
        "truncated_svd: values are too large for float32: the norm is 1.2e": lambda: (
            OPS.truncated_svd(huge, None, 2)),
        r"truncated_svd: fine_tuned - base overflows float32 in row 0": lambda: (
            OPS.truncated_svd(huge, -huge, 2)),
    }


@pytest.mark.parametrize("message", bad_calls())
def test_messages(message):
    with pytest.raises((ValueError, TypeError), match=message):
        bad_calls()[message]()


def test_operators_without_a_gradient_say_so():
    x = torch.randn(2, 5, requires_grad=True)
    y = OPS.lora_linear(x, torch.randn(2, 5), torch.randn(3, 2), 1.0)
    with pytest.raises(RuntimeError, match="not implemented"):
        y.sum().backward()


def test_cuda_kernels_are_registered():
    """Whether they can run is another matter: without CUDA in the build they say Unavailable."""
    for name in ("bitdelta_compress", "bitdelta_linear", "sparse_delta_linear", "lora_linear",
                 "truncated_svd"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"stockpot::{name}", "CUDA")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device answers")
def test_cuda_tensors_equal_cpu_tensors():
    x, base, signs, alpha = case(64, 256, 9, torch.bfloat16, torch.bfloat16, (3, 2))
    rows = torch.tensor([0, 1, 2, -1, 0, 1, 2, -1, 0])
    cuda = [t.cuda() for t in (x, base, signs, alpha, rows)]
    try:
        got = OPS.bitdelta_linear(*cuda)
    except NotImplementedError as error:
        pytest.skip(str(error))
    wanted = dense(x, base, signs, alpha, rows)
    assert (got.cpu().double() - wanted).abs().max() <= bound(x, base, alpha, 256)
    tuned = torch.randn_like(base)
    for ours, theirs in zip(OPS.bitdelta_compress(cuda[1], tuned.cuda()),
                            OPS.bitdelta_compress(base, tuned), strict=True):
        assert torch.equal(ours.cpu(), theirs)
    s = OPS.truncated_svd(cuda[1], None, 8, 8, 4)[1].cpu()
    torch.testing.assert_close(s, OPS.truncated_svd(base, None, 8, 8, 4)[1], rtol=1e-4, atol=1e-4)


def test_a_missing_library_says_where_it_was_looked_for(monkeypatch, tmp_path):
    monkeypatch.setattr("stockpot.ops._loaded", None)
    monkeypatch.setenv("STOCKPOT_LIB_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        stockpot.load_ops()
