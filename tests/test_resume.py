"""Promise 3: a run that is stopped or killed, at any moment, and resumed is the unbroken run."""

import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
from conftest import contents, hook, leaves, load, main, read_log, run, steps, write_shards

import train_gpt2

KILLS = int(os.environ.get("GPT2_TEST_KILLS", "8"))
NOHUP = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
slow = pytest.mark.slow


def assert_same_run(a, b) -> None:
    """Two folders hold the same records in the same order, but for times, and the same checkpoints,
    bit for bit, but for the flags, of which one is --log_dir."""
    logs = [Path(log_dir, "log.txt").read_text().splitlines() for log_dir in (a, b)]
    logs = [[line for line in lines if " dt " not in line] for lines in logs]
    assert logs[0] == logs[1]
    assert contents(a).keys() == contents(b).keys()
    for step in steps(a):
        one, two = (leaves(load(log_dir, step) | {"args": None}) for log_dir in (a, b))
        assert [name for name in one | two if one.get(name) != two.get(name)] == []


def break_off(log_dir, copy, step: int) -> Path:
    """Return a copy of log_dir as a crash some time after the checkpoint of `step` leaves it:
    log.txt goes further, and ends in half a line. A user has added blank lines and a note."""
    shutil.copytree(log_dir, copy)
    for later in steps(copy):
        if later > step:
            Path(copy, f"model_{later:05d}.pt").unlink()
    log = Path(copy, "log.txt")
    log.write_text("\n" + log.read_text().replace("\n1 lr", "\na note\n\n1 lr") + "12 tra")
    return copy


@pytest.mark.parametrize("recipe", [
    pytest.param("--optimizer adamw", marks=slow), pytest.param("--dtype float16", marks=slow),
    "--optimizer muon",  # Muon's and AdamW's state
])  # fmt: skip
def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(tmp_path, shards, recipe):
    """It is so from before the end of an epoch, in update 8, and from after it."""
    flags = ["--data_dir", shards, "--max_steps", 12, "--save_every", 3, "--keep", 0]
    flags += ["--val_every", 5, "--batch_size", 4, *recipe.split()]
    assert main(*flags, "--log_dir", tmp_path / "a") == 0
    for step in (6, 9):
        broken = break_off(tmp_path / "a", tmp_path / f"b{step}", step)
        assert main(*flags, "--log_dir", broken, "--resume") == 0
        assert_same_run(tmp_path / "a", broken)
    saved = load(tmp_path / "a", 12)  # with this empty, the test could not tell
    assert (saved["scaler"] != {}) == ("float16" in recipe)


def test_a_fork_with_dropout_and_values_of_its_own_is_resumed(tmp_path, shards, monkeypatch):
    """Masks depend on seed and step, log.txt keeps what a fork puts into it, and the groups of
    parameters may be other ones: the checkpoint has the optimizer's state by parameter."""
    forward, configure = train_gpt2.MLP.forward, train_gpt2.GPT.configure_optimizers

    def dropped(self, x):
        return torch.dropout(forward(self, x), 0.1, self.training)

    def count(optimizer, *_):
        for kept in optimizer.state.values():
            kept["count"] = kept.get("count", 0) + 1  # a number, and no tensor

    def counted(self, *args):
        optimizers = configure(self, *args)
        optimizers[0].register_step_post_hook(count)
        return optimizers

    def divided(self, *args):
        optimizers = counted(self, *args)
        first = optimizers[0].param_groups[0]
        optimizers[0].add_param_group(first | {"params": [first["params"].pop()]})
        return optimizers

    monkeypatch.setattr(train_gpt2.MLP, "forward", dropped)
    flags = ["--data_dir", shards, "--max_steps", 6, "--save_every", 3, "--keep", 0]
    with monkeypatch.context() as first:
        first.setattr(train_gpt2.GPT, "configure_optimizers", divided)
        assert main(*flags, "--log_dir", tmp_path / "a") == 0
    log = tmp_path / "a/log.txt"
    log.write_text(log.read_text().replace("\n1 lr", "\n1 norm/h.0 0.5\n1 lr"))
    broken = break_off(tmp_path / "a", tmp_path / "b", 3)
    with monkeypatch.context() as again:
        again.setattr(train_gpt2.GPT, "configure_optimizers", counted)
        assert main(*flags, "--log_dir", broken, "--resume") == 0
    assert_same_run(tmp_path / "a", broken)
    assert load(broken, 6)["optimizer"]["transformer.wpe.weight"]["count"] == 6


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("then", [True, False])
def test_weights_may_be_frozen_later_or_no_longer(tmp_path, shards, monkeypatch, optimizer, then):
    """What is updated from then on, and has no state in the checkpoint, begins with none."""
    configure = train_gpt2.GPT.configure_optimizers
    flags = ["--data_dir", shards, "--log_dir", tmp_path, "--optimizer", optimizer, "--resume"]
    for max_steps, learns in ((2, not then), (4, then)):

        def frozen(self, *rest, learns=learns):
            self.transformer.h[1].requires_grad_(learns)
            return configure(self, *rest)

        monkeypatch.setattr(train_gpt2.GPT, "configure_optimizers", frozen)
        assert main(*flags, "--max_steps", max_steps) == 0
    old, new = load(tmp_path, 2)["model"], load(tmp_path, 4)
    for name in old.keys() - {"lm_head.weight"}:
        is_frozen = name.startswith("transformer.h.1.") and not then
        assert torch.equal(old[name], new["model"][name]) == is_frozen, name
        assert (name in new["optimizer"]) == (not is_frozen), name


