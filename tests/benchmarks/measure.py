"""Measure train_gpt2.py and fineweb.py.

    python tests/benchmarks/measure.py ideas --data edu_small    a change beside GPT-2: 5 minutes a run
    python tests/benchmarks/measure.py speed                     of training: 3 minutes of a GPU
    python tests/benchmarks/measure.py tokenize docs.jsonl       from documents to shards
    python tests/benchmarks/measure.py quickstart                five starts: 10 minutes of 2 cores
    python tests/benchmarks/measure.py shakespeare input.txt     nanoGPT's example for a laptop

Versions and settings are measured in turn. Each measurement is printed as a line of a Markdown table,
and its values are rows of results/: date, machine, version of torch, commit, command, the case (what
was measured, with its settings), value and unit. Rows of ideas, mostly of your own copies, go to log/.
"""

import argparse
import hashlib
import json
import math
import os
import queue
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from itertools import product
from pathlib import Path

import numpy as np
import torch
from ideas import GPT2, IDEAS, change

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "train_gpt2.py"


# ---- rows ---------------------------------------------------------------------------------------


def describe_machine() -> str:
    """Return the name of the GPU, or of the processor, with how many of them there are."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    name = "a CPU"
    if Path("/proc/cpuinfo").exists():
        for found in re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()):
            name = found
    return f"{os.cpu_count()} cores of {name}"


def find_commit(script: Path) -> str:
    """Return the commit that last changed a script, with a + if the file differs from it."""
    if not shutil.which("git"):
        return "unknown"
    git = ["git", "-C", script.parent]
    last = [*git, "log", "-1", "--format=%h", "--", script.name]
    commit = subprocess.run(last, capture_output=True, text=True).stdout.strip()
    if not commit:  # downloaded without the history
        return "unknown"
    differs = subprocess.call([*git, "diff", "--quiet", "HEAD", "--", script.name])
    return f"{commit}+" if differs else commit


class Results:
    """The file to which a subcommand adds its rows."""

    def __init__(self, args, script=TRAIN):
        self.path = Path(args.results, f"{args.what}.jsonl")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.always = {
            "date": str(date.today()),
            "machine": describe_machine(),
            "torch": torch.__version__,
            "commit": os.environ.get("COMMIT") or find_commit(script),  # a copy has no history
            "command": shlex.join(["measure.py", *sys.argv[1:]]),
        }

    def add(self, case: dict, values: dict, **other) -> None:
        """Write a row for each {unit: value} of a case. `other` replaces what all rows have."""
        row = self.always | other | {"case": case}
        cells = [str(setting) for setting in case.values()]
        for unit, value in values.items():
            cells.append(f"{value} {unit}")
            with self.path.open("a") as file:
                file.write(json.dumps(row | {"value": value, "unit": unit}) + "\n")
        cells.append("{date}, {machine}, torch {torch}, {commit}".format(**row))
        print(f"| {' | '.join(cells)} |", flush=True)


# ---- a run --------------------------------------------------------------------------------------


MAIN = "if __name__ =="
PEAK = """import atexit

atexit.register(lambda: print("peak", torch.cuda.max_memory_allocated(), flush=True))
"""


def run_script(script: str, flags: str, folder, gpus="", path=ROOT) -> dict:
    """Run this version of train_gpt2.py, which imports from `path`. Return its log as {stream:
    [values]}, with B, the number of parameters, the peak memory in GiB, the seconds that it takes
    to start, make its first step and end, and the log's folder."""
    copy = Path(tempfile.mkdtemp(dir=folder), "train_gpt2.py")
    copy.write_text(script.replace(MAIN, PEAK + MAIN) if gpus else script, "utf-8")
    command = [sys.executable]
    if "," in gpus:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={gpus.count(',') + 1}"]
    log_dir = copy.parent / "log"
    command += [str(copy), "--log_dir", str(log_dir), *shlex.split(flags)]
    env = os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = gpus
    begin = time.perf_counter()
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    assert done.returncode == 0, done.stderr
    streams = read_log(log_dir / "log.txt")
    log = {stream: list(values.values()) for stream, values in streams.items()}
    log["s without steps"] = round(seconds - sum(log["dt"][1:]) / 1000, 1)  # but with the first one
    log["B"] = int(re.findall(r"B (\d+)", done.stdout)[-1])
    parameters = re.findall(r", ([\d,]+) parameters", done.stdout)[-1]
    log["parameters"] = int(parameters.replace(",", ""))
    for peak in re.findall(r"peak (\d+)", done.stdout):  # none from several processes
        log["GiB"] = round(int(peak) / 2**30, 2)
    return log | {"ms": median_ms(log["dt"]), "log_dir": log_dir}


