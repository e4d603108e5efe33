"""Promise 2: one process and several (DDP and ZeRO) make one run, and continue its checkpoints."""

import functools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import conftest
import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL, contents, hook, host, leaves, load, main, read_log, run, words
from test_hellaswag import make_examples, write

from train_gpt2 import GPT

slow = pytest.mark.slow


def assert_close(one: dict, two: dict, tolerance=1e-5) -> None:
    """Two logs tell of the same run, but for rounding. val and norm have four decimals."""
    assert one.keys() == two.keys()
    assert one.get("hella") == two.get("hella")
    for stream in one:
        rounding = tolerance * {"val": 20, "norm": 20}.get(stream, 1)
        assert two[stream] == pytest.approx(one[stream], abs=rounding), stream


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Return a function that makes a run, once for equal arguments."""
    folder = tmp_path_factory.mktemp("processes")
    data = conftest.write_shards(folder / "data")
    hella = write(folder / "hella.jsonl", make_examples(7))
    patch = f"import hellaswag\nhellaswag.fetch = lambda: {str(hella)!r}\n"
    patch += "hellaswag.BATCH_TOKENS['cpu'] = 99"  # batches that two processes have to share
    flags = f"--data_dir {data} --max_steps 20 --save_every 20 --batch_size 4 --val_every 10"
    flags += " --hellaswag on --num_samples 2 "

    @functools.cache
    def train(processes: int, own: str, also="") -> tuple[Path, list[str]]:
        log_dir = tmp_path_factory.mktemp("run")
        own = f"{flags} {own} --log_dir {log_dir}"
        result = run(own, processes=processes, patch=f"{patch}\n{also}", seconds=200)
        assert result[0] == 0, result
        printed = re.findall(r"step +\d+/.. [|] loss", result[1])
        assert printed and len(printed) == len({*printed}), "one process prints"
        assert "Warning" not in result[2]
        return log_dir, re.findall("(?m)^sample .*", result[1])

    return train


# GPUs may have other memories, and machines other folders
OWN = """
flags[flags.index("--data_dir") + 1] += "/" * rank
flags[flags.index("--log_dir") + 1] += "/" * rank
def choose(*args, choose=train_gpt2.choose_batch_size):
    return max(1, choose(*args) - rank)
train_gpt2.choose_batch_size = choose
"""


@pytest.mark.parametrize("optimizer, processes, B", [
    ("adamw", 1, 3), ("adamw", 2, 4), ("adamw", 3, 16), ("muon", 2, 4),
    *(pytest.param(*case, marks=slow) for case in [
        ("adamw", 3, 2), ("adamw", 5, 2), ("adamw", 7, 1), ("muon", 2, 3), ("muon", 3, 4)])
])  # fmt: skip
def test_any_number_of_processes_makes_the_run_of_one(start, optimizer, processes, B):
    # Muon's rate is 0.1 here, so that roundings grow 50 times in 20 steps
    flags = {"adamw": "--optimizer adamw --max_lr 6e-4", "muon": "--optimizer muon"}[optimizer]
    one, samples = start(1, flags)
    found, its_samples = start(processes, f"{flags} --batch_size {B}", also=OWN)
    logs = read_log(one), read_log(found)
    assert list(logs[0]["val"]) == [0, 10, 20] and list(logs[0]["hella"]) == [0, 10, 20]
    assert_close(*logs, tolerance={"adamw": 5e-6, "muon": 2e-3}[optimizer])
    assert samples == its_samples and len(samples) == 6
    saved = load(one, 20), load(found, 20)
    a, b = (leaves(each | {"args": None}) for each in saved)
    assert a.keys() == b.keys()
    for name, x in a.items():  # of tensors dtype and shape only
        assert (x[:2] == b[name][:2]) if isinstance(x, tuple) else (x == b[name]), name


@slow
def test_a_checkpoint_crosses_between_numbers_of_processes(shards):
    flags = "--optimizer muon --schedule constant --resume --max_lr 0.02 --warmup_steps 0"
    flags += " --val_every 1 --batch_size 4 --max_steps"
    assert main(flags, 12, "--log_dir a") == 0
    for n, processes in ((3, 3), (5, 2), (7, 1), (9, 3), (12, 2)):
        status, _, err = run(flags, n, "--log_dir b", processes=processes)
        assert status == 0 and max(read_log("b")["train"]) == n - 1, err
    assert_close(read_log("a"), read_log("b"))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_gpu_trains_as_it_would_without_compile_and_kernel(start, optimizer):
    flags = f"--device cuda --dtype bfloat16 --optimizer {optimizer} --max_lr 1e-3 --compile"
    one, _ = start(1, f"{flags} on")
    plain, _ = start(1, f"{flags} off", also="train_gpt2.triton = None")
    assert_close(read_log(one), read_log(plain) | {"hella": read_log(one)["hella"]}, 0.02)


DIVIDED = """
def check(self, lr, step=train_gpt2.ZeRO.step):
    step(self, lr)
    held = {p for optimizer in self.optimizers for p in optimizer.state}
    print("holds:", sum(p.numel() for p in held), len(held), flush=True)
