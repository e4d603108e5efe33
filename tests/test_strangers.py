"""What people bring: small inputs, and what should happen to each. A report of a bug is one line more."""

import io
import os
import shlex
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from conftest import main, write_shards
from pyarrow import parquet

import fineweb
import train_gpt2


def npy(dtype, shape=999, token=0) -> bytes:
    """Return the bytes of a .npy file of one token."""
    file = io.BytesIO()
    np.save(file, np.full(shape, token, dtype))
    return file.getvalue()


def llm_c(*header: int, tokens=999) -> bytes:
    """Return one of llm.c's shards of zeros."""
    return np.array([*header, *[0] * 253], np.int32).tobytes() + bytes(2 * tokens)


def pt(**saved) -> bytes:
    """Return the bytes of a checkpoint."""
    file = io.BytesIO()
    torch.save(saved, file)
    return file.getvalue()


class Attack:
    """An object whose pickle makes a folder."""

    def __reduce__(self):
        return os.mkdir, ("made",)


OTHER = {"model": {}, "config": {"n_layer": 2}, "args": {}}
OLD = OTHER | {"config": {"n_layer": 2, "eot": 256}, "args": {"zero": 0}}  # of commit 3a46ed5
SHARD, VAL, META = "data/test_train_000002.npy", "data/test_val_000000.npy", "data/meta.json"
BIN = "is no .bin shard of version 1, or was cut short"
HF = b'{"model_type": "gpt2", "vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256}'
NO_DEVICE = "mps" if torch.cuda.is_available() else "cuda"
# Flags, the files beside tiny data (None: one is deleted), and what the one line says
REFUSED = {
    "abbreviated flag": ("--max_step 3", {}, "unrecognized arguments: --max_step"),
    "text for a number": ("--max_steps many", {}, "--max_steps: invalid int value: 'many'"),
    "negative": ("--max_steps -1", {}, "--max_steps -1: expected a finite number >= 0"),
    "nan": ("--max_lr nan", {}, "--max_lr nan: expected a finite number"),
    "unknown schedule": ("--schedule cosin", {}, "invalid choice: 'cosin' (choose from "),
    "unknown model": ("--model d13", {}, "--model d13: expected one of tiny, d6, d12"),
    "unknown optimizer": ("--optimizer adam", {}, "--optimizer adam: expected adamw or muon"),
    "no such device": (f"--device {NO_DEVICE}", {}, "--device: this machine has"),
    "no token": ("--seq_len 0", {}, "--seq_len: expected 1 to 0"),
    "part of a sequence": ("--total_batch_size 100", {}, "expected a multiple of --seq_len 16"),
    "no sequence": ("--total_batch_size 0", {}, "expected a multiple of --seq_len 16"),
    "large seed": (f"--seed {2**32}", {}, "--seed: NumPy takes numbers below 2**32"),
    "nothing to do": ("--max_steps 0 --val_every 0", {}, "nothing to do: give --max_steps"),
    "sample of nothing": ("--sample", {}, "--init_from scratch: expected gpt2 ... "),
    "export of nothing": ("--export_hf out", {}, "--init_from scratch: expected gpt2 ... "),
    "resume and overwrite": ("--resume --overwrite", {}, "exclude each other"),
    "resume and evaluate": ("--resume --max_steps 0", {}, "exclude each other"),
    "overwrite and evaluate": ("--overwrite --max_steps 0", {}, "exclude each other"),
    "unknown source": ("--init_from nowhere.pt", {}, "--init_from nowhere.pt: expected gpt2 ... "),
    "folder of data as source": ("--init_from data", {}, "--init_from data: expected gpt2 ... "),
    "JSON as source": (f"--init_from {META}", {}, "meta.json cannot be loaded"),
    "weights alone": ("--init_from x.pt", {"x.pt": pt(state_dict={})}, "is not a checkpoint of this script"),
    "a fork's field": ("--init_from x.pt", {"x.pt": pt(**OTHER | {"config": {"rotary": 1}})}, "made with ['rotary']"),
    "an old checkpoint": ("--resume", {"log/model_00002.pt": pt(**OLD)}, "00002.pt was made with ['eot']"),
    "code in a pickle": ("--init_from x.pt", {"x.pt": pt(model=Attack())}, "x.pt cannot be loaded"),
    "half of a download": ("--init_from hf", {"hf/config.json": HF, "hf/model.safetensors": b"\1"}, "hf cannot be loaded"),
    "config.json without a model": ("--init_from hf", {"hf/config.json": b"{}"}, "hf cannot be loaded"),
    "log_dir is a file": (f"--log_dir {META}", {}, "meta.json/model_00000.pt cannot be written: "),
    "a run": ("", {"log/log.txt": b""}, "log holds a run: --resume continues it, --overwrite deletes"),
    "no data": ("--data_dir nowhere", {}, "nowhere holds no train shards: use fineweb.py"),
    "no validation data": ("", {VAL: None}, "data holds no val shards: use fineweb.py"),
    "int32": ("", {SHARD: npy(np.int32)}, "holds a 1-D int32 array, expected 1-D uint16"),
    "another byte order": ("", {SHARD: npy(">u2")}, "holds a 1-D >u2 array, expected 1-D uint16"),
    "2-D": ("", {SHARD: npy(np.uint16, (9, 99))}, "holds a 2-D uint16 array"),
    "a short split": ("", {VAL: npy(np.uint16, 16)}, "no val shard has 17 tokens: lower --seq_len"),
    "half of a .npy": ("", {SHARD: npy(np.uint16)[:-1]}, "train_000002.npy cannot be loaded"),
    "an empty .npy": ("", {SHARD: b""}, "train_000002.npy cannot be loaded"),
    "text in a .npy": ("", {SHARD: b"some text"}, "train_000002.npy cannot be loaded"),
    "a folder of that name": ("", {SHARD: None, f"{SHARD}/x": b""}, "train_000002.npy cannot be loaded"),
    "version 2": ("", {"data/a_train.bin": llm_c(20240520, 2, 999)}, BIN),
    "half of a .bin": ("", {"data/a_train.bin": llm_c(20240520, 1, 999, tokens=998)}, BIN),
    "an empty .bin": ("", {"data/a_train.bin": b""}, "a_train.bin cannot be loaded"),
    "an odd number of bytes": ("", {"data/a_train.bin": b"odd"}, "a_train.bin cannot be loaded"),
    "other tokens": ("", {"data/a_train.npy": npy(np.uint16, 10**5, 300)}, "a_train.npy has tokens beyond 256"),
    "other tokens to validate": ("", {VAL: npy(np.uint16, 999, 300)}, "val_000000.npy has tokens beyond 256"),
    "unfinished data": ("", {META: b'{"progress": {"done": false}}'}, "is not finished: run its fineweb.py"),
    "meta.json of another program": ("", {META: b"[1]"}, "meta.json is not a meta.json of fineweb.py"),
    "half of a meta.json": ("", {META: b'{"tokenizer": "by'}, "meta.json cannot be loaded: JSONDecodeError"),
    "an empty meta.json": ("", {META: b""}, "meta.json cannot be loaded: JSONDecodeError"),
    "an unknown tokenizer": ("--sample_every 1", {META: b'{"tokenizer": "llama"}'}, "the tokenizer llama "),
}  # fmt: skip
NANOGPT = {"nano/train.bin": bytes(2000), "nano/val.bin": bytes(2000)}  # tokens of GPT-2, no header
HIDDEN = {"data/._train_1.npy": b"Mac", "data/.DS_Store": b"", "data/train.npy.unfinished": b""}
# The same, but with what the run prints
TAKEN = {
    "hidden files": ("", HIDDEN, "done: "),
    "files of other programs": ("", {"data/train.txt": b"", "data/x_train.npz": b"", "data/README.md": b""}, "done: "),
    "nanoGPT's .bin": ("--data_dir nano --total_batch_size 16 --val_tokens 16", NANOGPT, "done: "),
    "folders end in a slash": ("--data_dir data/ --log_dir log/", {}, "--sample --init_from log/ --device cpu"),
    "a blank in a name": ("--log_dir 'my run'", {}, "--sample --init_from 'my run' --device cpu --seed 1"),
    "no checkpoint to resume": ("--resume", {}, "log has no checkpoint: a new run begins"),
    "a checkpoint that is no number": ("--resume", {"log/model_best.pt": b""}, "log has no checkpoint"),
    "no prompt": ("--sample_every 2 --prompt ''", {}, "sample 3: "),
    "a long prompt": (f"--sample_every 2 --prompt '{'long ' * 9}'", {}, "sample 3: long long "),
    "no samples": ("--sample_every 2 --num_samples 0", {}, "done: "),
    "a large top_k": ("--sample_every 2 --top_k 100000", {}, "sample 3: Hello"),
    "the largest seed": (f"--seed {2**32 - 1} --sample_every 2", {}, "sample 3: "),
    "one token": ("--seq_len 1", {}, "done: "),
    "one sequence": ("--total_batch_size 16", {}, "B 1\n"),
    "a large B": ("--batch_size 999", {}, "B 16\n"),
    "a long warmup": ("--warmup_steps 100", {}, "| lr 2.0000e-04 |"),
    "no token to validate": ("--val_tokens 0", {}, "step     2/2 | val loss: "),
}  # fmt: skip


