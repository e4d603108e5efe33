"""
What each mechanism of train_gpt2.py buys: take it away, and measure what is lost.

    python tests/benchmarks/price.py                       everything: 75 minutes on 2 cores, 10 of a GPU
    python tests/benchmarks/price.py --only compile Muon   the rows whose names contain one of these
    python tests/benchmarks/price.py --jobs 16             16 of the CPU's runs at a time, 2 threads each
    python tests/benchmarks/price.py --table               measure nothing, write the table again

Speed and memory are those of GPT-2 124M on a GPU, at 65,536 tokens a step, of random tokens as frequent as
words. The loss is the quickstart's on a CPU, all its steps, for three seeds. Results are added to
price.jsonl, and the table in README.md beside it is written from those of the last version of the script,
row by row.
"""

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCRIPT = (ROOT / "train_gpt2.py").read_text()
RESULTS = HERE / "price.jsonl"
SEEDS = (1337, 2, 3)


class Row(NamedTuple):
    """A mechanism, and how to take it away: by flags, or by another text in the script."""

    name: str
    spans: list  # the lines that are there for it: from a line with this text to one with that text
    without: str = ""
    base: str = ""  # flags of both runs
    edits: tuple = ()  # (old text, new text) pairs; each old text occurs once in the script
    measures: str = "speed"  # speed (with memory), loss, or both


MUON = "--optimizer muon"
PLAIN_LOSS = ("if triton and x.is_cuda and x.dtype == torch.bfloat16:", "if False:")
FLOAT32_STREAM = (
    'torch.bfloat16 if run.dtype == "bfloat16" else torch.float32',
    "torch.float32",
)
TO_KERNEL = ("self.transformer.ln_f(x).to(x.dtype)", "self.transformer.ln_f(x).to(torch.bfloat16)")
SDPA = "F.scaled_dot_product_attention(q, k, v, is_causal=True)"
SCORES = (
    "(q @ k.mT / hs**0.5).masked_fill(torch.ones(T, T, device=x.device).triu(1) > 0, -math.inf)"
)
FUSED = 'settings["fused"] = vectors[0].device.type != "mps"'
OWN_MUON = "Muon(groups, lr=learning_rate, weight_decay=weight_decay)"
THEIRS = f"torch.optim.{OWN_MUON[:-1]}, momentum=0.9, adjust_lr_fn='match_rms_adamw')"
TIE = "self.lm_head.weight = self.transformer.wte.weight"
# the best settings tried
ADAMW = "--optimizer adamw --max_lr 4e-3 --schedule wsd --final_lr_frac 0 --warmup_steps 52"

ROWS = [
    Row(
        "TF32 instead of float32",
        [("# high: TF32", "torch.set_float32_matmul_precision")],
        "--dtype float32",
        "--dtype tf32",
    ),
    Row(
        "bfloat16 instead of TF32",
        [("def autocast(", "return torch.autocast("), ("# Tensor cores", 'dtype = "bfloat16" if')],
        "--dtype tf32",
    ),
    Row(
        "torch.compile",
        [
            ("# Compilation fuses", "compile = capability"),
            ("# Every batch has the", "model.compile"),
        ],
        "--no-compile",
    ),
    Row(
        "FlashAttention",
        [("# This function scales", SDPA)],
        edits=((SDPA, f"{SCORES}.softmax(-1) @ v"),),
    ),
    Row(
        "residual stream in bfloat16",
        [("# With bfloat16 the residual", "residual_dtype = torch.bfloat16 if"), TO_KERNEL[:1] * 2],
        edits=(FLOAT32_STREAM, TO_KERNEL),
    ),
    Row(
        "loss kernel",
        [
            ("# ---- appendix A", "fused_cross_entropy.register_autograd"),
            ("# Appendix A computes", "return fused_cross"),
        ],
        edits=(PLAIN_LOSS,),
    ),
    Row(
        "the last two together",
        [],
        edits=(PLAIN_LOSS, FLOAT32_STREAM),
    ),
    Row(
        "padded vocabulary",
        [
            ("# Pad the vocabulary", "padded_vocab_size = math.ceil"),
            ("# The padded rows", "value[self.conf"),
        ],
        edits=(("math.ceil(config.vocab_size / 128) * 128", "config.vocab_size"),),
    ),
    Row(
        "fused AdamW", [("# Fused: one pass", FUSED)], edits=((FUSED, 'settings["fused"] = False'),)
    ),
    Row(
        "results read one step late",
        [("# A GPU goes on", "self.flush()  # the step before")],
        edits=(("self.is_async = run.device.type ==", "self.is_async = False and"),),
    ),
    Row(
        "pinned memory",
        [("# Only from pinned", "y = y.pin_memory()")],
        edits=(("x = x.pin_memory()", "pass"), ("y = y.pin_memory()", "pass")),
    ),
    Row("recompute", [("if self.recompute and", "x = recompute_in_backward")], "", "--recompute"),
    Row(
        "tied embeddings",
        [("# Use one matrix for", TIE)],
        edits=((TIE, "pass"),),
        measures="both",
    ),
    Row(
        "Muon instead of AdamW",
        [
            ("# ---- appendix B", "return x.mT if is_tall"),
            ("# Muon (appendix B)", "return [adamw, Muon"),
        ],
        ADAMW,
        MUON,
        measures="both",
    ),
    Row(
        "a Muon of its own, not torch.optim's",
        [("class Muon(", "return 0.2 * max(stack")],
        base=MUON,
        edits=((OWN_MUON, THEIRS),),
        measures="both",
    ),
    Row(
        "q, k and v apart in Muon",
        [("# c_attn is divided", "parts = stack.split")],
        base=MUON,
        edits=(('group.get("rows", shape[0])', "shape[0]"),),
        measures="both",
    ),
    Row(
        "Nesterov's momentum",
        [("# Nesterov's momentum", "ahead = gradient.lerp")],
        edits=(("ahead = gradient.lerp(average, momentum)", "ahead = average.clone()"),),
        measures="loss",
    ),
    Row(
        "a share of the rate for projections, vectors",
        [('elif name.endswith("c_proj', "projections.append"), ("# All layers write", "share = {")],
        edits=(('"lr_share": 1 / self.config.n_layer', '"lr_share": 1.0'),),
        measures="loss",
    ),
    Row(
        "warmup",
        [("# The rate rises", "return args.max_lr *")],
        "--warmup_steps 0",
        measures="loss",
    ),
    Row(
        "warmup, with AdamW",
        [],
        "--warmup_steps 0",
        ADAMW,
        measures="loss",
    ),
    Row(
        "decay of the rate",
        [('"wsd": lambda', '"wsd": lambda')],
        "--schedule constant",
        measures="loss",
    ),
    Row(
        "weight decay",
        [("# Matrices and embeddings decay", "decay = {")],
        "--weight_decay 0",
        measures="loss",
    ),
    Row(
        "gradient clipping", [("# 2. Clip the", "norm = whole(")], "--grad_clip 0", measures="loss"
    ),
    Row(
        "shuffling",
        [("def window_order(", "return np.random.RandomState")],
        "--no-shuffle",
        measures="loss",
    ),
    Row(
        "smaller residual projections at the start",
        [
            ("# 2 * n_layer projections", "residual_std = "),
            ('if name.endswith("c_proj', "std = residual_std"),
        ],
        edits=(("std = residual_std", "std = 0.02"),),
        measures="loss",
    ),
]


