"""Compare Muon with AdamW, as published and tuned, on the same data.

    python tests/benchmarks/half_the_tokens.py corpus            # 10 minutes of one H100

`corpus` is a folder of shards. GPT-2 124M reads 32,768 tokens a step: 280 and 560 steps with AdamW,
42% and 55% of these with Muon, each with two seeds. The claim holds if Muon's last validation loss
is below that of AdamW as published with 42% of the steps, and below that of the tuned AdamW with 55%.
draw_runs.py draws the curves: python tests/benchmarks/draw_runs.py log/half_the_tokens/*/log.txt
"""

import argparse
import gc
import io
import json
import re
import statistics
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import train_gpt2  # noqa: E402

# AdamW as tuned in README.md beside this file, and the shares of its steps that Muon gets
TUNED = "--max_lr 1.2e-3 --final_lr_frac 0 --schedule wsd --warmup_steps {warmup}"
ROWS = ("AdamW as published", "AdamW, tuned", "Muon, 42%", "Muon, 55%")


def get_flags(row: str, steps: int) -> list[str]:
    """Return the flags of a row of the comparison, given the number of AdamW's steps."""
    if row.startswith("Muon"):
        share = float(row[-3:-1]) / 100
        return ["--optimizer", "muon", "--max_steps", str(round(share * steps))]
    flags = ["--max_steps", str(steps)]
    if row == "AdamW, tuned":
        flags += TUNED.format(warmup=steps // 3).split()
    return flags


def train(name: str, flags: list[str], args: argparse.Namespace) -> dict:
    """Train one run and return {"name", "train": {step: loss}, "val": {step: loss}}."""
    log_dir = Path(args.out, re.sub(r"\W+", "_", name))
    argv = ["--data_dir", args.data_dir, "--log_dir", str(log_dir), "--overwrite"]
    argv += ["--model", args.model, "--seq_len", str(args.seq_len)]
    argv += ["--batch_size", str(args.batch_size)]
    argv += ["--total_batch_size", str(args.seq_len * args.batch_size)]
    argv += ["--val_every", str(args.val_every), "--val_tokens", str(args.val_tokens)]
    argv += ["--save_every", "0", "--hellaswag_every", "0", "--sample_every", "0", *flags]
    start = time.perf_counter()
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            train_gpt2.main(argv)
    except SystemExit as end:
        if end.code != 0:
            raise SystemExit(printed.getvalue()) from end
    gc.collect()  # the model; its compiled graph serves the next run too
    result = {"name": name, "train": {}, "val": {}, "dt": {}}
    for line in (log_dir / "log.txt").read_text().splitlines():
        step, stream, value = line.split()
        if stream in result:
            result[stream][int(step)] = float(value)
    ms = statistics.median(result["dt"].values())
    seconds = time.perf_counter() - start
    loss = list(result["val"].values())[-1]
    print(f"{name:45} val loss {loss:.4f}, {ms:.1f} ms a step, {seconds:.0f} s", flush=True)
    return result


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data_dir")
    parser.add_argument("--steps", type=int, nargs="+", default=[280, 560], help="AdamW's")
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4])  # the tuning used 1 and 2
    parser.add_argument("--model", default="d12")
    parser.add_argument("--seq_len", type=int, default=1024)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--val_every", type=int, default=40)
    parser.add_argument("--val_tokens", type=int, default=262144)
    parser.add_argument("--flags", default="", help="more flags for train_gpt2.py")
    parser.add_argument("--out", default="log/half_the_tokens", help="folder of the results")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    results = []
    last = {}  # the last validation loss by name
    for seed in args.seeds:
        for steps in args.steps:
            for row in ROWS:
                name = f"{row}, {steps} steps of AdamW, seed {seed}"
                flags = [*get_flags(row, steps), "--seed", str(seed), *args.flags.split()]
                results.append(train(name, flags, args))
                last[row, steps, seed] = list(results[-1]["val"].values())[-1]
                Path(args.out, "results.json").write_text(json.dumps(results))
    for seed in args.seeds:
        for steps in args.steps:
            published, tuned, less, half = [last[row, steps, seed] for row in ROWS]
            verdict = "holds" if less < published and half < tuned else "does not hold"
            print(f"{steps} steps, seed {seed}: the claim {verdict}")


if __name__ == "__main__":
    main()
