"""Promise 5, and what other failures do: they end the program, and damage nothing on the disk."""

import math
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import contents, hook, leaves, load, main, read_log, run, state, steps, write_shards

import fineweb
import train_gpt2


# In update 2, the losses of process 1 are multiplied by nan, and with them its gradients, or inf is
# added to them, of which its gradients know nothing, or its gradients alone overflow, as in float16
@pytest.mark.parametrize("change, zero", [
    ("* float('nan')", "--no-zero"), ("+ float('inf')", "--no-zero"),
    ("+ 1e38 * (losses - losses.detach())", "--no-zero"),
    pytest.param("* float('nan')", "--zero", marks=pytest.mark.slow),
])  # fmt: skip
def test_all_processes_skip_an_update_in_which_one_fails(tmp_path, shards, change, zero):
    """Weights and optimizer state stay as they are, and the run goes on."""
    patch = hook(f"if rank == 1 and sum(calls) == 3 and calls[-1]: losses = losses {change}")
    flags = ["--data_dir", shards, "--log_dir", tmp_path, "--max_steps", 5, "--save_every", 1]
    flags += ["--keep", 0, "--batch_size", 8, zero]
    status, out, err = run(*flags, processes=2, patch=patch)
    assert status == 0, err
    losses = read_log(tmp_path)["train"]
    norms = read_log(tmp_path)["norm"]
    assert [step for step in losses if not math.isfinite(losses[step] + norms[step])] == [2]
    [line] = [line for line in out.splitlines() if "update skipped" in line]
    assert line.startswith("step     2/5 | loss: ")
    assert state(tmp_path, 2) == state(tmp_path, 3)
    assert losses[4] < losses[3] < losses[1] < losses[0]


def test_twenty_skipped_updates_in_a_row_end_the_run(tmp_path, shards, break_losses, refused):
    """Nineteen do not, however often. Before the first good one, the weights are the initial ones,
    and between two others, weights and optimizer state stay as they are."""
    break_losses(lambda n, losses: losses if n in (19, 20, 40) else losses * math.nan)
    flags = ["--data_dir", shards, "--log_dir", tmp_path, "--max_steps", 99, "--save_every", 15]
    flags += ["--val_every", 0, "--keep", 0]
    assert refused("20 updates in a row were not finite: try a lower --max_lr", *flags)
    assert list(read_log(tmp_path)["train"]) == list(range(41 + 20))
    saved = load(tmp_path, 15)
    new = train_gpt2.GPT(train_gpt2.GPTConfig(**saved["config"]))
    torch.testing.assert_close(saved["model"], new.state_dict(), atol=0, rtol=0)
    assert state(tmp_path, 45) == state(tmp_path, 60) != state(tmp_path, 30)


# ---- a folder that holds a run


@pytest.fixture
def old(tmp_path, shards):
    """Return the folder of a run of two updates."""
    flags = ["--data_dir", shards, "--log_dir", tmp_path / "log", "--max_steps", 2]
    assert main(*flags, "--save_every", 1) == 0
    return tmp_path / "log"


def test_a_folder_that_holds_a_run_is_left_alone(old, shards, refused, monkeypatch):
    """A new run needs --overwrite there. Where torchrun may start it again, not even that deletes
    the checkpoints. An evaluation writes nothing."""
    flags = ["--data_dir", shards, "--log_dir", old, "--seq_len", 16]
    before = contents(old)
    holds = "holds a run: --resume continues it, --overwrite deletes it"
    assert refused(holds, *flags, "--max_steps", 4)
    assert main(*flags, "--init_from", old, "--max_steps", 0) == 0
    message = "torchrun could repeat --overwrite: use --resume"
    for name in ("TORCHELASTIC_MAX_RESTARTS", "LOCAL_WORLD_SIZE"):  # or on several machines
        with monkeypatch.context() as torchrun:
            torchrun.setenv(name, "3")
            assert refused(message, *flags, "--max_steps", 4, "--overwrite")
    assert contents(old) == before
    for path in old.glob("*.pt"):
        path.unlink()
    assert refused(holds, *flags, "--max_steps", 4), "log.txt alone is a run too"


def test_overwrite_deletes_the_old_run_once_the_new_one_has_data(old, shards, tmp_path, refused):
    """Until then, whatever fails, the old run is whole."""
    before = contents(old)
    flags = ["--log_dir", old, "--overwrite", "--max_steps", 1]
    other = write_shards(tmp_path / "other")
    (other / "test_val_000000.npy").unlink()
    assert refused("holds no val shards", *flags, "--data_dir", other)
    flags += ["--data_dir", shards]
    assert main(*flags, "--log_dir", tmp_path / "new", "--init_from", old) == 0
    assert contents(old) == before
    assert main(*flags) == 0
    assert contents(old).keys() == {"log.txt", "model_00000.pt", "model_00001.pt"}
    assert list(read_log(old)["train"]) == [0]


def test_overwrite_deletes_nothing_if_the_start_of_one_process_fails(old, shards):
    """The first process waits for the second before it deletes."""
    patch = "if rank == 1: train_gpt2.make_state = lambda *_: 1 / 0"  # the last thing that can fail
    before = contents(old)
    flags = ["--data_dir", shards, "--log_dir", old, "--max_steps", 1, "--batch_size", 8]
    status, _, err = run(*flags, "--overwrite", processes=2, patch=patch)
    assert status != 0 and "ZeroDivisionError" in err
    assert contents(old) == before


