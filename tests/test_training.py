"""Runs: what they do, that they go on where they stopped, and that hardware does not change them."""

import argparse
import dataclasses
import functools
import math
import re
import shutil
import signal

import numpy as np
import pytest
import torch
from conftest import FLAGS, break_loss, make_run, read_log, run_main, run_script, start_script
from torch.nn import functional as F

import train_gpt2
from train_gpt2 import (
    GPT,
    DataLoaderLite,
    GPTConfig,
    get_lr,
    judge,
    open_shards,
    read_tokens,
    validate,
)

# of a run of ten steps: seed 1337, data of write_shards, 2 layers, 2 heads, 32 channels, T=16
GOLDEN = [5.549957, 5.240763, 4.919174, 4.448143, 4.044548]
GOLDEN += [3.709803, 3.440975, 3.265277, 3.160801, 3.110108]


def train(log_dir, shards, *flags):
    """Train in this process and return log.txt."""
    assert run_main("--data_dir", shards, "--log_dir", log_dir, *FLAGS, *flags) == 0
    return read_log(log_dir)


def weights(log_dir, step):
    return train_gpt2.load_checkpoint(log_dir / f"model_{step:05d}.pt")["model"]


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def assert_close(a: dict, b: dict, tolerance=2e-5):
    """Two logs tell of the same run, to rounding."""
    assert a.keys() == b.keys()
    for stream in a:
        assert a[stream].keys() == b[stream].keys(), stream
        for step, value in a[stream].items():
            rounding = {"val": 1e-4, "norm": 2e-4}.get(stream, tolerance)  # val has 4 decimals
            assert value == pytest.approx(b[stream][step], abs=rounding, rel=1e-5), (stream, step)


# -----------------------------------------------------------------------------
# what a run does


def test_ten_golden_losses(tmp_path, shards):
    """A change of numerics, data order, init or schedule that no other test would see."""
    log = train(tmp_path / "log", shards, "--max_steps", 10, "--warmup_steps", 2)
    assert [log["train"][step] for step in range(10)] == pytest.approx(GOLDEN, abs=2e-4)


def test_the_loss_falls(tmp_path, shards):
    """An optimizer that does nothing, targets that are not the next token."""
    log = train(tmp_path / "log", shards, "--max_steps", 60)
    assert log["val"][60] < 0.6 * log["val"][0]


def test_the_last_update_is_evaluated_sampled_and_saved(tmp_path, shards, capsys):
    """The best model of the run, thrown away."""
    flags = ("--max_steps", 7, "--val_every", 5, "--sample_every", 5, "--save_every", 5)
    log = train(tmp_path / "log", shards, *flags)
    assert list(log["val"]) == [0, 5, 7]
    assert list(log["train"]) == list(log["lr"]) == list(log["norm"]) == list(range(7))
    saved = sorted(path.name for path in (tmp_path / "log").glob("*.pt"))
    assert saved == ["model_00005.pt", "model_00007.pt"]
    checkpoint = train_gpt2.load_checkpoint(tmp_path / "log/model_00007.pt")
    assert checkpoint["step"] == 7
    assert round(checkpoint["val_loss"], 4) == log["val"][7]
    assert capsys.readouterr().out.count("sample 0:") == 2  # at 5 and 7; at 0 it would be noise


def test_zero_means_never_and_max_steps_0_evaluates(tmp_path, shards, capsys):
    """An interval of 0 that divides by zero, a run of no step that trains."""
    log = train(tmp_path / "a", shards, "--max_steps", 3, "--val_every", 0, "--save_every", 0)
    assert "val" not in log and not list((tmp_path / "a").glob("*.pt"))
    log = train(tmp_path / "b", shards, "--max_steps", 0, "--sample_every", 9)
    assert list(log) == ["total_batch_size", "vocab_size", "val"] and list(log["val"]) == [0]
    assert capsys.readouterr().out.count("sample 0:") == 1


