"""Measure how training scales over the GPUs of one machine, in one call of a few minutes.

    python tests/benchmarks/scaling.py corpus                     # on 1, 2, 4 ... of its GPUs
    python tests/benchmarks/scaling.py corpus --gpus 1 8 --repeats 3

`corpus` is a folder of shards. GPT-2 124M, B 64. Every number of GPUs trains with 524,288 tokens a
step, where linear is the step of one GPU divided by their number, and with 65,536 tokens for each
of them, where linear is an eighth of it. Times are log.txt's, the median of a run after its first
five steps. Then one GPU and all of them train 20 steps of the same data, with two validations and
HellaSwag if --hellaswag is given, once more with Muon, and the losses are compared.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
SILENT = "--overwrite --save_every 0 --sample_every 0"
TIMED = f"{SILENT} --val_every 0 --hellaswag_every 0"


def train(gpus: int, flags: str, args: argparse.Namespace) -> dict:
    """Train on this number of GPUs. Return {"ms": median, "train": losses, "val": losses, "seconds":
    of each validation and of HellaSwag}."""
    launcher = [sys.executable]
    if gpus > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]
    where = [
        "--data_dir",
        args.data_dir,
        "--log_dir",
        args.out,
        "--batch_size",
        str(args.batch_size),
    ]
    command = [*launcher, str(ROOT / "train_gpt2.py"), *where, *flags.split(), *args.flags.split()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
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
    log = [line.split() for line in Path(args.out, "log.txt").read_text().splitlines()]
    result = {"seconds": seconds}
    for name in ("train", "val", "dt"):
        result[name] = [float(value) for _, stream, value in log if stream == name]
    result["ms"] = statistics.median(result["dt"][5:])
    return result


def measure_steps(args: argparse.Namespace) -> None:
    """Print a row for every number of GPUs and size of a step."""
    row = "{:>5} {:>9} {:>14} {:>9}  {}"
    print(row.format("GPUs", "tokens", "tok/s", "linear", "ms a step, each run"))
    one = None  # ms of one GPU
    for gpus in args.gpus:
        for total in (args.total, args.total // 8 * gpus):
            if gpus == 1 and total != args.total:
                continue
            steps = 14 if total == args.total else 60
            flags = f"{TIMED} --max_steps {steps} --total_batch_size {total}"
            runs = [train(gpus, flags, args)["ms"] for _ in range(args.repeats)]
            ms = statistics.median(runs)
            one = one or ms
            share = f"{one * total / args.total / gpus / ms:.1%}" if gpus > 1 else ""
            each = ", ".join(f"{run:.2f}" for run in runs)
            print(
                row.format(gpus, f"{total:,}", f"{1000 * total / ms:,.0f}", share, each), flush=True
            )


def compare_losses(args: argparse.Namespace) -> None:
    """Print the largest difference between the losses on one GPU and on all, the seconds of the
    evaluations, and what a step takes with each optimizer."""
    every = f"{SILENT} --max_steps 20 --val_every 10 --total_batch_size {args.total}"
    every += f" --hellaswag_every {10 if args.hellaswag else 0}"
    for optimizer in ("adamw", "muon"):
        results = [
            train(gpus, f"{every} --optimizer {optimizer}", args)
            for gpus in sorted({args.gpus[0], args.gpus[-1]})
        ]
        pairs = zip(results[0]["train"], results[-1]["train"], strict=True)
        difference = max(abs(a - b) for a, b in pairs)
        print(f"{optimizer}: losses of 20 steps differ by at most {difference:.5f}")
        for gpus, result in zip((args.gpus[0], args.gpus[-1]), results, strict=False):
            seconds = ", ".join(f"{value:.1f}" for value in result["seconds"])
            print(f"  {gpus} GPUs: {result['ms']:.1f} ms a step; val {result['val']}; s: {seconds}")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    count = torch.cuda.device_count()
    powers = [2**i for i in range(8) if 2**i <= max(1, count)]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data_dir")
    parser.add_argument("--gpus", type=int, nargs="+", default=powers, help="numbers of GPUs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--total", type=int, default=2**19, help="tokens a step")
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
