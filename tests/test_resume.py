"""Promise 3: a run that is stopped or killed, at any moment, and resumed is the unbroken run."""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from conftest import contents, hook, leaves, load, main, read_log, run, steps

import train_gpt2

KILLS = int(os.environ.get("GPT2_TEST_KILLS", "8"))
STREAMS = {"total_batch_size", "vocab_size", "val", "bpb", "hella", "train", "lr", "norm", "dt"}


def assert_same_run(a, b) -> None:
    """Two folders hold the same records, but for times, and checkpoints, but for flags."""
    logs = [Path(log_dir, "log.txt").read_text().splitlines() for log_dir in (a, b)]
    logs = [[line for line in lines if " dt " not in line] for lines in logs]
    assert logs[0] == logs[1]
    assert contents(a).keys() == contents(b).keys()
    for step in steps(a):
        one, two = (leaves(load(log_dir, step) | {"args": None}) for log_dir in (a, b))
        assert [name for name in one | two if one.get(name) != two.get(name)] == []


def break_off(log_dir, copy, step: int):
    """Return a copy as a crash leaves it: log.txt goes further than `step`, and ends in a record."""
    shutil.copytree(log_dir, copy)
    for later in steps(copy):
        if later > step:
            Path(copy, f"model_{later:05d}.pt").unlink()
    log = Path(copy, "log.txt")
    log.write_bytes(log.read_bytes() + b"\xff\n1 tra")
    return copy


@pytest.mark.parametrize("recipe", [
    "--optimizer muon",  # Muon's and AdamW's state
    *(pytest.param(x, marks=pytest.mark.slow) for x in ("--optimizer adamw", "--dtype float16")),
])  # fmt: skip
def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(shards, monkeypatch, recipe):
    """Before and after an epoch ends, in a fork with dropout, a stream and states of its own."""
    forward, configure = train_gpt2.MLP.forward, train_gpt2.GPT.configure_optimizers

    def dropped(self, x):
        return torch.dropout(forward(self, x), 0.1, self.training)

    def count(optimizer, *_):
        for kept in optimizer.state.values():
            kept["count"] = kept.get("count", 0) + 1 / 3  # a number, and no tensor

    def counted(self, *args):
        optimizers = configure(self, *args)
        optimizers[-1].register_step_post_hook(count)
        return optimizers

    def divided(self, *args):
        optimizers = counted(self, *args)
        first = optimizers[-1].param_groups[0]
        optimizers[-1].add_param_group(first | {"params": [first["params"].pop()]})
        return optimizers

    monkeypatch.setattr(train_gpt2.MLP, "forward", dropped)
    monkeypatch.setattr(train_gpt2.GPT, "configure_optimizers", divided)
    flags = "--max_steps 12 --save_every 3 --keep 0 --val_every 5 --num_samples 1"  # not dropped
    flags += f" --batch_size 4 {recipe} --log_dir"
    assert main(flags, "a") == 0
    log = Path("a/log.txt")
    log.write_text(log.read_text().replace("\n1 lr", "\n1 norm/h.0 0.5\n1 lr"))
    monkeypatch.setattr(train_gpt2.GPT, "configure_optimizers", counted)
    for step in (6, 9):
        broken = break_off("a", f"b{step}", step)
        assert main(flags, broken, "--resume") == 0
        assert_same_run("a", broken)
    saved = load("a", 12)  # with this empty, the test could not tell
    assert (saved["scaler"] != {}) == ("float16" in recipe)
    kept = saved["optimizer"]["transformer.wpe.weight"]["count"]
    assert isinstance(kept, float) and kept == pytest.approx(4), "a number stays a number"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("then", [True, False])
def test_weights_may_be_frozen_later_or_no_longer(shards, monkeypatch, optimizer, then):
    configure = train_gpt2.GPT.configure_optimizers
    for max_steps, learns in ((2, not then), (4, then)):

        def frozen(self, *rest, learns=learns):
            self.transformer.h[1].requires_grad_(learns)
            return configure(self, *rest)

        monkeypatch.setattr(train_gpt2.GPT, "configure_optimizers", frozen)
        assert main(f"--optimizer {optimizer} --resume --max_steps {max_steps}") == 0
    old, new = load("log", 2)["model"], load("log", 4)
    for name in old.keys() - {"lm_head.weight"}:
        is_frozen = name.startswith("transformer.h.1.") and not then
        assert torch.equal(old[name], new["model"][name]) == is_frozen, name
        assert name in new["optimizer"], "what is frozen keeps its state"


