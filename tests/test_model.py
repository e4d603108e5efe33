"""Promise 1: the model is GPT-2 exactly, and the padding of its vocabulary takes part in nothing."""

import json
import os
import re
import runpy
import sys
from argparse import Namespace
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT, SMALL, make_process, needs_data, new_model
from torch import nn
from torch.nn import functional as F

import fineweb
import train_gpt2
from train_gpt2 import (
    DEFAULTS,
    GPT,
    SIZES,
    GPTConfig,
    Start,
    UserError,
    change_layout,
    export_hf,
    generate,
)

transformers = pytest.importorskip("transformers")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randomize(model: nn.Module, scale=0.2) -> nn.Module:
    """Make every parameter random, biases and LayerNorms too. Padded rows stay zero."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            rows = model.config.vocab_size if "wte" in name else len(p)
            p[:rows] += scale * torch.randn_like(p[:rows])
    return model.eval()


def foreign(**changes) -> nn.Module:
    """Return a model of transformers, with the shape of SMALL but for the changes."""
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 16, "vocab_size": 257}
    ends = {"bos_token_id": 256, "eos_token_id": 256}
    config = transformers.GPT2Config(**(shape | ends | changes))
    return randomize(transformers.GPT2LMHeadModel(config))


def random_tokens(*shape, below=257) -> torch.Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("size", ["tiny", pytest.param("d12", marks=pytest.mark.slow)])
def test_logits_loss_and_gradients_equal_those_of_transformers(size):
    n_head, n_embd = SIZES[size]["n_head"], SIZES[size]["n_embd"]
    ours = randomize(new_model(GPTConfig(2, n_head, n_embd, 48, 300, "gpt2")), 0.05)
    theirs = foreign(n_head=n_head, n_embd=n_embd, n_positions=48, vocab_size=300)
    theirs.load_state_dict(change_layout(ours.state_dict(), 300))
    tokens = random_tokens(2, 33, below=300)
    x, y = tokens[:, :-1], tokens[:, 1:]
    torch.testing.assert_close(ours(x), theirs(x).logits, atol=1e-4, rtol=1e-4)
    loss = ours(x, y).mean()
    their_loss = theirs(tokens, labels=tokens).loss
    torch.testing.assert_close(loss, their_loss, atol=1e-4, rtol=1e-4)
    loss.backward()
    their_loss.backward()
    gradients = change_layout({name: p.grad for name, p in theirs.named_parameters()}, 384)
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], atol=1e-4, rtol=1e-4, msg=name)
        assert p.grad.abs().max() > 1e-3, f"{name}: an error would be below the tolerance"


def test_the_table_of_sizes_is_that_of_the_papers():
    """The papers give these numbers of parameters, GPT-2 124,439,808. Rates are GPT-3's."""
    with torch.device("meta"):  # shapes without numbers
        parameters = sum(p.numel() for p in GPT(GPTConfig()).parameters())
    assert parameters - (50304 - 50257) * 768 == 124_439_808
    assert GPTConfig(vocab_size=128).padded_vocab_size == 128, "no row too many"
    millions = {"d12": 124.4, "d24": 354.8, "d36": 774, "d48": 1557.6}
    for size, number in millions.items():
        n_layer, n_head, n_embd, _ = SIZES[size].values()
        count = n_layer * (12 * n_embd**2 + 13 * n_embd) + (50257 + 1024 + 2) * n_embd
        assert count / 1e6 == pytest.approx(number, rel=2e-3) and n_embd % n_head == 0, size
    heads_and_rates = [(SIZES[size]["n_head"], SIZES[size]["max_lr"]) for size in millions]
    assert heads_and_rates == [(12, 6e-4), (16, 3e-4), (20, 2.5e-4), (25, 2e-4)]


