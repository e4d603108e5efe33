"""train_gpt2.py with the tests' model size and deterministic kernels, for tests that need a process.

Environment variables break it on purpose. KILL_IN_SAVE=step: SIGKILL while that checkpoint is
written. NAN_LOSS=rank:call: the loss is nan, on that process, in that call of the model.
KILL_RANK_AT=rank:step: SIGKILL of that process in that step, at the first attempt of torchrun.
SIGNAL_AFTER=rank:step:call: SIGTERM to that process in that batch of the evaluation after the step;
step -1 is the evaluation before the first one.
HIDE_CHECKPOINTS=rank: that process finds none. NO_DATA=rank: that process finds no data.
SLOW_SAVE=seconds: a save takes that long.
SPOIL_AT=step:path: in that step, the file is cut to 200 bytes, or deleted if step is negative.
BUFFERS=1: a fork whose model multiplies by a table and by a count of its training calls.
READ_LATER=1 reads each step's results one step later, as with a GPU.
HELLASWAG=path takes the examples from there, so that nothing is downloaded.
"""

import dataclasses
import os
import signal
import time
from pathlib import Path

import conftest
import torch
from torch.nn import functional as F

import hellaswag
import train_gpt2

hellaswag.FILE = Path(os.environ.get("HELLASWAG", hellaswag.FILE))
train_gpt2.SIZES["test"] = conftest.TINY
torch.use_deterministic_algorithms(True)
sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 3))  # the patience of train_gpt2.report

if "KILL_IN_SAVE" in os.environ:
    replace = os.replace

    def die_before_the_name(source, target):
        """End at the worst moment: bytes are there, not all of them, and the name is still to come."""
        if str(target).endswith(f"model_{int(os.environ['KILL_IN_SAVE']):05d}.pt"):
            os.truncate(source, 1000)
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = die_before_the_name

if "SLOW_SAVE" in os.environ:
    save = torch.save

    def save_slowly(contents, file):
        """Write a checkpoint as large models have them."""
        sleep(float(os.environ["SLOW_SAVE"]))
        save(contents, file)

    torch.save = save_slowly

if "NAN_LOSS" in os.environ:
    rank, call = map(int, os.environ["NAN_LOSS"].split(":"))
    conftest.break_loss(lambda n, loss: loss * float("nan") if n == call else loss,
                        active=int(os.environ.get("RANK", 0)) == rank)  # fmt: skip

RANK = int(os.environ.get("RANK", 0))

if "KILL_RANK_AT" in os.environ and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    victim, at_step = map(int, os.environ["KILL_RANK_AT"].split(":"))
    get_lr = train_gpt2.get_lr

    def die_at_step(step, args):
        if (RANK, step) == (victim, at_step):
            os.kill(os.getpid(), signal.SIGKILL)
        return get_lr(step, args)

    train_gpt2.get_lr = die_at_step

if "SIGNAL_AFTER" in os.environ:
    place = tuple(int(number) for number in os.environ["SIGNAL_AFTER"].split(":"))
    here = [RANK, -1, 0]
    rate, forward = train_gpt2.get_lr, train_gpt2.GPT.forward

    def count_steps(step, args):
        if step < args.max_steps:  # the lines at the start print the last rate
            here[1:] = [step, 0]
        return rate(step, args)

    def count_batches(self, *args, **kwargs):
        here[2] += not self.training
        if tuple(here) == place and not self.training:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(self, *args, **kwargs)

    train_gpt2.get_lr, train_gpt2.GPT.forward = count_steps, count_batches

if "SPOIL_AT" in os.environ:
    spoil_at, path = os.environ["SPOIL_AT"].split(":")
    get_rate = train_gpt2.get_lr

    def spoil_at_step(step, args):
        if step == abs(int(spoil_at)) and RANK == 0:
            os.truncate(path, 200) if int(spoil_at) > 0 else os.remove(path)
        return get_rate(step, args)

    train_gpt2.get_lr = spoil_at_step

if "BUFFERS" in os.environ:

    class Forked(train_gpt2.GPT):
        """A GPT with two buffers, of which checkpoints hold the count and not the table."""

        def __init__(self, config, recompute=False):
            super().__init__(config, recompute)
            table = torch.linspace(0.5, 1.5, config.n_embd)
            self.transformer.ln_f.register_buffer("table", table, persistent=False)
            self.transformer.ln_f.register_buffer("count", torch.zeros(()))
            self.transformer.ln_f.register_forward_pre_hook(multiply)

    def multiply(ln_f, inputs):
        """Scale what LayerNorm reads, and count."""
        ln_f.count += ln_f.training
        return inputs[0] * (1 + ln_f.table / (1 + ln_f.count))

    train_gpt2.GPT = Forked

if "READ_LATER" in os.environ:
    setup_run = train_gpt2.setup_run
    train_gpt2.setup_run = lambda args: dataclasses.replace(setup_run(args), runs_ahead=True)

if os.environ.get("HIDE_CHECKPOINTS") == str(RANK):
    train_gpt2.list_checkpoints = lambda log_dir: []

if os.environ.get("NO_DATA") == str(RANK):
    open_shards = train_gpt2.open_shards
    train_gpt2.open_shards = lambda data_dir, split: open_shards("nowhere", split)

assert F.cross_entropy is train_gpt2.F.cross_entropy

if __name__ == "__main__":
    train_gpt2.main()
