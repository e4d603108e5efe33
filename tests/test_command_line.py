"""The command line: what a flag does, and one clear line with status 2 for a user's mistake."""

import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT, SMALL, decide, load, main, make_process, read_log, write_meta

import train_gpt2
from train_gpt2 import COMMANDS, FLAGS, GPT, SIZES, GPTConfig, UserError


def defaults(**given) -> Namespace:
    """Return all flags of a command that gives these."""
    given = {"device": "cpu", "log_dir": "nowhere"} | given
    argv = [f"--{flag}" if value is True else f"--{flag}={value}" for flag, value in given.items()]
    return decide(argv)[0]


def test_help_begins_with_examples_and_lists_every_flag_with_its_default(capsys, monkeypatch):
    assert main("--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert 0 < text.index("python train_gpt2.py --quickstart") < text.index("--model") < 1000
    for flag, (kind, default, help) in (FLAGS | COMMANDS).items():
        assert f"--{flag}" in text and " ".join(help.split()) in text, flag
        assert default is None or f"(default: {default})" in text, flag
        assert kind is not bool or f"--no-{flag}" in text, flag
    monkeypatch.setattr(train_gpt2, "__doc__", None)  # as by python -OO
    monkeypatch.setitem(FLAGS, "mine", (float, 5.0, "drop 5% of 100%"))
    assert main("--help") == 0 and "drop 5% of 100%" in capsys.readouterr().out


HOST = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("environment, is_taken", [
    ({}, True), ({"SLURM_STEP_NUM_TASKS": "1"}, True), ({"RANK": "0", "WORLD_SIZE": "1"}, True),
    ({"WORLD_SIZE": "1"}, True), ({"RANK": "1", "WORLD_SIZE": "2"} | HOST, True),
    ({"SLURM_STEP_NUM_TASKS": "2", "RANK": "1", "WORLD_SIZE": "2"} | HOST, True),  # srun torchrun
    ({"SLURM_STEP_NUM_TASKS": "8"}, False), ({"OMPI_COMM_WORLD_SIZE": "8"}, False),
    ({"PMI_SIZE": "8"}, False), ({"WORLD_SIZE": "2"}, False), ({"WORLD_SIZE": "two"}, False), ({"RANK": "3"}, False),
    ({"RANK": "0", "WORLD_SIZE": "2"}, False), ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}, False),
])  # fmt: skip
def test_several_processes_are_started_by_torchrun(environment, is_taken, monkeypatch):
    monkeypatch.setattr(os, "environ", environment)
    if is_taken:
        expected = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
        assert train_gpt2.read_ranks() == expected
    else:
        with pytest.raises(UserError, match="start several processes by torchrun"):
            train_gpt2.read_ranks()


def test_a_command_without_flags_is_gpt_3s_recipe_for_10_billion_tokens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no run lies, as after a quickstart in this folder
    args = defaults()
    names = (args.model, args.optimizer, args.schedule, args.data_dir)
    assert names == ("d12", "adamw", "cosine", "edu_fineweb10B")
    assert (args.seq_len, args.max_steps, args.total_batch_size) == (1024, 19073, 2**19)
    assert (args.max_lr, args.warmup_steps, args.final_lr_frac) == (6e-4, 715, 0.1)
    assert (args.weight_decay, args.grad_clip, args.zero_init) == (0.1, 1.0, False)
    assert (args.temperature, args.top_k, args.save_every, args.keep) == (1.0, 50, 1000, 2)
    args, _ = decide(["--quickstart"])
    assert (args.log_dir, args.device, args.optimizer) == ("log/quickstart", "cpu", "muon")
    tokens = args.max_steps * args.total_batch_size
    assert 500_000 < tokens < 2_000_000 and args.total_batch_size % args.seq_len == 0


def unusual(row: tuple, n: int):
    """Return the n-th value of a flag, 1 or 2, that no default, preset or other flag gives."""
    kind, default, _ = row
    if kind is bool:
        return bool(default) != (n == 1)
    if not callable(kind):
        return [choice for choice in kind if choice != default][-n]
    return (default or 0) + 7 * n if kind in (int, float) else f"unusual {n}"


MODEL = {"model", "n_layer", "n_head", "n_embd"}