def test_initial_weights_have_gpt_2s_deviations():
    """0.02, divided by sqrt(2 n_layer) for what adds to the residual stream; biases 0."""
    model = new_model(GPTConfig(8, 2, 128, 256, 300))
    stds = {"wte": 0.02, "wpe": 0.02, "c_attn": 0.02, "c_fc": 0.02, "c_proj": 0.02 / 4}
    for name, p in model.named_parameters():
        if p.dim() == 2:
            real = p[:300] if "wte" in name else p
            assert real.std().item() == pytest.approx(stds[name.split(".")[-2]], rel=0.03), name
            assert real.mean().item() == pytest.approx(0, abs=0.001), name
        else:
            assert (p == float(name.endswith("weight"))).all(), name
    assert model.lm_head.weight is model.transformer.wte.weight


def test_variants_with_one_seed_share_the_weights_that_both_have():
    class Swapped(GPT):
        def __init__(self, config):
            super().__init__(config)
            self.other_head = nn.Linear(32, 384)
            self.gate = nn.Parameter(torch.ones(2))
            self.lm_head.weight = nn.Parameter(torch.empty(384, 32))  # not tied
            self.transformer.wpe = self.transformer._modules.pop("wpe")  # now the last one
            for block in self.transformer.h:
                block.attn = block._modules.pop("attn")

    ours = new_model().state_dict()
    swapped = Swapped(SMALL)
    swapped.init_weights(1337)
    variant = swapped.state_dict()
    assert list(variant) != list(ours) and variant.keys() > ours.keys()
    assert [n for n in ours if not torch.equal(ours[n], variant[n])] == ["lm_head.weight"]
    assert (variant["gate"] == 1).all() and variant["other_head.weight"].std() < 0.03
    deeper = new_model(replace(SMALL, n_layer=3)).state_dict()
    assert [n for n in ours if not torch.equal(ours[n], deeper[n]) and "c_proj" not in n] == []
    other = new_model(seed=7).state_dict()
    matrices = [m[n] for m in (ours, other) for n in m if "c_fc.w" in n]
    assert len({p[0, 0].item() for p in matrices}) == 4


def test_a_new_state_follows_its_flags(monkeypatch):
    init = nn.LayerNorm.reset_parameters
    draw = lambda self: (init(self), nn.init.normal_(self.bias))  # noqa: E731
    monkeypatch.setattr(nn.LayerNorm, "reset_parameters", draw)
    drawn = []
    for seed, zero_init, recompute in ((1, False, True), (1, True, False), (2, True, True)):
        given = {"seed": seed, "zero_init": zero_init, "recompute": recompute, "max_lr": 1.0}
        args = Namespace(**DEFAULTS | given | {"weight_decay": 0.7})
        model = train_gpt2.make_model(SMALL, Start(), args, make_process())
        state = train_gpt2.make_state(model, Start(), args, make_process())
        drawn.append(state.model.state_dict())
        assert state.model.recompute == recompute
        [adamw] = state.optimizer.optimizers
        assert [g["weight_decay"] for g in adamw.param_groups] == [0.7, 0.0]
    for name, p in drawn[0].items():
        assert torch.equal(p * ("c_proj.weight" not in name), drawn[1][name]), name
    ours, other = (drawn[i]["transformer.ln_f.bias"] for i in (0, 2))
    assert not torch.equal(ours, other)


def test_recompute_changes_no_gradient():
    x, y = random_tokens(3, 16), random_tokens(3, 16).flip(0)
    gradients, calls = [], []
    for recompute in (False, True):
        model = randomize(new_model()).train()
        model.recompute = recompute
        model.transformer.h[0].ln_1.register_forward_hook(lambda *_: calls.append(1))
        model(x, y).mean().backward()
        gradients.append([p.grad for p in model.parameters()])
        assert len(calls) == 1 + 2 * recompute, "the second model computes block 0 twice"
    torch.testing.assert_close(*gradients, atol=0, rtol=0)