def test_log_lines_and_console_lines_have_their_form(tmp_path, shards, capsys):
    """A format that the notebooks of build-nanogpt's users no longer read."""
    train(tmp_path / "log", shards, "--max_steps", 1)
    lines = (tmp_path / "log/log.txt").read_text()
    run = "0 total_batch_size 256\n0 vocab_size 257\n"  # the units of what follows
    assert lines.startswith(run + "0 val 5.")
    number = r"[0-9.e+-]+"
    form = (
        run
        + rf"0 val {number}\n0 train \d\.\d{{6}}\n0 lr {number}\n0 norm {number}\n0 dt {number}\n1 val {number}\n"
    )
    assert re.fullmatch(form, lines)
    out = capsys.readouterr().out
    line = r"step     0/1 \| loss: \d\.\d{6} \| lr \d\.\d{4}e-\d\d \| norm: \d+\.\d{4} "
    assert re.search(line + r"\| dt: \d+\.\d\dms \| tok/sec: \d+\n", out)  # and no mfu on a CPU


def test_keep_keeps_the_newest(tmp_path, shards):
    """A disk that fills up, or the newest checkpoint deleted instead of the oldest."""
    train(tmp_path / "log", shards, "--max_steps", 6, "--save_every", 1, "--keep", 2)
    assert sorted(p.name for p in (tmp_path / "log").glob("*.pt")) == [
        "model_00005.pt",
        "model_00006.pt",
    ]


def test_overfit_one_batch_sees_one_batch(tmp_path, shards):
    """The debugging aid that debugs nothing, because the data still changes."""
    log = train(
        tmp_path / "log", shards, "--max_steps", 80, "--overfit_one_batch", "--val_every", 0
    )
    losses = list(log["train"].values())
    assert losses[-1] < 0.5 and losses[-1] == min(losses)


def test_evaluation_and_sampling_leave_the_trajectory_alone(tmp_path, shards):
    """Random numbers, gradients or a data cursor shared between training and evaluation."""
    off = train(tmp_path / "a", shards, "--max_steps", 6, "--val_every", 0, "--save_every", 6)
    flags = ("--val_every", 1, "--sample_every", 2, "--save_every", 1)
    on = train(tmp_path / "b", shards, "--max_steps", 6, *flags)
    assert on["train"] == off["train"] and on["norm"] == off["norm"]
    assert_same_weights(weights(tmp_path / "a", 6), weights(tmp_path / "b", 6))


def test_compile_with_evaluation_and_sampling_gives_the_same_run(tmp_path, shards):
    """compile switched off for evaluation's sake, or `_orig_mod.` in a checkpoint's names."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("torch.compile on a CPU needs a C++ compiler")
    flags = ("--max_steps", 4, "--val_every", 2, "--sample_every", 2, "--save_every", 4)
    eager = train(tmp_path / "a", shards, *flags, "--no-compile")
    compiled = train(tmp_path / "b", shards, *flags, "--compile")
    assert_close(eager, compiled, tolerance=1e-4)
    a, b = weights(tmp_path / "a", 4), weights(tmp_path / "b", 4)
    assert a.keys() == b.keys()
    model = GPT(GPTConfig(2, 2, 32, 16, 257, "bytes", 256))
    assert b.keys() == {name for name, _ in model.named_parameters()}, "a tied matrix stands once"


# -----------------------------------------------------------------------------
# where it runs must not matter


@pytest.mark.parametrize("batch_size", [1, 2, 4, 16, "auto"])
def test_the_batch_size_changes_nothing_but_rounding(tmp_path, shards, batch_size):
    """A loss summed over micro-steps where the mean is due, or other data for another B."""
    one = train(tmp_path / "a", shards, "--max_steps", 5, "--batch_size", 8)
    assert_close(one, train(tmp_path / "b", shards, "--max_steps", 5, "--batch_size", batch_size))


def test_two_processes_give_the_run_of_one_and_resume_it(tmp_path, shards):
    """One rank's loss printed as the mean, gradients summed, data that depends on the GPUs."""
    one = train(tmp_path / "one", shards, "--max_steps", 8, "--save_every", 4)
    flags = ["--data_dir", shards, "--log_dir", tmp_path / "two", *FLAGS, "--save_every", 4]
    status, out, err = run_script([*flags, "--max_steps", 8], processes=2)
    assert status == 0, err
    assert_close(one, read_log(tmp_path / "two"))
    assert out.count("step     3/8 | loss") == 1, "one printer"
    assert weights(tmp_path / "one", 8).keys() == weights(tmp_path / "two", 8).keys()
    # the checkpoint of two processes, continued by one
    (tmp_path / "two/model_00008.pt").unlink()
    resumed = train(tmp_path / "two", shards, "--save_every", 4, "--max_steps", 8, "--resume")
    assert_close(one, resumed)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("B", [1, 3, 8])
