"""What the tests share: the data folder, tiny shards, and one way to start a tiny run."""

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import shlex
import signal
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from unittest.mock import Mock

# Before torch is imported: tiny tensors gain nothing from a second thread, and where cores are few
# the threads of several processes wait for each other, which made some tests 50 times slower
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS is not deterministic
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore

import train_gpt2

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("GPT2_TEST_DATA", ROOT / ".." / "shared" / "data")).resolve()
needs_data = pytest.mark.skipif(not DATA.exists(), reason=f"needs {DATA}")
if DATA.exists():  # GPT-2's tokenizer is there, and need not be downloaded
    os.environ["TIKTOKEN_CACHE_DIR"] = str(DATA / "tiktoken_cache")

# 2 layers, 2 heads, 32 channels, of 16 tokens: what a test of the whole script can afford
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 32, "max_lr": 1e-2}
SMALL = train_gpt2.GPTConfig(2, 2, 32, 16, 257, "bytes")
# The flags of a tiny run. A test adds its own, which come later and count
FLAGS = ["--model", "test", "--total_batch_size", "256", "--device", "cpu", "--val_tokens", "640"]
FLAGS += ["--num_samples", "0", "--max_new_tokens", "8", "--seq_len", "16"]


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch):
    """Add the size `test` to the table for the length of a test, and compute deterministically."""
    monkeypatch.setitem(train_gpt2.SIZES, "test", TINY)
    torch.use_deterministic_algorithms(True)
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    handlers = {number: signal.getsignal(number) for number in (getattr(signal, n) for n in names)}
    yield
    torch.use_deterministic_algorithms(False)
    for number, handler in handlers.items():  # a run in this process has set its own
        signal.signal(number, handler)


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """Return a folder of English-like shards of bytes, 3 train and 1 val: --data_dir's default."""
    monkeypatch.chdir(tmp_path)
    return write_shards(tmp_path / train_gpt2.DEFAULTS["data_dir"])


def write_shards(folder: Path, sizes=(700, 1201, 333), val=999) -> Path:
    """Write shards of repeating words, so that a model has something to learn."""
    folder.mkdir(parents=True)
    rng = np.random.RandomState(0)
    words = [b"the ", b"model ", b"reads ", b"and ", b"writes ", b"tokens ", b"again "]
    for i, size in enumerate((val, *sizes)):
        text = b"".join(words[j] for j in rng.randint(0, len(words), size))[:size]
        tokens = np.frombuffer(text, np.uint8).astype(np.uint16)
        np.save(folder / f"test_{'train' if i else 'val'}_{i:06d}.npy", tokens)
    write_meta(folder)
    return folder


def write_meta(folder: Path, tokenizer="bytes", vocab_size=257) -> None:
    """Write what fineweb.py writes about its shards, as far as the trainer reads it."""
    meta = {"tokenizer": tokenizer, "vocab_size": vocab_size, "shards": {}}
    Path(folder, "meta.json").write_text(json.dumps(meta | {"progress": {"done": True}}))


def new_model(config=SMALL, seed=1337) -> train_gpt2.GPT:
    """Return a model with the first weights of a run."""
    model = train_gpt2.GPT(config)
    model.init_weights(seed)
    return model


def make_process(rank=0, world_size=1, **changes) -> train_gpt2.Process:
    """Return a Process of one or many processes on the CPU, but for the changes."""
    cpu = {"device": torch.device("cpu"), "device_name": "cpu", "dtype": "float32"}
    cpu |= {"compile": False, "rank": rank, "world_size": world_size}
    return train_gpt2.Process(**(cpu | changes))


@pytest.fixture
def break_losses(monkeypatch):
    """Return a function that lets change(n, losses) replace the losses of training batch n."""
    forward, calls, changes = train_gpt2.GPT.forward, itertools.count(), []

    def broken(self, *args, **options):
        losses = forward(self, *args, **options)
        return changes[0](next(calls), losses) if changes and self.training else losses

    monkeypatch.setattr(train_gpt2.GPT, "forward", broken)
    return changes.append


@pytest.fixture
def disk(monkeypatch) -> Mock:
    """Return an object whose mock_calls are all calls of fsync and replace."""
    disk = Mock(fsync=Mock(wraps=os.fsync), replace=Mock(wraps=os.replace))
    monkeypatch.setattr(os, "fsync", disk.fsync)
    monkeypatch.setattr(os, "replace", disk.replace)
    return disk


def hook(code: str) -> str:
    """Return a patch for `run`: code after each call of the model, which sees `calls` and `losses`."""
    return f"""
forward, calls = train_gpt2.GPT.forward, []
def act(self, *args, **options):
    calls.append(self.training)
    losses = forward(self, *args, **options)
{textwrap.indent(code, "    ")}
    return losses
train_gpt2.GPT.forward = act
"""


