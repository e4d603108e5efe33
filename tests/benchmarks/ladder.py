"""
Climb the ladder of this field's lectures on your own machine: what each step from plain float32 to
train_gpt2.py as it is gives, alone and on top of those before it.

    python tests/benchmarks/ladder.py                        GPT-2 124M on a GPU, a small one on a CPU
    python tests/benchmarks/ladder.py -b 4 -t 256            a small GPU
    python tests/benchmarks/ladder.py -b 64 --total_batch_size 524288 --only fused auto --repeats 3
                                                             plainly compiled against all of ours

Every rung is train_gpt2.py itself, run on random tokens with Zipf's frequencies; a rung that is not
climbed yet is undone from outside. Times are its log.txt's: whole optimizer steps with accumulation,
clipping, AdamW and logging, the median of those after the first few. Attention is causal in all.
The last rung takes the largest batch that fits, and as many tokens a step, unless --total_batch_size
is as large for all: then AdamW counts less.
"""

import argparse
import contextlib
import gc
import io
import json
import math
import re
import statistics
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt2

# name: ms a step in the lectures, on an A100 (B 16) and a T4 (B 4, float16). Source: llm.c's and
# build-nanogpt's lectures
RUNGS = {
    "float32": (1000, 1200),
    "TF32": (333, None),
    "16 bits": (300, 460),
    "compile": (130, 300),
    "FlashAttention": (96, 260),
    "padded vocabulary": (93, 250),
    "fused AdamW": (90, 250),
    "bfloat16 residual": (None, None),
    "loss kernel": (None, None),
    "auto batch size": (None, None),
}

# name: (width, decimal places); the last two are the lectures'
COLUMNS = {"B": (5, 0), "ms": (9, 1), "tok/s": (10, 0), "MFU %": (7, 1), "GiB": (7, 1)}
COLUMNS |= {"loss": (9, 4), "alone ms": (10, 1), "A100 ms": (9, 0), "T4 ms": (7, 0)}

# hardly a CPU has matrix units for 16 bits, and none TF32 or Triton
NEVER_ALONE = ("bfloat16 residual", "loss kernel", "auto batch size")  # no use in float32
GPU_ONLY = ("TF32", "16 bits", "bfloat16 residual", "loss kernel")


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask=None, is_causal=True) -> Tensor:
    """Return causal attention with all T x T scores in memory; q, k, v are (B, nh, T, hs)."""
    T = q.size(2)
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(2, 3) / math.sqrt(q.size(3))).masked_fill(future, -math.inf)
    return F.softmax(scores, dim=-1) @ v


def make_model(climbed: set[str]) -> type:
    """Return train_gpt2.GPT without what is not climbed yet."""

    class Model(train_gpt2.GPT):
        def __init__(self, config, recompute=False, residual_dtype=torch.float32):
            if "bfloat16 residual" not in climbed:
                residual_dtype = torch.float32
            super().__init__(config, recompute, residual_dtype)
            if "padded vocabulary" not in climbed:
                rows = nn.Parameter(self.lm_head.weight.data[: config.vocab_size].clone())
                self.transformer.wte.weight = self.lm_head.weight = rows

        def configure_optimizers(self, weight_decay, learning_rate, optimizer="adamw"):
            [optimizer] = super().configure_optimizers(weight_decay, learning_rate)
            if "fused AdamW" in climbed:
                return [optimizer]
            settings = {"lr": learning_rate, "betas": (0.9, 0.95), "eps": 1e-8}
            groups = [{k: g[k] for k in ("params", "weight_decay")} for g in optimizer.param_groups]
            return [torch.optim.AdamW(groups, **settings)]

    return Model


def write_tokens(folder: Path, n: int, tokenizer: str) -> None:
    """Write a shard of n tokens as frequent as words are: the r-th most frequent one ~ 1 / r."""
    vocab_size = {"gpt2": 50257, "bytes": 257}[tokenizer]
    ranks = np.exp(np.random.RandomState(0).uniform(0, math.log(vocab_size), n)) - 1
    np.save(folder / "zipf_train_000000.npy", ranks.astype(np.uint16))
    meta = {"tokenizer": tokenizer, "vocab_size": vocab_size, "eot": vocab_size - 1}
    (folder / "meta.json").write_text(json.dumps(meta))