def test_validation_is_over_the_same_tokens_whatever_b_and_world(shards, world, B):
    """A val loss that changes with the hardware, or spare rows that count."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(2, 2, 32, 16, 257, "bytes", 256))
    model.transformer.wte.weight.data *= 10
    val = open_shards(str(shards), "val")
    [shard] = val.values()
    tokens = torch.from_numpy(read_tokens(shard, 0, shard.tokens).astype(np.int64))
    for windows in (1, 5, 62):  # the split has 62
        x, y = tokens[: windows * 16].view(-1, 16), tokens[1 : windows * 16 + 1].view(-1, 16)
        expected = F.cross_entropy(model.eval()(x).double().flatten(0, 1), y.flatten()).item()
        total = 0.0
        for rank in range(world):  # each process's share, as the all-reduce would add them up
            run = make_run(rank, world)
            object.__setattr__(run, "mean", lambda values: values / world)
            loader = DataLoaderLite(val, B, 16, 257, None, run)
            total += validate(model, loader, windows * 16, run)
            assert model.training, "the model is handed back as it came"
        assert total == pytest.approx(expected, abs=1e-5)


# -----------------------------------------------------------------------------
# going on


no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("device, dtype", [
    ("cpu", "float32"), ("cpu", "float16"),
    pytest.param("cuda", "bfloat16", marks=[pytest.mark.cuda, no_gpu]),
    pytest.param("cuda", "float16", marks=[pytest.mark.cuda, no_gpu]),
])  # fmt: skip
def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(tmp_path, shards, device, dtype):
    """Anything the next step depends on that a checkpoint leaves out: the scaler, a window, a cursor."""
    flags = ("--max_steps", 9, "--save_every", 3, "--batch_size", 4)
    flags += ("--device", device, "--dtype", dtype)
    unbroken = train(tmp_path / "a", shards, *flags)
    half = train(tmp_path / "b", shards, *flags)
    for step in (6, 9):
        (tmp_path / f"b/model_{step:05d}.pt").unlink()
    resumed = train(tmp_path / "b", shards, *flags, "--resume")
    assert unbroken == half == resumed
    assert_same_weights(weights(tmp_path / "a", 9), weights(tmp_path / "b", 9))
    a, b = (torch.load(tmp_path / x / "model_00009.pt", map_location="cpu") for x in "ab")
    for key in ("scaler", "position", "step", "val_loss", "data"):
        assert a[key] == b[key], key
    torch.testing.assert_close(a["recent"], b["recent"], rtol=0, atol=0, equal_nan=True)
    assert (a["scaler"]["scale"] > 1) if dtype == "float16" else (a["scaler"] == {})
    for name, state in a["optimizer"]["state"].items():
        for key, value in state.items():
            assert torch.equal(value, b["optimizer"]["state"][name][key]), (name, key)


def test_killed_in_the_middle_of_a_save_it_goes_on_from_the_one_before(tmp_path, shards):
    """A torn file taken for the newest checkpoint, or an old one destroyed by the new."""
    flags = ["--data_dir", shards, *FLAGS, "--max_steps", 9, "--save_every", 3, "--batch_size", 4]
    flags = [str(flag) for flag in flags]
    assert run_script([*flags, "--log_dir", tmp_path / "a"])[0] == 0
    killed = run_script([*flags, "--log_dir", tmp_path / "b"], KILL_IN_SAVE="6")
    assert killed[0] == -signal.SIGKILL
    whole, torn = sorted(p.name for p in (tmp_path / "b").glob("model*"))
    assert whole == "model_00003.pt" and re.fullmatch(r"model_00006\.pt\.\d+\.tmp", torn)
    assert len(read_log(tmp_path / "b")["train"]) == 6
    status, out, err = run_script([*flags, "--log_dir", tmp_path / "b", "--resume"])
    assert status == 0, err
    assert "step     3/9 | loss" in out and "step     2/9 | loss" not in out
    assert read_log(tmp_path / "a") == read_log(tmp_path / "b")
    assert_same_weights(weights(tmp_path / "a", 9), weights(tmp_path / "b", 9))
    assert not list((tmp_path / "b").glob("*.tmp"))


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path, shards, capsys):
    """A run that can never be resumed again because a disk lost the end of one file."""
    flags = ("--max_steps", 6, "--save_every", 2)
    unbroken = train(tmp_path / "log", shards, *flags)
    newest = tmp_path / "log/model_00006.pt"
    newest.write_bytes(newest.read_bytes()[:5000])
    assert train(tmp_path / "log", shards, *flags, "--resume") == unbroken
    assert "model_00006.pt cannot be read" in capsys.readouterr().out


def test_resume_starts_where_there_is_nothing_and_ends_where_all_is_done(tmp_path, shards):
    """The same command launched for ever by a cluster: it must not fail at its ends."""
    flags = ("--max_steps", 4, "--save_every", 2, "--resume")
    first = train(tmp_path / "log", shards, *flags)
    assert len(first["train"]) == 4
    assert train(tmp_path / "log", shards, *flags) == first


def test_resume_alone_takes_every_flag_from_the_checkpoint(tmp_path, shards, capsys):
    """A run with a flag that was forgotten at its resume, and went on with the default."""
    flags = ["--max_steps", 8, "--save_every", 4, "--schedule", "linear", "--max_lr", 3e-3]
    unbroken = train(tmp_path / "log", shards, *flags, "--batch_size", 4, "--weight_decay", 0.3)
    (tmp_path / "log/model_00008.pt").unlink()
    assert run_main("--resume", "--log_dir", tmp_path / "log", "--device", "cpu") == 0
    assert read_log(tmp_path / "log") == unbroken
    assert "changed since" not in capsys.readouterr().out


def test_resume_announces_what_it_may_change_and_does_it(tmp_path, shards, capsys):
    """A weight decay that is given, and silently replaced by the one in the optimizer's state."""
    flags = ["--max_steps", 4, "--save_every", 4]
    train(tmp_path / "log", shards, *flags)
    where = ["--resume", "--log_dir", tmp_path / "log", "--device", "cpu"]
    assert run_main(*where, "--max_steps", 6, "--weight_decay", 0.5) == 0
    out = capsys.readouterr().out
    assert "max_steps is 6, was 4" in out and "weight_decay is 0.5, was 0.1" in out
    saved = torch.load(tmp_path / "log/model_00006.pt")
    assert saved["args"]["weight_decay"] == 0.5
    assert [group["weight_decay"] for group in saved["optimizer"]["param_groups"]] == [0.5, 0.0]


