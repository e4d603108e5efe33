"""Promise 2: every window once an epoch, in an order that the hardware does not change."""

import os
import tempfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_process, new_model
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import train_gpt2
from train_gpt2 import DataLoaderLite, GPTConfig, validate

# of windows of 8 tokens, in shards of 50, 37 and 90, with seed 1337: how the first two epochs begin
GOLDEN_ORDER = [[32, 95, 58, 0, 16, 24, 167, 111], [135, 0, 66, 127, 16, 74, 103, 151]]


def make_shards(folder, sizes) -> Path:
    """Write shards in which no token stands twice: token i of the data is i."""
    for i, (n, end) in enumerate(zip(sizes, np.cumsum(sizes), strict=True)):
        np.save(Path(folder, f"x_train_{i}.npy"), np.arange(end - n, end, dtype=np.uint16))
    return folder


def make_loaders(folder, T, world=1, seed=1337, shuffle=True, split="train"):
    args = Namespace(data_dir=str(folder), seq_len=T, seed=seed, shuffle=shuffle)
    runs = [make_process(rank, world) for rank in range(world)]
    return [DataLoaderLite(split, GPTConfig(), args, run) for run in runs]


def serve(folder, T, steps, sequences=8, B=1, world=1, first=0, **options) -> np.ndarray:
    """Return the first tokens of the windows of each step, in the order in which it sees them."""
    loaders = make_loaders(folder, T, world, **options)
    seen = []
    for start in range(first, first + steps * sequences, sequences):
        shares = [loader.batches(range(start, start + sequences), B) for loader in loaders]
        for batches in zip(*shares, strict=True):  # strict: all processes get equally many
            for x, y in batches:
                assert x.shape == y.shape == (B, T) and x.dtype == y.dtype == torch.int64
                assert torch.equal(x, x[:, :1] + torch.arange(T)), "a window is one run of tokens"
                spare = y[:, 0] < 0
                assert torch.equal(y[~spare], x[~spare] + 1), "targets are one token further on"
                assert (y[spare] == -1).all(), "spare rows count for nothing"
                seen += x[~spare, 0].tolist()
    return np.array(seen).reshape(steps, sequences)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_step_sees_the_same_windows_for_every_b_and_number_of_processes(shuffle, tmp_path):
    folder = make_shards(tmp_path, [50, 37, 8, 9, 120])
    expected = serve(folder, 8, steps=12, B=8, shuffle=shuffle)
    for world in (1, 2, 3, 5, 7, 9):
        for B in (1, 2, 3, 8):
            found = serve(folder, 8, steps=12, B=B, world=world, shuffle=shuffle)
            assert np.array_equal(found, expected), (world, B)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(1, 9), st.integers(0, 99))
def test_an_epoch_shows_every_window_once(sizes, T, seed):
    windows = []
    for size, end in zip(sizes, np.cumsum(sizes), strict=True):
        windows += range(end - size, end - T, T)
    assume(windows)
    with tempfile.TemporaryDirectory() as folder:
        make_shards(folder, sizes)
        epochs = serve(folder, T, steps=3, sequences=len(windows), seed=seed)
        plain = serve(folder, T, steps=3, sequences=len(windows), shuffle=False)
    assert np.array_equal(np.sort(epochs), [windows] * 3)
    assert np.array_equal(plain, [windows] * 3)
    if len(windows) > 6:
        assert not np.array_equal(epochs[0], epochs[1]) and not np.array_equal(epochs[1], epochs[2])


def test_the_order_is_a_function_of_seed_and_epoch_alone(tmp_path):
    """It is the same on every machine and version of NumPy, and from wherever a run resumes."""
    folder = make_shards(tmp_path, [50, 37, 90])
    whole = serve(folder, 8, steps=40, sequences=1)
    assert [whole[:8, 0].tolist(), whole[21:29, 0].tolist()] == GOLDEN_ORDER
    for position in (1, 21, 23):  # an epoch has 21 windows
        rest = serve(folder, 8, steps=40 - position, sequences=1, first=position)
        assert np.array_equal(rest, whole[position:])
    assert not np.array_equal(whole, serve(folder, 8, steps=40, sequences=1, seed=1338))
    large = train_gpt2.window_order(200_000, 1337, 4)  # as NumPy orders the numbers themselves
    assert large.dtype == np.uint32
    assert np.array_equal(large, np.random.RandomState((1337, 4)).permutation(200_000))


