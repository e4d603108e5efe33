"""Promise 5, and what other failures do: they end the program, and damage nothing on the disk."""

import math
import os
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import contents, hook, main, read_log, run, state, steps, words

import train_gpt2


# In update 2, the losses of process 1 are multiplied by nan, and with them its gradients, or inf is
# added to them, of which its gradients know nothing, or its gradients alone overflow, as in float16
@pytest.mark.parametrize(
    "change", ["* float('nan')", "+ float('inf')", "+ 1e38 * (losses - losses.detach())"]
)
def test_all_processes_skip_an_update_in_which_one_fails(shards, change):
    patch = hook(f"if rank == 1 and sum(calls) == 3 and calls[-1]: losses = losses {change}")
    flags = "--max_steps 5 --save_every 1 --keep 0 --batch_size 8"
    status, out, err = run(flags, processes=2, patch=patch)
    assert status == 0, err
    losses, norms = (read_log()[stream] for stream in ("train", "norm"))
    assert [step for step in losses if not math.isfinite(losses[step] + norms[step])] == [2]
    [line] = [line for line in out.splitlines() if "update skipped" in line]
    assert line.startswith("step     2/5 | loss: ")
    assert state("log", 2) == state("log", 3)
    assert losses[4] < losses[3] < losses[1] < losses[0]


def test_twenty_skipped_updates_in_a_row_end_the_run(shards, break_losses, refused):
    break_losses(lambda n, losses: losses if n in (19, 20, 40) else losses * math.nan)
    flags = "--max_steps 99 --save_every 15 --val_every 0 --keep 0"
    assert refused("20 updates in a row were not finite: try a lower --max_lr", flags)
    assert list(read_log()["train"]) == list(range(41 + 20))
    assert state("log", 45) == state("log", 60) != state("log", 30)


@pytest.fixture
def old(shards):
    """Make a run of two updates in the folder log, and return what is there."""
    assert main("--max_steps 2 --save_every 1") == 0
    return contents("log")


def test_a_new_run_fails_before_it_writes(shards):
    patch = "if rank == 1: train_gpt2.make_state = lambda *_: 1 / 0"  # the last thing that can fail
    status, _, err = run("--max_steps 1 --batch_size 8", processes=2, patch=patch)
    assert status != 0 and "ZeroDivisionError" in err and not Path("log").exists()


def test_a_sample_of_the_quickstart_needs_no_data(shards, capsys):
    assert main("--log_dir log/quickstart --max_steps 1 --num_samples 1") == 0
    with pytest.raises(SystemExit, match=r"^0$"):
        train_gpt2.main(["--quickstart", "--sample"])
    assert "sample 0: Hello" in capsys.readouterr().out


FULL_DISK = """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that a write fails with an OSError
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # bytes
"""
NO_MEMORY = "if rank == 1 and self.training: raise torch.OutOfMemoryError('CUDA out of memory')"


@pytest.mark.parametrize("patch, processes, error", [
    (FULL_DISK, 1, "model_00004.pt cannot be written: [Errno 27] File too large"),
    (hook(NO_MEMORY), 2, "CUDA out of memory"),
])  # fmt: skip
def test_a_full_disk_or_memory_ends_the_run(old, patch, processes, error):
    flags = "--resume --max_steps 4 --save_every 4 --batch_size 8"
    status, _, err = run(flags, processes=processes, patch=patch)
    assert status == processes % 2 + 1 and error in err and ("Traceback" in err) == (status == 1)
    assert contents("log") == old | {"log.txt": contents("log")["log.txt"]}
    assert main(flags) == 0 and steps() == [2, 4]


@pytest.mark.parametrize("name", ["torch.save", "train_gpt2.GPT.load_state_dict"])
def test_a_bug_is_no_users_mistake(old, monkeypatch, name):
    """What is no error of a file or of its contents is a traceback."""
    monkeypatch.setattr(name, Mock(side_effect=RuntimeError("CUDA error")))
    with pytest.raises(RuntimeError, match="CUDA error"):
        train_gpt2.main(words("--resume --max_steps 4 --save_every 1"))
    assert contents("log").keys() == old.keys()


def test_a_copy_of_the_script_has_its_own_name(monkeypatch, capsys):
    monkeypatch.setattr(train_gpt2, "__file__", "somewhere/mine.py")
    for flags in ("--typo", "--seq_len 0", "--log_dir /nowhere/else --sample"):
        with pytest.raises(SystemExit, match="2"):
            train_gpt2.main(flags.split())
        assert capsys.readouterr().err.startswith("mine.py: ")


# A log_dir that another program deletes in update 3, or that becomes a file, and a disk of 150 bytes,
# on which no more records fit: they alone end no run
GONE = "if self.training and sum(calls) == 4: import shutil; shutil.rmtree('log')"
SMALL_DISK = FULL_DISK.replace("50_000", "150")


@pytest.mark.parametrize("patch, every, message, saved", [
    (hook(GONE), 1000, "", [4]), (hook(GONE + "; open('log', 'w')"), 1000, "/log'", []),
    (SMALL_DISK, 0, "", []),
])  # fmt: skip
def test_an_output_that_cannot_be_written_is_named(shards, patch, every, message, saved):
    """At any time, in one line. A folder that has vanished is made again for the last checkpoint."""
    status, _, err = run(f"--max_steps 4 --save_every {every}", patch=patch)
    assert status == 2 * bool(message) and err.count("\n") == bool(message) and message in err
    assert steps() == saved