def count_lines(spans) -> int:
    """Return how many lines of the script the spans have."""
    lines = SCRIPT.splitlines()
    total = 0
    for first, last in spans:
        start = next(i for i, line in enumerate(lines) if first in line)
        total += next(i for i, line in enumerate(lines) if last in line and i >= start) - start + 1
    return total


def edit(edits) -> str:
    """Return the script with other texts, and with a last line that prints its peak memory."""
    script = SCRIPT
    for old, new in edits:
        assert script.count(old) == 1, f"train_gpt2.py has {script.count(old)} times {old}"
        script = script.replace(old, new)
    start = 'if __name__ == "__main__":\n'
    peak = "import atexit\n\natexit.register(lambda: print('peak', torch.cuda.max_memory_allocated()))\n"
    return script.replace(start, peak + start)


def write_tokens(folder: Path, n: int) -> None:
    """Write a shard of n tokens as frequent as words are: the r-th most frequent one ~ 1 / r."""
    folder.mkdir()
    ranks = np.exp(np.random.RandomState(0).uniform(0, np.log(50257), n)) - 1
    np.save(folder / "zipf_train_000000.npy", ranks.astype(np.uint16))


def run(folder: Path, edits, flags: str, threads: int) -> tuple[str, dict]:
    """Train in a new folder. Return what was printed, and the log as {stream: [values]}."""
    folder.mkdir()
    (folder / "train_gpt2.py").write_text(edit(edits))
    command = [
        sys.executable,
        folder / "train_gpt2.py",
        "--log_dir",
        folder / "log",
        *flags.split(),
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if "OutOfMemoryError" in done.stderr:
        return "", {}
    assert done.returncode == 0, done.stderr
    log = {}
    for line in (folder / "log" / "log.txt").read_text().splitlines():
        _, stream, value = line.split()
        log.setdefault(stream, []).append(float(value))
    return done.stdout, log


def measure_speed(folder: Path, edits, flags: str, args) -> list:
    """Return [ms a step, GiB at most] of GPT-2 on a GPU, or [] if the memory is too small."""
    tokens = args.tokens_per_step
    never = "--val_every 0 --hellaswag_every 0 --sample_every 0 --save_every 0"
    what = f"--model {args.model} --batch_size {args.batch_size} --total_batch_size {tokens}"
    fixed = f"--data_dir {args.tokens} --max_steps {args.steps} {what} {never}"
    printed, log = run(folder, edits, f"{fixed} {flags}", 1)
    if not log:
        return []
    times = log["dt"][args.steps // 3 :]
    gib = int(printed.split("peak ")[1]) / 2**30
    return [round(statistics.median(times), 2), round(gib, 2)]


def measure_loss(folder: Path, edits, flags: str, seed: int) -> float:
    """Return the last validation loss of the quickstart."""
    fixed = f"--quickstart --device cpu --seed {seed} --sample_every 0 --save_every 0"
    return run(folder, edits, f"{fixed} --data_dir {ROOT}/pydocs {flags}", 2)[1]["val"][-1]


def measure(rows, args, folder: Path) -> Iterator[dict]:
    """Yield a result for each row and kind: {"row", "speed": [with, without]}, or "loss" with a
    list of seeds for each of the two."""
    runs = {}

    def start(kind, edits, flags, *seed):
        """Begin to measure a script with flags, unless another row has done so."""
        key = (kind, edits, flags.strip(), *seed)
        if key not in runs:
            where = folder / f"run{len(runs)}"
            if kind == "speed":
                runs[key] = gpu.submit(measure_speed, where, edits, flags, args)
            else:
                runs[key] = cpu.submit(measure_loss, where, edits, flags, *seed)
        return runs[key]

    speed, loss = {}, {}
    with ThreadPoolExecutor(1) as gpu, ThreadPoolExecutor(args.jobs) as cpu:
        for row in rows:
            both = (((), row.base), (row.edits, f"{row.base} {row.without}"))
            if row.measures != "loss" and torch.cuda.is_available():
                speed[row.name] = [start("speed", *one) for one in both]
            if row.measures != "speed":
                loss[row.name] = [[start("loss", *one, seed) for seed in SEEDS] for one in both]
        for name, pair in speed.items():
            yield {"row": name, "speed": [run.result() for run in pair]}
        for name, pair in loss.items():
            yield {"row": name, "loss": [[run.result() for run in seeds] for seeds in pair]}


def show(values, places: int, unit="") -> str:
    """Return the least and the largest of some values as a text: "+1 to +2%", "+1%" or ""."""
    texts = list(dict.fromkeys(f"{value:+,.{places}f}" for value in sorted(values)))
    return " to ".join(dict.fromkeys([*texts[:1], *texts[-1:]])) + (unit if texts else "")


def newest(results, row: str, kind: str) -> list:
    """Return all results of a kind for a row, with the last version of the script that has any."""
    mine = [result for result in results if result["row"] == row and kind in result]
    return [result[kind] for result in mine if result["script"] == mine[-1]["script"]]


def make_table() -> str:
    """Return a row of Markdown for each mechanism."""
    results = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    lines = [
        "| without | its lines | ms a step | tokens a second | GiB | nats |",
        "|" + " --- |" * 6,
    ]
    for row in ROWS:
        pairs = newest(results, row.name, "speed")
        fitting = [(before, after) for before, after in pairs if after]
        ms = [after[0] - before[0] for before, after in fitting]
        share = [100 * (before[0] / after[0] - 1) for before, after in fitting]
        peak = [after[1] - before[1] for before, after in fitting]
        nats = []
        for before, after in newest(results, row.name, "loss"):
            nats += [b - a for a, b in zip(before, after, strict=True)]
        cells = [row.name, str(count_lines(row.spans) or ""), show(ms, 1), show(share, 0, "%")]
        cells += [show(peak, 1), show(nats, 3)]
        if pairs and not fitting:
            cells[2] = "out of memory"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_table() -> None:
    """Write the table between its two marks in README.md."""
    page = HERE / "README.md"
    before, mark, after = page.read_text().partition("<!-- by price.py -->\n")
    _, end, after = after.partition("<!-- end -->")
    page.write_text(f"{before}{mark}{make_table()}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="*", default=[""], help="rows whose names contain one of these texts")
    add("--jobs", type=int, default=1, help="runs on the CPU at a time")
    add("--table", action="store_true", help="only write the table")
    add("--model", default="d12")
    add("--batch_size", type=int, default=16)
    add("--tokens_per_step", type=int, default=65536)
    add("--steps", type=int, default=20, help="of a run on the GPU; the first third is not timed")
    add("--results", type=Path, default=RESULTS, help="where results are added")
    args = parser.parse_args()
    shape = (args.model, args.batch_size, args.tokens_per_step)
    if shape != ("d12", 16, 65536) and args.results == RESULTS:
        parser.error("the table is for one shape: name another file by --results")
    if not args.table:
        rows = [row for row in ROWS if any(text in row.name for text in args.only)]
        what = f"--dataset pydocs --out {ROOT}/pydocs".split()
        subprocess.run([sys.executable, ROOT / "fineweb.py", *what], check=True)
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
        machine = {"date": str(date.today()), "machine": name, "torch": torch.__version__}
        machine["script"] = hashlib.sha256(SCRIPT.encode()).hexdigest()[:8]  # its version
        with tempfile.TemporaryDirectory() as folder, open(args.results, "a") as file:
            args.tokens = Path(folder, "zipf")
            write_tokens(args.tokens, 2**21)
            for result in measure(rows, args, Path(folder)):
                file.write(json.dumps(machine | result) + "\n")
                print(result, flush=True)
    if args.results == RESULTS:
        write_table()


if __name__ == "__main__":
    main()
