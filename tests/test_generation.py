"""Sampling: what the cache saves must not change what is said."""

import argparse

import pytest
import torch
from conftest import TINY
from torch.nn import functional as F

from train_gpt2 import GPT, GPTConfig, generate, next_token


def make_args(**overrides) -> argparse.Namespace:
    flags = {"max_new_tokens": 40, "temperature": 1.0, "top_k": 50, "seq_len": 16, "seed": 3}
    return argparse.Namespace(**(flags | overrides))


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = GPT(GPTConfig(*TINY[:4], 257, "bytes", 256))
    for p in model.parameters():  # far from uniform, so that a wrong logit shows
        p.data += 0.3 * torch.randn_like(p)
    model.lm_head.weight.data[257:] = 5  # padding that would win if it could
    return model.eval()


@torch.no_grad()
def generate_plainly(model, tokens, args):
    """Continue tokens with no cache: the whole window through the model for every token."""
    generator, start = torch.Generator().manual_seed(args.seed), tokens.size(1)
    for _ in range(args.max_new_tokens):
        logits = model(tokens[:, -args.seq_len :])[:, -1]
        new = next_token(logits, args.temperature, args.top_k, generator)
        ended = (tokens[:, start:] == model.config.eot).any(1, keepdim=True)
        tokens = torch.cat((tokens, new.masked_fill(ended, model.config.eot)), 1)
        if (tokens[:, -1] == model.config.eot).all():
            break
    return tokens


@pytest.mark.parametrize("length", [1, 5, 16, 20])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_cached_and_uncached_decoding_agree(model, length, temperature):
    """A cache off by one, is_causal=True on one new token, or a window that does not slide."""
    prompt = torch.randint(0, 256, (3, length))
    args = make_args(temperature=temperature)
    assert torch.equal(generate(model, prompt, args), generate_plainly(model, prompt, args))


def test_logits_through_the_cache_are_those_of_the_whole_sequence(model):
    """Attention over the first key alone, which argmax might hide."""
    tokens = torch.randint(0, 256, (2, 16))
    whole, cache = model(tokens), [[] for _ in model.transformer.h]
    parts = [model(tokens[:, :7], cache=cache)]
    parts += [model(tokens[:, i : i + 1], cache=cache) for i in range(7, 16)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)


def test_no_padded_token_is_ever_drawn(model):
    """A token that the tokenizer cannot decode ends the run in the middle of the night."""
    out = generate(
        model, torch.zeros(64, 1, dtype=torch.int64), make_args(top_k=0, temperature=2.0)
    )
    assert out.max() <= 256


def test_a_sample_stops_at_end_of_text(model):
    """Text of the next document printed as if it belonged to this one."""
    out = generate(
        model, torch.zeros(64, 1, dtype=torch.int64), make_args(top_k=0, temperature=3.0)
    )
    rows_with_end = 0
    for row in out[:, 1:].tolist():
        if 256 in row:
            rows_with_end += 1
            assert set(row[row.index(256) :]) == {256}
    assert rows_with_end > 0
    model.lm_head.weight.data[:] = 0  # all logits alike: argmax is 0, made the end of text
    model.config.eot = 0
    out = generate(model, torch.ones(2, 3, dtype=torch.int64), make_args(temperature=0))
    assert out.shape == (2, 4), "nothing is computed once all have ended"


def test_an_end_of_text_in_the_prompt_does_not_end_the_sample(model):
    """The prompt that stands for an empty one is <|endoftext|> itself."""
    out = generate(model, torch.full((2, 1), 256), make_args(temperature=0, max_new_tokens=5))
    plain = generate_plainly(
        model, torch.full((2, 1), 256), make_args(temperature=0, max_new_tokens=5)
    )
    assert torch.equal(out, plain) and out.size(1) > 1


def test_temperature_and_top_k_shape_the_distribution():
    """A temperature that multiplies, or a top-k that lets the tail in."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]]).repeat(20000, 1)
    drawn = next_token(logits, 0.5, 2, generator)
    share = (drawn == 1).float().mean().item()
    assert set(drawn.unique().tolist()) == {1, 2}
    assert share == pytest.approx(F.softmax(torch.tensor([3.0, 2.0]) / 0.5, 0)[0].item(), abs=0.01)
    assert next_token(logits, 1.0, 0, generator).unique().numel() == 4
    assert (next_token(logits, 0, 50, generator) == 1).all()


def test_sampling_leaves_the_random_numbers_of_training_alone(model):
    """A sample every 250 steps that makes another run of it."""
    before = torch.get_rng_state()
    generate(model, torch.zeros(2, 1, dtype=torch.int64), make_args())
    assert torch.equal(before, torch.get_rng_state())