def gather_tensors(self, own, gather=train_gpt2.Process.gather_tensors):
    whole = gather(self, own)
    print("gathered:", len(whole), flush=True)
    return whole
train_gpt2.ZeRO.step, train_gpt2.Process.gather_tensors = check, gather_tensors
"""


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_each_process_holds_a_part_of_the_optimizers_state(shards, optimizer):
    flags = f"--optimizer {optimizer} --val_every 0 --resume --max_steps"
    assert main(flags, 1) == 0
    model = GPT(SMALL)
    for n in (2, 3):
        status, out, err = run(flags, n, processes=2, patch=DIVIDED)
        held = [[int(x) for x in pair] for pair in re.findall("holds: (.*) (.*)", out)]
        assert status == 0 and len(held) == 2, err
        numbers, tensors = zip(*held, strict=True)
        assert sum(numbers) == sum(p.numel() for p in model.parameters())
        assert sum(tensors) == len([*model.parameters()])
        assert max(numbers) < 0.7 * sum(numbers), numbers
        others, first = sorted(int(n) for n in re.findall(r"gathered: (\d+)", out))
        assert others == 0 < first, "the first process alone holds all of it, to save it"


@pytest.mark.parametrize("processes", [2, 3])
def test_only_the_state_of_a_parameters_owner_counts(shards, processes):
    """Adagrad's constructor makes state for all parameters, in every process."""
    patch = "adagrad = torch.optim.Adagrad\n"
    patch += "configure = lambda model, *_: [adagrad(model.parameters())]\n"
    patch += "train_gpt2.GPT.configure_optimizers = configure"
    for log_dir, n in (("a", 1), ("b", processes)):
        status, _, err = run("--max_steps 2", "--log_dir", log_dir, processes=n, patch=patch)
        assert status == 0, err
    a, b = (load(log_dir, 2)["optimizer"] for log_dir in ("a", "b"))
    torch.testing.assert_close(b, a, atol=1e-5, rtol=1e-3)


NOTING = """
def forward(self, *args, forward=train_gpt2.DDP.forward):
    exchanges = self.require_backward_grad_sync
    print("noted:", torch.initial_seed(), exchanges, flush=True)
    return forward(self, *args)
train_gpt2.DDP.forward = forward
train_gpt2.choose_batch_size = lambda *_: 4 + 4 * rank  # what fits into GPUs of two sizes
"""


def test_a_step_has_a_seed_in_each_process_and_one_exchange_of_gradients(shards):
    """A fork's dropout needs the seed. The last of two micro-steps exchanges gradients. Their B
    fits into the smaller GPU, too."""
    status, out, err = run("--max_steps 3 --val_every 0", processes=2, patch=NOTING)
    noted = re.findall("noted: (.*) (.*)", out)
    assert status == 0 and len({seed for seed, _ in noted}) == 6, (noted, err)
    assert [exchanges for _, exchanges in noted] == ["False", "True"] * 6


MAKE_ONCE = """
import fineweb
def make(argv):
    if not os.path.exists("pydocs"):
        print("made here", flush=True)
        time.sleep(0.5)
        write_shards(Path("pydocs"))
fineweb.main = make
"""


def test_one_process_makes_or_downloads_what_all_need(shards, monkeypatch):
    flags = "--quickstart --seq_len 16 --max_steps 1 --batch_size 8"
    status, out, err = run(flags, processes=2, patch=MAKE_ONCE)
    assert status == 0 and out.splitlines().count("made here") == 1, (out, err)
    monkeypatch.setitem(sys.modules, "fineweb", None)  # cannot be imported
    assert main(flags, "--max_steps 2 --resume") == 0, "a resumed run has its data already"


@pytest.mark.parametrize("difference", [
    "flags += ['--log_dir', 'elsewhere']", "flags += ['--max_lr', '0.02']",
    "flags += ['--dtype', 'bfloat16']", "flags += ['--data_dir', 'other']",
])  # fmt: skip
def test_processes_that_differ_stop(shards, difference):
    path = conftest.write_shards(Path("other")) / "test_val_000000.npy"
    np.save(path, np.load(path)[:-1])
    assert main("--max_steps 2") == 0
    before = contents("log")
    patch = f"if rank == 1: {difference}"
    status, out, err = run("--batch_size 8 --max_steps 4 --resume", processes=2, patch=patch)
    assert status == 2 and "loss" not in out
    (line,) = {*err.splitlines()}
    assert line.startswith("train_gpt2.py: the processes differ in checkpoint, precision, ")
    assert contents("log") == before