def test_the_quickstart_alone_replaces_its_run(tmp_path, shards, monkeypatch, refused):
    """With --resume it continues that run, and with any other flag it needs --overwrite."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fineweb, "main", lambda argv: None)
    small = {"data_dir": str(shards), "model": "test", "seq_len": 16, "max_steps": 2}
    monkeypatch.setattr(train_gpt2, "QUICKSTART", train_gpt2.QUICKSTART | small)
    for more, expected in (([], 2), (["--resume", "--max_steps", "3"], 3), ([], 2)):
        with pytest.raises(SystemExit, match=r"^0$"):
            train_gpt2.main(["--quickstart", *more])
        assert len(read_log("log/quickstart")["train"]) == expected
    assert refused("log/quickstart holds a run", "--quickstart")
    monkeypatch.setattr(fineweb, "main", lambda argv: 1 / 0)  # a sample needs no data
    assert main("--quickstart", "--sample", "--init_from", "log/quickstart") == 0


# ---- disks, memory and data

FULL_DISK = """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that a write fails with an OSError
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # bytes
"""
NO_MEMORY = "if rank == 1 and self.training: raise torch.OutOfMemoryError('CUDA out of memory')"


@pytest.mark.parametrize("patch, processes, error", [
    (FULL_DISK, 1, "[Errno 27] File too large"),
    (hook(NO_MEMORY), 2, "CUDA out of memory"),
])  # fmt: skip
def test_a_full_disk_or_memory_ends_the_run(old, patch, processes, error):
    """A full disk in one line, memory with a traceback. The older checkpoints are whole: --resume
    goes on from them. Nothing unfinished is left."""
    before = load(old, 2)
    flags = ["--log_dir", old, "--resume", "--max_steps", 4, "--save_every", 4, "--batch_size", 8]
    status, _, err = run(*flags, processes=processes, patch=patch)
    assert status == processes % 2 + 1 and error in err and ("Traceback" in err) == (status == 1)
    assert not (old / "unfinished.pt").exists()
    assert steps(old) == [1, 2] and leaves(load(old, 2)) == leaves(before)
    assert main(*flags) == 0 and steps(old) == [2, 4]


@pytest.mark.parametrize("name", ["train_000002.npy", "val_000000.npy"])
def test_a_token_beyond_the_vocabulary_ends_the_run_where_it_is_read(
    tmp_path, shards, refused, name
):
    """In any batch of both splits. On a GPU it would be an assertion of the device that names nothing."""
    tokens = np.load(shards / f"test_{name}")
    tokens[600] = 257
    np.save(shards / f"test_{name}", tokens)
    flags = ["--data_dir", shards, "--log_dir", tmp_path / "log", "--max_steps", 20, "--no-shuffle"]
    assert refused(f"{name} was cut short, or has tokens beyond 256", *flags)
    log = read_log(tmp_path / "log")
    assert 0 < len(log["train"]) < 9 if "train" in name else log.keys().isdisjoint({"val", "train"})


# A log_dir that another program deletes in update 3, or that becomes a file, and a disk of 150 bytes
GONE = "if self.training and sum(calls) == 4: import shutil; shutil.rmtree({log!r})"
SMALL_DISK = FULL_DISK.replace("50_000", "150")


@pytest.mark.parametrize("patch, flags, message", [
    (hook(GONE), [], ""), (hook(GONE + "; open({log!r}, 'w')"), [], "model_00004.pt cannot be written: "),
    (SMALL_DISK, ["--save_every", 0], "log.txt cannot be written: OSError(27, 'File too large')"),
])  # fmt: skip
def test_an_output_that_cannot_be_written_is_named(tmp_path, shards, patch, flags, message):
    """At any time, in one line. A folder that has vanished is made again for the last checkpoint."""
    flags = ["--data_dir", shards, "--log_dir", tmp_path / "log", "--max_steps", 4, *flags]
    status, _, err = run(*flags, patch=patch.replace("{log!r}", repr(str(tmp_path / "log"))))
    assert status == 2 * bool(message) and err.count("\n") == bool(message) and message in err
    assert steps(tmp_path / "log") == ([] if message else [4])


@pytest.mark.parametrize("what", ["HellaSwag", "hella.jsonl", "tokenizer", "transformers"])
def test_what_cannot_be_downloaded_or_read_deletes_nothing(old, shards, monkeypatch, refused, what):
    """A run with --overwrite on a machine without network leaves the old one as it is."""
    fail, before = Mock(side_effect=ConnectionError(f"{what} cannot be downloaded")), contents(old)
    flags = ["--data_dir", shards, "--log_dir", old, "--overwrite", "--max_steps", 4]
    (shards / "hella.jsonl").write_text("{}")
    if what.lower().startswith("hella"):
        flags += ["--hellaswag_every", 4]
        monkeypatch.setattr("hellaswag.fetch", {"HellaSwag": fail}.get(what, lambda: shards / what))
    elif what == "tokenizer":
        flags += ["--sample_every", 4]
        for name in ("tiktoken.Encoding", "tiktoken.get_encoding"):
            monkeypatch.setattr(name, fail)
        assert refused("none holds no train shards", *flags, "--data_dir", shards / "none")
    else:
        flags += ["--init_from", "gpt2"]
        monkeypatch.setattr("transformers.AutoConfig.from_pretrained", fail)
    message = "HellaSwag cannot be loaded" if what == "hella.jsonl" else f"{what} cannot be"
    assert refused(message, *flags)
    assert contents(old) == before