@pytest.mark.parametrize("names, flags, text", [
    ("hellaswag.fetch", "--hellaswag on", "save it as " + "/folder" * 40),  # is not cut
    ("tiktoken.Encoding tiktoken.get_encoding", "--val_every 4", "no network"),
    ("transformers.AutoConfig.from_pretrained", "--init_from gpt2", "no network"),
])  # fmt: skip
def test_what_cannot_be_downloaded_ends_the_run(shards, monkeypatch, refused, names, flags, text):
    """In one line, before anything is written. A run that does not need it goes on."""
    for name in names.split():
        monkeypatch.setattr(name, Mock(side_effect=ConnectionError(text)))
    assert refused(text, f"--max_steps 4 {flags}") and not Path("log").exists()
    assert main("--max_steps 2 --val_every 0") == 0


@pytest.mark.parametrize("package, flags", [
    ("transformers", "--init_from gpt2"), ("fineweb", "--quickstart --data_dir pydocs"),
    ("hellaswag", "--hellaswag on"),
])  # fmt: skip
def test_a_package_or_script_that_is_missing_is_named(shards, monkeypatch, refused, package, flags):
    monkeypatch.setitem(sys.modules, package, None)  # so that it cannot be imported
    assert refused(package, f"--max_steps 4 {flags}") and not Path("log").exists()


@pytest.mark.parametrize("flags, left", [
    ("--resume --max_steps 5 --save_every 1 --keep 1", [5]),
    ("--resume --max_steps 5 --save_every 1 --keep 3", [3, 4, 5]),
    ("--resume --max_steps 5 --save_every 2 --keep 0", [1, 2, 4, 5]),
    ("--resume --max_steps 5 --save_every 0", [1, 2]), ("--init_from log --max_steps 0", [1, 2]),
    ("--max_steps 0 --num_samples 1", [1, 2]), ("--init_from log --sample --num_samples 1", [1, 2]),
    ("--init_from log --export_hf log/sub", [1, 2]),
    ("--log_dir log/sub --init_from log --max_steps 1", [1, 2]),
])  # fmt: skip
def test_a_run_deletes_nothing_but_its_own_checkpoints(old, flags, left):
    """What does not continue it leaves all of it as it was."""
    for name in ("notes.txt", "model_1_copy.pt", "model_best.pt", "xmodel_00001.pt", "sub/x.pt"):
        Path("log", name).parent.mkdir(exist_ok=True)
        Path("log", name).write_text("mine")
    Path("log/unfinished.pt").write_text("of a run that was killed")
    assert main(flags) == 0
    assert steps() == left
    files = [path.read_bytes() for path in Path("log").rglob("*") if path.is_file()]
    assert files.count(b"mine") == 5
    assert "--resume" in flags or {name: Path("log", name).read_bytes() for name in old} == old


def test_a_second_run_in_one_folder_ends_before_it_overwrites(shards, break_losses, refused):
    another = Path("log/model_00004.pt")

    def start_another(n, losses):
        if n == 1:
            another.write_text("another run's")
        return losses

    break_losses(start_another)
    message = f"{another} is not of this run: move it away, then rename log/model_00004_new.pt"
    assert refused(message, "--max_steps 4")
    assert another.read_text() == "another run's"
    os.replace("log/model_00004_new.pt", another)  # as the message says: nothing is lost
    assert main("--max_steps 5 --resume") == 0 and steps() == [4, 5]


def test_keep_counts_from_the_checkpoint_just_saved(shards, break_losses):
    """Later ones, which somebody copies into the folder during the run, are not the run's own."""

    def copy(n, losses):
        if n == 1:
            Path("log/model_00130.pt").write_text("a backup")
        return losses

    break_losses(copy)
    assert main("--max_steps 4 --save_every 1 --keep 1") == 0 and steps() == [4, 130]


def test_an_old_checkpoint_that_another_program_reads_is_deleted_later(shards, monkeypatch):
    """As on Windows, where such a file cannot be deleted."""
    unlink, refusals = Path.unlink, []

    def refuse_once(path, **options):
        if path.name == "model_00001.pt" and not refusals:
            refusals.append(path)
            raise PermissionError(13, "used by another process")
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", refuse_once)
    assert main("--max_steps 4 --save_every 1 --keep 1") == 0
    assert refusals and steps() == [4]


FULL = OSError(28, "No space left on device")  # which names no file


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_names_the_file_and_leaves_what_was_there(call, shards, refused, monkeypatch):
    """Also where flushing finds it, and not writing."""
    assert main("--max_steps 2") == 0
    before = contents("log")
    monkeypatch.setattr(os, call, Mock(side_effect=FULL))
    flags = "--max_steps 4 --val_every 0 --log_dir new"
    assert refused("new/model_00000.pt cannot be written: [Errno 28] No space left", flags)
    assert refused("log.txt cannot be written: [Errno 28]", "--max_steps 4 --resume")
    assert contents("log") == before and not os.listdir("new")


def test_an_export_to_a_full_disk_is_one_line(shards, refused, monkeypatch):
    assert main("--max_steps 1") == 0
    save = "transformers.GPT2LMHeadModel.save_pretrained"
    monkeypatch.setattr(save, Mock(side_effect=RuntimeError("I/O error: No space left")))
    assert refused("folder cannot be written (RuntimeError(", "--init_from log --export_hf folder")


def test_a_program_without_a_console_has_no_prompts(shards, monkeypatch):
    assert main("--max_steps 1") == 0
    monkeypatch.setattr(sys, "stdin", None)
    assert main("--sample --num_samples 1 --prompt -") == 0
