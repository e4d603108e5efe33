"""Several processes: a sharded run is the run of one process, and every checkpoint fits every run."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from conftest import (
    FLAGS,
    ROOT,
    free_port,
    read_log,
    run_main,
    run_script,
    start_script,
    start_warm,
    write_shards,
)
from test_hellaswag import RAW, write_examples
from test_training import assert_close, assert_same_weights, weights

EVERY = ["--val_every", 3, "--save_every", 3, "--sample_every", 3, "--hellaswag_every", 3]


@pytest.fixture
def start(tmp_path):
    """Return a function that trains in a number of processes and returns log.txt."""
    data = write_shards(tmp_path / "data")
    examples = write_examples(tmp_path / "raw.jsonl")

    def run(log_dir, processes, *flags, **broken):
        where = ["--data_dir", data, "--log_dir", tmp_path / log_dir, *FLAGS, *EVERY]
        where += ["--batch_size", 2, "--num_samples", 2]
        # One process is what a CPU does, several read their results later, as GPUs do
        env = {"HELLASWAG": str(examples)} | ({"READ_LATER": "1"} if processes > 1 else {})
        status, out, err = run_script([*where, *flags], processes, **env, **broken)
        assert status == 0, err
        return read_log(tmp_path / log_dir), [
            line for line in out.splitlines() if line.startswith("sample ")
        ]

    return run


def test_a_fork_with_buffers_shards_and_resumes(start, tmp_path):
    """Tables that are never copied to a sharded model, running values that no checkpoint holds."""
    flags = ["--max_steps", 6]
    logs = []
    # With these batches, a process of either run calls the model equally often
    for processes, own in ((1, ["--batch_size", 4]), (2, ["--zero", 3])):
        log_dir = f"log{processes}"
        logs.append(start(log_dir, processes, *flags, *own, BUFFERS="1")[0])
        (tmp_path / log_dir / "model_00006.pt").unlink()
        resumed, _ = start(log_dir, processes, *flags, *own, "--resume", BUFFERS="1")
        assert resumed == logs[-1]
    assert_close(*logs)
    saved = torch.load(tmp_path / "log1/model_00006.pt")["model"]
    assert "transformer.ln_f.table" not in saved and saved["transformer.ln_f.count"] > 0


@pytest.mark.parametrize(
    "processes, stream, last", [(1, "val", 3), (1, "val", -1), (1, "hella", 1), (2, "val", 1)]
)
def test_a_signal_does_not_wait_for_the_end_of_an_evaluation(tmp_path, processes, stream, last):
    """A validation of minutes, and a scheduler that kills after 30 seconds what it asked to stop."""
    examples = write_examples(tmp_path / "raw.jsonl", RAW * 100)
    flags = ["--data_dir", write_shards(tmp_path / "data"), *FLAGS, "--batch_size", 1]
    flags += ["--max_steps", 4, "--save_every", 2, "--val_every", 2 * (stream == "val")]
    flags += ["--hellaswag_every", 2 * (stream == "hella"), "--zero", 3 * (processes > 1)]
    env = {"HELLASWAG": str(examples)}
    run_script([*flags, "--log_dir", tmp_path / "unbroken"], processes, **env)
    # The last process gets the signal, in the third batch of the evaluation after update `last`
    broken = env | {"SIGNAL_AFTER": f"{processes - 1}:{last}:3"}
    status, out, _ = run_script([*flags, "--log_dir", tmp_path / "log"], processes, **broken)
    assert status == (143 if processes == 1 else 1) and "--resume" in out
    evaluated = read_log(tmp_path / "log").get(stream, {})
    assert list(evaluated) == list(range(0, last + 1, 2))
    where = ["--data_dir", tmp_path / "data", "--log_dir", tmp_path / "log", "--resume"]
    # Once more in the same evaluation, with which the resumed run begins
    again = env | {"SIGNAL_AFTER": f"{processes - 1}:-1:3"}
    status, _, _ = run_script([*where, "--device", "cpu"], processes, **again)
    assert status == (143 if processes == 1 else 1)
    status, _, err = run_script([*where, "--device", "cpu"], processes, **env)
    assert status == 0, err
    assert read_log(tmp_path / "log") == read_log(tmp_path / "unbroken")
    for step in (2, 4):
        assert_same_weights(weights(tmp_path / "log", step), weights(tmp_path / "unbroken", step))
        path = f"model_{step:05d}.pt"
        ends = [torch.load(tmp_path / run / path)["val_loss"] for run in ("log", "unbroken")]
        assert ends[0] == ends[1], step


def test_nobody_leaves_while_the_first_process_writes(tmp_path):
    """torchrun, which kills all processes 30 seconds after the first of them has failed."""
    flags = ["--data_dir", write_shards(tmp_path / "data"), *FLAGS, "--log_dir", tmp_path / "log"]
    broken = {"SIGNAL_AFTER": "1:-1:1", "SLOW_SAVE": "2"}
    started = start_warm(tmp_path / "out", [*flags, "--batch_size", 1], 2, **broken)
    started[1].join(60)
    assert started[1].exitcode == 143 and (tmp_path / "log/model_00000.pt").exists()
    started[0].join(60)
    assert started[0].exitcode == 0


@pytest.mark.parametrize("zero, optimizer", [(2, "adamw"), (3, "muon")])
def test_a_sharded_run_is_the_run_of_one_process(start, tmp_path, zero, optimizer):
    """Gradients summed over shards instead of averaged, a norm or an evaluation of one shard only."""
    flags = ["--max_steps", 6, "--optimizer", optimizer]
    one, samples = start("one", 1, *flags)
    sharded, its_samples = start("sharded", 2, *flags, "--zero", zero)
    assert {"train", "norm", "val", "hella"} <= sharded.keys()
    assert_close(one, sharded)
    assert samples == its_samples and samples
    a, b = weights(tmp_path / "one", 6), weights(tmp_path / "sharded", 6)
    assert {n: p.shape for n, p in a.items()} == {n: p.shape for n, p in b.items()}


def test_an_evaluation_leaves_the_next_gradient_alone(start):
    """Weights that an evaluation has gathered, and beside them a gradient that nobody clears."""
    flags = ["--max_steps", 5, "--zero", 2, "--save_every", 0]  # 3 gathers nothing for long
    never = ["--val_every", 0, "--sample_every", 0, "--hellaswag_every", 0]
    without, _ = start("without", 2, *flags, *never)
    every = ["--val_every", 2, "--sample_every", 3, "--hellaswag_every", 4]
    evaluated, _ = start("with", 2, *flags, *every)
    assert evaluated["norm"] == without["norm"] and evaluated["train"] == without["train"]


def test_a_checkpoint_crosses_between_stages_and_numbers_of_processes(start):
    """A checkpoint that holds shards, or optimizer state keyed by what one mode calls a parameter."""
    # Muon's run has AdamW's state too
    flags = ["--optimizer", "muon", "--resume", "--warmup_steps", 2, "--max_lr", 0.02]
    flags += ["--schedule", "constant"]  # the number of steps must not shape the learning rate
    unbroken, _ = start("one", 1, *flags, "--max_steps", 12)
    stages = ((3, 2, ["--zero", 3]), (6, 1, []), (9, 4, ["--zero", 2]), (12, 2, ["--zero", 0]))
    for max_steps, processes, zero in stages:  # one process cannot shard, and needs no flag for it
        where = ["--max_steps", max_steps, *zero]
        crossing, _ = start("crossing", processes, *flags, *where)
    assert_close(unbroken, crossing)


def test_two_machines_give_the_run_of_one(tmp_path, shards):
    """Ranks counted per machine: both would train on the same data, or write the same files."""
    flags = ["--data_dir", shards, *FLAGS, "--max_steps", 6, "--batch_size", 2]
    assert run_main(*flags, "--log_dir", tmp_path / "one") == 0
    launcher = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=test"]
    launcher += [f"--rdzv_endpoint=127.0.0.1:{free_port()}"]
    flags += ["--log_dir", tmp_path / "two"]
    machines = [start_script(flags, launcher=launcher) for _ in range(2)]
    outputs = [machine.communicate(timeout=120) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert_close(read_log(tmp_path / "one"), read_log(tmp_path / "two"))
    assert sum("done:" in out for out, _ in outputs) == 1, "one printer"


def test_the_slurm_script_in_the_readme_starts_two_machines(tmp_path, shards):
    """A script that nobody has run: a variable that is not set, two groups of one process each."""
    [script] = re.findall(
        r"```\n(#!/bin/bash\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    # Slurm's two programs, as they behave for a job of two machines, which are both this one
    tools = {
        "scontrol": 'for host in $3; do echo "127.0.0.1"; done',
        "srun": '"$@" & first=$!; "$@"; second=$?; wait $first && exit $second',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }
    for name, body in tools.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text("")
    flags = ["--data_dir", shards, *FLAGS, "--max_steps", 6, "--batch_size", 2]
    small = shlex.join(map(str, [ROOT / "tests/run_tiny.py", "--resume", *flags]))
    assert script.count("train_gpt2.py --resume") == script.count("--nproc_per_node=8") == 1
    script = script.replace("train_gpt2.py --resume", f"{small} --log_dir two")
    script = script.replace("--nproc_per_node=8", "--nproc_per_node=1").replace(
        "29500", free_port()
    )
    job = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a b"}
    env = os.environ | job | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    env["PYTHONPATH"] = str(ROOT)
    command = ["bash", "-eu", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert run_main(*flags, "--log_dir", tmp_path / "one") == 0
    assert_close(read_log(tmp_path / "one"), read_log(tmp_path / "two"))


@pytest.mark.parametrize("flags", [["--zero", "2"], ["--zero", "3"]])
def test_sharding_one_process_is_refused(tmp_path, shards, capsys, flags):
    """A flag that does nothing, or an assertion in a library."""
    assert run_main("--data_dir", shards, "--log_dir", tmp_path / "log", *FLAGS, *flags) == 2
    assert "--zero: it shards a model over several processes" in capsys.readouterr().err