def test_an_evaluation_of_another_step_is_nobodys_result(tmp_path, shards):
    """The val loss of step 4 reported for step 6."""
    train(tmp_path / "log", shards, "--max_steps", 6, "--val_every", 4, "--save_every", 3)
    losses = [torch.load(tmp_path / f"log/model_0000{n}.pt")["val_loss"] for n in (3, 6)]
    assert losses[0] is None and losses[1] is not None


def test_when_no_checkpoint_can_be_read_nothing_is_started_again(tmp_path, shards, capsys):
    """A disk that is not mounted for an hour, and a night's log gone."""
    train(tmp_path / "log", shards, "--max_steps", 4, "--save_every", 2)
    log = (tmp_path / "log/log.txt").read_bytes()
    for path in (tmp_path / "log").glob("*.pt"):
        path.write_bytes(path.read_bytes()[:3000])
    assert run_main("--data_dir", shards, "--log_dir", tmp_path / "log", *FLAGS, "--resume") == 2
    assert "no checkpoint in" in capsys.readouterr().err
    assert (tmp_path / "log/log.txt").read_bytes() == log


def test_log_is_cut_to_the_records_before_the_checkpoint(tmp_path, shards):
    """A curve that runs twice through the same steps, or half a line from a crash."""
    flags = ("--max_steps", 6, "--save_every", 4)
    unbroken = train(tmp_path / "log", shards, *flags)
    (tmp_path / "log/model_00006.pt").unlink()
    with open(tmp_path / "log/log.txt", "a") as log:
        log.write("6 train 9.9\n7 train 9.9\n8 tra")
    assert train(tmp_path / "log", shards, *flags, "--resume") == unbroken


