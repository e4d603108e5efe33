"""train_gpt2.py with the tests' model size and deterministic kernels, for tests that need a process.

Two environment variables break it on purpose. KILL_IN_SAVE=step: SIGKILL while that checkpoint is
written. NAN_LOSS=rank:call: the loss is nan, on that process, in that call of the model.
"""

import os
import signal

import conftest
import torch
from torch.nn import functional as F

import train_gpt2

train_gpt2.SIZES["test"] = conftest.TINY
torch.use_deterministic_algorithms(True)

if "KILL_IN_SAVE" in os.environ:
    replace = os.replace

    def die_before_the_name(source, target):
        """End at the worst moment: bytes are there, not all of them, and the name is still to come."""
        if str(target).endswith(f"model_{int(os.environ['KILL_IN_SAVE']):05d}.pt"):
            os.truncate(source, 1000)
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = die_before_the_name

if "NAN_LOSS" in os.environ:
    rank, call = map(int, os.environ["NAN_LOSS"].split(":"))
    conftest.break_loss(lambda n, loss: loss * float("nan") if n == call else loss,
                        active=int(os.environ.get("RANK", 0)) == rank)  # fmt: skip

assert F.cross_entropy is train_gpt2.F.cross_entropy

if __name__ == "__main__":
    train_gpt2.main()
