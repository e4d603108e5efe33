"""Whatever bytes a file holds, it is read or refused with a UserError: no traceback, no hang.

`GPT2_TEST_FUZZ=5000 python -m pytest tests/test_fuzz.py` tries 5,000 inputs of each kind.
"""

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import FLAGS, run_main, write_shards
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hellaswag
import train_gpt2
from fineweb import UserError

INPUTS = int(os.environ.get("GPT2_TEST_FUZZ", "150"))
fuzz = settings(max_examples=INPUTS, deadline=None, derandomize=True, database=None,
                suppress_health_check=list(HealthCheck))  # fmt: skip


def npy() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(300, dtype=np.uint16) % 256)
    return buffer.getvalue()


def bin_shard() -> bytes:
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, 300
    return header.tobytes() + (np.arange(300, dtype=np.uint16) % 256).tobytes()


def checkpoint() -> bytes:
    buffer = io.BytesIO()
    config = train_gpt2.GPTConfig(1, 1, 8, 4, 5, "bytes", 4)
    model = train_gpt2.GPT(config)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    state = {"model": weights, "config": vars(config), "args": {"model": "test", "seq_len": 4}}
    torch.save(state, buffer)
    return buffer.getvalue()


META = json.dumps({"tokenizer": "bytes", "vocab_size": 257, "eot": 256,
                   "progress": {"done": True}, "shards": {}}).encode()  # fmt: skip
EXAMPLE = json.dumps({"ctx": "a b", "endings": ["c", "d", "e", "f"], "label": 2}).encode()
LOG = b"0 val 5.5\n0 train 5.5\n0 lr 1.0e-03\n1 train 5.4\n2 train 5.3\n"


@st.composite
def mutated(draw, valid: bytes) -> bytes:
    """Arbitrary bytes, or the valid ones with bytes changed, cut off, inserted or repeated."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.binary(max_size=400))
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 6))):
        place = draw(st.integers(0, len(data)))
        kind = draw(st.integers(0, 4))
        if kind == 0:
            data[place : place + 1] = draw(st.binary(min_size=1, max_size=1))
        elif kind == 1:
            del data[place:]
        elif kind == 2:
            data[place:place] = draw(st.binary(max_size=9))
        elif kind == 3:
            data[place:place] = draw(st.sampled_from([b"null", b"-1", b"1e999", b'"', b"[", b"{}"]))
        else:
            del data[place : place + draw(st.integers(0, 9))]
    return bytes(data)


def read_or_refuse(read, *args):
    """Return what is read, or None where it is refused with one line that says something."""
    try:
        return read(*args)
    except UserError as error:
        assert len(str(error)) > 10
        return None


@fuzz
@given(mutated(npy()), mutated(bin_shard()))
def test_shards(tmp_path_factory, first, second):
    folder = tmp_path_factory.mktemp("shards")
    for name, data in (("a_train_0.npy", first), ("b_train_1.bin", second)):
        (folder / name).write_bytes(data)
        shard = read_or_refuse(train_gpt2.open_shard, folder / name)
        assert shard is None or len(train_gpt2.read_tokens(shard, 0, shard.tokens)) == shard.tokens


@fuzz
@given(mutated(META))
def test_meta_json(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("meta")
    (folder / "meta.json").write_bytes(data)
    meta = read_or_refuse(train_gpt2.read_meta, str(folder))
    assert meta is None or 0 <= meta["eot"] < meta["vocab_size"] <= 2**16


@fuzz
@given(mutated(checkpoint()))
def test_checkpoints(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("checkpoint") / "model_00001.pt"
    path.write_bytes(data)
    found = read_or_refuse(train_gpt2.load_checkpoint, path)
    if found is not None:
        config = train_gpt2.GPTConfig(**found["config"])
        train_gpt2.GPT(config).load_weights(found["model"])


@fuzz
@given(mutated(LOG), st.integers(0, 3))
def test_log_lines(data, start):
    kept = [line for line in data.splitlines(keepends=True)
            if train_gpt2.is_record_before(line, start)]  # fmt: skip
    assert all(int(line.split(b" ")[0]) < start and line.endswith(b"\n") for line in kept)


@fuzz
@given(mutated(EXAMPLE))
def test_hellaswag_lines(data):
    example = read_or_refuse(hellaswag.parse_example, data, "val.jsonl, line 1")
    if example is not None:
        tokenizer = train_gpt2.fineweb.get_tokenizer("bytes")
        for convention in hellaswag.CONVENTIONS:
            assert len(hellaswag.render_rows(example, tokenizer, convention)) == 4


@pytest.mark.parametrize("seed", range(12))
def test_the_command_line_prints_one_line(tmp_path, capsys, seed):
    """The same through main: a status of 0, 1 or 2, and one line where it is not 0."""
    rng = np.random.RandomState(seed)
    folder = write_shards(tmp_path / "data")
    where = ["--data_dir", folder, "--log_dir", tmp_path / "log", *FLAGS, "--max_steps", 2]
    assert run_main(*where, "--save_every", 1) == 0
    files = [*folder.iterdir(), *(tmp_path / "log").iterdir()]
    victim = Path(files[seed % len(files)])
    data = bytearray(victim.read_bytes())
    for _ in range(3):
        data[rng.randint(len(data))] = rng.randint(256)
    victim.write_bytes(data if seed % 2 else data[: rng.randint(len(data))])
    capsys.readouterr()
    status = run_main(*where, "--resume")
    err = capsys.readouterr().err
    assert status in (0, 1, 2) and err.count("\n") == (status != 0), (victim, err)