@pytest.mark.parametrize(
    "signum, later",
    [(signal.SIGTERM, {}), (signal.SIGINT, {"READ_LATER": "1"}), (signal.SIGHUP, {})],
)
def test_a_signal_saves_first_and_the_status_says_which(tmp_path, shards, signum, later):
    """Hours lost to the scheduler's polite request to stop."""
    if signal.getsignal(signum) == signal.SIG_IGN:
        pytest.skip("these tests were started by nohup")
    flags = ["--data_dir", shards, *FLAGS, "--log_dir", tmp_path / "log", "--save_every", 0]
    process = start_script([*flags, "--max_steps", 100000, "--val_every", 0], **later)
    for line in process.stdout:
        if line.startswith("step     5/"):
            process.send_signal(signum)
            break
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signum, err
    assert "Saving a checkpoint after this step" in err, (
        "nobody should have to guess and press it again"
    )
    [saved] = (tmp_path / "log").glob("*.pt")
    step = train_gpt2.load_checkpoint(saved)["step"]
    assert f"model_{step:05d}.pt" == saved.name
    assert max(read_log(tmp_path / "log")["train"]) == step - 1, "saved after its last update"


@pytest.mark.parametrize("max_steps", [1, 3])
def test_a_signal_during_an_evaluation_saves_without_another_step(tmp_path, shards, max_steps):
    """A promise to save that is broken where no step follows, or one that takes too long."""
    flags = ["--data_dir", shards, *FLAGS, "--log_dir", tmp_path / "log", "--save_every", 0]
    slow = ["--sample_every", 1, "--max_new_tokens", 3000]  # some seconds of evaluation
    process = start_script([*flags, "--max_steps", max_steps, "--val_every", 0, *slow])
    for line in process.stdout:
        if line.startswith("step     0/"):
            process.send_signal(signal.SIGTERM)
            break
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "saved" in out and (tmp_path / "log/model_00001.pt").exists()
    assert list(read_log(tmp_path / "log")["train"]) == [0]


def test_a_signal_may_come_twice(tmp_path, shards):
    """A scheduler sends SIGTERM to every process, and torchrun passes its own on."""
    flags = ["--data_dir", shards, *FLAGS, "--log_dir", tmp_path / "log", "--save_every", 0]
    process = start_script([*flags, "--max_steps", 100000, "--val_every", 0])
    for line in process.stdout:
        if line.startswith("step     5/"):
            break
    process.send_signal(signal.SIGTERM)
    while "Saving a checkpoint" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert len(list((tmp_path / "log").glob("*.pt"))) == 1


def test_nohup_keeps_its_meaning(monkeypatch):
    """SIGHUP saves and stops, unless the run was started to survive it."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        train_gpt2.catch_signals()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@pytest.mark.parametrize("argv", [["--overwrite"], ["--quickstart"]])
def test_torchrun_does_not_overwrite_what_it_has_begun(monkeypatch, argv):
    """It starts all processes again after one has failed, and the new ones deleted the run."""
    assert train_gpt2.parse_args(argv).overwrite
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(train_gpt2.UserError, match="--resume continues"):
        train_gpt2.parse_args(argv)
    assert train_gpt2.parse_args(["--resume"]).resume


def test_another_peak_rate_on_resume_keeps_its_proportion_to_the_last_one(tmp_path, shards, capsys):
    """A lower --max_lr, and a rate that rose to the ten times higher end of the first one."""
    train(tmp_path / "log", shards, "--max_steps", 4, "--save_every", 4, "--max_lr", 1e-2)
    where = ["--resume", "--log_dir", tmp_path / "log", "--device", "cpu", "--max_steps", 8]
    assert run_main(*where, "--max_lr", 1e-4) == 0
    assert "min_lr is 1e-05, was 0.001" in capsys.readouterr().out
    rates = read_log(tmp_path / "log")["lr"]
    assert rates[4] <= 1e-4 and rates[7] < rates[4]
    assert run_main(*where[:-1], 12, "--max_lr", 1e-4) == 0
    assert "min_lr" not in capsys.readouterr().out, "nothing changes, to the last bit"


def test_resume_from_other_weights_is_refused(tmp_path, shards, capsys):
    """It was announced as a change, and the checkpoint's weights went on."""
    train(tmp_path / "log", shards, "--max_steps", 2, "--save_every", 2)
    where = ["--resume", "--log_dir", tmp_path / "log", "--device", "cpu", "--max_steps", 4]
    assert run_main(*where, "--init_from", "elsewhere") == 2
    assert "init_from is elsewhere, was scratch" in capsys.readouterr().err