def test_a_checkpoint_says_what_it_is(shards, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)  # which copies from a GPU
    assert main("--max_steps 2") == 0
    saved = load("log", 2)
    tied = [saved["model"][f"{name}.weight"].data_ptr() for name in ("lm_head", "transformer.wte")]
    assert tied[0] == tied[1], "one matrix is stored once"
    assert saved["args"]["dtype"] == "auto", "another machine chooses its own"
    shards = sorted(shards.glob("*train*"))  # all shorter than 64 KB, which is hashed twice then
    sums = [hashlib.sha256(2 * path.read_bytes()).hexdigest() for path in shards]
    found = [saved["data"][path.name] for path in shards]
    assert found == [[700, sums[0]], [1201, sums[1]], [333, sums[2]]]
    assert saved["script"] == Path(train_gpt2.__file__).read_text()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_is_known_before_its_first_step(shards, optimizer):
    """Killed there, it is continued with all of its flags, though the command names none of them."""
    flags = "--data_dir data --max_steps 4 --val_every 2 --seed 7 --keep 0 --seq_len 8"
    flags += f" --optimizer {optimizer} --log_dir"
    shards.rename("data")
    assert main(flags, "a") == 0
    patch = hook("if self.training: os.kill(os.getpid(), signal.SIGKILL)")
    status, out, _ = run(flags, "b", patch=patch)
    assert status == -signal.SIGKILL and "4 steps of 256 tokens" in out, "what is printed is there"
    assert list(read_log("b")) == ["total_batch_size", "vocab_size", "val", "bpb"]
    first = Path("b/model_00000.pt").stat()
    with pytest.raises(SystemExit, match="0"):
        train_gpt2.main(["--resume", "--log_dir", "b"])
    assert Path("b/model_00000.pt").stat().st_ino == first.st_ino, "it is not written again"
    assert_same_run("a", "b")


# Process `victim` is killed before the line with number `moment` of those that it executes in the
# script: between any two actions of a start, a step, a record or a save
KILLED_AT_A_LINE = """
import sys
lines = iter(range(10**9))
def trace(frame, event, arg):
    if not frame.f_code.co_filename.endswith("train_gpt2.py"):
        return None
    if event == "line" and rank == {victim} and next(lines) == {moment}:
        os.kill(os.getpid(), signal.SIGKILL)
    return trace
sys.settrace(trace)
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_at_random_moments_the_run_ends_as_the_unbroken_one(shards, processes):
    kills = {1: KILLS - KILLS // 3, 2: KILLS // 3}[processes]
    flags = f"--max_steps {8 * kills} --save_every 2 --keep 2 --val_every 5 --val_tokens 64"
    flags += " --batch_size 8 --resume --log_dir"
    assert run(flags, "a", processes=processes)[0] == 0
    rng = random.Random(processes)
    for _ in range(kills):
        patch = KILLED_AT_A_LINE.format(victim=rng.randrange(processes), moment=rng.randrange(5000))
        result = run(flags, "b", processes=processes, patch=patch)
        assert result[0] == -signal.SIGKILL, result
    assert steps("b")[-1:] != [8 * kills], "no kill came after the end"
    assert run(flags, "b", processes=processes)[0] == 0
    assert_same_run("a", "b")


KILLED_IN_SAVE = """
def save_half(contents, file, save=torch.save):
    save(contents, file)
    if contents["step"] == 4:
        file.truncate(50000)
        os.kill(os.getpid(), signal.SIGKILL)
torch.save = save_half
"""


def test_a_file_counts_once_it_has_its_name(shards, disk):
    """A half file has none, and continues nothing. Bytes reach the disk before their name."""
    flags = "--max_steps 6 --save_every 2 --batch_size 8 --log_dir"
    assert main(flags, "a") == 0
    calls = [name for name, _, _ in disk.mock_calls]
    assert calls == ["fsync", "replace"] * 5  # log.txt, four checkpoints
    assert run(flags, "b", patch=KILLED_IN_SAVE)[0] == -signal.SIGKILL
    assert {*os.listdir("b")} == {"log.txt", "model_00000.pt", "model_00002.pt", "unfinished.pt"}
    assert main(flags, "b", "--resume") == 0
    assert_same_run("a", "b")


def test_a_deleted_checkpoint_gives_back_its_disk(shards):
    """A run that was resumed from it maps it no longer: neither weights nor moments are the file's."""
    assert main("--max_steps 2") == 0
    patch = hook("print('mapped:', 'model_00002.pt' in open('/proc/self/maps').read())")
    status, out, err = run("--save_every 2 --keep 1 --max_steps 6 --resume", patch=patch)
    assert status == 0 and steps() == [6], err
    assert "mapped: False" in out and "mapped: True" not in out