@pytest.mark.parametrize("words, kept, fixed", [
    ("--resume --quickstart", {*FLAGS}, {"optimizer", "seq_len", "total_batch_size"}),
    ("--init_from=old --max_steps=0 --val_every=5", {*FLAGS}, set()),
    ("--sample --init_from=old", {*FLAGS}, set()),
    ("--init_from=old --max_steps=9", MODEL, set()),
])  # fmt: skip
def test_a_checkpoint_holds_its_flags(words, kept, fixed, monkeypatch, capsys):
    """Those of the command line count more. No model is another one than the loaded one."""
    saved = {flag: unusual(row, 1) for flag, row in FLAGS.items()}
    sizes = [saved[flag] for flag in ("n_layer", "n_head", "n_embd")]
    config = GPTConfig(*sizes, block_size=saved["seq_len"] + 1)  # it was trained on less
    resumed = {"step": 3, "dtype": "float32"}
    source = train_gpt2.Start(config, {}, saved | {"gone": 1}, resumed)
    monkeypatch.setattr(train_gpt2, "load_checkpoint", lambda path: source)
    is_resumed = "--resume" in words
    monkeypatch.setattr(train_gpt2, "list_checkpoints", lambda log_dir: [__file__] * is_resumed)
    argv = [word.replace("old", __file__) for word in words.split()]
    args = vars(decide(argv)[0])
    assert "gone" not in args and ("gone 1 -> None" in capsys.readouterr().out) == is_resumed
    if kept >= {"max_lr"}:
        assert args["max_lr"] == saved["max_lr"]
    else:  # fine-tuning has a tenth of the size's rate, and the whole context of the model
        assert args["max_lr"] == pytest.approx(SIZES[saved["model"]]["max_lr"] / 10)
        assert args["seq_len"] == config.block_size
    for flag in FLAGS.keys() - {*re.findall(r"--(\w+)", words)}:
        assert (args[flag] == saved[flag]) == (flag in kept), flag
        other = unusual(FLAGS[flag], 2)
        word = {True: f"--{flag}", False: f"--no-{flag}"}.get(other, f"--{flag}={other}")
        if flag in fixed | MODEL:
            with pytest.raises(UserError, match=f"--{flag} {other}: .* loaded has {saved[flag]}"):
                decide([*argv, word])
        elif flag in kept:
            assert vars(decide([*argv, word])[0])[flag] == other, flag
            is_printed = f"\n{flag} {saved[flag]} -> {other}" in capsys.readouterr().out
            assert is_printed == is_resumed, flag