SLOW_SAVE = """
import time
def rename_late(source, target, replace=os.replace):
    time.sleep(0.5 if str(target).endswith(".pt") else 0)
    replace(source, target)
def check(status, end=os._exit):
    print("ended by", sys._getframe(1).f_globals["__name__"], flush=True)
    end(status if os.path.exists("log/model_00001.pt") else 77)
os.replace, os._exit = rename_late, check
"""


def test_no_process_ends_before_the_last_checkpoint_is_whole(shards):
    status, out, err = run("--max_steps 1 --val_every 0", processes=2, patch=SLOW_SAVE)
    assert status == 0, err
    assert out.count("ended by train_gpt2") == 2, "Python's cleanup could wait for the others"


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


def torchrun(name: str, launcher: str, flags: str, patch: str) -> subprocess.Popen:
    """Start torchrun for a tiny run. What it prints is kept in a file of this name."""
    Path(f"{name}.py").write_text(SCRIPT.format(patch=patch))
    module = [sys.executable, "-m", "torch.distributed.run", *launcher.split()]
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = str(int("nnodes" in launcher))
    with open(f"{name}.txt", "w") as file:
        command = [*module, f"{name}.py", *words(flags)]
        return subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)


def printed() -> str:
    return "".join(f"--- {path}\n{path.read_text()}" for path in sorted(Path().glob("*.txt")))


@slow
def test_torchrun_starts_a_group_again_in_which_a_process_dies(shards):
    """The processes meet at the store of torchrun's agent, which still knows the dead ones."""
    flags = "--max_steps 10 --save_every 2 --max_lr 6e-4 --resume --log_dir"
    assert main(flags, "one") == 0
    patch = hook(KILLED.format(seconds=0, rank=1, processes="[os.getpid()]"))
    launcher = "--standalone --nproc_per_node=2 --max_restarts=3"
    status = torchrun("agent", launcher, f"{flags} two", patch).wait(120)  # seconds
    assert status == 0 and printed().count("on 2 x cpu") == 2, printed()
    assert_close(read_log("one"), read_log("two"), tolerance=5e-6)


@slow
def test_a_machine_may_die_and_come_back(shards):
    """Two go on, and later three again, to the same end. The command is that of CLUSTERS.md."""
    flags = "--max_steps 200 --save_every 2 --max_lr 6e-4 --resume --log_dir"
    assert main(flags, "one") == 0
    flags += " three"
    store = host()
    launcher = "--nnodes=1:3 --nproc_per_node=1 --max_restarts=9 --rdzv_id=test --rdzv_backend=c10d"
    launcher += f" --rdzv_endpoint=127.0.0.1:{store.port} --rdzv_conf=last_call_timeout=9,is_host=0"
    pids = "(os.getppid(), os.getpid())"  # the agent, the process
    killed = hook(KILLED.format(seconds=0.1, rank="rank", processes=pids))
    slowly = killed.replace('"0"', '"never"')
    patches = {"a": slowly, "b": slowly, "c": killed}
    agents = {name: torchrun(name, launcher, flags, patch) for name, patch in patches.items()}
    deadline = time.monotonic() + 240  # seconds
    try:
        while "on 2 x cpu" not in printed() or agents["c"].poll() is None:
            time.sleep(0.1)
            assert time.monotonic() < deadline, printed()
        agents["c"] = torchrun("back", launcher, flags, slowly)
        statuses = [agent.wait(deadline - time.monotonic()) for agent in agents.values()]
    finally:
        for agent in agents.values():
            agent.kill()
    out = printed()
    assert statuses == [0, 0, 0] and out.count("done: ") == 1, out
    assert out.count("on 3 x cpu") == 2 and out.count("on 2 x cpu") == 1, out
    assert_close(read_log("one"), read_log("three"), tolerance=5e-6)


def test_one_process_reads_prompts(shards):
    """Several that read lines from one keyboard would lose some of them."""
    assert main("--max_steps 1") == 0
    patch = "import io; sys.stdin = None if rank else io.StringIO('one\\ntwo\\n')"
    flags = "--sample --init_from log --num_samples 1 --prompt -"
    status, out, err = run(flags, processes=2, patch=patch)
    assert status == 0 and out.count("sample 0: one") == out.count("sample 0: two") == 1, err
