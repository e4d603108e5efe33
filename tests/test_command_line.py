"""The command line: one clear line and status 2 for what a user can put right, and true help."""

import re
import subprocess
import sys
from argparse import Namespace

import numpy as np
import pytest
import torch
from conftest import FLAGS, ROOT, make_run, run_main, run_script, write_shards

import train_gpt2
from fineweb import UserError


def bad_token(folder):
    for path in folder.glob("*train*"):
        tokens = np.load(path)
        tokens[:] = 300
        np.save(path, tokens)


def empty(folder):
    for path in folder.iterdir():
        path.unlink()


def truncate(folder):
    path = folder / "test_train_000001.npy"
    path.write_bytes(path.read_bytes()[:300])


def wrong_magic(folder):
    header = np.zeros(256, np.int32)
    header[0] = 1
    (folder / "test_train_000009.bin").write_bytes(header.tobytes())


def no_val(folder):
    (folder / "test_val_000000.npy").unlink()


def bad_meta(folder):
    (folder / "meta.json").write_text("{")


def used_log_dir(folder):
    (folder.parent / "log").mkdir()
    (folder.parent / "log/log.txt").write_text("0 train 5.0\n")


CHECKPOINT = "trained"  # a folder that the test makes

BAD = {
    "no data folder": (None, ["--data_dir", "nowhere"], "nowhere.*python fineweb.py.*--quickstart"),
    "empty folder": (empty, [], "no train shards.*python fineweb.py.*--quickstart"),
    "no val shards": (no_val, [], "no val shards"),
    "truncated .npy": (truncate, [], "test_train_000001.npy cannot be read"),
    "wrong magic": (wrong_magic, [], r"test_train_000009.bin .*\[1, 0, 0\], .*\[20240520, 1"),
    "token beyond the vocabulary": (bad_token, ["--max_steps", 9], "test_train_00000.\\.npy is damaged"),
    "broken meta.json": (bad_meta, [], "meta.json"),
    "indivisible batch": (None, ["--batch_size", 3], "batch_size 3 .*16 sequences"),
    "batch of no whole sequences": (None, ["--total_batch_size", 100], "100 .*multiple of seq_len 16 x 1 proc"),
    "unknown model": (None, ["--model", "d13"], "d13 .*d12"),
    "OpenAI's model": (None, ["--model", "gpt2"], "gpt2 .*--init_from gpt2"),
    "T longer than the model's": (None, ["--seq_len", 17], "17 .*context, 16"),
    "used log_dir": (used_log_dir, [], "--resume .*--overwrite"),
    "both of them": (None, ["--resume", "--overwrite"], "not both"),
    "warmup longer than the run": (None, ["--max_steps", 5, "--warmup_steps", 6], "warmup_steps 6 .*5"),
    "unknown flag": (None, ["--batchsize", 3], "batchsize"),
    "unknown schedule": (None, ["--schedule", "cosin"], "cosin"),
    "no number": (None, ["--batch_size", "many"], "batch_size: .*many"),
    "zero": (None, ["--seq_len", 0], "seq_len is 0"),
    "negative": (None, ["--max_steps", -1], "max_steps is -1"),
    "steps and epochs": (None, ["--max_steps", 1, "--epochs", 1], "--epochs: not allowed with argument --max_steps"),
    "no such checkpoint": (None, ["--init_from", "nowhere.pt"], "nowhere.pt is neither a checkpoint.*gpt2-xl"),
    "no checkpoint at all": (None, ["--init_from", __file__], "not a checkpoint, or only a part"),
    "a folder of none": (None, ["--init_from", "data"], "data holds no checkpoint"),
    "device with a number": (None, ["--device", "cuda:7"], "--device: .*cuda:7"),
    "no such device": (None, ["--device", "mps"], "no device mps"),
    "two sizes": (None, ["--init_from", CHECKPOINT, "--model", "d6"], "is a test: give --model test"),
    "endless epochs": (None, ["--epochs", "inf"], "epochs is inf"),
    "nameless export": (None, ["--export_hf", ""], "needs the name of a folder"),
    "huge seed": (None, ["--seed", 2**32], "seed is 4294967296"),
    "sample of nothing": (None, ["--sample"], "--init_from"),
    "export into a run": (None, ["--init_from", CHECKPOINT, "--export_hf", CHECKPOINT], "holds a run"),
    "rates upside down": (None, ["--max_lr", 1e-3, "--min_lr", 1], "min_lr 1.* above max_lr 0.001"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_status_2(case, tmp_path, capsys, monkeypatch):
    """A traceback for a typing error, or a run on other data than was asked for."""
    monkeypatch.chdir(tmp_path)
    folder = write_shards(tmp_path / "data")
    spoil, flags, message = BAD[case]
    if CHECKPOINT in flags:
        where = ["--data_dir", folder, "--log_dir", CHECKPOINT, *FLAGS]
        assert run_main(*where, "--max_steps", 1) == 0
        capsys.readouterr()
    if spoil:
        spoil(folder)
    assert run_main("--data_dir", folder, "--log_dir", tmp_path / "log", *FLAGS, *flags) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("train_gpt2.py: "), err
    assert re.search(message, err), err


@pytest.mark.parametrize("flag, value, named", [
    ("--seed", 7, "seed is 7, was 1337"),
    ("--seq_len", 8, "seq_len is 8, was 16"),
    ("--total_batch_size", 512, "total_batch_size is 512, was 256"),
    ("--model", "tiny", "model is tiny, was test"),
    ("--no-shuffle", None, "shuffle is False, was True"),
    ("--schedule", "wsd", "schedule is wsd, was cosine"),
    ("--data_dir", "other", "data is"),
    ("--max_steps", 1, "at step 2, beyond 1"),
])  # fmt: skip
def test_resume_of_another_run_is_refused_by_name(
    flag, value, named, tmp_path, capsys, monkeypatch
):
    """Two runs spliced into one curve."""
    monkeypatch.chdir(tmp_path)
    write_shards(tmp_path / "data")
    write_shards(tmp_path / "other", sizes=(500, 600))
    where = ["--data_dir", "data", "--log_dir", "log", *FLAGS, "--max_steps", 2]
    assert run_main(*where, "--save_every", 1) == 0
    more = [flag] if value is None else [flag, value]
    assert run_main(*where, "--resume", "--seq_len", 16, *more) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and named in err, err


def test_under_torchrun_one_process_prints_the_line(tmp_path):
    """Eight GPUs, eight times the same complaint."""
    status, _, err = run_script(["--data_dir", tmp_path / "nowhere", *FLAGS], processes=2)
    assert status != 0 and err.count("there is no folder") == 1


def test_importing_does_nothing():
    """An import that trains, prints, downloads or joins a process group."""
    code = "import sys, train_gpt2, fineweb, torch.distributed as d; assert not d.is_initialized();"
    code += "assert 'datasets' not in sys.modules and 'transformers' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_sample_writes_from_a_checkpoint(tmp_path, capsys):
    """A model that can be trained but not read."""
    folder = write_shards(tmp_path / "data")
    run_main("--data_dir", folder, "--log_dir", tmp_path / "log", *FLAGS, "--max_steps", 2)
    capsys.readouterr()
    path = tmp_path / "log/model_00002.pt"
    flags = ("--sample", "--init_from", path, "--device", "cpu", "--num_samples", 2)
    assert run_main(*flags, "--prompt", "the ", "--max_new_tokens", 40) == 0
    first = capsys.readouterr().out
    assert first.startswith("sample 0: the ") and "sample 1: the " in first
    assert run_main(*flags, "--prompt", "the ", "--max_new_tokens", 40) == 0
    assert capsys.readouterr().out == first, "the same seed, the same text"
    assert run_main(*flags, "--prompt", "") == 0
    capsys.readouterr()
    flags = [path.parent if flag == path else flag for flag in flags]
    assert run_main(*flags, "--prompt", "the ", "--max_new_tokens", 40) == 0
    assert capsys.readouterr().out == first, "a folder stands for its newest checkpoint"
    assert run_main(*flags, "--seq_len", 17) == 2
    assert "longer than the context, 16" in capsys.readouterr().err
    assert run_main("--init_from", path, "--export_hf", path) == 2
    assert "is a file" in capsys.readouterr().err


def test_help_names_every_flag_with_its_default(capsys):
    """Help that lies, or a flag without a word."""
    assert run_main("--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    for flag, value in vars(train_gpt2.parse_args([])).items():
        if flag not in ("help",):
            assert f"--{flag}" in text, flag
            assert (
                isinstance(value, bool) or value in (None, "") or f"(default: {value})" in text
            ), flag


def test_quickstart_values_are_flags_and_give_way():
    """A quickstart key that no flag reads, or one that cannot be changed."""
    plain = vars(train_gpt2.parse_args([]))
    assert train_gpt2.QUICKSTART.keys() <= plain.keys()
    args = train_gpt2.parse_args(["--quickstart", "--max_steps", "3"])
    assert args.max_steps == 3 and args.model == "tiny"


def test_the_quickstart_replaces_its_own_run_and_no_other():
    """Own text, trained with --quickstart into a folder of its own for an hour, and gone."""
    assert train_gpt2.parse_args(["--quickstart"]).overwrite
    assert not train_gpt2.parse_args(["--quickstart", "--resume"]).overwrite
    assert not train_gpt2.parse_args(["--quickstart", "--log_dir", "log/mine"]).overwrite
    assert not train_gpt2.parse_args(["--quickstart", "--no-overwrite"]).overwrite
    assert train_gpt2.parse_args(["--quickstart", "--data_dir", "pydocs/"]).overwrite
    with pytest.raises(UserError, match="log_dir of its own"):  # or the next one would delete it
        train_gpt2.parse_args(["--quickstart", "--data_dir", "mine"])
    assert not train_gpt2.parse_args([]).overwrite


def test_a_run_that_makes_little_sense_says_so(tmp_path, capsys):
    """A step of all the data, a context that stays untrained, months on a laptop: in silence."""
    where = ["--data_dir", write_shards(tmp_path / "data"), *FLAGS, "--log_dir", tmp_path / "log"]
    assert run_main(*where, "--max_steps", 2) == 0
    out = capsys.readouterr().out
    assert "warning" not in out and "note: the validation split" not in out
    large = ["--total_batch_size", 2048, "--seq_len", 8, "--max_steps", 1, "--val_tokens", 10**6]
    assert run_main(*where, *large, "--overwrite") == 0
    out = capsys.readouterr().out
    assert "fewer than --val_tokens 1,000,000" in out
    assert "0.9 epochs of the data" in out and "trains no positions from 8 on" in out
    flags = {"model": "d12", "seq_len": 1024, "warmup_steps": 715, "max_lr": 6e-4, "min_lr": 6e-5}
    flags |= {"batch_size": 1, "quickstart": False, "schedule": "cosine", "data_dir": "data"}
    flags |= {"val_every": 0}
    args = Namespace(**flags, total_batch_size=2**19, max_steps=19073)
    with torch.device("meta"):
        model = train_gpt2.GPT(train_gpt2.GPTConfig())
    loader = Namespace(windows=10**7)
    *_, warning = train_gpt2.describe(args, model, "", loader, loader, make_run())
    N = sum(p.numel() for p in model.parameters())
    hours = round(6 * N * 19073 * 2**19 / 1e11 / 3600)
    assert warning.startswith(f"warning: about {hours:,} hours on a CPU")


def test_mfu_counts_the_operations_of_the_causal_half(monkeypatch):
    """An MFU that flatters: the whole square of attention, the embeddings counted twice."""
    with torch.device("meta"):
        model = train_gpt2.GPT(train_gpt2.GPTConfig())
    gpu = train_gpt2.Run(torch.device("cuda"), "bfloat16", True, 0, 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    N = 12 * 12 * 768**2 + 50304 * 768
    flops = 6 * N + 6 * 12 * 768 * 1024
    assert flops == pytest.approx(798e6, rel=0.01)
    peak = train_gpt2.peak_tokens_per_second(model, 1024, gpu)
    assert peak == pytest.approx(8 * 989e12 / flops)
    assert train_gpt2.peak_tokens_per_second(model, 1024, make_run()) is None, "a CPU has no MFU"
    for name in ("NVIDIA L40", "NVIDIA T400 4GB", "Some New GPU"):  # not an L4, not a T4
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert train_gpt2.peak_tokens_per_second(model, 1024, gpu) is None, name


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_all_dtypes_train_compiled(tmp_path):
    """A precision that only the CPU tests know."""
    folder = write_shards(tmp_path / "data")
    flags = [*FLAGS, "--device", "cuda", "--max_steps", 12, "--val_every", 4, "--sample_every", 4]
    for dtype in ("bfloat16", "float16", "tf32", "float32"):
        log_dir = tmp_path / dtype
        assert run_main("--data_dir", folder, "--log_dir", log_dir, *flags, "--dtype", dtype) == 0