def read_log(path: Path) -> dict[str, dict[int, float]]:
    """Return a log.txt as {stream: {step: value}}. The last value of a step counts."""
    streams = {}
    for line in path.read_text().splitlines():
        step, stream, value = line.split()
        streams.setdefault(stream, {})[int(step)] = float(value)
    return streams


def list_gpus() -> list[str]:
    """Return the names of the GPUs that may be used, as CUDA_VISIBLE_DEVICES has them."""
    names = [str(gpu) for gpu in range(torch.cuda.device_count())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names and visible:
        return visible.split(",")
    return names


def median_ms(times: list[float]) -> float:
    """Return the median time of a step in ms, without the first third, which warms up."""
    warm = times[len(times) // 3 :]
    return round(statistics.median(warm), 2)


def time_command(command: list, **options) -> tuple[float, str]:
    """Run a command, and return its seconds and its output."""
    start = time.perf_counter()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **options)
    return round(time.perf_counter() - start, 2), done.stdout


# ---- speed --------------------------------------------------------------------------------------


def write_random_tokens(folder: str) -> None:
    """Write shards in which the r-th most frequent of 50257 tokens is as frequent as 1 / r, because
    only the loss depends on the text."""
    random = np.random.RandomState(0)
    for split in ("train", "val"):
        ranks = np.exp(random.uniform(0, np.log(50257), 2**21)) - 1
        np.save(Path(folder, f"zipf_{split}_000000.npy"), ranks.astype(np.uint16))


def measure_speed(args) -> None:
    """Time steps of each script, size of a step and number of GPUs, in turn, and say how long longer
    runs take. Without a GPU, time steps of one sequence. A GPU at its power limit computes at a speed
    that depends on the weights: --flags="--max_lr 0" leaves them as they are."""
    results = Results(args)
    gpus = list_gpus()
    paths = [TRAIN, *args.beside]
    always = "--val_every 0 --save_every 0"
    if not gpus:
        args.tokens = [1024]  # two minutes of a laptop
    with tempfile.TemporaryDirectory() as folder:
        write_random_tokens(folder)
        for turn, n, tokens, path in product(range(args.turns), args.gpus, args.tokens, paths):
            assert n <= max(1, len(gpus)), f"--gpus {n}: this machine has {len(gpus)}"
            steps = max(12, args.seconds * n * 550_000 // tokens) if gpus else 3
            flags = f"--data_dir {folder} {always} --total_batch_size {tokens} --max_steps {steps}"
            script = path.read_text("utf-8")
            log = run_script(script, f"{flags} {args.flags}", folder, ",".join(gpus[:n]))
            case = {"GPUs": n * bool(gpus), "B": log["B"], "tokens": tokens, "script": path.name}
            case |= {"flags": args.flags, "turn": turn}
            values = {unit: log[unit] for unit in ("ms", "GiB", "s without steps") if unit in log}
            other = {} if path == TRAIN else {"commit": path.stem}
            results.add(case, values, **other)
            for name, total in (("131M", 131e6), ("524M", 524e6), ("10B", 1e10)):
                minutes = total / tokens * log["ms"] / 1000 / 60
                print(f"{name} tokens would take {minutes:,.0f} minutes")


# ---- ideas --------------------------------------------------------------------------------------


CURVES = ROOT / "log" / "ideas"  # the logs of all runs
# Student's t: within so many standard errors of 0, for n - 1 = 1 to 5, a mean of n differences is
# in 19 of 20 cases if there is nothing but noise
T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57}


def judge(name: str, differences: list[float], steps: int) -> str:
    """Return what the differences of an idea to GPT-2 say, one for each seed, after so many steps."""
    n = len(differences)
    mean = statistics.mean(differences)
    if not math.isfinite(mean):
        return f"{name}: a loss is not a number"
    if not any(differences):
        same = f"{name}: the losses are those of {GPT2.name}"
        return f"{same}. Is the change in a place that these runs use?"
    side = "higher" if mean > 0 else "lower"
    found = f"{name}: after {steps:,} steps, the loss is {abs(mean):.4f} nats per token {side} than"
    found += f" that of {GPT2.name}"
    if n == 1:
        return f"{found}. With one seed, this may be noise."
    noise = T95.get(n - 1, 2.45) * statistics.stdev(differences) / n**0.5
    limit = f"by the spread of {n} seeds, noise stays below {noise:.4f} in 19 of 20 cases"
    verdict = "is more than noise" if abs(mean) > noise else "may be noise"
    return f"{found}. This {verdict} ({limit})."


def fingerprint(script: str, data: str) -> str:
    """Return a hash of a script, and of the names, sizes and dates of the files in a folder."""
    found = hashlib.sha1(script.encode())
    for path in sorted(Path(data).glob("*")):
        found.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}\n".encode())
    return found.hexdigest()[:8]