def measure(args: argparse.Namespace, climbed: set[str], folder: Path) -> dict:
    """Return ms a step, tokens a second, MFU and peak memory of a run with these rungs climbed."""
    dtype = args.half if "16 bits" in climbed else "tf32" if "TF32" in climbed else "float32"
    auto = "auto batch size" in climbed
    B = 0 if auto else args.batch_size  # 0: what fits
    total = max(args.total_batch_size, (128 if auto else B) * args.seq_len)  # 128 is auto's most
    compiled = "--compile" if "compile" in climbed else "--no-compile"
    where = f"--data_dir {folder} --log_dir {folder}/log --overwrite"
    what = f"--model {args.model} --dtype {dtype} {compiled} --max_steps {args.steps}"
    batch = f"--seq_len {args.seq_len} --batch_size {B} --total_batch_size {total}"
    never = "--val_every 0 --hellaswag_every 0 --sample_every 0 --save_every 0"
    torch.compiler.reset()
    gc.collect()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    printed = io.StringIO()
    with contextlib.ExitStack() as undone:
        undone.enter_context(contextlib.redirect_stdout(printed))
        undone.enter_context(mock.patch.object(train_gpt2, "GPT", make_model(climbed)))
        if "FlashAttention" not in climbed:
            undone.enter_context(
                mock.patch.object(F, "scaled_dot_product_attention", plain_attention)
            )
        if "loss kernel" not in climbed:
            undone.enter_context(mock.patch.object(train_gpt2, "triton", None))
        try:
            train_gpt2.main(f"{where} {what} {batch} {never}".split())
        except torch.OutOfMemoryError:
            return {}
        except SystemExit as end:
            if end.code:
                raise
    log = [line.split() for line in (folder / "log" / "log.txt").read_text().splitlines()]
    times = [float(value) for _, stream, value in log if stream == "dt"][args.steps // 3 :]
    row = {"B": int(re.search(r"(\d+) x \d+ tokens at", printed.getvalue())[1])}
    row |= {"ms": statistics.median(times), "tok/s": 1000 * total / statistics.median(times)}
    row["loss"] = next(float(value) for _, stream, value in log[::-1] if stream == "train")
    if cuda:
        row["GiB"] = torch.cuda.max_memory_allocated() / 2**30
    if mfu := re.findall(r"mfu: ([\d.]+)%", printed.getvalue()):
        row["MFU %"] = statistics.median(map(float, mfu[args.steps // 3 :]))
    return row


def cell(row: dict, name: str) -> str:
    """Return a column's text, a dash for what was not measured or did not fit."""
    width, places = COLUMNS[name]
    return f"{'-':>{width}}" if row.get(name) is None else f"{row[name]:{width},.{places}f}"


def draw(path: str, title: str, rows: list[tuple[str, dict, dict]]) -> None:
    """Draw a bar a rung, its thousands of tokens a second, and a line where it is alone."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.4 * len(rows) + 1), layout="constrained")
    rows = list({row[0]: row for row in rows}.values())  # of repeats, the last
    names = [name for name, _, _ in rows]
    speeds = [row.get("tok/s", 0) / 1000 for _, row, _ in rows]
    bars = axes.barh(names, speeds, color="tab:blue", label="with all rungs above it")
    axes.bar_label(bars, fmt="%.3g", padding=3)
    alone = [(name, row["tok/s"] / 1000) for name, _, row in rows if row]
    if alone:
        places, ends = zip(*alone, strict=True)
        axes.plot(ends, places, "k|", markersize=14, label="alone, on float32")
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set(xlabel="thousand tokens a second", title=title)
    axes.legend(loc="upper right", frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="d12" if gpu else "tiny")
    add("-b", "--batch_size", type=int, default=16 if gpu else 4)
    add("-t", "--seq_len", type=int, default=1024 if gpu else 128)
    add("--total_batch_size", type=int, default=0, help="tokens a step (default: one batch)")
    add("--steps", type=int, default=15 if gpu else 9, help="of each run")
    add("--only", nargs="*", default=[], help="rungs whose name begins so, with those before them")
    add("--repeats", type=int, default=1)
    add("--png", default="ladder.png", help="the chart")
    args = parser.parse_args()
    run = train_gpt2.setup_run(argparse.Namespace(device="auto", dtype="auto", compile=None))
    args.half = run.dtype
    name = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    shape = f"{args.model}, B {args.batch_size}, T {args.seq_len}"
    print(f"{name}, torch {torch.__version__}, {shape}{f', 16 bits: {args.half}' if gpu else ''}\n")
    print(f"{'rung':18}" + "".join(f"{name:>{width}}" for name, (width, _) in COLUMNS.items()))
    rungs, rows = [rung for rung in RUNGS if gpu or rung not in GPU_ONLY], []
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder), 4 * 2**20, "gpt2" if gpu else "bytes")
        for _ in range(args.repeats):
            for i, rung in enumerate(rungs):
                if args.only and not rung.startswith(tuple(args.only)):
                    continue
                row = measure(args, set(rungs[: i + 1]), Path(folder))
                lonely = not args.only and i > 1 and rung not in NEVER_ALONE
                alone = measure(args, {rung}, Path(folder)) if lonely else {}
                rows.append((rung, row, alone))
                cells = row | dict(zip(("A100 ms", "T4 ms"), RUNGS[rung], strict=True))
                cells["alone ms"] = alone.get("ms")
                print(f"{rung:18}" + "".join(cell(cells, name) for name in COLUMNS), flush=True)
    draw(args.png, f"{name}: {shape}", rows)
    print(f"\ndrawn in {args.png}")


if __name__ == "__main__":
    main()
