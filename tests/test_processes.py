"""Promise 2: one process, two with a copy of the model each (DDP), and two that share its weights
(--zero) compute the same run, to rounding, and continue each other's checkpoints."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import FLAGS, ROOT, hook, host, leaves, load, main, read_log, run, steps, write_shards
from test_hellaswag import make_examples, write

slow = pytest.mark.slow


def assert_close(one: dict, two: dict, tolerance=1e-5) -> None:
    """Two logs tell of the same run, to rounding. val and norm have four decimals."""
    assert one.keys() == two.keys()
    assert one.get("hella") == two.get("hella")
    for stream in one:
        rounding = tolerance * {"val": 20, "norm": 20}.get(stream, 1)
        assert two[stream] == pytest.approx(one[stream], abs=rounding), stream


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Return a function that makes a run with everything on, once for the same arguments, or goes on
    with the one in log_dir, and returns its log_dir and its samples."""
    folder = tmp_path_factory.mktemp("processes")
    data = write_shards(folder / "data")
    hella = write(folder / "hella.jsonl", make_examples(7))
    patch = f"import hellaswag\nhellaswag.fetch = lambda: {str(hella)!r}\n"
    patch += "hellaswag.BATCH_TOKENS['cpu'] = 99"  # batches that two processes have to share
    flags = ["--data_dir", data, "--max_steps", 20, "--save_every", 20, "--batch_size", 4]
    flags += ["--val_every", 10, "--hellaswag_every", 10, "--sample_every", 10, "--num_samples", 2]
    made = {}

    def train(processes: int, *own, also="", log_dir=None) -> tuple[Path, list[str]]:
        key, log_dir = (processes, own, also, log_dir), log_dir or folder / str(len(made))
        if key not in made:
            own = [*own, "--log_dir", log_dir]
            result = run(*flags, *own, processes=processes, patch=f"{patch}\n{also}", seconds=200)
            assert result[0] == 0, result
            printed = re.findall(r"step +\d+/.. [|] loss", result[1])
            assert printed and len(printed) == len({*printed}), "one process prints"
            assert "Warning" not in result[2]
            made[key] = log_dir, re.findall("(?m)^sample .*", result[1])
        return made[key]

    return train


@pytest.mark.parametrize("optimizer, processes, zero, B", [
    ("adamw", 1, 0, 3), ("adamw", 2, 0, 4), ("adamw", 3, 0, 16), ("adamw", 3, 1, 6), ("muon", 2, 1, 4),
    *(pytest.param(*case, marks=slow) for case in [
        ("adamw", 2, 1, 4), ("adamw", 3, 1, 2), ("adamw", 5, 0, 2),
        ("adamw", 7, 0, 1), ("muon", 2, 1, 3), ("muon", 3, 0, 4)])
])  # fmt: skip
def test_any_number_of_processes_makes_the_run_of_one(start, optimizer, processes, zero, B):
    """Also where they divide neither the 16 sequences of a step nor the 40 of the validation. The
    checkpoint has the same contents, the tied matrix once. AdamW's rate is GPT-3's; Muon takes 0.1 for
    this small model, so that roundings grow 50 times in these 20 steps."""
    flags = ["--optimizer", optimizer, *(["--max_lr", 6e-4] if optimizer == "adamw" else [])]
    one, samples = start(1, *flags)
    flags += ["--batch_size", B, "--zero" if zero else "--no-zero"]
    found, its_samples = start(processes, *flags)
    logs = read_log(one), read_log(found)
    assert list(logs[0]["val"]) == [0, 10, 20] and list(logs[0]["hella"]) == [10, 20]
    assert_close(*logs, tolerance={"adamw": 5e-6, "muon": 2e-3}[optimizer])
    assert samples == its_samples and len(samples) == 4
    saved = load(one, 20), load(found, 20)
    a, b = (leaves(each | {"args": None}) for each in saved)
    assert a.keys() == b.keys()
    for name, x in a.items():  # of tensors dtype and shape only
        assert (x[:2] == b[name][:2]) if isinstance(x, tuple) else (x == b[name]), name


