"""Loss and gradient of scale distillation, by PyTorch's autograd in float64 over transformers.

FOLDER holds base/, tuned/ (Hugging Face folders) and numbers/: tokens [sequences, length],
alpha/NAME of every 1-bit tensor, and what is checked: loss and gradient/NAME.
"""

import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: do not spin on a busy machine

import torch
from safetensors.torch import load_file
from torch.func import functional_call
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-3  # of the largest gradient of a tensor: ours is in float32


def main(folder):
    torch.set_num_threads(1)
    base = load_file(os.path.join(folder, "base", "model.safetensors"))
    tuned = load_file(os.path.join(folder, "tuned", "model.safetensors"))
    numbers = load_file(os.path.join(folder, "numbers", "model.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(
        os.path.join(folder, "tuned"), dtype=torch.float64, attn_implementation="eager")
    tokens = numbers["tokens"].long()
    alphas = {name[len("alpha/"):]: value.double().requires_grad_()
              for name, value in numbers.items() if name.startswith("alpha/")}
    weights = {}
    for name, alpha in alphas.items():
        delta = tuned[name].double() - base[name].double()
        sign = torch.where(delta >= 0, 1.0, -1.0).double()
        weights[name] = base[name].double() + alpha[:, None] * sign
    with torch.no_grad():
        teacher = model(tokens).logits
    student = functional_call(model, weights, (tokens,)).logits
    loss = (student - teacher).square().mean()
    loss.backward()
    got = float(numbers["loss"][0])
    assert abs(got / float(loss) - 1) < 1e-4, (got, float(loss))
    largest = 0.0
    for name, alpha in alphas.items():
        want = alpha.grad
        error = (numbers[f"gradient/{name}"].double() - want).abs().max() / want.abs().max()
        assert error < TOLERANCE, (name, float(error))
        largest = max(largest, float(error))
    # The check could fail: a neighbour's gradient is another one.
    name = next(iter(alphas))
    moved = alphas[name].grad.roll(1)
    assert (moved - alphas[name].grad).abs().max() > 0.1 * moved.abs().max()
    print(f"loss {float(loss):.4g}, largest error of a gradient {largest:.1e}")


if __name__ == "__main__":
    main(sys.argv[1])