def test_mfu_counts_every_matrix_once_and_half_of_attention(monkeypatch):
    """6 N + 6 L C T operations a token for d12 are 798M, over 989 TFLOP/s of an H100 each."""
    with torch.device("meta"):
        model = GPT(GPTConfig())
    flops = 6 * (12 * 12 * 768**2 + 50304 * 768) + 6 * 12 * 768 * 1024
    for name, dtype, peak in (
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12), ("Tesla T4", "float16", 65e12),
        ("NVIDIA H100 80GB HBM3", "tf32", None), ("Tesla T4", "float32", None),  # have other peaks
        ("New GPU", "bfloat16", None), ("NVIDIA T400 4GB", "float16", None),
    ):  # fmt: skip
        run = make_process(0, 8, device_name=name, dtype=dtype)
        found = train_gpt2.peak_tokens_per_second(model, 1024, run)
        assert found == (peak and pytest.approx(8 * peak / flops)), name


# (N, C, V, padded V): odd sizes; V on both sides of the kernel's block of 16384 columns; GPT-2's
LOSS_SIZES = [(7, 16, 257, 384), (9, 24, 333, 333), (5, 8, 16384, 16512), (5, 8, 16385, 16512)]
LOSS_SIZES += [(20, 32, 50257, 50304)]
# Without a GPU, Triton interprets the kernel: `pip install triton`, and TRITON_INTERPRET=1
CAN_RUN = train_gpt2.triton and (DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
KERNEL = pytest.mark.skipif(not CAN_RUN, reason="needs a GPU, or Triton and TRITON_INTERPRET=1")


@dataclass
class Pointer:
    """Places in a tensor, of any shape, as the kernel computes with them."""

    tensor: torch.Tensor
    places: torch.Tensor | int = 0

    def __add__(self, offset):
        return Pointer(self.tensor, self.places + offset)


def load(pointer, mask=True, other=0):
    return torch.where(torch.as_tensor(mask), pointer.tensor[pointer.places * mask], other)


def store(pointer, value, mask=True):
    mask = torch.as_tensor(mask).expand(value.shape)
    pointer.tensor[pointer.places[mask]] = value[mask].to(pointer.tensor.dtype)


@pytest.fixture
def emulated(monkeypatch):
    """Return train_gpt2 where Triton's words are spelled in PyTorch, and stand for all rows at once."""
    tl = Namespace(constexpr=int, float32=torch.float32, int64=torch.int64, load=load, store=store)
    tl.arange, tl.exp, tl.log, tl.static_range = torch.arange, torch.exp, torch.log, range
    tl.maximum = lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b))
    tl.max = lambda x, axis: x.amax(-1, keepdim=True)
    tl.sum = lambda x, axis: x.sum(-1, keepdim=True)
    tl.debug_barrier = lambda: None

    class Launch:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            tl.program_id = lambda axis: torch.arange(*grid)[:, None]
            return self.launch

        def launch(self, *args, num_warps):
            self.kernel(*(Pointer(x.view(-1)) for x in args[:3]), *args[3:])

    operator = partial(torch.library.custom_op, "emulated::cross_entropy")
    monkeypatch.setattr(torch.library, "triton_op", lambda name, **rest: operator(**rest))
    monkeypatch.setattr(torch.library, "wrap_triton", Launch)
    triton = Namespace(jit=lambda kernel: kernel, language=tl)
    with monkeypatch.context() as imports:  # PyTorch would take it for the library
        imports.setitem(sys.modules, "triton", triton)
        imports.setitem(sys.modules, "triton.language", tl)
        return Namespace(**runpy.run_path(train_gpt2.__file__))