def choose_variants(args, script: str) -> dict:
    """Return {name: (source, script, folder from which it imports)} of what is to be trained."""
    variants = {}
    only = args.only or ([] if args.beside else [""])
    for idea in IDEAS:
        if any(text.lower() in idea.name.lower() for text in only):
            variants[idea.name] = (idea.source, change(script, idea.edits), ROOT)
    for path in args.beside:
        assert path.stem not in [*variants, GPT2.name], f"--beside: two copies named {path.stem}"
        variants[path.stem] = (path.name, path.read_text("utf-8-sig"), path.resolve().parent)
        compile(
            path.read_text("utf-8-sig"), path, "exec"
        )  # a mistake is seen before hours of training
    assert variants, f"--only {only}: no idea has such a name"
    if args.base:
        variants[GPT2.name] = (GPT2.source, script, ROOT)
    return variants


def find_base(results: Results, args, same: dict) -> dict:
    """Return {(seed, GPT-2): loss} of earlier calls on this machine, for --no-base."""
    losses = {}
    lines = results.path.read_text().splitlines() if results.path.exists() else []
    for row in map(json.loads, lines):
        is_base = row["unit"] == "nats per token" and row["machine"] == results.always["machine"]
        if is_base and (same | {"idea": GPT2.name}).items() <= row["case"].items():
            losses[row["case"]["seed"], GPT2.name] = row["value"]
    missing = [seed for seed in args.seeds if (seed, GPT2.name) not in losses]
    if missing:
        found = f"no run of this script on these texts with seeds {missing} and {args.flags!r}"
        sys.exit(f"--no-base: {results.path} has {found}")
    return losses


def train_variant(args, idle: queue.SimpleQueue, folder, seed: int, name: str, variant) -> dict:
    """Train a variant on the next GPU or core that is idle, and return its log."""
    _, script, path = variant
    flags = f"--data_dir {shlex.quote(args.data)} --optimizer muon --max_steps 2000"  # B: what fits
    flags += f" --hellaswag off --num_samples 0 --save_every 0 {args.flags}"
    if name != GPT2.name:
        flags += f" {args.own}"
    gpu = idle.get()
    print(f"{name}, seed {seed}: begins", flush=True)
    try:
        log = run_script(script, f"{flags} --seed {seed}", folder, gpu, path)
    finally:
        idle.put(gpu)
    assert "val" in log, "no validation loss: is --val_every 0?"
    shutil.copytree(log["log_dir"], CURVES / f"{name}, seed {seed}", dirs_exist_ok=True)
    return log


def measure_ideas(args) -> None:
    """Train ideas of ideas.py, or changed copies of the script (--beside), and the unchanged script,
    for 131M tokens, or as --flags say, with the same seeds. Every GPU, or without one every core,
    trains one of them at a time."""
    results = Results(args)
    script = TRAIN.read_text("utf-8")
    variants = choose_variants(args, script)
    if args.data == "pydocs" and not list(Path("pydocs").glob("*.npy")):
        # Here, because otherwise all runs would make it, at once
        make = [sys.executable, ROOT / "fineweb.py", "--dataset", "pydocs", "--out", "pydocs"]
        time_command(make)
    same = {"flags": args.flags, "inputs": fingerprint(script, args.data)}
    losses = {} if args.base else find_base(results, args, same)  # {(seed, name): loss}
    on_cpu = "--quickstart" in args.flags and "--device" not in args.flags
    workers = [] if on_cpu else list_gpus()
    workers = workers or [""] * os.cpu_count()  # "": a core
    idle = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)
    # Seed by seed, so that only the first run of each idea has to be compiled
    keys = list(product(args.seeds, variants))
    print(f"{len(keys)} runs, up to {len(workers)} at a time", flush=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(workers)) as pool:
        started = {}
        for seed, name in keys:
            run = pool.submit(train_variant, args, idle, folder, seed, name, variants[name])
            started[run] = (seed, name)
        try:
            for run in as_completed(started):
                seed, name = started[run]
                if run.exception():
                    print(f"{name}, seed {seed}: {run.exception()}")
                    continue
                log = run.result()
                losses[seed, name] = log["val"][-1]
                case = {"idea": name, "seed": seed, "source": variants[name][0]}
                case |= same | {"data": args.data}
                if name != GPT2.name:
                    case["flags"] = f"{args.flags} {args.own}".strip()
                values = {"nats per token": log["val"][-1], "ms": log["ms"]}
                results.add(case, values | {"parameters": log["parameters"]})
        except KeyboardInterrupt:  # the runs have heard it too, and those that wait must not begin
            pool.shutdown(wait=False, cancel_futures=True)
            sys.exit(130)
    for name in variants:
        pairs = [((seed, name), (seed, GPT2.name)) for seed in args.seeds]
        differences = [losses[a] - losses[b] for a, b in pairs if {a, b} <= losses.keys()]
        if differences and name != GPT2.name:
            print(judge(name, differences, len(log["dt"])))
    print(f"logs: {CURVES}, which play.ipynb draws; rows: {results.path}")
    failed = sum(key not in losses for key in keys)
    if failed:
        sys.exit(f"{failed} runs failed: see above")