def test_a_checkpoint_says_what_it_is(tmp_path, shards):
    """It is loaded without executing code, and its names are those of the model's parameters."""
    assert main("--data_dir", shards, "--log_dir", tmp_path, "--max_steps", 2) == 0
    saved = load(tmp_path, 2)
    keys = {"model", "optimizer", "scaler", "config", "args", "dtype", "step", "data", "script"}
    assert saved.keys() == keys and saved["step"] == 2 and saved["dtype"] == "float32"
    assert saved["args"]["dtype"] == "auto", "another machine chooses its own"
    lengths = {1: 700, 2: 1201, 3: 333}
    assert saved["data"] == {f"test_train_{i:06d}.npy": n for i, n in lengths.items()}
    model = train_gpt2.GPT(train_gpt2.GPTConfig(**saved["config"]))
    assert saved["model"].keys() == model.state_dict().keys()
    assert saved["script"] == Path(train_gpt2.__file__).read_text()


# ---- killed


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_is_known_before_its_first_step(tmp_path, shards, optimizer):
    """Killed there, it is continued with all of its flags, though the command names none of them."""
    flags = ["--data_dir", shards, "--max_steps", 4, "--val_every", 2, "--seed", 7, "--keep", 0]
    flags += ["--optimizer", optimizer, "--seq_len", 8]
    assert main(*flags, "--log_dir", tmp_path / "a") == 0
    patch = hook("if self.training: os.kill(os.getpid(), signal.SIGKILL)")
    assert run(*flags, "--log_dir", tmp_path / "b", patch=patch)[0] == -signal.SIGKILL
    assert list(read_log(tmp_path / "b")) == ["total_batch_size", "vocab_size", "val"]
    with pytest.raises(SystemExit, match="0"):
        train_gpt2.main(["--resume", "--log_dir", str(tmp_path / "b")])
    assert_same_run(tmp_path / "a", tmp_path / "b")


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