def test_a_run_is_saved_before_it_is_evaluated(shards, monkeypatch):
    values = iter([5.0, 4.0])
    with monkeypatch.context() as broken:
        broken.setattr(train_gpt2, "validate", lambda *_: (next(values), 1.0))
        with pytest.raises(StopIteration):
            main("--max_steps 4 --val_every 2")
    assert steps() == [4]
    assert main("--resume") == 0
    assert list(read_log()["val"]) == [0, 2, 4]


def test_a_longer_run_keeps_the_records_of_the_shorter_one(shards, monkeypatch):
    """Of every stream, and each once: what the shorter run measured at its end is not due again."""
    hella = {"fetch": str, "load": lambda *_: "it", "score": lambda *_: Namespace(acc_norm=1, n=4)}
    monkeypatch.setitem(sys.modules, "hellaswag", Namespace(**hella))
    flags = "--val_every 2 --hellaswag on --save_every 2 --keep 0 --resume --log_dir"
    assert main(flags, "a", "--max_steps 5") == 0
    broken = break_off("a", "b", 4)
    assert main(flags, broken, "--max_steps 5") == 0
    assert_same_run("a", broken)
    before = Path("b/log.txt").read_text().splitlines()
    assert {line.split()[1] for line in before} == STREAMS
    assert main(flags, broken, "--max_steps 8") == 0
    after = Path("b/log.txt").read_text().splitlines()
    assert after[: len(before)] == before
    records = [line.split() for line in after]
    found = {name: [int(step) for step, x, _ in records if x == name] for name in STREAMS}
    assert found["train"] == found["dt"] == [*range(8)]
    assert found["val"] == found["bpb"] == found["hella"] == [0, 2, 4, 5, 6, 8]
    for off in ("--hellaswag off", "--val_tokens 0"):
        assert main(flags, broken, "--max_steps 8 --val_every 8", off) == 0
        found = read_log(broken)
        assert {*found["hella"]} == {*found["val"]} == {0, 2, 4, 5, 6, 8}, f"kept with {off}"


def signal_in(call: int, name: str, times=1, training=True, rank=0) -> str:
    """Return a patch that sends a signal in the process `rank`, in this call of the model."""
    when = f"rank == {rank} and self.training is {training} and calls.count({training}) == {call}"
    kill = f"    os.kill(os.getpid(), signal.{name})\n"
    return hook(f"if {when}:\n{times * kill}")


