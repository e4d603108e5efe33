"""The loss and its gradients against float64: plain PyTorch here, the kernel where there is a GPU."""

import pytest
import torch
from torch.nn import functional as F

from train_gpt2 import FusedCrossEntropy, linear_cross_entropy

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, gpu])]
# (N, C, V, Vp): odd sizes, no padding, padding; V and Vp on both sides of the kernel's block of
# 16384 columns; GPT-2's own
SIZES = [(1, 8, 2, 2), (7, 16, 257, 384), (9, 24, 333, 333), (5, 8, 16300, 16384)]
SIZES += [(5, 8, 16384, 16384), (5, 8, 16385, 16512), (20, 32, 50257, 50304)]
GPT2 = SIZES[-1]


def both(size, device, scale=1.0, dtype=torch.float32, reduce=torch.sum):
    """Return (losses, dx, dweight) of ours and of float64, for random input of logits ~ scale."""
    N, C, V, Vp = size
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, C, generator=generator).to(dtype).float() * scale / C**0.5
    weight = torch.randn(Vp, C, generator=generator).to(dtype).float()
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[1::3] = -1
    results = []
    for ours in (True, False):
        kind = {"device": device} if ours else {"dtype": torch.float64}
        a, w = (t.detach().to(**kind).requires_grad_() for t in (x, weight))
        if ours:
            with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                if device == "cuda":  # training takes the kernel for bfloat16 alone
                    losses = FusedCrossEntropy.apply(a.to(dtype), w, targets.to(device), V)
                else:
                    losses = linear_cross_entropy(a, w, targets, V)
        else:
            losses = F.cross_entropy(a @ w[:V].T, targets, ignore_index=-1, reduction="none")
        reduce(losses).backward()
        results.append([t.detach().cpu().double() for t in (losses, a.grad, w.grad)])
    return targets, *results


def error(found, expected) -> float:
    """Return the norm of the difference relative to what was expected."""
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients_are_those_of_float64(size, device):
    """A block's edge, the padding, the last column: each would be seen in one of the sizes."""
    targets, found, expected = both(size, device)
    for ours, theirs in zip(found, expected, strict=True):
        assert error(ours, theirs) < 1e-5
    assert (found[0][targets == -1] == 0).all(), "an ignored position has a loss"
    assert (found[1][targets == -1] == 0).all(), "an ignored position has a gradient"
    assert (found[2][size[2] :] == 0).all(), "the padding has a gradient"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_very_small_and_very_large_logits(scale, device):
    """Exponentials that overflow, or a sum that cancels."""
    _, found, expected = both(SIZES[1], device, scale)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.isfinite(ours).all()
        assert error(ours, theirs) < 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_rounds_and_no_more(device):
    """A sum over the row in bfloat16, which does not grow beyond 256 times what is added."""
    _, found, expected = both(GPT2, device, dtype=torch.bfloat16)
    for ours, theirs, most in zip(found, expected, (1e-3, 1e-2, 1e-2), strict=True):
        assert error(ours, theirs) < most


@pytest.mark.parametrize("device", DEVICES)
def test_each_row_has_the_weight_that_the_gradient_says(device):
    """One scale for all rows: right for a mean, wrong for any other use of the losses."""
    weights = torch.linspace(-1, 2, SIZES[1][0])
    _, found, expected = both(SIZES[1], device, reduce=lambda t: (t * weights.to(t)).sum())
    for ours, theirs in zip(found, expected, strict=True):
        assert error(ours, theirs) < 1e-5