@slow
def test_a_checkpoint_crosses_between_stages_and_numbers_of_processes(tmp_path, shards):
    """Each part of the run is made by other processes than the one before."""
    flags = ["--data_dir", shards, "--optimizer", "muon", "--schedule", "constant", "--resume"]
    flags += ["--max_lr", 0.02, "--warmup_steps", 0, "--val_every", 1, "--batch_size", 4]
    assert main(*flags, "--max_steps", 12, "--log_dir", tmp_path / "a") == 0
    for max_steps, processes, zero in ((3, 3, 0), (5, 2, 0), (7, 1, 0), (9, 3, 1), (12, 2, 1)):
        own = ["--max_steps", max_steps, *(["--zero"] * zero), "--log_dir", tmp_path / "b"]
        status, _, err = run(*flags, *own, processes=processes)
        assert status == 0 and steps(tmp_path / "b")[-1] == max_steps, err
    assert_close(read_log(tmp_path / "a"), read_log(tmp_path / "b"))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_gpu_trains_as_it_would_without_compile_kernel_and_caches(start, optimizer, tmp_path):
    """Compiled, in bfloat16, with validation, HellaSwag and samples between: the losses of plain
    PyTorch to rounding; with empty caches, and stopped and resumed, the same bits."""
    flags = ["--device", "cuda", "--dtype", "bfloat16", "--optimizer", optimizer, "--max_lr", 1e-3]
    flags += ["--schedule", "constant", "--warmup_steps", 0, "--save_every", 10, "--keep", 0]
    one, samples = start(1, *flags, "--compile")
    plain, _ = start(1, *flags, "--no-compile", also="train_gpt2.triton = None")
    assert_close(read_log(one), read_log(plain) | {"hella": read_log(one)["hella"]}, 0.02)
    empty = f"os.environ['TORCHINDUCTOR_CACHE_DIR'] = {str(tmp_path)!r}"
    for _ in range(2):  # and then they are full
        again, its_samples = start(1, *flags, "--compile", also=empty)
        assert read_log(one) == read_log(again) and samples == its_samples
        empty += " "
    half, _ = start(1, *flags, "--compile", "--max_steps", 10)
    start(1, *flags, "--compile", "--resume", log_dir=half)
    for step in (10, 20):
        assert leaves(load(one, step) | {"args": 0}) == leaves(load(half, step) | {"args": 0})
    assert read_log(one) == read_log(half)


# Four blocks of 50 MB, of which each of two processes keeps a half. The memory is measured while
# the state is made. In deterministic mode, PyTorch would write to memory that nobody has set, and
# without mallopt (of M_MMAP_THRESHOLD, -3), C's library would keep what is freed
MEASURED = """
import ctypes
ctypes.CDLL(None).mallopt(-3, 2**20)
torch.use_deterministic_algorithms(False)
train_gpt2.SIZES["test"] = (4, 4, 1024, 1e-3)
make = train_gpt2.make_state
def status(name):
    return int(open("/proc/self/status").read().split(name + ":")[1].split()[0]) / 1024
def measured(*args):
    open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
    before = status("VmRSS")
    state = make(*args)
    print("grew by", status("VmHWM") - before, flush=True)
    os._exit(0)
train_gpt2.make_state = measured
"""


def test_a_sharded_model_is_never_whole_on_a_cpu(tmp_path, shards):
    """Beside its own part, 101 MB, a process holds one matrix at a time, of 17 MB, and a copy of its
    part of it. The whole model has 202 MB."""
    flags = ["--data_dir", shards, "--log_dir", tmp_path, "--max_steps", 1, "--zero"]
    status, out, err = run(*flags, processes=2, patch=MEASURED)
    grown = [float(line.split()[-1]) for line in out.splitlines() if "grew by" in line]
    assert status == 0 and len(grown) == 2, err
    assert min(grown) > 95 and max(grown) < 140, grown


NOTING = """
def forward(self, *args, forward=train_gpt2.DDP.forward):
    exchanges = self.require_backward_grad_sync
    print("noted:", torch.initial_seed(), exchanges, flush=True)
    return forward(self, *args)
train_gpt2.DDP.forward = forward
"""


def test_a_step_has_a_seed_in_each_process_and_one_exchange_of_gradients(tmp_path, shards):
    """A fork's dropout follows PyTorch's generator, which is seeded before each step. The last of two
    micro-steps exchanges gradients."""
    flags = ["--data_dir", shards, "--log_dir", tmp_path, "--max_steps", 3, "--batch_size", 4]
    status, out, err = run(*flags, "--val_every", 0, processes=2, patch=NOTING)
    noted = re.findall("noted: (.*) (.*)", out)
    assert status == 0 and len({seed for seed, _ in noted}) == 6, (noted, err)
    assert [exchanges for _, exchanges in noted] == ["False", "True"] * 6