@pytest.mark.parametrize("name, processes, training, call", [
    ("SIGTERM", 2, True, 5), ("SIGHUP", 2, True, 5), ("SIGINT", 1, False, 8),  # 5 batches each
    pytest.param("SIGUSR1", 2, True, 5, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_signal_stops_the_run_after_a_save(shards, name, processes, training, call):
    """Also with --save_every 0, after a step, and where the last process alone gets it."""
    flags = "--max_steps 8 --save_every 8 --keep 0 --val_every 4 --batch_size 8 --log_dir"
    times = 2 if name == "SIGTERM" else 1  # schedulers repeat it
    patch = signal_in(call, name, times, training, rank=processes - 1)
    if processes == 1:  # nobody reads the output: the same Ctrl-C has ended `| tee`
        patch += "r, w = os.pipe(); os.dup2(w, 1); os.dup2(w, 2); os.close(r)\n"
    status, out, _ = run(flags, "b b", "--save_every 0", processes=processes, patch=patch)
    others = [143] * (processes - 1)  # the first process, without a signal, may be the first to end
    assert status in (128 + getattr(signal, name), *others)
    assert ('with --resume --log_dir "b b"\n' in out) == (processes == 2)
    assert [[*read_log("b b")[stream]] for stream in ("val", "train")] == [[0, 4], [*range(5)]]
    assert steps("b b") == [5]
    assert run(flags, "b b", "--resume", processes=processes)[0] == 0
    assert run(flags, "a", processes=processes)[0] == 0
    os.remove("b b/model_00005.pt")  # the unbroken run saves nothing here, but at the start
    os.remove("a/model_00000.pt")
    assert_same_run("a", "b b")


@pytest.mark.parametrize("patch", [
    signal_in(4, "SIGTERM"), "del signal.SIGHUP, signal.SIGUSR1",
    "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + signal_in(2, "SIGHUP"),
])  # fmt: skip
def test_a_signal_in_the_last_update_or_under_nohup_changes_nothing(shards, patch):
    """The run is complete, with status 0. So is one on Windows, which has no SIGHUP."""
    status, out, _ = run("--max_steps 4 --num_samples 1", patch=patch)
    assert status == 0 and "sample 0: " in out and "done: " in out
    assert steps() == [4] and list(read_log()["val"]) == [0, 4]


def test_a_second_ctrl_c_ends_the_run_at_once(shards):
    status, _, err = run("--max_steps 8", patch=signal_in(5, "SIGINT", times=2))
    assert status == -signal.SIGINT and "saving after this step" in err and not steps()


@pytest.mark.slow
def test_a_ctrl_c_before_the_training_ends_the_script_without_a_traceback(tmp_path):
    """As in --sample. It does not count where a shell lets it be ignored, as after `&`."""
    code = "import os, runpy, signal, sys, torch\n"
    code += "act = lambda **_: (os.kill(os.getpid(), signal.SIGINT), os._exit(0))\n"
    code += "torch.accelerator.current_accelerator = act\n"
    code += "signal.signal(signal.SIGINT, getattr(signal, sys.argv.pop()))\n"
    code += f"runpy.run_path({train_gpt2.__file__!r}, run_name='__main__')"
    for handler, status in (("default_int_handler", 130), ("SIG_IGN", 0)):
        command = [sys.executable, "-c", code, handler]
        result = subprocess.run(command, capture_output=True, cwd=tmp_path)
        assert (result.returncode, result.stderr) == (status, b"")


def test_resume_starts_where_there_is_nothing_and_ends_where_all_is_done(shards, capsys):
    assert main("--max_steps 2 --resume") == 0
    before = read_log()
    assert list(before["train"]) == [0, 1] and list(before["val"]) == [0, 2]
    Path("log/model_00009_copy.pt").touch()  # a user's own file is no checkpoint
    assert "log has no checkpoint: a new run begins" in capsys.readouterr().out
    assert main("--max_steps 2 --resume") == 0
    out = capsys.readouterr().out
    assert "step     2/2 | val loss" in out and "a new run begins" not in out
    assert "saved " not in out, "the checkpoint that was loaded is there"
    assert read_log() == before and steps() == [2]


def test_one_command_begins_and_continues_a_fine_tuning(shards, capsys):
    """As torchrun repeats it. The rate, a tenth, is that of the run, and its model is its own."""
    assert main("--max_steps 2 --log_dir a") == 0
    for max_steps in (2, 4):
        capsys.readouterr()
        assert main(f"--resume --init_from a --log_dir b --max_steps {max_steps}") == 0
        assert load("b", max_steps)["args"]["max_lr"] == 1e-3
    out = capsys.readouterr().out
    assert "max_steps 2 -> 4" in out and "max_lr" not in out


def test_folder_precision_and_script_may_change(shards, monkeypatch, capsys):
    """Data are known by the names and lengths of their shards. What is another one is reported."""
    assert main("--max_steps 4") == 0
    shards.rename("moved")
    assert main("--resume --data_dir moved --max_steps 5 --dtype bfloat16") == 0
    out = capsys.readouterr().out
    assert "is at step 4 of 5, so far in float32" in out and "another version" not in out
    assert load("log", 5)["dtype"] == "bfloat16"
    monkeypatch.setattr(train_gpt2, "SCRIPT", train_gpt2.SCRIPT + "# an edit")
    assert main("--resume --data_dir moved --max_steps 6 --dtype float16") == 0, "a new scaler"
    assert "by another version of this script" in capsys.readouterr().out


def test_a_damaged_newest_checkpoint_is_named_and_nothing_is_changed(shards, refused):
    assert main("--max_steps 4") == 0
    newest = Path("log/model_00004.pt")
    whole = newest.read_bytes()
    lengths = (0, 100, 30_000, 60_000, 66_000, 300_000, len(whole) - 1)  # bytes
    for damaged in (b"not a checkpoint", *(whole[:length] for length in lengths)):
        newest.write_bytes(damaged)
        before = contents("log")
        assert refused(f"{newest} cannot be loaded", "--resume")
        assert contents("log") == before
