"""The loader: every window once an epoch, in an order that hardware does not change."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_run, write_shards
from hypothesis import given, settings
from hypothesis import strategies as st

from train_gpt2 import (
    DataLoaderLite,
    Shard,
    UserError,
    open_shard,
    open_shards,
    read_meta,
    read_tokens,
)

GOLDEN_ORDER = [74, 66, 50, 58, 24, 40, 8, 16]  # seed 1337, shards of 50, 37 and 90 tokens, T=8


def make_shards(folder, sizes) -> dict[str, Shard]:
    """Write shards in which no token stands twice, and return them: token i of the data is i."""
    ends = np.cumsum(sizes)
    for i, (n, end) in enumerate(zip(sizes, ends, strict=True)):
        np.save(Path(folder, f"s{i}.npy"), np.arange(end - n, end, dtype=np.uint16))
    return {f"s{i}": open_shard(Path(folder, f"s{i}.npy")) for i in range(len(sizes))}


def serve(shards, T, B, world, steps, seed, sequences=8, position=0):
    """Return the first tokens of the windows of each step, in the order the step sees them."""
    loaders = [
        DataLoaderLite(shards, B, T, 65536, seed, make_run(rank, world)) for rank in range(world)
    ]
    for loader in loaders:
        loader.reset(position)
    seen = []
    for _ in range(steps):
        for _ in range(sequences // (B * world)):
            for loader in loaders:
                x, y = loader.next_batch()
                assert x.shape == y.shape == (B, T) and x.dtype == y.dtype == torch.int64
                assert torch.equal(y, x + 1), "targets are the inputs one token further on"
                assert torch.equal(x, x[:, :1] + torch.arange(T)), "a window is one run of tokens"
                seen += x[:, 0].tolist()
    return np.array(seen).reshape(steps, sequences)


@pytest.mark.parametrize("seed", [None, 7])
def test_a_step_sees_the_same_windows_whatever_the_processes_and_the_batch_size(seed, tmp_path):
    """Ranks that drift apart at a shard's end: the data would depend on the number of GPUs."""
    # shards that end in the middle of batches, one of them without a window
    shards = make_shards(tmp_path, [50, 37, 8, 9, 120])
    expected = serve(shards, 8, B=8, world=1, steps=12, seed=seed)  # several epochs
    for world in (1, 2, 4):
        for B in (1, 2, 4, 8):
            if 8 % (B * world) == 0:
                assert np.array_equal(serve(shards, 8, B, world, 12, seed), expected), (world, B)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=5),
    st.integers(1, 9),
    st.integers(0, 2**32 - 1),
)
def test_an_epoch_shows_every_window_once(sizes, T, seed):
    """A window lost or doubled where a shard, an epoch or a batch ends; a tail served short."""
    with tempfile.TemporaryDirectory() as folder:
        shards = make_shards(folder, sizes)
        starts = [range((size - 1) // T) for size in sizes]  # token i of the data is i
        first = np.cumsum([0, *sizes])
        windows = {int(first[i]) + w * T for i, some in enumerate(starts) for w in some}
        if not windows:
            return
        n = len(windows)
        epochs = serve(shards, T, B=1, world=1, steps=3, seed=seed, sequences=n)
    for epoch in epochs:
        assert sorted(epoch) == sorted(windows)
    if n > 6:
        assert not np.array_equal(epochs[0], epochs[1]), "a new order every epoch"


def test_the_order_is_a_function_of_seed_and_epoch_alone(tmp_path):
    """An order that a resumed run, another version of numpy or another machine would not repeat."""
    shards = make_shards(tmp_path, [50, 37, 90])
    whole = serve(shards, 8, 1, 1, 40, seed=1337, sequences=1)[:, 0]
    assert np.array_equal(whole[23:], serve(shards, 8, 1, 1, 17, 1337, 1, position=23)[:, 0])
    assert whole[:8].tolist() == GOLDEN_ORDER
    assert not np.array_equal(whole, serve(shards, 8, 1, 1, 40, seed=1338, sequences=1)[:, 0])


def test_without_shuffle_the_order_is_that_of_the_files(tmp_path):
    """A --no-shuffle that shuffles."""
    first = serve(make_shards(tmp_path, [20, 17]), 8, 1, 1, 4, seed=None, sequences=1)[:, 0]
    assert first.tolist() == [0, 8, 20, 28]


def test_npy_and_bin_shards_hold_the_same_tokens(tmp_path):
    """llm.c's shards read with an offset, or a wrong type."""
    tokens = np.arange(1000, dtype=np.uint16)
    np.save(tmp_path / "x_train_000001.npy", tokens)
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, 1000
    (tmp_path / "x_val_000000.bin").write_bytes(header.tobytes() + tokens.tobytes())
    for split, name in (("train", "x_train_000001.npy"), ("val", "x_val_000000.bin")):
        shard = open_shards(str(tmp_path), split)[name]
        assert shard.tokens == 1000 and np.array_equal(read_tokens(shard, 0, 1000), tokens)
    assert read_meta(str(tmp_path)) == {}, "which stands for GPT-2's"
    shutil.copy(tmp_path / "x_val_000000.bin", tmp_path / "x_train_000001.bin")
    with pytest.raises(UserError, match=r"000001.npy and x_train_000001.bin hold the same tokens"):
        open_shards(str(tmp_path), "train")  # converted in place, and each read once


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts files by Linux's /proc")
def test_no_shard_is_kept_open(tmp_path):
    """A process may open 1,024 files, and FineWeb-Edu's larger samples have more shards."""
    folder = write_shards(tmp_path / "many", sizes=[40] * 100)
    before = len(list(Path("/proc/self/fd").iterdir()))
    loader = DataLoaderLite(open_shards(str(folder), "train"), 1, 8, 257, 7, make_run())
    for _ in range(100):
        loader.next_batch()
    assert len(list(Path("/proc/self/fd").iterdir())) < before + 10


def damage(path, how):
    """Spoil a shard in one way."""
    good = path.read_bytes()
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, 100
    spoiled = {
        "truncated": good[: len(good) // 2],
        "empty": b"",
        "no npy": b"<html>not found</html>",
        "bin magic": header.tobytes().replace(header[:1].tobytes(), b"\0\0\0\1") + bytes(200),
        "bin short": header.tobytes() + bytes(198),
        "bin no header": bytes(10),
    }[how]
    path.unlink()
    path.with_suffix(".bin" if how.startswith("bin") else ".npy").write_bytes(spoiled)


@pytest.mark.parametrize(
    "how", ["truncated", "empty", "no npy", "bin magic", "bin short", "bin no header"]
)
def test_a_damaged_shard_is_refused_by_name(tmp_path, how):
    """A half-copied file that trains on what happens to be there."""
    folder = write_shards(tmp_path / "data")
    damage(folder / "test_train_000002.npy", how)
    with pytest.raises(ValueError, match="test_train_000002"):
        open_shards(str(folder), "train")


@pytest.mark.parametrize("array", [np.zeros(9, np.int32), np.zeros((3, 3), np.uint16)])
def test_an_array_that_is_not_tokens_is_refused(tmp_path, array):
    """Token ids of another width, read as if they were uint16."""
    np.save(tmp_path / "a_train_0.npy", array)
    with pytest.raises(ValueError, match="expected 1-D uint16"):
        open_shards(str(tmp_path), "train")


def test_a_token_beyond_the_vocabulary_is_found_before_it_is_used(tmp_path):
    """An index out of range on a GPU ends the process with no word of where."""
    shards = make_shards(tmp_path, [40, 40])
    damaged = read_tokens(shards["s1"], 0, 40)
    damaged[9] = 257
    np.save(tmp_path / "s1.npy", damaged)
    loader = DataLoaderLite(shards, 1, 8, 257, None, make_run())
    for _ in range(5):
        loader.next_batch()  # the first shard is sound, and so is the second one's first window
    assert not loader.damage
    x, y = loader.next_batch()
    assert "s1 is damaged: a token at 8 or after is not below 257" in loader.damage
    assert x.max() == y.max() == 0, "nothing that an embedding cannot look up"


def test_a_name_of_both_splits_is_refused(tmp_path):
    """Validation data that is trained on because of a file's name."""
    np.save(tmp_path / "train_val_0.npy", np.zeros(99, np.uint16))
    with pytest.raises(ValueError, match="both"):
        open_shards(str(tmp_path), "train")