MAKE_ONCE = """
import fineweb
def make(argv):
    if not os.path.exists({path!r}):
        print("made here", flush=True)
        time.sleep(0.5)
        write_shards(Path({path!r}))
fineweb.main = make
train_gpt2.QUICKSTART["data_dir"] = {path!r}
"""


def test_one_process_makes_or_downloads_what_all_need(tmp_path):
    """The others wait, and find it."""
    flags = ["--quickstart", "--seq_len", 16, "--log_dir", tmp_path / "log", "--max_steps", 1]
    patch = MAKE_ONCE.format(path=str(tmp_path / "made"))
    status, out, err = run(*flags, "--batch_size", 8, processes=2, patch=patch)
    assert status == 0 and out.splitlines().count("made here") == 1, (out, err)


def test_zero_gathers_the_weights_of_one_block_at_a_time(tmp_path, shards):
    """After a block has computed, its weights are sharded again, as DTensors."""
    flags = ["--data_dir", shards, "--log_dir", tmp_path, "--max_steps", 1, "--val_every", 0]
    weight = "self.transformer.h[0].mlp.c_fc.weight.data"
    patch = hook(f"print('data:', type({weight}).__name__, flush=True)")
    status, out, err = run(*flags, "--zero", processes=2, patch=patch)
    assert status == 0 and set(re.findall("data: (.*)", out)) == {"DTensor"}, (out, err)


DIFFERENCES = {
    "step: [2, 0]": "train_gpt2.list_checkpoints = lambda log_dir: []",
    "max_lr: [0.01, 0.02]": "flags += ['--max_lr', '0.02']",
    "precision: ['float32', 'bfloat16']": "flags += ['--dtype', 'bfloat16']",
    "shards: [[{'test_train_000001.npy'": "flags += ['--data_dir', {other!r}]",
}


@pytest.mark.parametrize("message", DIFFERENCES)
def test_processes_that_differ_stop(tmp_path, shards, message):
    """Each machine has its own disk, flags and GPU. A difference is one line, before anything on the
    disk is changed. (--resume itself refuses other training data, and not other validation data.)"""
    other = write_shards(tmp_path / "other", val=998)
    flags = ["--log_dir", tmp_path / "log", "--batch_size", 8]
    assert main(*flags, "--data_dir", shards, "--max_steps", 2) == 0
    before = (tmp_path / "log/log.txt").read_bytes()
    patch = f"if rank == 1: {DIFFERENCES[message].format(other=str(other))}"
    flags += ["--data_dir", shards, "--max_steps", 4, "--resume"]
    status, out, err = run(*flags, processes=2, patch=patch)
    assert status == 2 and "loss" not in out
    (line,) = {*err.splitlines()}
    assert line.startswith(f"train_gpt2.py: processes differ in {message}")
    assert (tmp_path / "log/log.txt").read_bytes() == before and steps(tmp_path / "log") == [2]


def test_processes_take_the_least_of_their_batch_sizes(tmp_path, shards):
    """GPUs may have other memories, and folders other names. The losses are those of one process."""
    flags = ["--data_dir", shards, "--max_steps", 4]
    assert main(*flags, "--log_dir", tmp_path / "one") == 0
    patch = "train_gpt2.choose_batch_size = lambda *_: 4 - rank\n"
    patch += f"flags += ['--data_dir', '{shards}' + '/' * rank, '--log_dir', '{tmp_path}/two' + '/' * rank]"
    status, out, err = run(*flags, "--log_dir", tmp_path / "two", processes=2, patch=patch)
    assert status == 0 and "B 3" in out, err
    assert_close(read_log(tmp_path / "one"), read_log(tmp_path / "two"))


SLOW_SAVE = """
import time
def rename_late(source, target, replace=os.replace):
    time.sleep(0.5 if str(target).endswith(".pt") else 0)
    replace(source, target)
def check(status, end=os._exit):
    print("ended by", sys._getframe(1).f_globals["__name__"], flush=True)
    end(status if os.path.exists({path!r}) else 77)
os.replace, os._exit = rename_late, check
def init(*args, start=torch.distributed.init_process_group):
    print("waits", args[2])
    start(*args)
torch.distributed.init_process_group = init
"""


