"""What people bring: small inputs, and what should happen to each. A report of a bug is one line more."""

import hashlib
import io
import os
import shlex
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL, main, new_model, write_shards

import fineweb


def saved(value) -> bytes:
    """Return the bytes of a .npy file of an array, or of a checkpoint."""
    file = io.BytesIO()
    if isinstance(value, np.ndarray):
        np.save(file, value)
    else:
        torch.save(value, file)
    return file.getvalue()


def snapshot() -> dict[Path, bytes]:
    return {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}


def llm_c(*header: int, tokens=999) -> bytes:
    """Return one of llm.c's shards of zeros."""
    return np.array([*header, *[0] * 253], np.int32).tobytes() + bytes(2 * tokens)


MODEL = {"model": new_model().state_dict(), "config": asdict(SMALL), "args": {"model": "test"}}
MODEL |= {"step": 1, "optimizer": {}, "scaler": {}, "dtype": "float32", "data": {}, "script": ""}
WIDE = MODEL | {"config": asdict(SMALL) | {"width": 4}}
GATED = {"gate": torch.ones(2), "transformer.wpe.weight": torch.ones(16, 64)}
GATED = MODEL | {"model": new_model().state_dict() | GATED}
DIVERGED = {name: torch.full_like(p, torch.nan) for name, p in MODEL["model"].items()}
DIVERGED = MODEL | {"model": DIVERGED}
RUN = MODEL | {"args": {"seq_len": 16, "total_batch_size": 256, "optimizer": "adamw"}}
DATA = write_shards(Path(tempfile.mkdtemp(), "data"))  # as below
SUMS = {
    path.name: hashlib.sha256(2 * path.read_bytes()).hexdigest() for path in DATA.glob("*train*")
}
LENGTHS = {
    "test_train_000001.npy": 700,
    "test_train_000002.npy": 1201,
    "test_train_000003.npy": 333,
}
TRUE = {name: [n, SUMS[name]] for name, n in LENGTHS.items()}
RUN |= {"step": 2, "dtype": "float32", "data": TRUE}
LONGER = TRUE | {"test_train_000001.npy": [701, SUMS["test_train_000001.npy"]]}
RENAMED = {name.replace("3.npy", "4.npy"): known for name, known in TRUE.items()}
REMADE = TRUE | {"test_train_000001.npy": [700, SUMS["test_train_000002.npy"]]}
FORK = RUN | {"args": RUN["args"] | {"smoothing": 0.1}}
SHARD, VAL, META = "data/test_train_000002.npy", "data/test_val_000000.npy", "data/meta.json"
COPIED = b'{"tokenizer": "bytes", "vocab_size": 257, "shards": {"test_train_000002.npy": {}}, "progress": {"done": true}}'
META_DONE = b'{"tokenizer": "bytes", "vocab_size": 257, "shards": {}, "progress": {"done": true}}'
HF = b'{"model_type": "gpt2", "vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256}'
NO_DEVICE = "mps" if torch.cuda.is_available() else "cuda"
# Flags, the files beside tiny data (None: one is deleted), and what the one line says
REFUSED = {
    "abbreviated flag": ("--max_step 3", {}, "unrecognized arguments: --max_step"),
    "a prompt of a pipe": ("--prompt -", {}, "--prompt - is for --sample"),
    "negative": ("--max_steps -1", {}, "--max_steps -1: expected a finite number >= 0"),
    "unknown model": ("--model d13", {}, "argument --model: invalid choice: 'd13' (choose from"),
    "unknown optimizer": ("--optimizer adam", {}, "--optimizer adam: expected adamw or muon"),
    "no such device": (f"--device {NO_DEVICE}", {}, "use --device auto"),
    "no token": ("--seq_len 0", {}, "--seq_len 0: expected 1 or more"),
    "part of a sequence": ("--total_batch_size 100", {}, "expected a multiple of --seq_len 16"),
    "no batch": ("--total_batch_size 0", {}, "expected a multiple of --seq_len 16"),
    "sample of nothing": ("--sample", {}, "log has no checkpoint: name a model by --init_from"),
    "no sample": ("--sample --init_from x.pt", {"x.pt": saved(MODEL)}, "nothing to do: with --num_samples 4, the model writes"),
    "evaluation of nothing": ("--max_steps 0", {}, "log has no checkpoint: name a model by --init_from"),
    "weights alone": ("--init_from x.pt", {"x.pt": saved({"state_dict": {}})}, "x.pt cannot be loaded (KeyError('config')): is it damaged, or another"),
    "a longer context": ("--init_from x.pt --seq_len 17", {"x.pt": saved(MODEL)}, "--seq_len 17: the model has 16 positions"),
    "another size": ("--init_from x.pt --model tiny", {"x.pt": saved(MODEL)}, "--model tiny: what is loaded has test"),
    "another number of layers": ("--sample --init_from x.pt --n_layer 3", {"x.pt": saved(MODEL)}, "--n_layer 3: what is loaded has 2"),
    "a field of another script": ("--init_from x.pt", {"x.pt": saved(WIDE)}, "cannot be loaded (TypeError"),
    "weights of another script": ("--init_from x.pt", {"x.pt": saved(GATED)}, "another model: they differ in gate, transformer.wpe.weight"),
    "a model of other tokens": ("--init_from x.pt", {"x.pt": saved(MODEL), META: None}, "has tokens of gpt2, the model reads bytes"),
    "fewer steps": ("--resume --max_steps 1", {"log/model_00002.pt": saved(RUN)}, "--max_steps 1: log is at step 2"),
    "another optimizer": ("--resume --optimizer muon", {"log/model_00002.pt": saved(RUN)}, "--optimizer muon: what is loaded has adamw"),
    "a run without our flags": ("--resume", {"log/model_00002.pt": saved(RUN | {"data": LONGER, "args": {"total_batch_size": 256}})}, "--resume: data has other data"),
    "longer shards": ("--resume", {"log/model_00002.pt": saved(RUN | {"data": LONGER})}, "--resume: data has other data"),
    "a shard of another name": ("--resume", {"log/model_00002.pt": saved(RUN | {"data": RENAMED})}, "--resume: data has other data"),
    "shards of other texts": ("--resume", {"log/model_00002.pt": saved(RUN | {"data": REMADE})}, "--resume: data has other data"),
    "a run without checksums": ("--resume", {"log/model_00002.pt": saved(RUN | {"data": LENGTHS})}, "or an earlier version of the script, whose checkpoints had no checksums"),
    "code in a pickle": ("--init_from x.pt", {"x.pt": saved(MODEL | {"step": Path()})}, "x.pt cannot be loaded"),
    "log_dir is a file": (f"--log_dir {META}", {}, "data/meta.json is a file: expected the folder of a run"),
    "an unset variable": ('--log_dir ""', {}, "--log_dir is empty: is a variable not set?"),
    "an unset model": ('--init_from ""', {}, "--init_from is empty"),
    "an unset folder": ('--init_from x.pt --export_hf ""', {"x.pt": saved(MODEL)}, "--export_hf is empty"),
    "a run to resume": ("--resume log/mine", {}, "--resume takes no value: use --resume --log_dir log/mine"),
    "a flag that went": ("--sample_every=4", {}, "--sample_every is no longer a flag: use --num_samples"),
    "compile as it was": ("--no-compile", {}, "--no-compile is no longer a flag: use --compile off"),
    "a run below": ("--sample", {"log/mine/model_00002.pt": b""}, "log has no checkpoint, but log/mine has: name a model"),
    "runs below": ("--init_from log", {"log/mine/model_00002.pt": b""}, "--init_from log has no checkpoint, but log/mine has"),
    "without its ending": ("--init_from old/model_00002", {"old/model_00002.pt": b""}, "did you mean old/model_00002.pt?"),
    "a run": ("", {"log/log.txt": b""}, "log holds a run, without a checkpoint: delete it, or choose another"),
    "a run without a checkpoint": ("--resume", {"log/log.txt": b"0 val 5.5"}, "log holds a run, without a checkpoint: delete it, "),
    "a run with one": ("", {"log/model_00002.pt": saved(RUN)}, "log holds a run: continue it by --resume, delete it"),
    "int32": ("", {SHARD: saved(np.zeros(999, np.int32))}, "holds 1-D int32, expected 1-D uint16"),
    "a short split": ("", {VAL: saved(np.zeros(16, np.uint16))}, "no val shard has 17 tokens: lower --seq_len"),
    "half of a .npy": ("", {SHARD: saved(np.zeros(999, np.uint16))[:-1]}, "train_000002.npy cannot be loaded"),
    "an empty .npy": ("", {SHARD: b""}, "train_000002.npy cannot be loaded"),
    "a folder of that name": ("", {SHARD: None, f"{SHARD}/x": b""}, "train_000002.npy cannot be loaded (IsADirectoryError("),
    "32 bits in a .bin": ("", {"data/a_train.bin": llm_c(20240801, 7, 999)}, "a_train.bin holds tokens of 32 bits, expected uint16"),
    "half of a .bin": ("", {"data/a_train.bin": llm_c(20240520, 1, 999, tokens=998)}, "a_train.bin was cut short"),
    "nanoGPT's characters": ("", {"data/meta.pkl": b"", META: None}, "data holds nanoGPT's characters: use fineweb.py"),
    "more steps than time": (f"--max_steps {10**17}", {}, "expected less than 2**32"),
    "large seed": (f"--seed {2**32}", {}, "--seed 4294967296: expected less than 2**32"),
    "half of a copy": ("", {SHARD: None, META: COPIED}, "data lacks test_train_000002.npy, which meta.json names"),
    "another folder": ("--init_from x.pt --data_dir gone", {"x.pt": saved(MODEL)}, "/gone holds no train shards: use fineweb.py"),
    "mistyped": ("--init_from data/x.pt", {}, "--init_from data/x.pt cannot be loaded (OSError("),
    "shards of another form": ("", {META: b'{"progress": {"done": true}, "shards": 5}'}, "meta.json cannot be loaded (TypeError("),
    "no val shards": ("", {VAL: None}, "data holds no val shards"),
    "half of a download": ("--init_from hf", {"hf/config.json": HF, "hf/model.safetensors": b"\1"}, ": expected gpt2 ... gpt2-xl, a checkpoint, "),
    "an empty .bin": ("", {"data/a_train.bin": b""}, "a_train.bin cannot be loaded"),
    "other tokens to validate": ("", {VAL: saved(np.full(999, 300, np.uint16))}, "val_000000.npy was cut short, or has tokens beyond 256"),
    "half of a meta.json": ("", {META: b'{"tokenizer": "by'}, "meta.json cannot be loaded (JSONDecodeError('Unterminated string"),
    "unfinished data": ("", {META: COPIED.replace(b"true", b"false")}, "data is not finished: wait for the fineweb.py"),
    "a meta.json of something else": ("", {META: b"[1]"}, "meta.json cannot be loaded (TypeError("),
    "no progress": ("", {META: b'{"progress": {}}'}, "meta.json cannot be loaded (KeyError('done')): is it damaged?"),
    "tokens of an unknown name": ("", {META: META_DONE.replace(b"bytes", b"foo")}, "unknown tokenizer foo: expected gpt2, bytes, or your own"),
    "an adapter": ("--init_from hf", {"hf/adapter_config.json": b""}, "--init_from hf cannot be loaded"),
    "another family": ("--init_from hf", {"hf/config.json": b'{"model_type": "qwen2"}'}, "hf is no GPT-2: model_type is qwen2, expected gpt2"),
    "export onto a file": ("--init_from x.pt --export_hf data/meta.json", {"x.pt": saved(MODEL)}, "data/meta.json'"),
}  # fmt: skip
GPT2 = np.arange(999, dtype=np.uint16)
NANOGPT = {"nano/train.bin": GPT2.tobytes(), "nano/val.bin": GPT2.tobytes()}  # without a header
# The same, but with what the run prints
TAKEN = {
    "a fork's run, evaluated": ("--init_from x.pt --max_steps 0", {"x.pt": saved(FORK)}, "0/0 | val loss: "),
    "files of other programs": ("", {"data/train.txt": b"", "data/x_train.npz": b"", "data/._train_1.npy": b"Mac"}, "done: "),
    "nanoGPT's .bin": ("--data_dir nano --total_batch_size 16 --val_every 0", NANOGPT, "done: "),
    "folders end in a slash": ("--data_dir data/ --log_dir log/", {}, '--sample --init_from "log/" --seed 1'),
    "a value like a flag": ("--log_dir my--no_clip", {}, "saved my--no_clip/model_00002.pt"),
    "a file called log": (f"--sample --init_from x.pt --num_samples 4 --log_dir {META}", {"x.pt": saved(MODEL)}, "sample 3: "),
    "a blank in a name": ("--log_dir 'my run'", {}, '--sample --init_from "my run" --seed 1'),
    "a folder called scratch": ("", {"scratch/model_00001.pt": b""}, "done: "),
    "no prompt": ("--num_samples 4 --prompt ''", {}, "sample 3: "),
    "the largest seed": (f"--seed {2**32 - 1} --num_samples 4", {}, "sample 3: "),
    "one token": ("--seq_len 1", {}, "done: "),
    "a log_dir at home": ("--log_dir=~/runs", {}, "/runs/model_00002.pt"),
    "a link that leads nowhere": ("", {"log": Path("disk/purged")}, "saved log/model_00002.pt"),
    "a tiny temperature": ("--temperature 1e-300 --num_samples 4", {}, "sample 3: "),
    "a sample that resumes": ("--sample --resume --init_from x.pt --num_samples 4", {"x.pt": saved(MODEL)}, "sample 3: "),
    "a model that has diverged": ("--sample --init_from x.pt --num_samples 4", {"x.pt": saved(DIVERGED)}, "sample 3: "),
    "a log_dir in new folders": ("--log_dir a/b/c", {}, "saved a/b/c/model_00002.pt"),
    "hyphens": ("--max-steps=1 --no-zero-init --prompt a-b_c --num-samples 1", {}, "sample 0: a-b_c"),
    "a long warmup": ("--warmup_steps 5", {}, "the rate never reaches its peak: it rises for 5 steps"),
    "a large B": ("--batch_size 999", {}, "B 16\n"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED | TAKEN)
def test_an_input_is_used_or_refused_in_one_line(case, tmp_path, monkeypatch, refused, capsys):
    words, files, text = (REFUSED | TAKEN)[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_shards(tmp_path / "data")
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).unlink(missing_ok=True)
        if isinstance(content, Path):
            Path(name).symlink_to(content)
        elif content is not None:
            Path(name).write_bytes(content)
    before = snapshot()
    flags = ["--data_dir", "data", "--max_steps", "2", *shlex.split(words)]
    if case in TAKEN:
        assert main(*flags) == 0 and text in capsys.readouterr().out
    else:
        assert refused(text, *flags) and snapshot() == before


def test_pydocs_are_topics_and_docstrings_in_the_order_of_names(tmp_path, monkeypatch):
    """A long paragraph counts once, a text of 200 characters or less not at all."""
    a, b, c, d = (f"{letter} " * 120 for letter in "abcd")
    pages = {"b": f"\n{b}\n \n{a}\n", "a": f"‘{a}’ “x” –\tx\n\nshort\n\nshort", "short": "z" * 199}
    monkeypatch.setattr("pydoc_data.topics.topics", pages)
    code = f'"""{c}"""\nclass C:\n """Of C."""\n async def f(self):\n  "{d}"\ndef g():\n "{b}"\n'
    files = {"z/m.py": code, "b.py": f'"{d} of b"', "a.py": code + "\n# end", "x.txt": code}
    names = "test tests my_test my_tests site-packages dist-packages idlelib lib2to3 turtledemo encodings"
    files |= {f"{name}/m.py": f'"{name} {d}"' for name in [*names.split(), "pydoc_data"]}
    files["latest/m.py"] = f'"{a} of latest"'
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "__file__", str(tmp_path / "os.py"))
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda top: ((x, y, sorted(z)[::-1]) for x, y, z in walk(top)))
    a, b, c, d = (x.rstrip() for x in (a, b, c, d))
    assert [*fineweb.read_pydocs()] == [
        f"'{a} ' \"x\" - x\n\nshort\n\nshort\n", f"{b}\n\n{a}\n",
        f"a: {c}\n\na.C: Of C.\n\na.C.f: {d}\n\na.g: {b}\n", f"b: {d}  of b\n",
        f"m: {a}  of latest\n", f"m: {c}\n\nm.C: Of C.\n\nm.C.f: {d}\n\nm.g: {b}\n",
    ]  # fmt: skip