@pytest.fixture
def bring(tmp_path, monkeypatch):
    """Return a function that puts a case into an empty folder, beside data, and returns its flags."""

    def put(words: str, files: dict) -> list[str]:
        write_shards(tmp_path / "data")
        monkeypatch.chdir(tmp_path)
        for name, content in files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).unlink(missing_ok=True)
            if content is not None:
                Path(name).write_bytes(content)
        return ["--data_dir", "data", "--max_steps", "2", *shlex.split(words)]

    return put


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_one_line_and_changes_nothing(case, bring, refused):
    """It says what was found and what was expected, before the run makes log_dir. Status 2."""
    words, files, message = REFUSED[case]
    flags = bring(words, files)
    before = sorted(Path().rglob("*"))
    assert refused(message, *flags)
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("case", TAKEN)
def test_what_can_be_used_is_used(case, bring, capsys):
    """The run ends well, and has printed what the table says."""
    words, files, text = TAKEN[case]
    assert main(*bring(words, files)) == 0
    assert text in capsys.readouterr().out


@pytest.mark.parametrize("size", ["", "-medium", "-large", "-xl"])
def test_openais_models_have_two_names(size, monkeypatch, tmp_path):
    """The hub shows the longer one. A folder of that name is no model of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_gpt2, "load_hf", lambda name: [name])
    for name in (f"gpt2{size}", f"openai-community/gpt2{size}"):
        assert train_gpt2.load_source(name) == [name]


def test_several_large_row_groups_give_each_row_once(tmp_path, monkeypatch):
    """As a .parquet file of pandas with more than a million rows has them."""
    texts = [f"text {i}" for i in range(700)]
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "x.parquet", row_group_size=300)
    monkeypatch.setattr(fineweb, "GROUP_SIZE", 100)  # bytes
    batches = fineweb.read_file(str(tmp_path / "x.parquet"), "text")
    assert [text for batch in batches for text in batch() if text] == texts