def test_no_process_ends_before_the_last_checkpoint_is_whole(tmp_path, shards):
    """torchrun ends the first process, which writes, soon after another one has ended. NCCL by itself
    would wait for 10 minutes, and a large checkpoint on a slow disk takes longer."""
    flags = ["--data_dir", shards, "--log_dir", tmp_path, "--max_steps", 1, "--val_every", 0]
    patch = SLOW_SAVE.format(path=str(tmp_path / "model_00001.pt"))
    status, out, err = run(*flags, processes=2, patch=patch)
    assert status == 0 and out.count("waits 1:00:00") == 2, err
    assert out.count("ended by train_gpt2") == 2, (
        "Python's cleanup could wait for the other process"
    )


SCRIPT = """
import os, signal, time, conftest, torch, train_gpt2
train_gpt2.SIZES["test"] = conftest.TINY
rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
{patch}
train_gpt2.main()
"""
KILLED = """
time.sleep({seconds})
if (attempt, rank, sum(calls)) == ("0", {rank}, 6):  # in update 6 of the first attempt
    for process in {processes}:
        os.kill(process, signal.SIGKILL)
"""


def torchrun(folder: Path, name: str, launcher: str, flags, patch) -> subprocess.Popen:
    """Start torchrun for a tiny run. What it prints is kept in a file of this name."""
    (folder / f"{name}.py").write_text(SCRIPT.format(patch=patch))
    module = [sys.executable, "-m", "torch.distributed.run", *launcher.split()]
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = str(int("nnodes" in launcher))
    with open(folder / f"{name}.txt", "w") as file:
        command = [*module, folder / f"{name}.py", *map(str, [*FLAGS, *flags])]
        return subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)


def printed(folder: Path) -> str:
    """Return what all torchruns have printed."""
    return "".join(f"--- {path}\n{path.read_text()}" for path in sorted(folder.glob("*.txt")))


@slow
def test_torchrun_starts_a_group_again_in_which_a_process_dies(tmp_path, shards):
    """The processes meet at the store of torchrun's agent, which still knows the dead ones."""
    flags = ["--data_dir", shards, "--max_steps", 10, "--save_every", 2, "--max_lr", 6e-4]
    assert main(*flags, "--log_dir", tmp_path / "one") == 0
    patch = hook(KILLED.format(seconds=0, rank=1, processes="[os.getpid()]"))
    launcher = "--standalone --nproc_per_node=2 --max_restarts=3"
    flags += ["--resume", "--log_dir", tmp_path / "two"]
    status = torchrun(tmp_path, "agent", launcher, flags, patch).wait(120)  # seconds
    assert status == 0 and printed(tmp_path).count("on 2 x cpu") == 2, printed(tmp_path)
    assert_close(read_log(tmp_path / "one"), read_log(tmp_path / "two"), tolerance=5e-6)


@slow
def test_a_machine_may_die_and_come_back(tmp_path, shards):
    """Two go on, and later three again, to the same end. The command is that of CLUSTERS.md."""
    flags = ["--data_dir", shards, "--max_steps", 200, "--save_every", 2, "--max_lr", 6e-4]
    assert main(*flags, "--log_dir", tmp_path / "one") == 0
    flags += ["--resume", "--log_dir", tmp_path / "three"]
    store = host()
    launcher = "--nnodes=1:3 --nproc_per_node=1 --max_restarts=9 --rdzv_id=test --rdzv_backend=c10d"
    launcher += f" --rdzv_endpoint=127.0.0.1:{store.port} --rdzv_conf=last_call_timeout=9,is_host=0"
    pids = "(os.getppid(), os.getpid())"  # the agent, the process
    killed = hook(KILLED.format(seconds=0.1, rank="rank", processes=pids))
    slowly = killed.replace('"0"', '"never"')
    patches = {"a": slowly, "b": slowly, "c": killed}
    agents = {name: torchrun(tmp_path, name, launcher, flags, p) for name, p in patches.items()}
    deadline = time.monotonic() + 240  # seconds
    try:
        while "on 2 x cpu" not in printed(tmp_path) or agents["c"].poll() is None:
            time.sleep(0.1)
            assert time.monotonic() < deadline, printed(tmp_path)
        agents["c"] = torchrun(tmp_path, "back", launcher, flags, slowly)
        statuses = [agent.wait(deadline - time.monotonic()) for agent in agents.values()]
    finally:
        for agent in agents.values():
            agent.kill()
    out = printed(tmp_path)
    assert statuses == [0, 0, 0] and out.count("done: ") == 1, out
    assert out.count("on 3 x cpu") == 2 and out.count("on 2 x cpu") == 1, out
    assert_close(read_log(tmp_path / "one"), read_log(tmp_path / "three"), tolerance=5e-6)