@pytest.mark.parametrize(
    "kernel", [None, "emulated", pytest.param("triton", marks=[pytest.mark.cuda, KERNEL])]
)
@pytest.mark.parametrize("scale", [1e-3, 1, 1e4])  # of the logits
@pytest.mark.parametrize("size", LOSS_SIZES)
def test_losses_and_gradients_are_those_of_float64(size, scale, kernel, monkeypatch, request):
    """Padded columns, with the largest logits here, and targets of -1 give neither."""
    N, C, V, padded = size
    torch.manual_seed(0)
    x = (torch.randn(N, C) * scale / C**0.5).bfloat16().float()
    weight = torch.randn(padded, C).bfloat16().float()
    weight[V - 1] = 5 * x[3].sign()
    weight[V:] = 9 * x[0].sign()
    targets = torch.randint(V, (N,))
    targets[1::3] = -1
    importance = torch.linspace(-1, 2, N)
    device = DEVICE if kernel == "triton" else "cpu"
    if kernel and device == "cpu":  # which has no product of bfloat16 matrices in float32
        monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))

    results = []
    for dtype, where in ((torch.float32, device), (torch.float64, "cpu")):
        a, w = (t.to(where, dtype, copy=True).requires_grad_() for t in (x, weight))
        if dtype == torch.float64:
            logits = a @ w[:V].T
            if kernel:  # rounded in value, and not in the gradient
                logits = logits + (logits.bfloat16() - logits).detach()
            losses = F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
        elif kernel:
            script = train_gpt2 if kernel == "triton" else request.getfixturevalue(kernel)
            losses = script.fused_loss(a.bfloat16(), w, targets.to(where), V)[0]
        else:
            losses = train_gpt2.lm_head_loss(a, w, targets, V)
        (losses * importance.to(losses)).sum().backward()
        results.append([t.detach().cpu().double() for t in (losses, a.grad, w.grad)])
    tolerances = (1e-4, 8e-3, 8e-3) if kernel else (1e-4,) * 3  # bfloat16 has 8 bits
    for found, expected, tolerance in zip(*results, tolerances, strict=True):
        assert (found - expected).norm() <= tolerance * expected.norm()
    losses, dx, dweight = results[0]
    assert not losses[targets == -1].any() and not dx[targets == -1].any()
    assert not dweight[V:].any() and (losses[targets >= 0] >= 0).all()


def test_temperature_0_is_the_most_likely_token_after_the_context():
    model = randomize(new_model())
    text = prompt = random_tokens(3, 5)
    for _ in range(40):
        text = torch.cat((text, model(text[:, -16:])[:, -1:].argmax(dim=2)), dim=1)
    assert torch.equal(text, generate(model, prompt, 40, temperature=0))


