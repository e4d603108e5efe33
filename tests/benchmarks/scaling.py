"""Measure how training scales over the GPUs of one machine.

    python tests/benchmarks/scaling.py corpus                     # on 1, 2, 4 ... of its GPUs
    python tests/benchmarks/scaling.py corpus --gpus 1 8 --repeats 3

`corpus` is a folder of shards. GPT-2 124M, B 64. One GPU trains with 524,288 tokens a step, which
takes it t milliseconds. n GPUs train with 524,288 tokens a step, too, where linear scaling would
take t / n, and with 65,536 tokens for each GPU, where it would take t / 8.

An H200 under full load is limited by its power. What it computes in a second then depends on the
chip, on its temperature and on the weights: those of a trained model take up to 2% more time than
new ones. Therefore the runs take turns. t is the mean over all GPUs in use, each of which trains by
itself at the same time. The learning rate is 0, so that every run computes with the same weights. A
run has 14 steps of 524,288 tokens for each GPU, about 13 seconds of an H200, and its time is the
median of log.txt's steps in its second half.

After that one GPU and all of them really train, 20 steps on the same data, with AdamW and with
Muon. There are two validations, and with --hellaswag two scores. The losses are compared.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
SILENT = "--overwrite --save_every 0 --sample_every 0"
TIMED = f"{SILENT} --val_every 0 --hellaswag_every 0 --max_lr 0"


def start(gpus: int, flags: str, args: argparse.Namespace, first: int = 0) -> subprocess.Popen:
    """Start to train on this number of GPUs, of which `first` is the first."""
    command = [sys.executable]
    if gpus > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]
    command += [str(ROOT / "train_gpt2.py"), "--data_dir", args.data_dir]
    command += ["--log_dir", f"{args.out}/{first}", "--batch_size", str(args.batch_size)]
    command += [*flags.split(), *args.flags.split()]
    all_gpus = [str(gpu) for gpu in range(max(args.gpus))]
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        all_gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    visible = ",".join(all_gpus[first : first + gpus])
    # torchrun gives every process one thread, so a process alone gets one as well
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen, args: argparse.Namespace, first: int = 0) -> dict:
    """Wait for a run that was just started. Return {"ms": median of the second half of its steps,
    "train": losses, "val": losses, "seconds": of each validation and of HellaSwag}."""
    seconds, lines = [], []
    last = time.perf_counter()
    for line in process.stdout:
        now = time.perf_counter()
        if "val loss" in line or "HellaSwag:" in line:
            seconds.append(now - last)  # since the line before it
        last = now
        lines.append(line)
    if process.wait():
        raise SystemExit("".join(lines))
    log = [line.split() for line in Path(args.out, str(first), "log.txt").read_text().splitlines()]
    result = {"seconds": seconds}
    for name in ("train", "val", "dt"):
        result[name] = [float(value) for _, stream, value in log if stream == name]
    result["ms"] = statistics.median(result["dt"][len(result["dt"]) // 2 :])
    return result


def measure_steps(args: argparse.Namespace) -> None:
    """Print a line for every run as it ends, then a row for every number of GPUs and size of a
    step, with the median of its runs, and the least and the greatest of them in brackets."""
    most = max(args.gpus)
    sizes = {(1, args.total)}
    sizes |= {(n, total) for n in args.gpus if n > 1 for total in (args.total, args.total // 8 * n)}
    runs = {size: [] for size in sorted(sizes, reverse=True)}  # the largest might not be possible
    for turn in range(args.repeats):
        for (gpus, total), times in runs.items():
            steps = max(10, args.tokens * gpus // total)
            flags = f"{TIMED} --max_steps {steps} --total_batch_size {total}"
            firsts = range(most) if gpus == 1 else [0]
            processes = [start(gpus, flags, args, first) for first in firsts]
            each = []
            for first, process in zip(firsts, processes, strict=True):
                each.append(finish(process, args, first)["ms"])
            times.append(statistics.mean(each))
            text = ", ".join(f"{ms:.2f}" for ms in each)
            print(f"turn {turn}: {gpus} GPUs, {total:,} tokens: {text} ms", flush=True)
    row = "{:>5} {:>9} {:>12} {:>26} {:>24}"
    print(row.format("GPUs", "tokens", "tok/s", "ms a step", "of linear"))
    for (gpus, total), times in sorted(runs.items()):
        linear = [one * total / args.total / gpus for one in runs[1, args.total]]
        shares = [at_best / ms for at_best, ms in zip(linear, times, strict=True)]
        ms = statistics.median(times)
        share = statistics.median(shares)
        times_text = f"{ms:.2f} ({min(times):.2f} to {max(times):.2f})"
        share_text = f"{share:.1%} ({min(shares):.1%} to {max(shares):.1%})"
        print(row.format(gpus, f"{total:,}", f"{1000 * total / ms:,.0f}", times_text, share_text))


def compare_losses(args: argparse.Namespace) -> None:
    """Print the largest difference between the losses on one GPU and on all, the seconds of the
    evaluations, and what a step takes with each optimizer."""
    every = f"{SILENT} --max_steps 20 --val_every 20 --total_batch_size {args.total}"
    every += f" --hellaswag_every {20 if args.hellaswag else 0}"
    for optimizer in ("adamw", "muon"):
        results = {}
        for gpus in sorted({1, max(args.gpus)}):
            process = start(gpus, f"{every} --optimizer {optimizer}", args)
            results[gpus] = finish(process, args)
        pairs = zip(results[1]["train"], results[max(args.gpus)]["train"], strict=True)
        difference = max(abs(a - b) for a, b in pairs)
        print(f"{optimizer}: losses of 20 steps differ by at most {difference:.6f}")
        for gpus, result in results.items():
            seconds = ", ".join(f"{value:.1f}" for value in result["seconds"])
            print(
                f"  {gpus} GPUs: {result['ms']:.1f} ms; val {result['val']}; s: {seconds}",
                flush=True,
            )


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    count = torch.cuda.device_count()
    powers = [2**i for i in range(8) if 2**i <= max(1, count)]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data_dir")
    parser.add_argument("--gpus", type=int, nargs="+", default=powers, help="numbers of GPUs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--total", type=int, default=2**19, help="tokens a step")
    parser.add_argument("--tokens", type=int, default=14 * 2**19, help="of a GPU in a run")
    parser.add_argument("--hellaswag", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--flags", default="", help="more flags for train_gpt2.py")
    parser.add_argument("--out", default="log/scaling", help="folder of the runs")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    print(torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", torch.__version__)
    measure_steps(args)
    compare_losses(args)


if __name__ == "__main__":
    main()