@pytest.mark.parametrize("header", [[20240520, 1, 1000, *[0] * 253], []], ids=["llm.c", "nanoGPT"])
def test_npy_and_bin_shards_hold_the_same_tokens(tmp_path, header):
    """llm.c's header is 256 int32, nanoGPT has none. The validation split is never shuffled."""
    tokens = np.arange(1000, dtype=np.uint16)
    np.save(tmp_path / "x_train_0.npy", tokens)
    (tmp_path / "x_val_0.bin").write_bytes(np.array(header, np.int32).tobytes() + tokens.tobytes())
    [npy] = make_loaders(tmp_path, 8, shuffle=False)
    [bin] = make_loaders(tmp_path, 8, split="val", shuffle=True)
    assert npy.n_windows == bin.n_windows == 124
    torch.testing.assert_close([*npy.batches(range(124), 1)], [*bin.batches(range(124), 1)])


def test_a_shard_that_is_cut_short_or_has_other_tokens_is_named_where_it_is_read(tmp_path):
    folder = make_shards(tmp_path, [50, 30])
    np.save(folder / "x_train_1.npy", np.full(30, 50257, np.uint16))
    make_loaders(folder, 8)  # which looks at the first window, whatever the order
    [loader] = make_loaders(folder, 8, shuffle=False)
    os.truncate(folder / "x_train_0.npy", 150)
    assert len(next(loader.batches(range(1), 1))[0]) == 1
    for window, name in ((1, "x_train_0"), (6, "x_train_1")):
        message = rf"{name}\.npy was cut short, or has tokens beyond 50256"
        with pytest.raises(train_gpt2.UserError, match=message):
            next(loader.batches(range(window, window + 1), 1))


def test_the_split_is_a_word_of_the_name(tmp_path):
    """Not, by accident, a part of one. Hidden files, such as those of a Mac, are no shards."""
    words = "retrieval_train_000 fineweb_val_000001 val-001-of-128_000000 TRAIN.x ._train"
    for name in words.split():
        np.save(tmp_path / f"{name}.npy", np.arange(20, dtype=np.uint16))
    train, val = (set(make_loaders(tmp_path, 8, split=s)[0].contents) for s in ("train", "val"))
    assert train == {"retrieval_train_000.npy", "TRAIN.x.npy"}
    assert val == {"fineweb_val_000001.npy", "val-001-of-128_000000.npy"}


@pytest.mark.parametrize("B", [1, 3, 8])
def test_validation_sees_the_same_tokens_for_every_b(shards, B):
    torch.manual_seed(0)
    model = new_model().eval()
    model.transformer.wte.weight.data[:257] *= 20  # losses then differ from window to window
    data = torch.from_numpy(np.load(shards / "test_val_000000.npy").astype(np.int64))
    args = Namespace(data_dir=str(shards), seq_len=16, seed=1337, shuffle=True)
    loader = DataLoaderLite("val", model.config, args, make_process())
    seen = []
    for tokens, windows in ((7, 1), (16 * 5 + 15, 5), (16 * 62, 62), (10**6, 62)):
        x, y = data[: windows * 16].view(-1, 16), data[1 : windows * 16 + 1].view(-1, 16)
        expected = F.cross_entropy(model(x).double().flatten(0, 1), y.flatten()).item()
        found, _ = validate(model, train_gpt2.Data(None, loader, None, B), tokens, make_process())
        assert found == pytest.approx(expected, abs=1e-5)
        seen.append(round(expected, 3))
    assert len(set(seen)) == 3, "another number of windows has another loss"
