"""The model: GPT-2 exactly, and nothing of the padding."""

import math

import numpy as np
import pytest
import torch
from conftest import TINY
from torch.nn import functional as F

from train_gpt2 import GPT, SIZES, GPTConfig, Run, choose_batch_size, parse_args

transformers = pytest.importorskip("transformers")

TRANSPOSED = ("c_attn.weight", "c_fc.weight", "c_proj.weight")  # Conv1D keeps matrices (in, out)


def hugging_face(model: GPT):
    """Return transformers' GPT-2 with the weights of ours."""
    c = model.config
    config = transformers.GPT2Config(
        vocab_size=c.vocab_size, n_positions=c.block_size, n_embd=c.n_embd, n_layer=c.n_layer,
        n_head=c.n_head, bos_token_id=c.eot, eos_token_id=c.eot, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config)
    state = {k: v.T if k.endswith(TRANSPOSED) else v for k, v in model.state_dict().items()}
    for name in ("lm_head.weight", "transformer.wte.weight"):
        state[name] = state[name][: c.vocab_size]
    theirs.load_state_dict({k: v.clone().contiguous() for k, v in state.items()})
    return theirs


def random_model(config: GPTConfig) -> GPT:
    """Return a model whose every parameter, biases and LayerNorms too, is random."""
    torch.manual_seed(0)
    model = GPT(config)
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    for matrix in (model.transformer.wte.weight, model.lm_head.weight):
        matrix.data[config.vocab_size :] = 0
    return model.eval()


@pytest.mark.parametrize("size", ["d12", "d24", "d36", "d48"])
def test_logits_loss_and_gradients_are_those_of_transformers(size):
    """Any change of the architecture: a mask, an epsilon, a GELU, an order of heads, a scale."""
    _, n_head, n_embd, *_ = SIZES[size]
    # heads and channels of the real size, layers and vocabulary cut to what a test can afford
    model = random_model(GPTConfig(2, n_head, n_embd, 64, 300, "gpt2", 299))
    theirs = hugging_face(model)
    tokens = torch.randint(0, 300, (2, 33))
    x, y = tokens[:, :-1], tokens[:, 1:]
    torch.testing.assert_close(model(x), theirs(x).logits, atol=1e-4, rtol=1e-4)
    loss, their_loss = model(x, y), theirs(tokens, labels=tokens).loss
    torch.testing.assert_close(loss, their_loss, atol=1e-4, rtol=1e-4)
    loss.backward()
    their_loss.backward()
    grads = dict(theirs.named_parameters())
    for name, p in model.named_parameters():
        grad = grads[name].grad.T if name.endswith(TRANSPOSED) else grads[name].grad
        ours = p.grad[:300] if name == "transformer.wte.weight" else p.grad
        torch.testing.assert_close(ours, grad, atol=1e-4, rtol=1e-4, msg=name)


def test_names_and_shapes_are_those_of_transformers_in_all_four_sizes():
    """A renamed or reshaped parameter: no checkpoint would cross over any more."""
    for size in ("d12", "d24", "d36", "d48"):
        n_layer, n_head, n_embd, block_size, _ = SIZES[size]
        with torch.device("meta"):
            ours = GPT(GPTConfig(n_layer, n_head, n_embd, block_size)).state_dict()
            config = transformers.GPT2Config(n_layer=n_layer, n_head=n_head, n_embd=n_embd)
            theirs = transformers.GPT2LMHeadModel(config).state_dict()
        assert ours.keys() == theirs.keys()
        for name, p in theirs.items():
            expected = p.shape[::-1] if name.endswith(TRANSPOSED) else p.shape
            padded = (50304, n_embd) if p.shape[0] == 50257 else expected
            assert ours[name].shape == torch.Size(padded), name


def test_parameters_of_d12_counted_and_grouped_for_decay():
    """A bias or LayerNorm that decays, a matrix that does not, a parameter too many."""
    with torch.device("meta"):
        model = GPT(GPTConfig())
        [optimizer] = model.configure_optimizers(0.1, 6e-4)
    padding = (50304 - 50257) * 768
    assert sum(p.numel() for p in model.parameters()) - padding == 124_439_808
    decay, rest = optimizer.param_groups
    assert (len(decay["params"]), decay["weight_decay"]) == (50, 0.1)
    assert (len(rest["params"]), rest["weight_decay"]) == (98, 0.0)
    assert sum(p.numel() for p in decay["params"]) == 124_354_560
    assert sum(p.numel() for p in rest["params"]) == 121_344
    assert decay["betas"] == (0.9, 0.95) and decay["eps"] == 1e-8 and decay["fused"]


def test_first_loss_is_that_of_guessing():
    """An init too wide or a loss over the padding: the first loss would be above ln V."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(2, 2, 64, 32, 50257))
    tokens = torch.randint(0, 50257, (4, 33))
    assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(math.log(50257), abs=0.05)


def test_init_scales_residual_projections_and_zeroes_padding():
    """A missing (2 n_layer)^-0.5, or padding rows that start as noise."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(8, 2, 128, 32, 300))
    block = model.transformer.h[3]
    for matrix, std in [(block.attn.c_attn, 0.02), (block.mlp.c_fc, 0.02),
                        (block.attn.c_proj, 0.02 / 4), (block.mlp.c_proj, 0.02 / 4)]:  # fmt: skip
        assert matrix.weight.std().item() == pytest.approx(std, rel=0.05)
        assert matrix.bias.count_nonzero() == 0
    assert model.transformer.wte.weight.shape == (384, 128)
    assert model.transformer.wte.weight[300:].count_nonzero() == 0