@slow
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_at_random_moments_the_run_ends_as_the_unbroken_one(tmp_path, shards, processes):
    """Launched with --resume after each kill. A seed makes the moments the same everywhere."""
    kills = {1: KILLS - KILLS // 3, 2: KILLS // 3}[processes]
    flags = ["--data_dir", shards, "--max_steps", 8 * kills, "--save_every", 2, "--keep", 2]
    flags += ["--val_every", 5, "--val_tokens", 64, "--batch_size", 8, "--resume"]
    assert run(*flags, "--log_dir", tmp_path / "a", processes=processes)[0] == 0
    rng = random.Random(processes)
    flags += ["--log_dir", tmp_path / "b"]
    for _ in range(kills):
        patch = KILLED_AT_A_LINE.format(victim=rng.randrange(processes), moment=rng.randrange(5000))
        result = run(*flags, processes=processes, patch=patch)
        assert result[0] == -signal.SIGKILL, result
    assert steps(tmp_path / "b")[-1:] != [8 * kills], "no kill came after the end"
    assert run(*flags, processes=processes)[0] == 0
    assert_same_run(tmp_path / "a", tmp_path / "b")


KILLED_IN_SAVE = """
def save_half(contents, file, save=torch.save):
    save(contents, file)
    if contents["step"] == 4:
        file.truncate(50000)
        os.kill(os.getpid(), signal.SIGKILL)
torch.save = save_half
"""


def test_a_file_counts_once_it_has_its_name(tmp_path, shards, monkeypatch):
    """A run that is killed while it saves continues the checkpoint before. Bytes reach the disk
    before their name, or a crash of the machine could leave the name without the bytes."""
    flags = ["--data_dir", shards, "--max_steps", 6, "--save_every", 2, "--batch_size", 8]
    calls, known = [], {"fsync": os.fsync, "replace": os.replace}
    for name, call in known.items():
        spy = lambda *args, call=call: (calls.append(call), call(*args))  # noqa: E731
        monkeypatch.setattr(os, name, spy)
    assert main(*flags, "--log_dir", tmp_path / "a") == 0
    assert calls == [*known.values()] * 5  # log.txt, four checkpoints
    assert run(*flags, "--log_dir", tmp_path / "b", patch=KILLED_IN_SAVE)[0] == -signal.SIGKILL
    names = {"log.txt", "model_00000.pt", "model_00002.pt", "unfinished.pt"}
    assert contents(tmp_path / "b").keys() == names
    assert main(*flags, "--log_dir", tmp_path / "b", "--resume") == 0
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_a_deleted_checkpoint_gives_back_its_disk(tmp_path, shards):
    """A run that was resumed from it maps it no longer: neither weights nor moments are the file's."""
    flags = ["--data_dir", shards, "--log_dir", tmp_path, "--save_every", 2, "--keep", 1]
    assert main(*flags, "--max_steps", 2) == 0
    patch = hook("print('mapped:', 'model_00002.pt' in open('/proc/self/maps').read())")
    status, out, err = run(*flags, "--max_steps", 6, "--resume", patch=patch)
    assert status == 0 and steps(tmp_path) == [6], err
    assert "mapped: False" in out and "mapped: True" not in out


def test_a_run_is_saved_before_it_is_evaluated(tmp_path, shards, monkeypatch):
    """An evaluation that fails after the last update loses nothing."""
    values = iter([5.0, 4.0])
    with monkeypatch.context() as broken:
        broken.setattr(train_gpt2, "validate", lambda *_: next(values))
        with pytest.raises(StopIteration):
            main("--data_dir", shards, "--log_dir", tmp_path, "--max_steps", 4, "--val_every", 2)
    assert steps(tmp_path) == [4]
    assert main("--log_dir", tmp_path, "--resume") == 0
    assert list(read_log(tmp_path)["val"]) == [0, 2, 4]


def test_a_longer_run_has_every_record_once(tmp_path, shards):
    """It keeps the validation at the end of the shorter one, which is off --val_every. What is due
    again where a run is resumed is recorded again, and no twice."""
    flags = ["--data_dir", shards, "--val_every", 2, "--save_every", 2, "--keep", 0, "--resume"]
    assert main(*flags, "--max_steps", 5, "--log_dir", tmp_path / "a") == 0
    broken = break_off(tmp_path / "a", tmp_path / "b", 4)
    assert main(*flags, "--max_steps", 5, "--log_dir", broken) == 0
    assert_same_run(tmp_path / "a", broken)
    assert main(*flags, "--max_steps", 8, "--log_dir", broken) == 0
    records = [line.split()[:2] for line in (broken / "log.txt").read_text().splitlines()]
    assert [int(step) for step, stream in records if stream == "val"] == [0, 2, 4, 5, 6, 8]
    assert [int(step) for step, stream in records if stream == "train"] == [*range(8)]


@pytest.mark.parametrize("old, new, is_other", [
    ('approximate="tanh"', 'approximate="none"', True), ("# mixes the heads", "# another word", False),
])  # fmt: skip
def test_a_script_with_another_model_says_so(tmp_path, shards, old, new, is_other):
    """With the same parameters, another layer may compute something else; another comment does not."""
    flags = ["--data_dir", shards, "--log_dir", tmp_path]
    patch = f"train_gpt2.SCRIPT = train_gpt2.SCRIPT.replace({old!r}, {new!r})"
    assert run(*flags, "--max_steps", 2, patch=patch)[0] == 0
    assert new in load(tmp_path, 2)["script"]
    status, out, _ = run(*flags, "--max_steps", 4, "--resume")
    assert status == 0 and out.count("of a script with another model section") == is_other


# ---- asked to stop


def signal_in(call: int, name: str, times=1, training=True, rank=0) -> str:
    """Return a patch that sends a signal in the process `rank`, in this call of the model."""
    when = f"rank == {rank} and self.training is {training} and calls.count({training}) == {call}"
    kill = f"    os.kill(os.getpid(), signal.{name})\n"
    return hook(f"if {when}:\n{times * kill}")


@pytest.mark.parametrize("name, processes, training, call", [
    ("SIGTERM", 2, True, 5), ("SIGHUP", 2, True, 5), ("SIGINT", 1, False, 8),  # 5 batches each
])  # fmt: skip
def test_a_signal_stops_the_run_after_a_save(tmp_path, shards, name, processes, training, call):
    """Also with --save_every 0. The step is finished, or the evaluation and the step after it. Only
    the last process gets it."""
    flags = ["--data_dir", shards, "--max_steps", 8, "--save_every", 8, "--keep", 0]
    flags += ["--val_every", 4, "--batch_size", 8]
    patch = signal_in(call, name, training=training, rank=processes - 1)
    if processes == 1:  # nobody reads the output: the same Ctrl-C has ended `| tee`
        patch += "r, w = os.pipe(); os.dup2(w, 1); os.dup2(w, 2); os.close(r)\n"
    a, b = tmp_path / "a", tmp_path / "b b"
    first = [*flags, "--save_every", 0, "--log_dir", b]
    status, out, _ = run(*first, processes=processes, patch=patch)
    others = [143] * (processes - 1)  # the first process, without a signal, may be the first to end
    assert status in (128 + getattr(signal, name), *others)
    assert (f"with --resume --log_dir '{b}'\n" in out) == (processes == 2)
    assert [steps(b), [*read_log(b)["val"]], [*read_log(b)["train"]]] == [[5], [0, 4], [*range(5)]]
    assert run(*flags, "--log_dir", b, "--resume", processes=processes)[0] == 0
    assert run(*flags, "--log_dir", a, processes=processes)[0] == 0
    (b / "model_00005.pt").unlink()  # the unbroken run saves nothing at this step, but at the start
    (a / "model_00000.pt").unlink()
    assert_same_run(a, b)


@pytest.mark.parametrize("patch", [
    signal_in(4, "SIGTERM"), NOHUP + signal_in(2, "SIGHUP"), "del signal.SIGHUP",
])  # fmt: skip
def test_a_signal_in_the_last_update_or_under_nohup_changes_nothing(tmp_path, shards, patch):
    """The run is complete: its last update is evaluated, sampled, saved, and the status is 0. So is
    one on Windows, which has no SIGHUP."""
    flags = ["--data_dir", shards, "--log_dir", tmp_path, "--max_steps", 4, "--sample_every", 4]
    status, out, _ = run(*flags, patch=patch)
    assert status == 0 and "sample 0: " in out and "done: " in out
    assert steps(tmp_path) == [4] and list(read_log(tmp_path)["val"]) == [0, 4]


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path, shards):
    """Nothing is saved then."""
    flags = ["--data_dir", shards, "--log_dir", tmp_path, "--max_steps", 8]
    status, _, err = run(*flags, patch=signal_in(5, "SIGINT", times=2))
    assert status == -signal.SIGINT and "saving after the next step" in err and not steps(tmp_path)