def test_other_validation_data_is_announced(tmp_path, shards, capsys):
    """Two val losses of one run that do not compare."""
    train(tmp_path / "log", shards, "--max_steps", 2, "--save_every", 2)
    path = shards / "test_val_000000.npy"
    np.save(path, np.load(path)[::-1])
    train(tmp_path / "log", shards, "--max_steps", 4, "--resume")
    assert (
        "changed since the checkpoint: max_steps is 4, was 2, val_data is"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("source", ["log", "log/model_00002.pt"])
def test_overwrite_does_not_delete_the_model_it_starts_from(
    tmp_path, shards, capsys, monkeypatch, source
):
    """Fine-tuning in the folder of the model: an interrupted start, and the model is gone."""
    monkeypatch.chdir(tmp_path)
    train("log", shards, "--max_steps", 2, "--save_every", 2)
    flags = ("--data_dir", shards, *FLAGS, "--init_from", source, "--overwrite")
    assert run_main(*flags, "--log_dir", "log") == 2
    assert "--overwrite would delete" in capsys.readouterr().err
    assert (tmp_path / "log/model_00002.pt").exists()


def test_overwrite_deletes_the_old_run_only_when_the_new_one_can_start(tmp_path, shards):
    """A typing error in a flag that costs the run it would have replaced."""
    flags = ("--max_steps", 4, "--save_every", 2)
    old = train(tmp_path / "log", shards, *flags)
    where = ("--data_dir", shards, "--log_dir", tmp_path / "log", *FLAGS)
    assert run_main(*where, "--overwrite", "--batch_size", 7) == 2
    assert read_log(tmp_path / "log") == old and len(list((tmp_path / "log").glob("*.pt"))) == 2
    train(tmp_path / "log", shards, "--max_steps", 1, "--save_every", 0, "--overwrite")
    assert not list((tmp_path / "log").glob("*.pt"))


def test_init_from_takes_weights_and_nothing_else(tmp_path, shards):
    """Fine-tuning that starts with another run's step, schedule or optimizer."""
    train(tmp_path / "a", shards, "--max_steps", 30, "--save_every", 30)
    source = tmp_path / "a/model_00030.pt"
    log = train(tmp_path / "b", shards, "--init_from", source, "--max_steps", 2)
    assert log["val"][0] == read_log(tmp_path / "a")["val"][30]
    assert list(log["train"]) == [0, 1]


# -----------------------------------------------------------------------------
# what must not reach the weights


def test_a_loss_that_is_not_finite_on_one_process_stops_no_process_and_reaches_no_weight(
    tmp_path, shards
):
    """A step on a nan norm ends the model; ranks that disagree about it end the run."""
    flags = ["--data_dir", shards, "--log_dir", tmp_path / "log", *FLAGS, "--batch_size", 4]
    flags += ["--max_steps", 5, "--save_every", 1]
    status, out, err = run_script(flags, processes=2, NAN_LOSS="1:5")  # 2 calls a step: step 2
    assert status == 0, err
    assert out.count("update skipped") == 1
    log = read_log(tmp_path / "log")
    assert math.isnan(log["train"][2]) and math.isnan(log["norm"][2])
    assert all(math.isfinite(log["train"][step]) for step in (0, 1, 3, 4))
    before, after = weights(tmp_path / "log", 2), weights(tmp_path / "log", 3)
    assert_same_weights(before, after)
    later = weights(tmp_path / "log", 4)
    assert not any(torch.equal(after[name], later[name]) for name in after)


def set_async(monkeypatch):
    """Read each step's results one step later, as with a GPU."""
    setup_run = train_gpt2.setup_run
    monkeypatch.setattr(
        train_gpt2, "setup_run", lambda args: dataclasses.replace(setup_run(args), runs_ahead=True)
    )


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "nadam"])
def test_results_read_a_step_later_change_nothing(tmp_path, shards, monkeypatch, optimizer):
    """A GPU's run that skips other updates than a CPU's, or logs or saves them at another step; an
    optimizer put in AdamW's place, as README shows it, which knows nothing of found_inf."""
    flags = ("--max_steps", 12, "--save_every", 7, "--val_every", 5, "--batch_size", 16)
    if optimizer == "nadam":
        nadam = functools.partial(torch.optim.NAdam, decoupled_weight_decay=True)
        monkeypatch.setattr(torch.optim, "AdamW", lambda groups, lr, **_: nadam(groups, lr=lr))
    else:
        flags += ("--optimizer", optimizer)
    cross_entropy = F.cross_entropy
    logs = {}
    for name in ("now", "later"):
        monkeypatch.setattr(F, "cross_entropy", cross_entropy)
        break_loss(lambda n, loss: loss * math.nan if n in (4, 11) else loss)
        logs[name] = train(tmp_path / name, shards, *flags)
        set_async(monkeypatch)
    assert math.isnan(logs["now"]["train"][4]) and math.isnan(logs["now"]["train"][11])
    assert repr(logs["now"]) == repr(logs["later"])  # nan is not equal to nan
    for step in (7, 12):
        assert_same_weights(weights(tmp_path / "now", step), weights(tmp_path / "later", step))