@pytest.mark.parametrize("device, capability, dtype, precision", [
    ("cuda:1", (8, 0), "bfloat16", "high"), ("cuda:1", (7, 5), "float16", "high"),
    ("cuda:1", (6, 1), "float32", "highest"), ("cpu", None, "float32", "highest"),
])  # fmt: skip
def test_defaults_follow_the_device(monkeypatch, device, capability, dtype, precision):
    """A GPU is that of LOCAL_RANK. float32 is not rounded to TF32. A CPU scores no HellaSwag."""
    is_gpu = capability is not None
    best = torch.device("cuda") if is_gpu else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: best)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: best is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(train_gpt2, "triton", "installed")
    for name, value in (HOST | {"RANK": "9", "WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    if is_gpu:
        monkeypatch.setenv("LOCAL_RANK", "2")
        with pytest.raises(UserError, match="process 2 of this machine: found 2 GPUs"):
            train_gpt2.start_process(defaults(device="auto"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    for compile, expected in (("off", False), ("on", True), ("auto", dtype != "float32")):
        process = train_gpt2.start_process(defaults(device="auto", compile=compile))
        assert process.compile == expected
    assert (process.rank, process.device, process.dtype) == (9, torch.device(device), dtype)
    fake = Namespace(fetch=lambda: "path", load=lambda *_: "examples")
    monkeypatch.setitem(sys.modules, "hellaswag", fake)
    monkeypatch.setattr(train_gpt2, "get_tokenizer", lambda name: "tokenizer")

    def scores(**given) -> bool:
        found = train_gpt2.load_hellaswag(GPTConfig(), defaults(**given), process)
        return found == "examples"

    assert scores(hellaswag="on") and not scores(hellaswag="off") and scores() == is_gpu
    monkeypatch.setattr(train_gpt2, "__file__", "nowhere/train_gpt2.py")  # alone
    assert not scores() and scores(hellaswag="on")
    assert torch.get_float32_matmul_precision() == precision


def test_defaults_follow_the_model_and_the_optimizer():
    for optimizer, n, warmup in (("adamw", 50, 16), ("muon", 350, 60)):
        assert defaults(optimizer=optimizer, max_steps=n).warmup_steps == warmup
    assert defaults(warmup_steps=0).warmup_steps == 0, "0 is a value"
    assert defaults(model="d24").max_lr == 3e-4
    args = defaults(model="d24", optimizer="muon")
    assert args.max_lr == pytest.approx(3e-3)
    assert (args.schedule, args.final_lr_frac, args.zero_init) == ("linear", 0.0, True)
    # A size is a preset: its fields are flags, and its rate is that of the nearest name
    args = defaults(model="d24", n_layer=3, n_head=4)
    assert (args.n_layer, args.n_head, args.n_embd, args.max_lr) == (3, 4, 1024, 3e-4)
    # The preset comes before what follows from other flags
    args = defaults(quickstart=True, seq_len=32)
    found = (args.seq_len, args.val_every, args.schedule, args.device)
    assert found == (32, 200, "linear", "cpu")


@pytest.mark.parametrize("max_steps, exponent", [
    (1, 15), (1000, 15), (2000, 16), (3000, 16), (4000, 17), (8000, 18), (19073, 19), (10**6, 19),
])  # fmt: skip
def test_steps_and_tokens_a_step_grow_together(max_steps, exponent):
    args = defaults(max_steps=max_steps)
    assert args.total_batch_size == 2**exponent and args.val_tokens == 20 * 2**19
    assert args.val_every == 250 * 2 ** (19 - exponent)
    assert defaults(max_steps=max_steps, total_batch_size=2**18).val_every == 500
    tokens = defaults(max_steps=max_steps, seq_len=768).total_batch_size
    assert tokens % 768 == 0 and 0 <= 2**exponent - tokens < 768, "whole sequences"
    assert defaults(max_steps=max_steps, seq_len=2**20).total_batch_size == 2**20, "at least one"


def test_b_is_the_least_that_keeps_the_number_of_micro_steps(monkeypatch):
    """8192 tokens fit on a CPU. On a GPU, as many as a test shows."""
    model = GPT(SMALL)

    def choose(run, **given):
        return train_gpt2.choose_batch_size(model, defaults(**given), run)

    for T, sequences, world, B in (
        (1024, 512, 1, 8), (64, 12, 1, 12), (1000, 14, 1, 7), (16384, 2, 1, 1), (1000, 17, 1, 6),
        (1024, 512, 3, 8), (1024, 512, 7, 8), (1024, 20, 3, 7), (1024, 5, 5, 1),
    ):  # fmt: skip
        assert choose(make_process(0, world), seq_len=T, total_batch_size=T * sequences) == B
    assert choose(make_process(0, 5), total_batch_size=3 * 1024) == 1, "two processes have none"
    monkeypatch.setattr(train_gpt2, "count_fitting_sequences", lambda *_: 17)
    gpu = make_process(device=torch.device("cuda", 0), dtype="bfloat16")
    assert [choose(gpu, total_batch_size=1024 * share) for share in (17, 18)] == [17, 9]
    assert choose(gpu, batch_size=4) == 4, "the user knows better"
    args = Namespace(**vars(defaults()) | {"max_steps": 0})
    assert train_gpt2.choose_batch_size(model, args, gpu) == 8, "an evaluation has no optimizer"


@pytest.mark.parametrize("gib, world, T, most, expected", [
    (24, 1, 1024, 99, 18), (24, 8, 1024, 99, 19), (81, 1, 1024, 99, 67), (900, 1, 1024, 99, 128),
    (9, 1, 1024, 3, 6), (4, 1, 1024, 1, 1), (2, 1, 1024, 99, None), (2, 1, 1024, 0, None),
    (24, 1, 256, 99, 19), (24, 1, 2**18, 99, 1), (2, 1, 256, 99, None),
])  # fmt: skip
def test_what_fits_into_a_gpu_is_measured(gib, world, T, most, expected, monkeypatch):
    """A sequence takes 1 GiB here, beside 0.5 GiB of weights and 0.5 GiB of gradients, which are
    not there at first, and where the sum is below 5 GiB, something else takes 5. The moments take
    another GiB. Without them, no more sequences than `most` fit."""
    seen = []

    class Model(torch.nn.Linear):
        def forward(self, x, y):
            if len(x) > most:
                raise torch.OutOfMemoryError
            seen.append(len(x))
            return super().forward(x[:, :1].float())

    def peak() -> int:
        others = 2**29 * 10 if T < 1024 else 0
        return max(others, 2**29 * (2 + 2 * seen[-1] - (len(seen) == 1)))

    model = Model(1, 1)
    model.others = torch.nn.Parameter(torch.empty(2**27, device="meta"))
    fakes = {"reset_peak_memory_stats": None, "empty_cache": None, "memory_reserved": 2**30}
    fakes["mem_get_info"] = (gib * 2**30 - 2**30, 80 * 2**30)
    for name, value in fakes.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peak)
    found = lambda: train_gpt2.count_fitting_sequences(model, T, make_process(0, world))  # noqa: E731
    if expected:
        assert found() == expected and model.weight.grad is None
    else:
        with pytest.raises(UserError, match=r"no sequence fits .*: use --recompute"):
            found()


OWN = ("bpe-259-abcdef 7468 746865", 259)  # th, the


@pytest.mark.parametrize("tokens", [pytest.param(("bytes", 257), marks=pytest.mark.slow), OWN])
def test_a_trained_model_is_reused_in_every_way(shards, capsys, monkeypatch, refused, tokens):
    """No other script is needed: what is a token lies in the checkpoint, and in the folder."""
    write_meta(shards, *tokens)
    for name in ("fineweb", "hellaswag"):
        monkeypatch.setitem(sys.modules, name, None)  # cannot be imported
    shards.rename("data")
    assert main("--data_dir data --log_dir a --max_steps 10 --save_every 8 --num_samples 4") == 0
    assert "sample 3: Hello, I'm" in capsys.readouterr().out
    loss = read_log("a")["val"][10]
    capsys.readouterr()
    assert load("a", 10)["config"]["block_size"] == 16, "others would never be trained"
    with monkeypatch.context() as patch:
        patch.setattr("transformers.__version__", "5.16.1")
        assert refused("found transformers 5.16.1, expected 5.17", "--log_dir a --export_hf folder")
        capsys.readouterr()
    assert main("--init_from a --log_dir a --export_hf folder") == 0
    assert capsys.readouterr().out == "wrote folder, which transformers can load\n"
    assert {"tokenizer_config.json", "model.safetensors"} < {*os.listdir("folder")}
    for source in ("a", "a/model_00010.pt", "folder"):
        capsys.readouterr()
        assert main("--max_steps 0 --val_every 0 --data_dir data --init_from", source) == 0
        assert f"step     0/0 | val loss: {loss:.4f} | bits" in capsys.readouterr().out, source
        shutil.rmtree("b", ignore_errors=True)
        assert main("--data_dir data --log_dir b --max_steps 2 --init_from", source) == 0
        log = read_log("b")
        assert log["val"][0] == loss and list(log["train"]) == [0, 1], "a new run of that model"
        texts = []
        for seed in (1, 1, 2):
            flags = "--sample --num_samples 2 --prompt 'the ' --seed"
            assert main(flags, seed, "--init_from", source) == 0
            texts.append(capsys.readouterr().out.rpartition("sample 0")[2])
        assert texts[0] == texts[1] != texts[2] and "\nsample 1: the " in texts[0]
    # --val_every 0, which its run may have had, keeps no model from being evaluated
    evaluation = "--init_from a/model_00008.pt --max_steps 0 --val_every 0"
    assert main(evaluation) == 0, "on the data of its run"
    assert re.search(r"step     0/0 \| val loss: ", capsys.readouterr().out)
    assert sorted(os.listdir()) == ["a", "b", "data", "folder"], "evaluations write nothing"
    assert sorted(os.listdir("a")) == ["log.txt", "model_00008.pt", "model_00010.pt"]
    assert main("--init_from a --log_dir a --export_hf a") == 0
    assert train_gpt2.load_pretrained("a").flags["max_steps"] == 10, "the run, not its export"


def test_a_field_of_gptconfig_and_its_flag_are_a_setting(shards, refused, monkeypatch):
    @dataclass
    class Config(GPTConfig):
        width: int = 4

    assert main("--max_steps 1") == 0
    monkeypatch.setattr(train_gpt2, "GPTConfig", Config)
    monkeypatch.setitem(FLAGS, "width", (int, 4, "of the MLP"))
    monkeypatch.setattr(train_gpt2, "MODEL_FLAGS", train_gpt2.MODEL_FLAGS | {"width"})
    assert refused("--width 6: what is loaded has 4", "--max_steps 2 --resume --width 6")
    assert main("--max_steps 2 --resume") == 0
    assert main("--log_dir new --max_steps 1 --width 6") == 0
    assert load("new", 1)["config"]["width"] == 6
    assert refused("--width 4: what is loaded has 6", "--init_from new --max_steps 0 --width 4")
    assert main("--init_from new --max_steps 1 --log_dir tuned") == 0
    assert load("tuned", 1)["args"]["width"] == 6, "fine-tuning takes the source's config"


def test_the_size_of_a_model_may_be_given_in_numbers(shards, refused, monkeypatch):
    """--model names a preset of them. A loaded model keeps its own."""
    flags = "--n_layer 3 --n_embd 48 --log_dir deep --max_steps"
    assert main(flags, 1) == main(flags, 2, "--resume") == 0
    assert main("--log_dir deep --resume --max_steps 3") == 0
    config = load("deep", 3)["config"]
    assert (config["n_layer"], config["n_head"], config["n_embd"]) == (3, 2, 48)
    resumed = "--log_dir deep --max_steps 4 --resume"
    assert refused("--n_layer 2: what is loaded has 3", f"{resumed} --n_layer 2")
    assert main("--log_dir tuned --init_from deep --max_steps 1 --seq_len 8") == 0
    assert load("tuned", 1)["args"]["n_embd"] == 48 and load("tuned", 1)["args"]["max_lr"] == 1e-3
    again = decide(["--init_from", "tuned", "--log_dir", "new"])[0]
    assert again.seq_len == 16, "all of the context, whatever the last run has read of it"
    with monkeypatch.context() as patch:
        patch.delitem(SIZES, "test")
        assert decide(["--init_from", "deep", "--sample"])[0].model == "test", "a fork's size"
    assert main("--init_from deep --export_hf folder") == 0
    with pytest.raises(UserError, match="--model d24: what is loaded has test"):
        decide(["--init_from", "folder", "--sample", "--model", "d24"])
    assert main("--init_from folder --log_dir again --max_steps 1 --model test") == 0
    assert load("again", 1)["args"]["n_layer"] == 3
    for size in ("--n_head 5", "--n_head 0", "--n_layer 0"):
        assert refused("n_embd a multiple of n_head", f"--log_dir new --max_steps 1 {size}")


@pytest.mark.parametrize("name", ["train_gpt2.py", "fineweb.py", "hellaswag.py"])
def test_uv_run_installs_what_a_script_imports(name):
    text = Path(ROOT, name).read_text()
    (needed,) = re.findall("^# dependencies = (.*)$", text, re.MULTILINE)
    pins = set(re.findall(r"(\w+)==", Path(ROOT, "requirements.txt").read_text()))
    imported = set(re.findall(r"^ *(?:import|from) (\w+)", text, re.MULTILINE))
    if name == "train_gpt2.py":
        imported.add("tqdm")  # of fineweb.py and hellaswag.py, which it imports if they are there
    assert set(re.findall(r'"(\w+)', needed)) == imported & pins


@pytest.mark.slow
def test_importing_the_scripts_does_nothing(tmp_path):
    code = "import sys, train_gpt2, fineweb, hellaswag, torch.distributed as dist\n"
    code += "print(dist.is_initialized(), {'transformers', 'datasets'} & {*sys.modules})"
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **options)
    assert (result.stdout, result.stderr) == ("False set()\n", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_script_alone_trains_validates_samples_and_resumes(tmp_path, shards):
    """Copied beside shards, also where a console cannot print all characters, as on Windows."""
    shutil.copy(ROOT / "train_gpt2.py", tmp_path)
    flags = "--device cpu --model tiny --seq_len 64 --val_tokens 128 --total_batch_size 128"
    flags += " --prompt Hello\u6f22 --max_new_tokens 4"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["PYTHONIOENCODING"] = "cp1252"
    for more in ("--max_steps 2", "--max_steps 4 --resume"):
        command = [sys.executable, "-P", "train_gpt2.py", *flags.split(), *more.split()]
        options = {"env": environment, "encoding": "cp1252", "capture_output": True}
        result = subprocess.run(command, **options)
        assert result.returncode == 0 and "sample 0: Hello?" in result.stdout, result.stderr
    log = read_log()
    assert list(log["train"]) == [0, 1, 2, 3] and list(log["val"]) == [0, 2, 4], "2 stays"


def test_one_process_of_all_machines_prints_at_once(monkeypatch):
    said = Mock()
    monkeypatch.setattr(train_gpt2, "print", said, raising=False)
    for rank in ("0", "8"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", "0")
        train_gpt2.print0(f"of process {rank}")
    said.assert_called_once_with("of process 0", flush=True)