# ---- fineweb.py ---------------------------------------------------------------------------------


def measure_tokenize(args) -> None:
    """Time fineweb.py, and other versions of it in turn, from documents to finished shards. What a
    single token takes (imports, the vocabulary, the start of the workers) does not count."""
    results = Results(args, ROOT / "fineweb.py")
    for turn, script in product(range(args.turns), [ROOT / "fineweb.py", *args.beside]):
        flags = ["--files", args.documents, "--workers", str(args.workers)]
        with tempfile.TemporaryDirectory() as out:
            one = ["--max_tokens", "1", "--val_tokens", "0", "--out", f"{out}/one"]
            idle, _ = time_command([sys.executable, script, *flags, *one])
            whole = ["--val_tokens", "1000000", "--out", f"{out}/whole"]
            seconds, _ = time_command([sys.executable, script, *flags, *whole])
            tokens = 0
            for path in Path(out, "whole").glob("*.npy"):
                tokens += len(np.load(path, mmap_mode="r"))
        speed = round(tokens / (seconds - idle))
        case = {"workers": args.workers, "source": args.documents.name}
        case |= {"script": script.name, "turn": turn}
        other = {"commit": script.stem} if script in args.beside else {}
        results.add(case, {"tokens/s": speed}, **other)


# ---- a laptop -----------------------------------------------------------------------------------


def measure_quickstart(args) -> None:
    """Time --quickstart from its start to its end, each time in a new folder."""
    results = Results(args)
    for turn in range(args.turns):
        command = [sys.executable, TRAIN, "--quickstart", *shlex.split(args.flags)]
        with tempfile.TemporaryDirectory() as folder:
            seconds, out = time_command(command, cwd=folder)
        loss, bits = re.findall(r"val loss: (\S+) \| bits per byte: (\S+)", out)[-1]
        sample = out.rpartition("\nsample 0: ")[2].partition("\nsample 1: ")[0]
        values = {"s": seconds, "nats per token": float(loss), "bits per byte": float(bits)}
        case = {"flags": args.flags, "turn": turn}
        results.add(case, values | {"sample": " ".join(sample.split())})


# All settings of a run are named, so that this row stays what it is when the quickstart changes
SHAKESPEARE = "--model tiny --seq_len 64 --total_batch_size 768 --grad_clip 1 --device cpu"
SHAKESPEARE += " --val_every 1000 --val_tokens 1000000 --num_samples 0"
MUON = "--optimizer muon --max_lr 1.2e-2 --schedule linear --final_lr_frac 0 --warmup_steps 60"
MUON += " --weight_decay 0.2 --zero_init"
ADAMW = "--optimizer adamw --max_lr 4e-3 --schedule wsd --final_lr_frac 0 --warmup_steps 52"
ADAMW += " --weight_decay 0.1 --no-zero_init"
# The command for a laptop in nanoGPT's README: 4 layers, 128 channels, 12 sequences of 64 characters
NANOGPT = "train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20"
NANOGPT += " --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128"
NANOGPT += " --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"


def write_shards(text: bytes, folder: str) -> None:
    """Write a text as shards of bytes, divided as nanoGPT does: the last tenth is for validation."""
    tokens = np.frombuffer(text, np.uint8).astype(np.uint16)
    cut = int(0.9 * len(tokens))
    np.save(Path(folder, "text_train_000000.npy"), tokens[:cut])
    np.save(Path(folder, "text_val_000000.npy"), tokens[cut:])
    meta = {"tokenizer": "bytes", "vocab_size": 257, "shards": {}, "progress": {"done": True}}
    Path(folder, "meta.json").write_text(json.dumps(meta))


