"""What the tests share: the data folder, tiny shards, and a way to run the trainer in-process."""

import functools
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Before torch is imported: tiny tensors gain nothing from a second thread, and where cores are few
# the threads of several processes wait for each other, which made some tests 50 times slower
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import train_gpt2

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS is not deterministic
ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("GPT2_TEST_DATA", ROOT / ".." / "shared" / "data"))

# 2 layers, 2 heads, 32 channels, 16 tokens: what a test of the whole script can afford
TINY = (2, 2, 32, 16, 1e-2)
FLAGS = ["--model", "test", "--total_batch_size", "256", "--device", "cpu", "--val_tokens", "640"]
FLAGS += ["--hellaswag_every", "0", "--sample_every", "0", "--max_new_tokens", "8"]


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch):
    """Add the size `test` to the table for the length of a test, and keep its arithmetic simple."""
    monkeypatch.setitem(train_gpt2.SIZES, "test", TINY)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # training keeps the signals it took


@pytest.fixture
def shards(tmp_path):
    """Return a folder of byte-level shards: English-like text in 3 train shards and 1 val shard."""
    return write_shards(tmp_path / "data")


def write_shards(folder: Path, sizes=(700, 1201, 333), val=999) -> Path:
    """Write shards of repeating words, so that a model has something to learn."""
    folder.mkdir(parents=True)
    rng = np.random.RandomState(0)
    words = [b"the ", b"model ", b"reads ", b"and ", b"writes ", b"tokens ", b"again "]
    for i, size in enumerate((val, *sizes)):
        text = b"".join(words[j] for j in rng.randint(0, len(words), size))[:size]
        split = "val" if i == 0 else "train"
        np.save(
            folder / f"test_{split}_{i:06d}.npy", np.frombuffer(text, np.uint8).astype(np.uint16)
        )
    (folder / "meta.json").write_text('{"tokenizer": "bytes", "vocab_size": 257, "eot": 256}')
    return folder


def run_main(*argv) -> int:
    """Run the command line in this process and return its exit status."""
    with pytest.raises(SystemExit) as exit_info:
        train_gpt2.main([str(arg) for arg in argv])
    return exit_info.value.code


def read_log(log_dir) -> dict[str, dict[int, float]]:
    """Return log.txt as {stream: {step: value}}, times left out: they differ between runs."""
    streams: dict[str, dict[int, float]] = {}
    for line in (Path(log_dir) / "log.txt").read_text().splitlines():
        step, stream, value = line.split()
        if stream != "dt":
            streams.setdefault(stream, {})[int(step)] = float(value)
    return streams


def save_model(model: train_gpt2.GPT, path: Path) -> None:
    """Save a model as a checkpoint without optimizer state, which --init_from takes."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    args = {"model": "test", "seq_len": model.config.block_size}
    torch.save({"model": weights, "config": vars(model.config), "args": args}, path)


def make_run(rank=0, world_size=1) -> train_gpt2.Run:
    """Return a process of a run on the CPU, without starting the other processes."""
    return train_gpt2.Run(torch.device("cpu"), "float32", False, rank, world_size)


def break_loss(change, active=True) -> None:
    """Pass what torch's cross entropy returns through change(n, loss), n counting training calls."""
    right, calls = F.cross_entropy, iter(range(10**9))

    def cross_entropy(*args, **kwargs):
        loss = right(*args, **kwargs)
        return change(next(calls), loss) if active and torch.is_grad_enabled() else loss

    F.cross_entropy = cross_entropy


def start_script(argv, processes=1, launcher=None, **broken) -> subprocess.Popen:
    """Start the trainer with the size `test`, alone or under torchrun; broken: see run_tiny.py."""
    script = [str(Path(__file__).parent / "run_tiny.py"), *(str(arg) for arg in argv)]
    if processes > 1:
        launcher = ["--standalone", f"--nproc_per_node={processes}"]
    torchrun = ["-m", "torch.distributed.run", *launcher] if launcher else []
    command = [sys.executable, *torchrun, *script]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **broken}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True,
                            stderr=subprocess.PIPE)  # fmt: skip


@functools.cache
def warm_server() -> multiprocessing.context.ForkServerContext:
    """Return what starts processes that have imported everything: in 0.1 s, and not in 3."""
    # The server does not look at sys.path before it imports
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["pytest", "conftest", "torch._dynamo"])
    return server


def run_rank(argv, env: dict[str, str], out: Path, err: Path) -> None:
    """Run the trainer in this new process, with its output in two files."""
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.update(env)
    sys.argv = ["run_tiny.py", *argv]
    try:
        runpy.run_path(str(ROOT / "tests/run_tiny.py"), run_name="__main__")
    finally:
        sys.stdout.flush()


def start_warm(folder: Path, argv, processes=1, **broken) -> list:
    """Start what start_script does, sooner and without torchrun. The output goes to out and err
    with the rank behind it, in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    group = {}
    if processes > 1:
        group = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    started = []
    for rank in range(processes):
        env = broken | group | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if group else {})
        files = (folder / f"out{rank}", folder / f"err{rank}")
        args = ([str(arg) for arg in argv], env, *files)
        process = warm_server().Process(target=run_rank, args=args)
        process.start()
        started.append(process)
    return started


def run_script(argv, processes=1, **broken) -> tuple[int, str, str]:
    """Run the trainer and return status, stdout and stderr. If one of several processes fails, the
    others are ended and the status is 1, as torchrun does it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = start_warm(folder, argv, processes, **broken)
        deadline = time.monotonic() + 120
        while any(process.is_alive() for process in started):
            failed = any(process.exitcode not in (0, None) for process in started)
            for process in started:
                if failed or time.monotonic() > deadline:
                    process.terminate()
            time.sleep(0.02)
        assert time.monotonic() < deadline, "it hangs"
        status = max((process.exitcode for process in started), key=abs)
        texts = [
            "".join((folder / f"{stream}{rank}").read_text() for rank in range(processes))
            for stream in ("out", "err")
        ]
    return (1 if status and processes > 1 else status), *texts


def free_port() -> str:
    """Return a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