# ---- what --resume finds


def test_resume_starts_where_there_is_nothing_and_ends_where_all_is_done(tmp_path, shards, capsys):
    """The same command can be launched for ever."""
    flags = ["--data_dir", shards, "--log_dir", tmp_path / "log", "--max_steps", 2, "--resume"]
    assert main(*flags) == 0
    before = read_log(tmp_path / "log")
    assert list(before["train"]) == [0, 1] and list(before["val"]) == [0, 2]
    (tmp_path / "log/model_00009_copy.pt").touch()  # a user's own file is no checkpoint
    assert "log has no checkpoint: a new run begins" in capsys.readouterr().out
    assert main(*flags) == 0
    out = capsys.readouterr().out
    assert "step     2/2 | val loss" in out and "a new run begins" not in out
    assert "saved " not in out, "the checkpoint that was loaded is there"
    assert read_log(tmp_path / "log") == before and steps(tmp_path / "log") == [2]


def test_resume_refuses_what_would_be_another_run(tmp_path, shards, refused, capsys):
    """One line says what is different, and nothing on the disk is changed. Data may move: it is
    known by the names and lengths of its shards. So may the precision, which is reported."""
    flags = ["--data_dir", shards, "--log_dir", tmp_path / "log", "--max_steps", 4]
    assert main(*flags) == 0
    longer = write_shards(tmp_path / "longer", sizes=(700, 1201, 334))
    renamed = write_shards(tmp_path / "renamed")
    (renamed / "test_train_000003.npy").rename(renamed / "test_train_000004.npy")
    others = {
        "seed 1337, not 7": ["--seed", 7], "beyond --max_steps 3": ["--max_steps", 3],
        "longer has other data": ["--data_dir", longer],
        "renamed has other data": ["--data_dir", renamed],
    }  # fmt: skip
    before = contents(tmp_path / "log")
    for message, other in others.items():
        assert refused(message, *flags, "--resume", *other), message
        assert contents(tmp_path / "log") == before, message
    flags += ["--data_dir", shards.rename(tmp_path / "moved"), "--dtype", "bfloat16"]
    assert main(*flags, "--resume", "--max_steps", 5) == 0
    assert "is at step 4 of 5, so far in float32" in capsys.readouterr().out
    assert load(tmp_path / "log", 5)["dtype"] == "bfloat16"
    assert main(*flags, "--resume", "--max_steps", 6, "--dtype", "float16") == 0, "a new scaler"