@pytest.mark.parametrize("temperature", [0.6, 1.5])
@pytest.mark.parametrize("top_k, allowed", [(2, "12"), (3, "012"), (0, "0123"), (9, "0123")])
def test_temperature_and_top_k_shape_the_distribution(top_k, allowed, temperature):
    logits, allowed = torch.tensor([1.0, 3.0, 2.0, -0.5]), [*map(int, allowed)]
    model = Mock(side_effect=lambda tokens, first: logits.expand(*tokens.shape, 4))
    model.config.vocab_size, model.config.block_size = 4, 16
    prompt = torch.zeros(20000, 1, dtype=torch.int64)
    before = torch.get_rng_state()

    def draw(**given) -> torch.Tensor:
        return generate(model, prompt, 1, top_k=top_k, **given)[:, 1]

    drawn = draw(temperature=temperature)
    shares = torch.bincount(drawn, minlength=4) / 20000
    expected = torch.zeros(4)
    expected[allowed] = F.softmax(logits[allowed] / temperature, dim=0)
    torch.testing.assert_close(shares, expected, atol=0.015, rtol=0)
    assert drawn.unique().tolist() == allowed
    assert torch.equal(drawn, draw(temperature=temperature))
    assert not torch.equal(drawn, draw(temperature=temperature, seed=4))
    logits[2] = logits[1]
    assert len(draw(temperature=0).unique()) == 1
    assert torch.equal(before, torch.get_rng_state()), "training's random numbers are its own"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_cross_over_and_back_bit_for_bit(tmp_path, dtype):
    """From transformers to ours and back, in float32: logits in 16 bits would differ from ours."""
    theirs = foreign().to(dtype)
    theirs.save_pretrained(tmp_path / "theirs")
    theirs.float()
    ours = GPT.from_pretrained(str(tmp_path / "theirs"))
    assert ours.config == SMALL and not ours.training
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    tokens = random_tokens(2, 16)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)
    assert ours.transformer.wte.weight[257:].count_nonzero() == 0
    export_hf(ours, str(tmp_path / "again"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").state_dict()
    torch.testing.assert_close(again, theirs.state_dict(), atol=0, rtol=0)


OWN = "own d7a9 d6b8 d7a9d6b8 c3b6 206c"  # in hex: the letter shin, a vowel, both; ö, " l"


@pytest.mark.parametrize("name, vocab_size", [
    ("bytes", 257), (OWN, 262), pytest.param("gpt2", 50257, marks=[needs_data, pytest.mark.slow]),
])  # fmt: skip
def test_an_exported_folder_reads_and_writes_the_same_text(name, vocab_size, tmp_path):
    config = replace(SMALL, block_size=64, tokenizer=name, vocab_size=vocab_size)
    model = randomize(new_model(config))
    export_hf(model, str(tmp_path / "folder"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    text = "שָׁלוֹם, héllo <|endoftext|>wörld , do n't . "
    tokens = tokenizer(text, return_tensors="pt").input_ids
    ours = train_gpt2.get_tokenizer(name)
    expected = ours.encode(text, allowed_special="all")
    assert tokens[0].tolist() == expected
    page = (ROOT / "README.md").read_text("utf-8") + " don't  \n\n\t漢字 🎉 1234567 aaaaaaaaa"
    assert tokenizer(page).input_ids == ours.encode(page, allowed_special="all")
    assert expected == fineweb.get_tokenizer(name).encode(text, allowed_special="all")
    assert tokenizer.decode(tokens[0]) == text and tokenizer.eos_token_id == vocab_size - 1
    assert tokenizer.model_max_length == theirs.config.n_positions == 64
    expected = theirs.generate(tokens, max_new_tokens=20, do_sample=False)
    found = generate(model, tokens, 20, temperature=0)
    assert torch.equal(found[:, : expected.size(1)], expected) and expected.size(1) > tokens.size(1)


def test_a_folder_with_a_tokenizer_of_another_language_is_refused(tmp_path):
    foreign().save_pretrained(tmp_path)
    train_gpt2.export_tokenizer(replace(SMALL, tokenizer=OWN), str(tmp_path))
    with pytest.raises(UserError, match="has a tokenizer of its own, expected bytes"):
        train_gpt2.load_pretrained(str(tmp_path))


@pytest.mark.parametrize("change, message", [
    ({"vocab_size": 300}, "has 300 tokens, expected 50257 or 257"),
    ({"vocab_size": 258, "tokenizer": "bytes"}, "has 258 tokens, expected 257"),  # [PAD], added
    ({"activation_function": "relu"}, "activation_function is relu, expected gelu_new"),
    ({"activation_function": "gelu"}, "activation_function is gelu, expected gelu_new"),
    ({"scale_attn_by_inverse_layer_idx": True}, "layer_idx is True, expected False"),
    ({"scale_attn_weights": False}, "scale_attn_weights is False, expected True"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings is False, expected True"),
    ({"layer_norm_epsilon": 1e-2}, "layer_norm_epsilon is 0.01, expected 1e-05"),
    ({"n_inner": 5}, "is no GPT-2: n_inner is 5"),
    ({"model_type": "qwen2"}, "is no GPT-2: model_type is qwen2, expected gpt2"),
    ({"n_layer": 3}, "lacks the weights transformer.h.2.attn.c_attn.bias, "),
])  # fmt: skip
def test_a_folder_that_is_no_gpt_2_is_refused(change, message, tmp_path):
    foreign().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=re.escape(message)):
        train_gpt2.load_pretrained(str(tmp_path))
