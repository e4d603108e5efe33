"""Runs on machines that fail: whatever happens, nothing is lost, and one line says what happened.

`GPT2_TEST_KILLS=50 python -m pytest tests/test_faults.py -k random` kills 50 times instead of 10.
"""

import errno
import fcntl
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    FLAGS,
    ROOT,
    break_loss,
    free_port,
    read_log,
    run_main,
    run_script,
    start_script,
    start_warm,
)
from torch.nn import functional as F

import train_gpt2
from fineweb import UserError

KILLS = int(os.environ.get("GPT2_TEST_KILLS", "10"))
SCRIPT = str(Path(__file__).parent / "run_tiny.py")
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def train(log_dir, shards, *flags) -> int:
    """Train in this process and return the exit status."""
    return run_main("--data_dir", shards, "--log_dir", log_dir, *FLAGS, *flags)


def steps(log_dir) -> list[int]:
    return [int(path.stem[6:]) for path in train_gpt2.list_checkpoints(str(log_dir))]


def same_weights(a, b) -> bool:
    a, b = (train_gpt2.load_checkpoint(path)["model"] for path in (a, b))
    return all(torch.equal(a[name], b[name]) for name in a)


# -----------------------------------------------------------------------------
# killed


@pytest.mark.parametrize("processes", [1, 2])
def test_killed_at_random_moments_the_run_is_the_unbroken_one(tmp_path, shards, processes):
    """Anything that a kill can lose or mix: half a checkpoint, half a record, a step done twice."""
    # long enough for several kills, with something to do between steps
    flags = ["--data_dir", shards, *FLAGS, "--max_steps", 400, "--save_every", 20, "--keep", 2]
    flags += ["--val_every", 50, "--batch_size", 8, "--resume"]
    status, _, err = run_script([*flags, "--log_dir", tmp_path / "a"], processes=processes)
    assert status == 0, err
    # kills at moments that no signal announces
    rng = random.Random(0)
    killed = 0
    wanted = KILLS * 3 // 5 if processes == 1 else KILLS * 2 // 5
    while killed < wanted:
        started = start_warm(tmp_path / "out", [*flags, "--log_dir", tmp_path / "b"], processes)
        started[0].join(rng.uniform(0.3, 1.5) * processes)  # seconds
        alive = [process for process in started if process.is_alive()]
        for process in alive:
            process.kill()
        for process in started:
            process.join()
        killed += bool(alive)
        if steps(tmp_path / "b")[-1:] == [400]:  # too late to lose anything: begin again
            for path in (tmp_path / "b").iterdir():
                path.unlink()
    status, _, err = run_script([*flags, "--log_dir", tmp_path / "b"], processes=processes)
    assert status == 0, err
    assert read_log(tmp_path / "a") == read_log(tmp_path / "b")
    assert same_weights(tmp_path / "a/model_00400.pt", tmp_path / "b/model_00400.pt")
    assert steps(tmp_path / "b") == [380, 400]
    assert not list((tmp_path / "b").glob("*.tmp"))


def test_torchrun_restarts_a_killed_process_and_the_run_goes_on(tmp_path, shards):
    """A restart that hangs on the dead process's address, or begins at step 0."""
    flags = ["--data_dir", shards, *FLAGS, "--max_steps", 300, "--save_every", 20, "--resume"]
    flags += ["--val_every", 0, "--batch_size", 8, "--log_dir", tmp_path / "log"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["--max_restarts=2", SCRIPT, *map(str, flags)]
    process = subprocess.Popen(command, cwd=ROOT, env={**ENV, "KILL_RANK_AT": "1:50"},
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert steps(tmp_path / "log")[-1] == 300
    assert out.count("step    45/300 | loss") == 2, "once before the kill, once from step 40 on"
    assert list(read_log(tmp_path / "log")["train"]) == list(range(300))


# -----------------------------------------------------------------------------
# checkpoints that are damaged, of another run, or out of reach


def flip(path, at=0.5):
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [
    lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    lambda path: path.write_bytes(b""),
    lambda path: flip(path),
    lambda path: torch.save({"model": {}}, path),
    lambda path: torch.save([1, 2], path),
    lambda path: torch.save(torch.load(path) | {"config": {"n_layer": "two"}}, path),
    lambda path: torch.save(torch.load(path) | {"model": {"a": torch.zeros(3)}}, path),
    lambda path: torch.save(torch.load(path) | {"model": {"a": 3}}, path),
], ids=["half", "empty", "bit", "keys", "list", "config", "weights", "types"])  # fmt: skip
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path, shards, damage, capsys
):
    """A flipped bit that torch.load does not notice; --keep that keeps only the damaged file."""
    flags = ("--max_steps", 6, "--save_every", 2, "--keep", 2)
    assert train(tmp_path / "log", shards, *flags) == 0
    log = read_log(tmp_path / "log")
    damage(tmp_path / "log/model_00006.pt")
    capsys.readouterr()
    assert train(tmp_path / "log", shards, *flags, "--resume") == 0
    assert "model_00006.pt cannot be read" in capsys.readouterr().out
    assert read_log(tmp_path / "log") == log and steps(tmp_path / "log") == [4, 6]
    train_gpt2.load_checkpoint(tmp_path / "log/model_00006.pt")