def test_a_run_with_a_flag_that_the_script_lacks_is_refused(tmp_path, shards, refused, monkeypatch):
    """The flag would be forgotten. The model of the run is known, and can be evaluated."""
    flags = ["--data_dir", shards, "--log_dir", tmp_path / "log"]
    with monkeypatch.context() as fork:
        fork.setitem(train_gpt2.FLAGS[train_gpt2.RUN], "smoothing", (float, 0.0, "of labels"))
        fork.setitem(train_gpt2.DEFAULTS, "smoothing", 0.0)
        assert main(*flags, "--max_steps", 1) == 0
    assert refused("was made with ['smoothing'], which this script does", *flags, "--resume")
    assert main("--init_from", tmp_path / "log", "--max_steps", 0) == 0


def test_a_damaged_newest_checkpoint_is_named_and_nothing_is_changed(tmp_path, shards, refused):
    """Wherever it was cut short. Once the user has deleted it, --resume continues the one before."""
    flags = ["--data_dir", shards, "--max_steps", 4, "--save_every", 2, "--log_dir"]
    assert main(*flags, tmp_path / "a") == 0
    newest = shutil.copytree(tmp_path / "a", tmp_path / "b") / "model_00004.pt"
    whole = newest.read_bytes()
    lengths = (0, 100, 30_000, 60_000, 66_000, 300_000, len(whole) - 1)  # bytes
    for damaged in (b"not a checkpoint", *(whole[:length] for length in lengths)):
        newest.write_bytes(damaged)
        before = contents(tmp_path / "b")
        assert refused(f"{newest} cannot be loaded", *flags, tmp_path / "b", "--resume")
        assert contents(tmp_path / "b") == before
    newest.unlink()
    assert main(*flags, tmp_path / "b", "--resume") == 0
    assert_same_run(tmp_path / "a", tmp_path / "b")