def test_a_parameter_that_the_loss_does_not_use_is_named(tmp_path, shards, monkeypatch):
    """A fork that forgets to delete wpe: it trains for hours, and its checkpoints do not resume."""
    forward = torch.nn.Embedding.forward

    def without_positions(self, idx):
        return forward(self, idx) if idx.dim() == 2 else torch.zeros(())

    monkeypatch.setattr(torch.nn.Embedding, "forward", without_positions)
    with pytest.raises(AssertionError, match=r"does not depend on.*transformer.wpe.weight"):
        train(tmp_path / "log", shards, "--max_steps", 2)


def test_float16_overflow_lowers_the_scale_and_skips(tmp_path, shards, monkeypatch):
    """Clipping before unscaling, or updates skipped without the log saying so."""
    monkeypatch.setattr(F, "cross_entropy", F.cross_entropy)  # restored afterwards
    break_loss(lambda n, loss: loss * 1e36 if n in (1, 2) else loss)
    flags = ("--max_steps", 5, "--save_every", 1, "--dtype", "float16")
    log = train(tmp_path / "log", shards, *flags)
    assert not math.isfinite(log["norm"][1])
    scales = [
        torch.load(tmp_path / f"log/model_{n:05d}.pt")["scaler"]["scale"] for n in range(1, 6)
    ]
    assert scales == [65536, 32768, 16384, 16384, 16384]
    assert_same_weights(weights(tmp_path / "log", 1), weights(tmp_path / "log", 3))
    assert log["norm"][0] < 100, "the norm is that of unscaled gradients"


def test_outliers_are_skipped_and_only_they(tmp_path, shards, monkeypatch, capsys):
    """A spike that throws the run off although --skip_loss_z is on."""
    monkeypatch.setattr(F, "cross_entropy", F.cross_entropy)
    break_loss(lambda n, loss: loss * 3 if n in (20, 140) else loss)  # 20: the window is not full
    flags = (
        "--max_steps",
        142,
        "--val_every",
        0,
        "--save_every",
        1,
        "--keep",
        3,
        "--batch_size",
        16,
    )
    train(tmp_path / "log", shards, *flags, "--max_lr", 1e-4, "--skip_loss_z", 6)
    assert_same_weights(weights(tmp_path / "log", 140), weights(tmp_path / "log", 141))
    assert capsys.readouterr().out.count("update skipped") == 1