def prepare_nanogpt(checkout: Path, text: bytes, folder: str) -> Path:
    """Return a copy of nanoGPT that has prepared this text."""
    copy = Path(folder, "nanoGPT")
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git", "out*"))
    data = copy / "data/shakespeare_char"
    (data / "input.txt").write_bytes(text)  # so that nothing is downloaded
    time_command([sys.executable, data / "prepare.py"])
    return copy


def measure_shakespeare(args) -> None:
    """Time runs as long as nanoGPT's example for a laptop: with Muon, with Muon in 0.7 times as many
    steps, which take as long as nanoGPT, and with AdamW. --nanogpt adds nanoGPT itself, in turn."""
    results = Results(args)
    text = args.text.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        write_shards(text, folder)
        runs = []  # (case, command, the folder in which it runs, what its rows have of their own)
        if args.nanogpt:
            case = {"program": "nanoGPT", "optimizer": "adamw", "steps": args.steps}
            command = NANOGPT.replace("=2000", f"={args.steps}")
            other = {"commit": find_commit(args.nanogpt / "train.py")}
            runs.append((case, command, prepare_nanogpt(args.nanogpt, text, folder), other))
        for recipe, share in ((MUON, 1), (MUON, 0.7), (ADAMW, 1)):
            steps = round(share * args.steps)
            case = {"program": TRAIN.name, "optimizer": recipe.split()[1], "steps": steps}
            command = f"{shlex.quote(str(TRAIN))} --data_dir {folder} --log_dir log"
            command += f" {SHAKESPEARE} {recipe} --max_steps {steps}"
            runs.append((case, command, folder, {}))
        for turn, (case, command, cwd, other) in product(range(args.turns), runs):
            shutil.rmtree(Path(folder, "log"), ignore_errors=True)  # of the run before
            seconds, out = time_command([sys.executable, *shlex.split(command)], cwd=cwd)
            loss = re.findall(r"val loss:? (\d\S*)", out)[-1]
            values = {"s": seconds, "nats per byte": float(loss)}
            results.add(case | {"turn": turn}, values, **other)


# ---- the command line ---------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="what", required=True)

    def add_kind(function, folder="tests/benchmarks/results", turns=0):
        """Add a subcommand, and return the function that adds its flags."""
        name = function.__name__.removeprefix("measure_")
        kind = kinds.add_parser(name, help=function.__doc__, description=function.__doc__)
        kind.set_defaults(function=function)
        add = kind.add_argument
        add("--results", default=ROOT / folder, help=f"for the rows ({folder})")
        if turns > 0:
            add("--turns", type=int, default=turns)
        return add

    add = add_kind(measure_ideas, "log")
    add("--data", required=True, help="folder of shards, such as fineweb.py makes")
    add("--beside", type=Path, nargs="*", default=[], help="changed copies of train_gpt2.py")
    add("--only", nargs="*", help="ideas whose names contain one of these (default: all)")
    add("--seeds", type=int, nargs="*", default=[1, 2, 3], help="a run of each with each")
    add("--flags", default="", help="more flags for all runs")
    add("--own", default="", help="flags for the ideas only, not for GPT-2")
    add("--no-base", dest="base", action="store_false", help="GPT-2's rows are there")

    add = add_kind(measure_speed, turns=3)
    add("--beside", type=Path, nargs="*", default=[], help="other versions of train_gpt2.py")
    add("--tokens", type=int, nargs="*", default=[2**16, 2**19], help="per step")
    add("--gpus", type=int, nargs="*", default=[1], help="how many GPUs, by torchrun")
    add("--seconds", type=int, default=8, help="that the steps of a run take, about")
    add("--flags", default="", help="more flags, such as --model d24 --batch_size 32")

    add = add_kind(measure_tokenize, turns=3)
    add("documents", type=Path, help=".jsonl with a text key")
    add("--beside", type=Path, nargs="*", default=[], help="other versions of fineweb.py")
    add("--workers", type=int, default=os.cpu_count())

    add = add_kind(measure_quickstart, turns=5)
    add("--flags", default="", help="more flags for train_gpt2.py")

    add = add_kind(measure_shakespeare, turns=1)
    add("text", type=Path, help="TinyShakespeare: data/tinyshakespeare/input.txt of char-rnn")
    add("--nanogpt", type=Path, help="folder of nanoGPT")
    add("--steps", type=int, default=2000, help="fewer only for a trial")

    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
