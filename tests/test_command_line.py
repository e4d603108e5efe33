"""The command line: what a flag does, and one clear line with status 2 for a user's mistake."""

import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from conftest import DATA, ROOT, load, main, make_run, read_log
from torch import nn

import train_gpt2
from train_gpt2 import FLAGS, QUICKSTART, RECIPES, GPTConfig, UserError, decide_args


def defaults(**given) -> Namespace:
    return decide_args({"device": "cpu"} | given, {})


NO_DEVICE = "mps" if torch.cuda.is_available() else "cuda"
BAD = {
    "abbreviated flag": (["--max_step", 3], "--max_step"),
    "negative": (["--max_steps", -1], "--max_steps -1: expected a finite number >= 0"),
    "nan": (["--max_lr", "nan"], "--max_lr nan: expected a finite number"),
    "unknown schedule": (["--schedule", "cosin"], "cosin.*wsd"),
    "unknown model": (["--model", "d13"], "--model d13: .*d12"),
    "unknown optimizer": (["--optimizer", "adam"], "--optimizer adam: expected adamw or muon"),
    "unknown source": (["--init_from", "nowhere.pt"], "--init_from nowhere.pt: .*gpt2-xl"),
    "no checkpoint": (["--init_from", __file__], "test_command_line.py cannot be read or is"),
    "T above the context": (["--seq_len", 17], "--seq_len 17: the context is 16"),
    "a fraction of a sequence": (
        ["--total_batch_size", 100],
        "100: not a multiple of seq_len 16 x 1",
    ),
    "indivisible batch": (["--batch_size", 3], "--batch_size 3 does not divide 16 sequences"),
    "sample of nothing": (["--sample"], "need a model: --init_from"),
    "resume and overwrite": (["--resume", "--overwrite"], "exclude each other"),
    "resume and evaluate": (["--resume", "--max_steps", 0], "exclude each other"),
    "overwrite and evaluate": (["--overwrite", "--max_steps", 0], "exclude each other"),
    "no such device": (["--device", NO_DEVICE], f"--device {NO_DEVICE}: this machine has"),
    "used log_dir": (["--log_dir", "used"], "used holds a run: --resume .* --overwrite"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_one_line_and_status_2(case, tmp_path, shards, capsys, monkeypatch):
    """It says what was found and what was expected, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used/log.txt").write_text("0 train 5.0\n")
    flags, message = BAD[case]
    assert main("--data_dir", shards, *flags) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("train_gpt2.py: "), err
    assert re.search(message, err), err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "used"]


def test_help_lists_every_flag_with_its_default(capsys):
    """Numbers too, unless the default depends on other flags."""
    assert main("--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    for flags in FLAGS.values():
        for flag, (kind, default, help) in flags.items():
            assert f"--{flag}" in text and " ".join(help.split()) in text, flag
            assert default is None or f"(default: {default})" in text, flag
            assert kind is not bool or f"--no-{flag}" in text, flag


def test_a_flag_comes_from_the_first_that_has_it(monkeypatch):
    """The command line, the checkpoint, the optimizer's recipe, --quickstart, the default."""
    monkeypatch.setitem(QUICKSTART, "weight_decay", 0.7)
    monkeypatch.setitem(RECIPES, "muon", {"weight_decay": 0.6, "schedule": "wsd"})
    stored = {"optimizer": "muon", "weight_decay": 0.5, "max_lr": 0.5, "seq_len": 8, "model": "d6"}
    stored["hellaswag_every"] = 7
    resumed, source = {"step": 3, "args": stored}, {"args": stored}
    cases = [({}, {}, 0.1), ({"quickstart": True, "optimizer": "adamw"}, {}, 0.7),
             ({"quickstart": True}, {}, 0.6), ({"optimizer": "muon"}, {}, 0.6), ({}, resumed, 0.5),
             ({"quickstart": True}, resumed, 0.5), ({"weight_decay": 0.4}, resumed, 0.4),
             ({}, source, 0.1), ({"sample": True}, source, 0.5), ({"max_steps": 0}, source, 0.5)]  # fmt: skip
    for given, where, expected in cases:
        args = decide_args(given | {"device": "cpu"}, where)
        assert args.weight_decay == expected, (given, where)
        assert not where or (args.model, args.seq_len) == ("d6", 8), "a new run takes the model too"
        assert args.hellaswag_every == 0, "the device decides"
    assert decide_args({"max_lr": 0.0, "device": "cpu"}, resumed).max_lr == 0, "0 is a value"


def test_defaults_follow_the_model_and_the_optimizer():
    """GPT-3's rate for the size, its context, llm.c's name for it, Muon's recipe. --quickstart is
    a set of flags that replaces its own earlier run, and no other."""
    args = defaults(model="gpt2:d24")
    assert (args.model, args.max_lr, args.seq_len, args.schedule) == ("d24", 3e-4, 1024, "cosine")
    assert defaults(model="gpt3:c768").seq_len == 2048 and args.hellaswag_every == 0
    args = defaults(model="d24", optimizer="muon")
    assert args.max_lr > 3e-4 and vars(args).items() >= RECIPES["muon"].items()
    assert defaults().total_batch_size * defaults().max_steps == pytest.approx(10e9, rel=1e-3)
    args = defaults(quickstart=True, max_steps=3)
    assert vars(args).items() >= (QUICKSTART | {"max_steps": 3}).items() and args.overwrite
    for given in ({"resume": True}, {"log_dir": "mine"}):
        assert not defaults(quickstart=True, **given).overwrite and not defaults().overwrite


def test_b_is_the_largest_number_that_fits_and_divides(monkeypatch):
    """8192 tokens fit on a CPU. On a GPU of 80 GiB, 12 blocks of 768 channels take for a token
    12 * 40 * 768 bytes, and the logits 2 * 50257; the weights and the rest 20 a parameter."""
    for T, sequences, B in ((1024, 512, 8), (64, 12, 12), (1000, 14, 7), (16384, 2, 1)):
        args = defaults(seq_len=T, total_batch_size=T * sequences)
        assert train_gpt2.choose_batch_size(GPTConfig(), args, make_run()) == B
    memory = Namespace()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    for gib, flags, dtype, world, fitting, B in [
        (80, {}, "bfloat16", 1, 155, 128), (24, {}, "bfloat16", 1, 43, 32), (24, {}, "tf32", 1, 21, 16),
        (24, {"recompute": True}, "bfloat16", 1, 135, 128), (24, {"zero": 3}, "bfloat16", 8, 46, 32),
        (2, {}, "tf32", 1, 0, None),
    ]:  # fmt: skip
        memory.total_memory = gib * 2**30
        args = defaults(**flags)
        gpu = make_run(0, world, device=torch.device("cuda", 0), dtype=dtype)
        assert train_gpt2.fitting_batch_size(GPTConfig(), args, gpu) == fitting, (gib, flags, dtype)
        if B:
            assert train_gpt2.choose_batch_size(GPTConfig(), args, gpu) == B
    with pytest.raises(UserError, match="no sequence fits"):
        train_gpt2.choose_batch_size(GPTConfig(), args, gpu)
    args.batch_size = 4
    assert train_gpt2.choose_batch_size(GPTConfig(), args, gpu) == 4, "the user knows better"
    evaluation = defaults(max_steps=0, seq_len=1000)  # divides nothing, keeps nothing
    assert train_gpt2.choose_batch_size(GPTConfig(), evaluation, gpu) == 16


def test_a_trained_model_is_reused_in_every_way(tmp_path, shards, capsys, monkeypatch):
    """Fine-tuned, evaluated, sampled, exported, from a log_dir, a checkpoint, or a folder."""
    monkeypatch.chdir(tmp_path)
    assert main("--data_dir", shards, "--log_dir", "a", "--max_steps", 30, "--save_every", 20) == 0
    loss = read_log("a")["val"][30]
    assert main("--init_from", "a", "--log_dir", "a", "--export_hf", "folder") == 0
    for source in ("a", "a/model_00030.pt", "folder"):
        capsys.readouterr()
        assert main("--init_from", source, "--max_steps", 0, "--data_dir", shards) == 0
        assert f"step     0/0 | val loss: {loss:.4f}\n" in capsys.readouterr().out, source
        flags = ("--data_dir", shards, "--init_from", source, "--overwrite", "--max_steps", 2)
        assert main("--log_dir", "b", *flags) == 0
        log = read_log("b")
        assert log["val"][0] == loss and list(log["train"]) == [0, 1], "a new run of that model"
        texts = []
        for seed in (1, 1, 2):
            capsys.readouterr()
            flags = ("--sample", "--num_samples", 2, "--prompt", "the ", "--seed", seed)
            assert main("--init_from", source, *flags) == 0
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1] != texts[2] and "\nsample 1: the " in texts[0]
    assert main("--init_from", "a/model_00020.pt", "--max_steps", 0) == 0, "on the data of its run"
    assert re.search(r"step     0/0 \| val loss: ", capsys.readouterr().out)
    assert sorted(os.listdir()) == ["a", "b", "data", "folder"], "evaluations write nothing"
    assert sorted(os.listdir("a")) == ["log.txt", "model_00020.pt", "model_00030.pt"]


def test_a_field_of_gptconfig_and_its_flag_are_a_setting(tmp_path, shards, capsys, monkeypatch):
    """It reaches the model and the checkpoint; --resume keeps it and refuses another value. Older
    checkpoints have the default, and an old field may get a flag as well."""

    @dataclass
    class Config(GPTConfig):
        width: int = 4
        unused: int = 0  # no flag

    class MLP(train_gpt2.MLP):
        def __init__(self, config):
            super().__init__(config)
            self.c_fc = nn.Linear(config.n_embd, config.width * config.n_embd)
            self.c_proj = nn.Linear(config.width * config.n_embd, config.n_embd)

    new, old = (["--data_dir", shards, "--log_dir", tmp_path / name] for name in ("new", "old"))
    assert main(*old, "--max_steps", 1) == 0
    monkeypatch.setattr(train_gpt2, "GPTConfig", Config)
    monkeypatch.setattr(train_gpt2, "MLP", MLP)
    monkeypatch.setitem(FLAGS, "a fork", {"width": (int, 4, "of the MLP")})
    assert main(*old, "--max_steps", 2, "--resume") == 0
    assert main(*old, "--max_steps", 3, "--resume", "--width", 6) == 2
    assert main(*new, "--max_steps", 1, "--width", 6) == 0
    assert main(*new, "--max_steps", 2, "--resume") == 0
    checkpoint = load(tmp_path / "new", 2)
    assert checkpoint["config"]["width"] == checkpoint["args"]["width"] == 6
    assert checkpoint["model"]["transformer.h.1.mlp.c_fc.weight"].shape == (6 * 32, 32)
    assert main(*new, "--max_steps", 3, "--resume", "--width", 4) == 2
    assert capsys.readouterr().err.count("the flags describe another model") == 2
    monkeypatch.setitem(FLAGS, "a fork", {"n_layer": (int, 2, "blocks")})
    assert main(*new, "--overwrite", "--max_steps", 1, "--n_layer", 3) == 0
    assert load(tmp_path / "new", 1)["config"]["n_layer"] == 3


@pytest.mark.slow
def test_importing_the_scripts_does_nothing(tmp_path):
    """No output, no file, no process group, and no library that one script alone needs."""
    code = "import sys, train_gpt2, fineweb, hellaswag, torch.distributed as dist\n"
    code += "print(dist.is_initialized(), {'transformers', 'datasets'} & {*sys.modules})"
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **options)
    assert (result.stdout, result.stderr) == ("False set()\n", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_script_alone_trains_validates_samples_and_resumes(tmp_path):
    """Copied into an empty folder, beside shards of GPT-2's tokens without a meta.json."""
    shutil.copy(ROOT / "train_gpt2.py", tmp_path)
    tokens = np.random.RandomState(0).randint(0, 50257, 3000).astype(np.uint16)
    for split in ("train", "val"):
        np.save(tmp_path / f"x_{split}_0.npy", tokens)
    flags = "--data_dir . --model tiny --seq_len 64 --total_batch_size 128 --val_tokens 128"
    flags += " --max_new_tokens 4 --num_samples 1 --device cpu"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    flags += f" --sample_every {250 * DATA.exists()}"
    for more in ("--max_steps 2", "--max_steps 4 --resume"):
        command = [sys.executable, "-P", "train_gpt2.py", *flags.split(), *more.split()]
        options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
        result = subprocess.run(command, **options)
        assert result.returncode == 0, result.stderr
        assert ("sample 0: Hello" in result.stdout) == DATA.exists()
    log = read_log(tmp_path / "log")
    assert list(log["train"]) == [0, 1, 2, 3] and list(log["val"]) == [0, 4]
    assert all(10 < loss < 11.5 for loss in log["val"].values()), "near ln 50257 = 10.8"