def test_outliers_are_judged_as_in_llm_c():
    """A window that never fills, forgets nothing, or takes in what is not finite."""
    limits = argparse.Namespace(skip_loss_z=2.0, skip_grad_z=3.0)
    rng = np.random.RandomState(0)
    losses, norms = rng.standard_t(3, (2, 400)).astype(np.float32)
    windows = torch.full((2, 128), math.nan)
    skipped = 0
    for i, pair in enumerate(zip(losses, norms, strict=True)):
        skip, windows = judge(torch.tensor([*pair, 0.0, 0.0]), windows, limits)
        expected = False
        if i >= 127:
            recent = losses[i - 127 : i + 1], norms[i - 127 : i + 1]
            z = [(values[-1] - values.mean()) / values.std() for values in recent]
            expected = z[0] > 2 or z[1] > 3
        assert skip.item() == expected
        skipped += expected
    assert 5 < skipped < 100
    for unsound in ([math.nan, 1, 0, 0], [1, math.inf, 0, 0], [1, 1, 0, 0.5]):
        skip, after = judge(torch.tensor(unsound), windows, limits)
        assert skip and torch.equal(after, windows)
    constant = torch.ones(2, 128)
    assert not judge(torch.ones(4) * torch.tensor([1, 1, 1, 0]), constant, limits)[0], "no z-score"
    off = argparse.Namespace(skip_loss_z=0.0, skip_grad_z=0.0)
    assert not judge(torch.tensor([1e6, 1e6, 0, 0]), windows, off)[0]


# -----------------------------------------------------------------------------
# schedules


def schedule(name, max_steps=1000, warmup_steps=100, max_lr=6e-4, min_lr=6e-5):
    args = argparse.Namespace(schedule=name, max_steps=max_steps, warmup_steps=warmup_steps)
    args.max_lr, args.min_lr = max_lr, min_lr
    return [get_lr(step, args) for step in range(max_steps + 1)]


def test_every_schedule_warms_up_without_a_step_of_zero():
    """A first update with learning rate 0, a peak that is never reached."""
    for name in ("cosine", "linear", "constant", "wsd"):
        lrs = schedule(name)
        assert lrs[0] == pytest.approx(6e-6) and lrs[99] == lrs[100] == pytest.approx(6e-4)
        assert max(lrs) == pytest.approx(6e-4)


def test_schedules_have_their_shapes():
    """A cosine that ends elsewhere than min_lr, a wsd that decays from the start."""
    cosine, linear, constant, wsd = (schedule(n) for n in ("cosine", "linear", "constant", "wsd"))
    for lrs in (cosine, linear, wsd):
        assert lrs[1000] == pytest.approx(6e-5)
    assert cosine[550] == linear[550] == pytest.approx((6e-4 + 6e-5) / 2)
    assert cosine[325] == pytest.approx(6e-5 + 5.4e-4 * (1 + math.cos(math.pi / 4)) / 2)
    assert set(constant[100:]) == {6e-4}
    # the decay takes the last fifth of the steps after warmup, 180 of 900
    assert set(wsd[100:821]) == {6e-4} and wsd[865] == pytest.approx(6e-5 + 5.4e-4 * 0.5)
    assert schedule("linear", min_lr=0.0)[1000] == 0, "--min_lr 0 is a value"
    assert schedule("cosine", 5, 0) and schedule("cosine", 5, 5)


def test_a_short_run_scales_the_default_warmup_down(tmp_path, shards):
    """715 steps of warmup in a run of 50: it would never reach its learning rate."""
    log = train(tmp_path / "log", shards, "--max_steps", 50, "--val_every", 0)
    assert max(log["lr"].values()) == pytest.approx(1e-2) and log["lr"][0] == pytest.approx(5e-3)


def test_epochs_set_the_steps_from_the_data(tmp_path, shards):
    """An epoch counted in tokens that no window has."""
    windows = (700 - 1) // 16 + (1201 - 1) // 16 + (333 - 1) // 16
    log = train(tmp_path / "log", shards, "--epochs", 2, "--val_every", 0)
    assert len(log["train"]) == 2 * windows * 16 // 256