@pytest.mark.parametrize("key", ["step", "position", "optimizer", "scaler", "data"])
def test_a_checkpoint_without_what_resuming_needs_is_refused(tmp_path, shards, key, capsys):
    """A KeyError in the middle of the night."""
    flags = ("--max_steps", 4, "--save_every", 4)
    assert train(tmp_path / "log", shards, *flags) == 0
    path = tmp_path / "log/model_00004.pt"
    checkpoint = torch.load(path)
    del checkpoint[key]
    torch.save(checkpoint, path)
    capsys.readouterr()
    assert train(tmp_path / "log", shards, *flags, "--resume") == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and key in captured.out + captured.err


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_checkpoint_that_cannot_be_read_now_is_not_called_damaged(
    tmp_path, shards, capsys, monkeypatch, number, late
):
    """A disk with a hiccup: the run went back to an older checkpoint and set a good one aside."""
    assert train(tmp_path / "log", shards, "--max_steps", 4, "--save_every", 2) == 0

    def fail(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(*(train_gpt2.ZipFile, "testzip") if late else (os.path, "getsize"), fail)
    assert train(tmp_path / "log", shards, "--max_steps", 4, "--resume") == 2
    err = capsys.readouterr().err
    assert "model_00004.pt cannot be read" in err and os.strerror(number) in err
    assert steps(tmp_path / "log") == [2, 4]


def test_a_checkpoint_under_another_number_is_not_the_newest(tmp_path, shards, capsys):
    """A copy of step 2 as model_00099.pt, and the good step 4 was set aside."""
    assert train(tmp_path / "log", shards, "--max_steps", 4, "--save_every", 2) == 0
    copy = tmp_path / "log/model_00099.pt"
    copy.write_bytes((tmp_path / "log/model_00002.pt").read_bytes())
    assert train(tmp_path / "log", shards, "--max_steps", 6, "--resume") == 0
    out = capsys.readouterr().out
    assert "model_00099.pt is not of that step, but of 2" in out and "resumed at step 4" in out
    assert steps(tmp_path / "log") == [2, 4, 6]


def test_a_damaged_file_of_a_higher_number_costs_no_good_checkpoint(tmp_path, shards):
    """--keep that counts the damaged file and deletes the one just saved."""
    flags = ("--save_every", 2, "--keep", 1, "--resume")
    assert train(tmp_path / "log", shards, "--max_steps", 4, *flags) == 0
    (tmp_path / "log/model_00099.pt").write_bytes(b"PK damaged")
    assert train(tmp_path / "log", shards, "--max_steps", 8, *flags) == 0
    assert steps(tmp_path / "log") == [8]
    assert (tmp_path / "log/model_00099.pt.damaged").exists(), "nothing is deleted unasked"


def test_keep_is_kept_by_a_run_that_was_killed_before_it_could(tmp_path, shards):
    """A kill between save and prune that leaves one checkpoint too many for good."""
    flags = ("--max_steps", 4, "--save_every", 2)
    assert train(tmp_path / "log", shards, *flags) == 0
    assert train(tmp_path / "log", shards, *flags, "--resume", "--keep", 1) == 0
    assert steps(tmp_path / "log") == [4]


def test_a_bad_first_batch_costs_no_earlier_run(tmp_path, shards, capsys):
    """--overwrite that deletes the old run, and then the start fails."""
    assert train(tmp_path / "log", shards, "--max_steps", 4, "--save_every", 2) == 0
    log = (tmp_path / "log/log.txt").read_bytes()
    for path in shards.glob("*train*"):
        np.save(path, np.full_like(np.load(path), 300))
    capsys.readouterr()
    assert train(tmp_path / "log", shards, "--max_steps", 4, "--overwrite") == 2
    assert "is damaged" in capsys.readouterr().err
    assert steps(tmp_path / "log") == [2, 4] and (tmp_path / "log/log.txt").read_bytes() == log


def test_processes_that_see_different_checkpoints_stop(tmp_path, shards):
    """Weights of step 10 on one machine and of step 0 on the other, and 'done'."""
    flags = ["--data_dir", shards, *FLAGS, "--max_steps", 4, "--save_every", 2, "--batch_size", 8]
    assert run_script([*flags, "--log_dir", tmp_path / "log"])[0] == 0
    status, out, err = run_script(
        [*flags, "--log_dir", tmp_path / "log", "--resume"], processes=2, HIDE_CHECKPOINTS="1"
    )
    assert status != 0 and "step     4/4" not in out
    assert err.count("different checkpoints, data or flags") == 1, err
    assert steps(tmp_path / "log") == [2, 4]


def test_data_with_other_content_is_another_run(tmp_path, shards, capsys):
    """Shards of the same names and sizes, made of other text."""
    flags = ("--max_steps", 4, "--save_every", 2)
    assert train(tmp_path / "log", shards, *flags) == 0
    path = shards / "test_train_000002.npy"
    np.save(path, np.load(path)[::-1])
    capsys.readouterr()
    assert train(tmp_path / "log", shards, *flags, "--resume") == 2
    assert "data_sample is" in capsys.readouterr().err


def test_a_checkpoint_before_the_first_update_resumes_bit_for_bit(tmp_path, shards, monkeypatch):
    """An empty optimizer state, filled by a step of zeros that counts."""
    monkeypatch.setattr(F, "cross_entropy", F.cross_entropy)
    flags = ("--max_steps", 6, "--save_every", 1, "--dtype", "float16")
    break_loss(lambda n, loss: loss * 1e36 if n == 0 else loss)  # the first update overflows
    assert train(tmp_path / "a", shards, *flags) == 0
    (tmp_path / "b").mkdir()
    first = tmp_path / "a/model_00001.pt"
    (tmp_path / "b/model_00001.pt").write_bytes(first.read_bytes())
    assert torch.load(first)["optimizer"] == {}
    assert train(tmp_path / "b", shards, *flags, "--resume") == 0
    assert same_weights(tmp_path / "a/model_00006.pt", tmp_path / "b/model_00006.pt")
    state = torch.load(tmp_path / "b/model_00006.pt")["optimizer"]["state"]
    assert {int(s["step"]) for s in state.values()} == {5}


# -----------------------------------------------------------------------------
# divergence


def test_a_diverged_run_stops_with_status_1_however_often_it_is_started(
    tmp_path, shards, monkeypatch, capsys
):
    """A cluster that relaunches until a run of nan is 'done'; good checkpoints pruned meanwhile."""
    monkeypatch.setattr(F, "cross_entropy", F.cross_entropy)
    break_loss(lambda n, loss: loss * float("nan") if n >= 10 else loss)
    # 15 to 25 are saved, so that the count of skipped updates goes on, but are not good
    flags = ["--max_steps", 60, "--save_every", 5, "--keep", 2, "--batch_size", 16, "--resume"]
    for _ in range(3):
        assert train(tmp_path / "log", shards, *flags) == 1
        err = capsys.readouterr().err
        found = r"20 updates were skipped .*last good checkpoint is .*model_00010.pt: delete newer"
        assert re.search(found, err), err
    assert {5, 10} <= set(steps(tmp_path / "log")), "the good ones are still there"


def test_weights_that_are_not_finite_are_never_saved(tmp_path, shards, monkeypatch, capsys):
    """A nan that an update makes, saved before any loss could show it."""
    update = torch.optim.AdamW.step
    calls = iter(range(100))

    def step(self, *args, **kwargs):
        update(self, *args, **kwargs)
        if next(calls) == 5:
            self.param_groups[0]["params"][1].data[0, 0] = float("nan")

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    assert train(tmp_path / "log", shards, "--max_steps", 9, "--save_every", 2, "--keep", 1) == 1
    assert re.search(r"not finite at step 6; .*model_00004", capsys.readouterr().err)
    assert steps(tmp_path / "log") == [4]


def test_sampling_from_a_diverged_model_prints_something(tmp_path, shards, monkeypatch):
    """An error of torch.multinomial that ends the run before it could stop properly."""
    model = train_gpt2.GPT(train_gpt2.GPTConfig(2, 2, 32, 16, 257, "bytes", 256))
    model.transformer.wpe.weight.data[:] = float("nan")
    flags = {"max_new_tokens": 4, "temperature": 1.0, "top_k": 0, "seq_len": 16, "seed": 1}
    args = train_gpt2.Namespace(**flags)
    out = train_gpt2.generate(model, torch.zeros(2, 1, dtype=torch.int64), args)
    assert out.max() <= 256


# -----------------------------------------------------------------------------
# output, folders, disks


@pytest.mark.parametrize("reader", ["head -n 3", "head -n 3; sleep 1"])
def test_output_that_nobody_reads_does_not_end_a_run(tmp_path, shards, reader):
    """A broken pipe after `| head`, before anything was saved."""
    flags = ["--data_dir", shards, *FLAGS, "--max_steps", 30, "--log_dir", tmp_path / "log"]
    command = " ".join([sys.executable, SCRIPT, *map(str, flags)])
    script = f"set -o pipefail; {command} | ({reader}); echo status $?"
    out = subprocess.run(["bash", "-c", script], cwd=ROOT, env=ENV, capture_output=True, text=True)
    assert "status 0" in out.stdout, out
    assert steps(tmp_path / "log") == [30]
    assert "Traceback" not in out.stderr and "Exception ignored" not in out.stderr


def test_ctrl_c_saves_although_the_readers_die_first(tmp_path, shards):
    """`2>&1 | tee log` and Ctrl-C: both pipes break before the checkpoint is written."""
    flags = ["--data_dir", shards, *FLAGS, "--max_steps", 10**6, "--log_dir", tmp_path / "log"]
    flags += ["--val_every", 0, "--save_every", 0]
    process = subprocess.Popen([sys.executable, SCRIPT, *map(str, flags)], cwd=ROOT, env=ENV,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    for line in process.stdout:
        if "step     5/" in line:
            break
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT
    assert len(steps(tmp_path / "log")) == 1


def test_closed_streams_and_a_narrow_encoding_are_survived(tmp_path, shards):
    """stderr's number given to log.txt; a sample that the terminal cannot encode."""
    flags = ["--data_dir", shards, *FLAGS, "--max_steps", 4, "--log_dir", tmp_path / "log"]
    flags += ["--sample_every", 2, "--prompt", "漢字", "--save_every", 4]
    command = " ".join([sys.executable, SCRIPT, *map(str, flags)])
    env = {**ENV, "PYTHONIOENCODING": "cp1252"}
    out = subprocess.run(
        ["bash", "-c", f"{command} 2>&- <&-"], cwd=ROOT, env=env, capture_output=True
    )
    assert out.returncode == 0, out
    assert steps(tmp_path / "log") == [4] and b"sample 0: ??" in out.stdout
    whole = {"total_batch_size", "vocab_size", "train", "val", "lr", "norm"}
    assert set(read_log(tmp_path / "log")) == whole, "and nothing else"


def test_two_runs_in_one_folder_are_refused(tmp_path, shards, capsys):
    """Mixed checkpoints, a dead run, 'done' with the other's weights."""
    (tmp_path / "log").mkdir()
    descriptor = os.open(tmp_path / "log", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert train(tmp_path / "log", shards, "--max_steps", 1) == 2
    assert "another process is training in" in capsys.readouterr().err
    os.close(descriptor)
    assert train(tmp_path / "log", shards, "--max_steps", 1) == 0


def test_other_peoples_temporary_files_stay(tmp_path, shards):
    """`--log_dir .` that deletes every *.tmp."""
    (tmp_path / "thesis.tmp").write_text("a year's work")
    (tmp_path / "model_00003.pt.77.tmp").write_text("left by a killed run")
    assert train(tmp_path, shards, "--max_steps", 1) == 0
    assert (tmp_path / "thesis.tmp").exists()
    assert not (tmp_path / "model_00003.pt.77.tmp").exists()


def limit_file_size():
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))  # bytes; a checkpoint has more
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk_is_one_line_and_leaves_nothing_behind(tmp_path, shards, processes):
    """A traceback that ends in 'unexpected pos', and a .tmp that keeps the disk full. The second
    process went on, and its 'Connection closed by peer' hid the reason."""
    flags = ["--data_dir", shards, *FLAGS, "--max_steps", 4, "--log_dir", tmp_path / "log"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    launcher = torchrun if processes > 1 else []
    command = [sys.executable, *launcher, SCRIPT, *map(str, [*flags, "--save_every", 2])]
    out = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True,
                         preexec_fn=limit_file_size)  # fmt: skip
    assert out.returncode == 1, out.stderr
    ours = [line for line in out.stderr.splitlines() if "model_00002" in line or "peer" in line]
    [line] = ours if processes > 1 else out.stderr.splitlines()  # torchrun prints lines of its own
    assert re.fullmatch(r"train_gpt2.py: .*model_00002.pt cannot be written: .*", line), out
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == ["log.txt"]


def test_a_folder_that_is_a_file_is_noticed_before_anything_is_built(tmp_path, shards, capsys):
    """Minutes of setup for an error that was there from the start."""
    (tmp_path / "log").write_text("")
    assert train(tmp_path / "log", shards, "--max_steps", 1) == 2
    assert "log is a file" in capsys.readouterr().err


def test_garbage_in_the_log_is_dropped(tmp_path, shards):
    """A blank line that ends every --resume in a traceback."""
    flags = ("--max_steps", 4, "--save_every", 2)
    assert train(tmp_path / "log", shards, *flags) == 0
    log = read_log(tmp_path / "log")
    (tmp_path / "log/model_00004.pt").unlink()
    with open(tmp_path / "log/log.txt", "ab") as file:
        file.write(b"\n\xff\xfe garbage\n-3 train x\n2 tra")
    assert train(tmp_path / "log", shards, *flags, "--resume") == 0
    assert read_log(tmp_path / "log") == log


# -----------------------------------------------------------------------------
# data that changes, processes that fail alone


@pytest.mark.parametrize("processes", [1, 2])
def test_data_damaged_while_training_is_named_after_a_save(tmp_path, shards, processes):
    """Hours lost to a bad token in a late shard."""
    path = shards / "test_train_000001.npy"
    tokens = np.load(path)
    tokens[-40:] = 300  # the last windows only: some later step meets them
    np.save(path, tokens)
    flags = ["--data_dir", shards, *FLAGS, "--max_steps", 40, "--log_dir", tmp_path / "log"]
    flags += ["--save_every", 0, "--total_batch_size", 64, "--batch_size", 2]
    later = {"READ_LATER": "1"} if processes > 1 else {}
    status, _, err = run_script(flags, processes, **later)
    assert status == 1, err
    assert err.count("test_train_000001.npy is damaged") == 1, err
    [step] = steps(tmp_path / "log")
    assert step > 0 and step not in read_log(tmp_path / "log")["train"]
    # mended, it goes on as if nothing had been
    tokens[-40:] = 32
    np.save(path, tokens)
    saved = train_gpt2.load_checkpoint(tmp_path / f"log/model_{step:05d}.pt")
    assert saved["position"] == step * 4 and saved["skipped"] == 0


@pytest.mark.parametrize("processes, step", [(1, 3), (1, -3), (2, 3)])
def test_a_shard_truncated_or_deleted_while_training_is_named_after_a_save(
    tmp_path, shards, processes, step
):
    """SIGBUS: a process that ends without a word, and everything since the last checkpoint."""
    path = shards / "test_train_000002.npy"
    flags = ["--data_dir", shards, *FLAGS, "--max_steps", 99, "--log_dir", tmp_path / "log"]
    flags += ["--save_every", 0, "--batch_size", 2, "--val_every", 0]
    later = {"READ_LATER": "1"} if processes > 1 else {}
    status, out, err = run_script(flags, processes, SPOIL_AT=f"{step}:{path}", **later)
    assert status == 1, err
    [line] = [line for line in err.splitlines() if "test_train_000002.npy" in line]
    assert line.startswith("train_gpt2.py: ")
    [saved] = steps(tmp_path / "log")
    assert saved > 3 and "done" not in out


@pytest.mark.parametrize("max_steps", [0, 4])
def test_damaged_validation_data_ends_the_run_with_one_line(tmp_path, shards, max_steps):
    """A validation loss of nan that nobody explains, and 'done'."""
    path = shards / "test_val_000000.npy"
    tokens = np.load(path)
    tokens[300:320] = 300
    np.save(path, tokens)
    flags = ["--data_dir", shards, *FLAGS, "--max_steps", max_steps, "--log_dir", tmp_path / "log"]
    status, out, err = run_script(flags)
    assert status == 2, err
    assert err.count("test_val_000000.npy is damaged") == 1 and "done" not in out, out


def test_machines_started_with_different_flags_stop(tmp_path, shards):
    """Each replica updated by a learning rate of its own, and the first one's saved as the model."""
    flags = ["--data_dir", shards, *FLAGS, "--max_steps", 4, "--log_dir", tmp_path / "log"]
    launcher = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=test"]
    launcher += [f"--rdzv_endpoint=127.0.0.1:{free_port()}"]
    differing = (["--max_lr", 0.01], ["--max_lr", 0.001, "--val_every", 0])
    machines = [start_script([*flags, *some], launcher=launcher) for some in differing]
    outputs = [machine.communicate(timeout=120) for machine in machines]
    assert all(machine.returncode for machine in machines)
    printed = "".join(err for _, err in outputs)
    assert "different checkpoints, data or flags" in printed and "KeyError" not in printed


def test_an_error_that_only_one_process_meets_is_printed_by_it(tmp_path, shards):
    """'Connection closed by peer' on process 0 for a file that only process 1 cannot read."""
    flags = ["--data_dir", shards, *FLAGS, "--max_steps", 4, "--log_dir", tmp_path / "log"]
    status, _, err = run_script([*flags, "--batch_size", 8], processes=2, NO_DATA="1")
    assert status != 0
    assert err.count("train_gpt2.py: there is no folder") == 1, err


def test_rank_without_world_size_is_refused(tmp_path, shards, monkeypatch, capsys):
    """A run that trains for hours and writes nothing."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert train(tmp_path / "log", shards, "--max_steps", 1) == 2
    assert "RANK is 1 and WORLD_SIZE 1" in capsys.readouterr().err


@pytest.mark.parametrize("meta, message", [
    ('{"tokenizer": "bytes", "vocab_size": "257", "eot": 256}', "vocab_size 257 and eot 256"),
    ('{"tokenizer": "bytes", "vocab_size": null, "eot": 256}', "vocab_size None"),
    ('{"tokenizer": "bytes", "vocab_size": 100000, "eot": 256}', "16 bits"),
    ('{"tokenizer": "bytes", "vocab_size": 257, "eot": 257}', "eot 257"),
    ('{"tokenizer": "bytes", "vocab_size": 257, "eot": 256, "progress": {"done": false}}',
     "still being built"),
    ('[1, 2]', "cannot be read"), ('{"tokenizer": "bytes"}', "cannot be read"),
])  # fmt: skip
def test_a_meta_json_that_cannot_be_is_refused(tmp_path, shards, meta, message, capsys):
    """A model of 2**31 rows, or a run on data that is still being written."""
    (shards / "meta.json").write_text(meta)
    assert train(tmp_path / "log", shards, "--max_steps", 1) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1, err


def test_parts_that_were_not_merged_are_refused(tmp_path, shards, capsys):
    """A third of the data trained on as if it were all, or as another tokenizer's."""
    (shards / "meta.json").rename(shards / "meta-001-of-003.json")
    assert train(tmp_path / "log", shards, "--max_steps", 1) == 2
    assert "--merge" in capsys.readouterr().err


def test_a_fifo_is_no_shard(shards):
    """A start that hangs for ever."""
    os.mkfifo(shards / "more_train_000009.npy")
    assert "more_train_000009.npy" not in train_gpt2.open_shards(str(shards), "train")


def test_no_pickle_is_executed(tmp_path):
    """A checkpoint from somebody else that runs a command."""

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/owned",)

    torch.save({"model": {}, "config": {}, "args": Evil()}, tmp_path / "model_00001.pt")
    with pytest.raises(UserError, match="cannot be read"):
        train_gpt2.load_checkpoint(tmp_path / "model_00001.pt")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("flags, status", [((), 0), (("--batch_size", "16"), 1)])
def test_out_of_memory_in_the_first_step_halves_a_batch_size_that_nobody_chose(
    tmp_path, shards, monkeypatch, capsys, flags, status
):
    """An evening lost to a card that another program uses, too."""
    right = F.cross_entropy

    def cross_entropy(logits, *args, **kwargs):
        if torch.is_grad_enabled() and len(logits) > 4 * 16:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return right(logits, *args, **kwargs)

    monkeypatch.setattr(F, "cross_entropy", cross_entropy)
    where = ["--data_dir", shards, *FLAGS, "--max_steps", 2, "--log_dir", tmp_path / "log"]
    assert run_main(*where, *flags) == status
    printed = capsys.readouterr()
    if status == 0:
        assert re.findall("note: (.*)", printed.out) == [
            "16 sequences need too much memory; trying 8",
            "8 sequences need too much memory; trying 4",
        ]
        assert list(read_log(tmp_path / "log")["train"]) == [0, 1]
    else:
        assert "A smaller --batch_size" in printed.err and printed.err.count("\n") == 1


def test_out_of_memory_later_is_one_line(tmp_path, shards, monkeypatch, capsys):
    """A run that begins anew in the middle of the night."""
    calls = iter(range(10**9))
    right = F.cross_entropy

    def cross_entropy(*args, **kwargs):
        if torch.is_grad_enabled() and next(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return right(*args, **kwargs)

    monkeypatch.setattr(F, "cross_entropy", cross_entropy)
    where = ["--data_dir", shards, *FLAGS, "--max_steps", 4, "--log_dir", tmp_path / "log"]
    assert run_main(*where) == 1
    assert "A smaller --batch_size" in capsys.readouterr().err
    assert list(read_log(tmp_path / "log")["train"]) == [0, 1]


def test_overwrite_deletes_nothing_if_only_the_second_process_has_bad_data(tmp_path, shards):
    """The old run gone, and the new one never begun."""
    flags = ["--data_dir", shards, *FLAGS, "--log_dir", tmp_path / "log", "--no-shuffle"]
    flags += ["--batch_size", 2, "--max_steps", 4, "--save_every", 2]
    assert run_script(flags, 2)[0] == 0
    before = (tmp_path / "log/log.txt").read_bytes()
    path = shards / "test_train_000001.npy"
    tokens = np.load(path)
    tokens[2 * 16 + 5] = 300  # window 2: the first batch of process 1
    np.save(path, tokens)
    status, _, err = run_script([*flags, "--overwrite"], 2)
    assert status != 0 and "is damaged" in err
    assert (tmp_path / "log/log.txt").read_bytes() == before
    assert steps(tmp_path / "log") == [2, 4]


def test_a_diverged_run_of_an_older_version_stops_too(tmp_path, shards, monkeypatch, capsys):
    """A count of 20 in the checkpoint, and 21 at the next update, which is not 20."""
    where = ["--data_dir", shards, *FLAGS, "--log_dir", tmp_path / "log"]
    assert run_main(*where, "--max_steps", 2) == 0
    path = tmp_path / "log/model_00002.pt"
    torch.save(torch.load(path) | {"skipped": 20}, path)
    monkeypatch.setattr(F, "cross_entropy", F.cross_entropy)  # is put back after the test
    break_loss(lambda n, loss: loss * float("nan"))
    assert run_main(*where, "--max_steps", 40, "--resume") == 1
    assert "updates were skipped in a row" in capsys.readouterr().err