def test_the_head_is_tied():
    """A vocabulary matrix too many."""
    model = GPT(GPTConfig(*TINY[:4], 257, "bytes", 256))
    assert model.lm_head.weight is model.transformer.wte.weight


def test_padding_takes_no_part_where_all_logits_are_far_below_zero():
    """A softmax over padded columns: their zeros would swallow it, as GPT-2's logits are near -40."""
    n_layer, n_head, n_embd, block_size, _ = TINY
    model = random_model(GPTConfig(n_layer, n_head, n_embd, block_size, 257, "bytes", 256)).double()
    model.transformer.ln_f.bias.data += 1
    # a direction that every output has in common: it shifts all logits of real tokens by -40
    model.lm_head.weight.data[:257] -= 40 / n_embd
    x, y = torch.randint(0, 257, (2, 16)), torch.randint(0, 257, (2, 16))
    logits = model(x)
    assert logits.shape == (2, 16, 257) and logits.mean() < -30
    exact = F.cross_entropy(logits.double().flatten(0, 1), y.flatten())
    assert model(x, y).item() == pytest.approx(exact.item(), abs=1e-5)


def test_padding_stays_zero_through_training():
    """A gradient or a decay that reaches the padding."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(*TINY[:4], 257, "bytes", 256))
    [optimizer] = model.configure_optimizers(0.1, 1e-2)
    for _ in range(3):
        tokens = torch.randint(0, 257, (4, 17))
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.transformer.wte.weight[257:].count_nonzero() == 0


def test_a_target_of_minus_one_counts_for_nothing():
    """Spare rows of the last validation batch leaking into the loss."""
    model = random_model(GPTConfig(*TINY[:4], 257, "bytes", 256))
    x, y = torch.randint(0, 257, (3, 16)), torch.randint(0, 257, (3, 16))
    masked = y.clone()
    masked[2] = -1
    each = model(x, masked, reduction="none")
    assert each.shape == (3, 16) and each[2].count_nonzero() == 0
    torch.testing.assert_close(model(x, masked), model(x[:2], y[:2]))
    torch.testing.assert_close(each[:2].mean(), model(x[:2], y[:2]))


def test_recompute_changes_memory_not_gradients():
    """Recomputation that drops or doubles a block."""
    config = GPTConfig(*TINY[:4], 257, "bytes", 256)
    x, y = torch.randint(0, 257, (3, 16)), torch.randint(0, 257, (3, 16))
    grads = []
    for recompute in (False, True):
        model = random_model(config).train()  # only training recomputes
        model.recompute = recompute
        model(x, y).backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_sizes_are_those_of_the_papers():
    """A typing error in the table: heads that do not divide, a learning rate that jumps up."""
    expected = {"d12": 124.4e6, "d24": 354.8e6, "d36": 774.0e6, "d48": 1557.6e6, "gpt3:c768": 125.2e6,
                "gpt3:c2560": 2651e6, "gpt3:c12288": 174.6e9}  # fmt: skip
    for size, (n_layer, _, n_embd, block_size, _) in SIZES.items():
        count = 12 * n_layer * n_embd**2 + 13 * n_layer * n_embd + 2 * n_embd
        count += (50257 + block_size) * n_embd
        if size in expected:
            assert count == pytest.approx(expected[size], rel=2e-3), size
    assert all(C % heads == 0 for _, heads, C, _, _ in SIZES.values())
    for family in ("d", "gpt3"):
        rates = [row[-1] for name, row in SIZES.items() if name.startswith(family)]
        assert rates == sorted(rates, reverse=True) and np.unique(rates).size >= 7


@pytest.mark.parametrize("size, context, gib, least, most", [
    ("d12", 1024, 16, 8, 32), ("d12", 1024, 24, 16, 64), ("d12", 1024, 80, 64, 128),
    ("d12", 2048, 40, 16, 64), ("d36", 1024, 80, 16, 64), ("d48", 1024, 80, 8, 32),
])  # fmt: skip
def test_the_batch_size_fits_the_memory(size, context, gib, least, most, monkeypatch):
    """A formula that forgets the logits, or the moments: an error an hour later on a smaller card."""
    properties = type("Properties", (), {"total_memory": gib * 2**30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    run = Run(torch.device("cuda", 0), "bfloat16", True, 0, 1)
    n_layer, n_head, n_embd, *_ = SIZES[size]
    args = parse_args([])
    args.seq_len = context
    B = choose_batch_size(args, GPTConfig(n_layer, n_head, n_embd, context), run)
    assert least <= B <= most
    args.recompute = True
    assert choose_batch_size(args, GPTConfig(n_layer, n_head, n_embd, context), run) >= B