def words(*flags) -> list[str]:
    """Return the words of a tiny run's command. A flag may stand with its value in one string."""
    split = [shlex.split(flag) if str(flag).startswith("--") else [str(flag)] for flag in flags]
    return [*FLAGS, *itertools.chain(*split)]


def run(*flags, processes=1, patch="", seconds=60) -> tuple[int, str, str]:
    """Make a tiny run in processes of its own, which end if one fails, as torchrun's, and return
    status, stdout and stderr. `patch` is code that each runs first. It sees `flags` and `rank`."""
    flags = words(*flags)
    store, group = host(), {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1"}
    group |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    group["LOCAL_WORLD_SIZE"] = str(processes)
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(processes):
            env = group | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            args = (flags, patch, env, folder, rank)
            started.append(warm_server().Process(target=run_rank, args=args))
            started[-1].start()
        deadline = time.monotonic() + seconds
        failed, is_alive = [], True  # failed: the statuses other than 0
        while not failed and is_alive and time.monotonic() < deadline:
            time.sleep(0.01)
            is_alive = any(process.is_alive() for process in started)
            failed = [process.exitcode for process in started if process.exitcode]
        for process in started:
            process.terminate()
            process.join(10)
            process.kill()
        paths = {stream: sorted(Path(folder).glob(f"{stream}*")) for stream in ("out", "err")}
        out, err = ("".join(path.read_text() for path in paths[stream]) for stream in paths)
    assert failed or not is_alive, f"it hangs: {out} {err}"
    return min(failed, default=0), out, err


def main(*flags) -> int:
    """Make a tiny run in this process, and return its status."""
    with pytest.raises(SystemExit) as exit_info:
        train_gpt2.main(words(*flags))
    return exit_info.value.code or 0


def decide(argv: list[str]) -> tuple[argparse.Namespace, train_gpt2.Start]:
    """Return the flags of a command, and what it begins with."""
    return train_gpt2.read_command_line(argv)


@pytest.fixture
def refused(capsys):
    """Return a function: whether a run ends with status 2 and one line that has the message."""

    def is_refused(message: str, *flags) -> bool:
        capsys.readouterr()
        status = main(*flags)
        err = capsys.readouterr().err
        is_line = err.startswith("train_gpt2.py: ") and err.count("\n") == 1
        return status == 2 and is_line and message in err

    return is_refused


def read_log(log_dir="log") -> dict[str, dict[int, float]]:
    """Return log.txt as {stream: {step: value}}, times left out: they differ between runs."""
    streams: dict[str, dict[int, float]] = {}
    for line in Path(log_dir, "log.txt").read_text().splitlines():
        step, stream, value = line.split()
        if stream != "dt":
            streams.setdefault(stream, {})[int(step)] = float(value)
    return streams


def steps(log_dir="log") -> list[int]:
    """Return the steps of the checkpoints in log_dir, but for the first, before any update."""
    found = [int(path.stem[6:]) for path in train_gpt2.list_checkpoints(log_dir)]
    return [step for step in found if step > 0]


def load(log_dir, step: int) -> dict:
    return torch.load(Path(log_dir, f"model_{step:05d}.pt"), weights_only=True)


def state(log_dir, step: int) -> dict:
    """Return the weights and the optimizer's state of a checkpoint, as bits."""
    saved = load(log_dir, step)
    return leaves(saved["model"]) | leaves(saved["optimizer"], "state")


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def leaves(value, name="") -> dict:
    """Return all that a checkpoint holds, {path: value}, tensors as (dtype, shape, bits)."""
    if isinstance(value, torch.Tensor):
        return {name: (value.dtype, tuple(value.shape), value.numpy().tobytes())}
    if not isinstance(value, dict | list | tuple):
        return {name: value}
    found = {}
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        found |= leaves(item, f"{name}/{key}")
    return found


@functools.cache
def warm_server() -> multiprocessing.context.ForkServerContext:
    """Return what starts processes that have imported everything: in 0.1 s, and not in 3."""
    # The server does not look at sys.path before it imports
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["pytest", "conftest", "torch._dynamo"])
    return server


def run_rank(flags, patch, env: dict[str, str], folder: str, rank: int) -> None:
    """Train in this new process, with its output in two files."""
    for descriptor, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(folder, f"{stream}{rank}"), os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.update(env)
    train_gpt2.SIZES["test"] = TINY
    torch.use_deterministic_algorithms(True)
    for number in (signal.SIGHUP, signal.SIGINT):  # nohup and a shell's & let them be ignored
        signal.signal(number, signal.SIG_DFL)
    exec(patch, globals() | {"flags": flags, "rank": rank})
    try:
        train_gpt2.main(flags)
    finally:
        sys.stdout.flush()


def host() -> TCPStore:
    """Return a store, at a free port, where the processes of a group meet."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
