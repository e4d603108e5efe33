"""
Measure train_gpt2.py, fineweb.py and runs. Each measurement is a row in results/, from which
tables.py makes the tables of README.md and of the pages in this folder. Rows of ideas go to log/,
because they are mostly of your own copies, unless --results names another folder.

    python tests/benchmarks/measure.py speed              of training, on one GPU: 3 minutes
    python tests/benchmarks/measure.py start              of a run, until its first update is done
    python tests/benchmarks/measure.py memory             the largest batches in 16, 24, 40 and 80 GiB
    python tests/benchmarks/measure.py price              what each mechanism buys: 75 minutes on 2 cores
    python tests/benchmarks/measure.py scaling            several GPUs beside one
    python tests/benchmarks/measure.py ideas --data edu_small  changes to GPT-2 beside it: 5 minutes a run
    python tests/benchmarks/measure.py tokenize docs.jsonl     fineweb.py beside tiktoken alone
    python tests/benchmarks/measure.py quickstart         five times: 10 minutes of 2 cores
    python tests/benchmarks/measure.py runs log/*/log.txt      of finished runs, from their logs

A row has the date, the machine, the version of torch, the commit of the script, the command, the
case (what was measured, with its settings), the value and its unit. GPUs train on random tokens that
are as frequent as words, as only the loss depends on the text. Versions are measured in turn.
"""

import argparse
import hashlib
import json
import lzma
import math
import multiprocessing
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
from functools import lru_cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import numpy as np
import tiktoken
import torch
from ideas import ENTRIES, GPT2, count_changes
from mechanisms import ROWS, change

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NEVER = "--val_every 0 --hellaswag_every 0 --sample_every 0 --save_every 0"


# ---- rows ---------------------------------------------------------------------------------------


def describe_machine() -> str:
    """Return the name of the GPU, or of the processor, with how many of them there are."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return f"{os.cpu_count()} cores of {names[0] if names else 'a CPU'}"


def list_gpus() -> list[str]:
    """Return the names of the GPUs that may be used, as CUDA_VISIBLE_DEVICES has them."""
    names = [str(gpu) for gpu in range(torch.cuda.device_count())]
    return os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(names)).split(",") if names else []


def find_commit(script: Path) -> str:
    """Return the commit that last changed a script, with a + where the file differs from it."""
    if "COMMIT" in os.environ:  # for a copy of the files without their history
        return os.environ["COMMIT"]
    if not shutil.which("git"):
        return "unknown"
    git = ["git", "-C", script.parent]
    last = [*git, "log", "-1", "--format=%h", "--", script.name]
    commit = subprocess.run(last, capture_output=True, text=True).stdout.strip()
    if not commit:  # downloaded without the history
        return "unknown"
    return commit + "+" * subprocess.call([*git, "diff", "--quiet", "HEAD", "--", script.name])


class Results:
    """The file to which a subcommand adds its rows."""

    def __init__(self, args, script="train_gpt2.py"):
        self.path = Path(args.results, f"{args.what}.jsonl")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "a")  # noqa: SIM115
        self.always = {"date": str(date.today()), "machine": describe_machine()}
        self.always |= {"torch": torch.__version__, "commit": find_commit(ROOT / script)}
        self.always |= {"command": shlex.join(["measure.py", *sys.argv[1:]])}

    def add(self, case: dict, value, unit: str, quiet=False, **other) -> None:
        """Write and print a row. `other` replaces what all rows have."""
        row = self.always | other | {"case": case, "value": value, "unit": unit}
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        if not quiet:
            print(*case.values(), value, unit, flush=True)

    def earlier(self, unit: str, **case) -> list[dict]:
        """Return the rows of this script and machine that are there, in this unit and for this case."""
        rows = map(json.loads, self.path.read_text().splitlines())
        same = {"unit": unit} | {key: self.always[key] for key in ("commit", "machine")}
        return [r for r in rows if same.items() <= r.items() and case.items() <= r["case"].items()]


# ---- a run --------------------------------------------------------------------------------------


PEAK = """import atexit

atexit.register(lambda: print("peak", torch.cuda.max_memory_allocated(), flush=True))
"""
START = 'if __name__ == "__main__":\n'
EXIT = "os._exit(status)"  # of a process of several, without atexit


class Runs:
    """Runs of train_gpt2.py, or of changed copies of it, in a folder that is deleted at the end."""

    def __init__(self, folder: str):
        self.folder = Path(folder)
        # The r-th most frequent of 50257 tokens is as frequent as 1 / r
        random = np.random.RandomState(0)
        for split in ("train", "val"):
            ranks = np.exp(random.uniform(0, np.log(50257), 2**21)) - 1
            np.save(self.folder / f"zipf_{split}_000000.npy", ranks.astype(np.uint16))

    def start(self, script: str, flags: str, threads=1, gpus="", **env) -> subprocess.Popen:
        """Start a run of this script. Its process has the folder of its log as `log_dir`."""
        path = Path(tempfile.mkdtemp(dir=self.folder), "train_gpt2.py")
        peak = PEAK if torch.cuda.is_available() else ""
        script = script.replace(EXIT, f"atexit._run_exitfuncs(), {EXIT}" if peak else EXIT)
        path.write_text(script.replace(START, peak + START))
        launcher = [sys.executable]
        if gpus.count(","):
            launcher += ["-m", "torch.distributed.run", "--standalone"]
            launcher += [f"--nproc_per_node={gpus.count(',') + 1}"]
        log_dir = path.parent / "log"
        command = [*launcher, str(path), "--log_dir", str(log_dir), *shlex.split(flags)]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)} | env
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = gpus
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, env=env, **pipes)
        process.log_dir = log_dir
        return process

    def finish(self, process: subprocess.Popen) -> dict:
        """Wait for a run. Return its log as {stream: [values]} and its peak memory as "GiB"; nothing
        if the memory was too small."""
        out, err = process.communicate()
        if "OutOfMemoryError" in err or "no sequence fits" in err:
            return {}
        assert process.returncode == 0, err
        records = {}
        for line in (process.log_dir / "log.txt").read_text().splitlines():
            step, stream, value = line.split()
            records.setdefault(stream, {})[step] = float(value)  # the last one of a step counts
        log = {stream: [*values.values()] for stream, values in records.items()}
        log["B"] = int(re.findall(r"B (\d+)", out)[-1])
        log["parameters"] = int(re.findall(r", ([\d,]+) parameters", out)[-1].replace(",", ""))
        if "peak" in out:
            log["GiB"] = round(int(out.split("peak ")[1].split()[0]) / 2**30, 2)
        return log

    def run(self, script: str, flags: str, **options) -> dict:
        """Start a run and wait for it."""
        return self.finish(self.start(script, flags, **options))


def median_ms(log: dict) -> float:
    """Return the median time of a step in ms, without the first third, which warms up."""
    return round(statistics.median(log["dt"][len(log["dt"]) // 3 :]), 2)


def scripts_of(args) -> dict:
    """Return {name: script}: train_gpt2.py, and those that --beside names."""
    paths = [ROOT / "train_gpt2.py", *args.beside]
    assert len({path.name for path in paths}) == len(paths), "--beside: use other names"
    return {path.name: path.read_text() for path in paths}


def commit_of(name: str) -> dict:
    """Return what a row of another version has instead of the commit: its name."""
    return {} if name in ("train_gpt2.py", "fineweb.py") else {"commit": Path(name).stem}


# ---- speed, start, memory -----------------------------------------------------------------------


def measure_speed(args) -> None:
    """Time steps of each model, size of a step and script, in turn."""
    results = Results(args)
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(folder)
        for turn in range(args.turns):
            for tokens in args.tokens:
                steps = max(12, args.seconds * 550_000 // tokens)
                flags = f"--data_dir {folder} --total_batch_size {tokens} --max_steps {steps}"
                flags += (
                    f" --model {args.model} --batch_size {args.batch_size} {NEVER} {args.flags}"
                )
                for name, script in scripts_of(args).items():
                    log = runs.run(script, flags)
                    case = {"model": args.model, "B": log["B"], "tokens": tokens, "script": name}
                    case |= {"flags": args.flags, "turn": turn}
                    results.add(case, median_ms(log), "ms", **commit_of(name))
                    if "GiB" in log:
                        results.add(case, log["GiB"], "GiB", **commit_of(name))


def seconds_since(begin: float) -> float:
    return round(time.perf_counter() - begin, 2)


def measure_start(args) -> None:
    """Time a start until the first update is done, after a validation on 0.3M tokens, with full and
    empty caches of compiled kernels, and what it is made of."""
    results = Results(args)
    flags = "--max_steps 1 --val_every 1 --val_tokens 300000 --hellaswag_every 0 --sample_every 0"
    flags += f" --save_every 0 --total_batch_size 65536 --batch_size 64 {args.flags}"
    parts = [("setup and state", " parameters, "), ("validation", "val loss"), ("step", "| loss")]
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(folder)
        for turn in range(args.turns):
            for name, script in scripts_of(args).items():
                first = ("empty", "full") if turn == 0 else ("full",)
                for cache in ("empty",) if args.empty else first:
                    kept = f"{folder}/cache-{name}"
                    if cache == "empty":
                        shutil.rmtree(kept, ignore_errors=True)
                    env = {"TORCHINDUCTOR_CACHE_DIR": kept, "TRITON_CACHE_DIR": f"{kept}/triton"}
                    case = {"cache": cache, "script": name, "flags": args.flags, "turn": turn}
                    own = commit_of(name)
                    begin = last = time.perf_counter()
                    runs.start(script, "--help", **env).communicate()
                    results.add(case | {"part": "imports"}, seconds_since(begin), "s", **own)
                    begin = last = time.perf_counter()
                    process = runs.start(script, f"--data_dir {folder} {flags}", **env)
                    left = list(parts)
                    for line in process.stdout:
                        now = time.perf_counter()
                        if left and left[0][1] in line:
                            part = {"part": left[0][0]}
                            results.add(case | part, round(now - last, 2), "s", **own)
                            left.pop(0)
                            last = now
                    results.add(case | {"part": "all"}, round(last - begin, 2), "s", **own)
                    assert process.wait() == 0 and not left, process.stderr.read()


def measure_memory(args) -> None:
    """Find the B that the script chooses, and the largest that trains, uncompiled, where a GPU's
    memory is limited, without and with --recompute; and time a compiled step of the chosen one."""
    results = Results(args)
    script = scripts_of(args)["train_gpt2.py"]
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(folder)
        for model in args.models:
            for limit in args.limits:
                share = min(1.0, limit * 2**30 / torch.cuda.get_device_properties(0).total_memory)
                limited = f"{START}    torch.cuda.set_per_process_memory_fraction({share})\n"
                text = change(script, [(START, limited)])
                free = "torch.cuda.mem_get_info(process.device)[0]"
                text = change(text, [(free, f"{limit} * 2**30")])
                for recompute in ("", " --recompute"):
                    flags = f"--data_dir {folder} --model {model} {NEVER}{recompute}"
                    flags += " --total_batch_size 131072"
                    case = {"model": model, "GiB": limit, "recompute": bool(recompute)}
                    chosen = runs.run(text, f"{flags} --max_steps 12")
                    if chosen:
                        results.add(case | {"B": "chosen"}, chosen["B"], "sequences")
                        results.add(case | {"B": "chosen"}, median_ms(chosen), "ms")
                        results.add(case | {"B": "chosen"}, chosen["GiB"], "GiB")
                    flags += " --max_steps 1 --no-compile --batch_size"
                    sizes = [2**i for i in range(7, -1, -1)]
                    fits = (B for B in sizes if runs.run(text, f"{flags} {B}"))
                    results.add(case | {"B": "largest"}, next(fits, 0), "sequences")


# ---- what each mechanism buys -------------------------------------------------------------------


def measure_price(args) -> None:
    """Take each mechanism of mechanisms.py away. Speed and memory are GPT-2's on a GPU, at 65,536
    tokens a step in 4 micro-steps, and the loss is the quickstart's on a CPU, for three seeds. A
    value is a pair: with the mechanism, and without it."""
    results = Results(args)
    script = scripts_of(args)["train_gpt2.py"]
    make = ["fineweb.py", "--dataset", "pydocs", "--out", "pydocs"]
    subprocess.run([sys.executable, *make], cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(folder)
        timed = f"--data_dir {folder} {NEVER} --batch_size 16 --total_batch_size 65536"
        timed += " --max_steps 20"
        learns = (
            f"--quickstart --device cpu --data_dir {ROOT}/pydocs --sample_every 0 --save_every 0"
        )

        @lru_cache(None)  # many rows are compared with the same run
        def start(flags, edits=()):
            workers = gpu if flags.startswith(timed) else cpu
            return workers.submit(runs.run, change(script, edits), flags)

        started = []  # (name, seed, run with, run without)
        with ThreadPoolExecutor(1) as gpu, ThreadPoolExecutor(args.jobs) as cpu:
            for row in ROWS:
                if not any(text in row.name for text in args.only or [""]):
                    continue
                flags = []
                if row.measures != "loss" and torch.cuda.is_available():
                    flags.append((None, timed))
                if row.measures != "speed":
                    flags += [(seed, f"{learns} --seed {seed}") for seed in args.seeds]
                for seed, always in flags:
                    plain = start(f"{always} {row.base}")
                    started.append(
                        (
                            row.name,
                            seed,
                            plain,
                            start(f"{always} {row.base} {row.without}", row.edits),
                        )
                    )
            for name, seed, *both in started:
                logs = [run.result() for run in both]
                case = {"without": name, "seed": seed}
                if seed is not None:
                    results.add(case, [log["val"][-1] for log in logs], "nats per byte")
                elif all(logs):  # else the memory was too small
                    results.add(case, [median_ms(log) for log in logs], "ms")
                    results.add(case, [log["GiB"] for log in logs], "GiB")


# ---- several GPUs -------------------------------------------------------------------------------


def measure_scaling(args) -> None:
    """Time steps of single GPUs, all of which train separately at the same time, and of all together,
    half of them and so on, in turn. The rate is 0: what a GPU at its power limit computes depends on
    the weights."""
    results = Results(args)
    script = scripts_of(args)["train_gpt2.py"]
    visible = list_gpus()
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(folder)
        flags = f"--data_dir {folder} --max_lr 0 --batch_size 64 {NEVER} {args.flags}"
        for turn in range(args.turns):
            for gpus in [len(visible) >> i for i in range(len(visible).bit_length())]:
                for tokens in {2**19, gpus * 2**16} if gpus > 1 else {2**19}:
                    steps = max(14, 14 * 2**19 * gpus // tokens)
                    own = f"{flags} --max_steps {steps} --total_batch_size {tokens}"
                    names = [",".join(visible[:gpus])] if gpus > 1 else visible
                    started = [runs.start(script, own, gpus=name) for name in names]
                    logs = [runs.finish(process) for process in started]
                    ms = statistics.mean(median_ms(log) for log in logs)
                    case = {"GPUs": gpus, "tokens": tokens, "flags": args.flags, "turn": turn}
                    results.add(case, round(ms, 2), "ms")
                    results.add(case, logs[0]["GiB"], "GiB")


# ---- ideas --------------------------------------------------------------------------------------


CURVES = ROOT / "log" / "ideas"  # the logs of all runs
# Student's t: within so many standard errors of 0, for n - 1 = 1 to 5, a mean of n differences is
# in 19 of 20 cases if there is nothing but chance
T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57}


def judge(name: str, differences: list[float], steps: int) -> str:
    """Return what the differences of an idea to GPT-2 say, one for each seed, after so many steps."""
    n, mean = len(differences), statistics.mean(differences)
    if not math.isfinite(mean):
        return f"{name}: a loss is not a number"
    if not any(differences):
        same = f"{name}: the losses are those of {GPT2.name}"
        return f"{same}. Is the change in a place that these runs use?"
    side = "higher" if mean > 0 else "lower"
    found = f"{name}: after {steps:,} steps, the loss is {abs(mean):.4f} nats per token {side} than"
    found += f" that of {GPT2.name}"
    if n == 1:
        return f"{found}. With one seed, this may be chance."
    chance = T95.get(n - 1, 2.45) * statistics.stdev(differences) / n**0.5
    limit = f"by the spread of {n} seeds, chance gives less than {chance:.4f} in 19 of 20 cases"
    if abs(mean) > chance:
        return f"{found}. This is more than chance ({limit})."
    return f"{found}. This may be chance ({limit})."


def fingerprint(script: str, data: str) -> str:
    """Return a hash of a script, and of the names, sizes and dates of the files in a folder."""
    found = hashlib.sha1(script.encode())
    for path in sorted(Path(data).glob("*")):
        found.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}\n".encode())
    return found.hexdigest()[:8]


def measure_ideas(args) -> None:
    """Train ideas of ideas.py, or changed copies of the script (--beside), and the unchanged script,
    for 131M tokens, or as --flags say, with the same seeds. Every GPU, or without one every core, trains one
    of them at a time."""
    results = Results(args)
    script = (ROOT / "train_gpt2.py").read_text()
    only = args.only or ([] if args.beside else [""])
    variants = {}  # {name: (source, script)}
    for idea in ENTRIES:
        if any(text.lower() in idea.name.lower() for text in only):
            variants[idea.name] = (idea.source, change(script, idea.edits))
    for path in args.beside:
        assert path.stem not in [*variants, GPT2.name], f"--beside: two copies named {path.stem}"
        variants[path.stem] = (path.name, path.read_text())
    folders = {path.stem: path.resolve().parent for path in args.beside}  # of what a copy imports
    assert variants, f"--only {only}: no idea has such a name"
    for name, (_, text) in variants.items():
        compile(text, name, "exec")  # a mistake is seen before hours of training
    if args.data == "pydocs" and not list(Path("pydocs").glob("*.npy")):
        # Here, because otherwise all runs would make it, at once
        make = [sys.executable, ROOT / "fineweb.py", "--dataset", "pydocs", "--out", "pydocs"]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    same = {"flags": args.flags, "inputs": fingerprint(script, args.data)}
    losses = {  # those of an earlier call, for --no-base
        (GPT2.name, row["case"]["seed"]): row["value"]
        for row in results.earlier("nats per token", idea=GPT2.name, **same)
    }
    if args.base:
        variants[GPT2.name] = (GPT2.source, script)
    elif missing := [seed for seed in args.seeds if (GPT2.name, seed) not in losses]:
        found = f"no run of this script on these texts with seeds {missing} and {args.flags!r}"
        sys.exit(f"--no-base: {results.path} has {found}")
    else:
        for seed in args.seeds:
            print(f"{GPT2.name}, seed {seed}: {losses[GPT2.name, seed]:.4f}, in an earlier run")
    own = {name: "" if name == GPT2.name else args.own for name in variants}
    flags = f"--data_dir {shlex.quote(args.data)} --optimizer muon --max_steps 2000"  # B: what fits each
    flags += f" --hellaswag_every 0 --sample_every 0 --save_every 0 {args.flags}"
    on_cpu = "--quickstart" in args.flags and "--device" not in args.flags
    gpus = [] if on_cpu else list_gpus()
    gpus = gpus or [""] * os.cpu_count()  # "": a core
    idle = queue.SimpleQueue()
    for gpu in gpus:
        idle.put(gpu)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(gpus)) as pool:
        runs = Runs(folder)

        def train(seed: int, name: str) -> dict:
            gpu = idle.get()
            print(f"{name}, seed {seed}: begins\n", end="", flush=True)
            try:
                path = os.pathsep.join([str(folders.get(name, ROOT)), str(ROOT)])
                line = f"{flags} {own[name]} --seed {seed}"
                process = runs.start(variants[name][1], line, gpus=gpu, PYTHONPATH=path)
                log = runs.finish(process)
            finally:
                idle.put(gpu)
            assert not log or "val" in log, "no validation loss: is --val_every 0?"
            if log:
                curve = CURVES / f"{name}, seed {seed}"
                shutil.copytree(process.log_dir, curve, dirs_exist_ok=True)
            return log

        # Seed by seed, so that only the first run of each idea has to be compiled
        keys = list(product(args.seeds, variants))
        print(f"{len(keys)} runs, up to {len(gpus)} at a time", flush=True)
        started = {pool.submit(train, *key): key for key in keys}
        steps = {}

        def collect(run) -> bool:
            """Add the rows of a run that has ended, and return whether it succeeded."""
            seed, name = started[run]
            if run.exception() or not run.result():
                print(f"{name}, seed {seed}: {run.exception() or 'the memory is too small'}")
                return False
            source, text = variants[name]
            lines, places = count_changes(text)
            case = {"idea": name, "source": source, "seed": seed}
            case |= same | {"flags": f"{args.flags} {own[name]}".strip()}
            case |= {"data": args.data, "lines": lines, "places": places}
            log = run.result()
            losses[name, seed] = log["val"][-1]
            steps[name] = len(log["dt"])
            results.add(case, log["val"][-1], "nats per token", quiet=True)
            results.add(case, median_ms(log), "ms", quiet=True)
            results.add(case, log["parameters"], "parameters", quiet=True)
            line = f"{name}, seed {seed}: {log['val'][-1]:.4f} nats per token, {median_ms(log)} ms a step"
            print(f"{line}, {log['parameters']:,} parameters\n", end="", flush=True)
            return True

        try:
            failed = sum(not collect(run) for run in as_completed(started))
        except KeyboardInterrupt:  # the runs have heard it too, and those that wait must not begin
            pool.shutdown(wait=False, cancel_futures=True)
            print(f"stopped: {results.path} has the rows of the runs that had ended")
            sys.exit(130)
    variants.pop(GPT2.name, None)
    for name in variants:
        pairs = [((name, seed), (GPT2.name, seed)) for seed in args.seeds]
        pairs = [pair for pair in pairs if losses.keys() >= set(pair)]
        if pairs:
            differences = [losses[idea] - losses[base] for idea, base in pairs]
            print(judge(name, differences, steps[name]))
    print(f"logs: {CURVES}, which play.ipynb draws; rows: {results.path}")
    if failed:
        sys.exit(f"{failed} runs failed: see above")


# ---- fineweb.py ---------------------------------------------------------------------------------


def encode_share(texts: list[str], ready, counts) -> None:
    """Encode texts, from when every process is ready."""
    enc = tiktoken.get_encoding("gpt2")
    enc.encode_ordinary("warm")
    ready.wait()
    counts.put(sum(len(enc.encode_ordinary(text)) for text in texts))


def run_tiktoken(texts: list[str], workers: int) -> float:
    """Return the tokens per second of independent processes, from common start to last end."""
    tiktoken.get_encoding("gpt2")  # is its vocabulary there?
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(workers + 1)
    counts = context.Queue()
    shares = [texts[k::workers] for k in range(workers)]
    processes = [context.Process(target=encode_share, args=(s, ready, counts)) for s in shares]
    for process in processes:
        process.start()
    ready.wait()
    start = time.perf_counter()
    tokens = sum(counts.get() for _ in processes)
    seconds = time.perf_counter() - start
    for process in processes:
        process.join()
    return tokens / seconds


def read_memory(pid: int) -> int:
    """Return the resident bytes of a process and of all its children, 0 once it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(read_memory(int(child)) for child in children)


def run_fineweb(script: Path, source: list[str], workers: int) -> tuple[float, int, int]:
    """Return seconds, tokens and peak memory in bytes of one run."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, script, "--workers", str(workers), "--val_tokens", "1000000"]
        command += ["--out", f"{out}/shards", *source]
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        peak = 0
        while process.poll() is None:
            peak = max(peak, read_memory(process.pid))
            time.sleep(0.02)
        seconds = time.perf_counter() - start
        assert process.returncode == 0, process.stdout.read().decode()
        shards = [np.load(path, mmap_mode="r") for path in Path(out, "shards").glob("*.npy")]
        return seconds, sum(len(shard) for shard in shards), peak


def write_documents(source: str, copies: int, folder: str) -> tuple[dict, list[str]]:
    """Unpack and repeat the documents; return fineweb.py's options by format, and their texts."""
    opener = {".xz": lzma.open}.get(Path(source).suffix, open)
    with opener(source, "rb") as file:
        once = file.read()
    Path(folder, "docs.jsonl").write_bytes(once * copies)
    formats = {".jsonl": ["--files", f"{folder}/docs.jsonl"]}
    texts = [json.loads(line)["text"] for line in once.split(b"\n") if line] * copies
    if find_spec("pyarrow"):
        import pyarrow
        from pyarrow import parquet

        # Texts of FineWeb's usual length, in row groups of 1,000, as FineWeb has them
        size = 4600
        rows = [text[i : i + size] for text in texts for i in range(0, len(text), size)]
        table = pyarrow.table({"text": rows})
        parquet.write_table(table, f"{folder}/docs.parquet", row_group_size=1000)
        formats[".parquet"] = ["--files", f"{folder}/docs.parquet"]
    return formats, texts


def measure_tokenize(args) -> None:
    """Time fineweb.py from documents to finished shards, less what a single token takes (imports,
    vocabulary, start of the workers), beside as many independent tiktoken processes, which have
    their texts in memory, and beside other versions, in turn."""
    results = Results(args, "fineweb.py")
    with tempfile.TemporaryDirectory() as folder:
        formats, texts = write_documents(args.documents, args.copies, folder)
        if args.hub:  # of the server that HF_ENDPOINT names
            formats["hub"] = ["--dataset", args.hub]
        for turn in range(args.turns):
            case = {"workers": args.workers, "turn": turn}
            speed = round(run_tiktoken(texts, args.workers))
            results.add(case | {"source": "memory", "script": "tiktoken"}, speed, "tokens/s")
            for script in [ROOT / "fineweb.py", *args.beside]:
                for name, source in formats.items():
                    workers = args.workers
                    if name == "hub":  # as its default
                        workers += workers // 2
                    one = [*source, "--max_tokens", "1", "--val_tokens", "0"]
                    idle = run_fineweb(script, one, workers)[0]
                    seconds, tokens, peak = run_fineweb(script, source, workers)
                    own = case | {"source": name, "script": script.name, "copies": args.copies}
                    other = commit_of(script.name)
                    results.add(own, round(tokens / (seconds - idle)), "tokens/s", **other)
                    results.add(own, round(peak / 2**30, 2), "GiB", **other)


# ---- the quickstart, and runs -------------------------------------------------------------------


def measure_quickstart(args) -> None:
    """Time --quickstart from its start to its end, in new folders, and its last validation loss."""
    results = Results(args)
    for turn in range(args.turns):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            command = [sys.executable, str(ROOT / "train_gpt2.py"), "--quickstart"]
            done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
            seconds = time.perf_counter() - start
        results.add({"turn": turn}, round(seconds, 1), "s")
        loss = float(re.findall(r"val loss: (\S+)", done.stdout)[-1])
        results.add({"turn": turn}, loss, "nats per byte")


def measure_runs(args) -> None:
    """Take the last losses, the HellaSwag score and the time of steps from logs of runs, which were
    made by the commit, the command and the machine that the options name."""
    results = Results(args)
    options = ("commit", "machine", "date", "torch", "command")
    made = {key: getattr(args, key) for key in options if getattr(args, key)}
    for path in args.logs:
        log = {}
        for line in path.read_text().splitlines():
            step, stream, value = line.split()
            log.setdefault(stream, {})[int(step)] = float(value)
        name = path.name.removesuffix(".log.txt").replace("log.txt", path.parent.name)
        case = {"run": name, "steps": max(log["val"]), "batch": int(log["total_batch_size"][0])}
        results.add(case, list(log["val"].values())[-1], "nats per token", **made)
        if "hella" in log:
            results.add(case, list(log["hella"].values())[-1], "acc_norm", **made)
        results.add(case, round(statistics.median(log["dt"].values()), 1), "ms", **made)
        results.add(case, round(sum(log["dt"].values()) / 60_000, 2), "minutes", **made)


# ---- the command line ---------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="what", required=True)
    functions = {
        name[8:]: function for name, function in globals().items() if name[:8] == "measure_"
    }
    for name, function in functions.items():
        kind = kinds.add_parser(name, help=function.__doc__, description=function.__doc__)
        kind.set_defaults(function=function, beside=[])
        add = kind.add_argument
        own = "log" if name == "ideas" else "tests/benchmarks/results"  # only these make tables
        add("--results", default=ROOT / own, help=f"folder of the rows (default: {own})")
        if name in ("speed", "start", "scaling", "tokenize", "quickstart"):
            add("--turns", type=int, default={"quickstart": 5}.get(name, 3))
        if name in ("speed", "start", "scaling", "ideas"):
            add("--flags", default="", help="more flags for train_gpt2.py")
        if name in ("speed", "start", "tokenize", "ideas"):
            add("--beside", type=Path, nargs="*", help="other versions of the script")
        if name == "speed":
            add("--model", default="d12")
            add("--batch_size", type=int, default=64, help="0: what the script chooses")
            add("--tokens", type=int, nargs="*", default=[2**16, 2**19], help="per step")
            add("--seconds", type=int, default=8, help="that the steps of a run take, about")
        if name in ("price", "ideas"):
            add("--only", nargs="*", help="rows whose names contain one of these (default: all)")
        if name == "ideas":
            add("--data", required=True, help="folder of shards, such as fineweb.py makes")
            add("--seeds", type=int, nargs="*", default=[1, 2, 3], help="a run of each with each")
            add("--own", default="", help="flags for the ideas only, not for GPT-2")
            add("--no-base", dest="base", action="store_false", help="GPT-2's rows are there")
        if name == "price":
            add("--seeds", type=int, nargs="*", default=[1337, 2, 3], help="none: time only")
            add("--jobs", type=int, default=1, help="runs on the CPU at a time, a thread each")
        if name == "start":
            add("--empty", action="store_true", help="with empty caches only")
        if name == "memory":
            add("--models", nargs="*", default=["d12", "d24", "d36", "d48"])
            add("--limits", type=int, nargs="*", default=[16, 24, 40, 80], help="in GiB")
        if name == "tokenize":
            add("documents", help=".jsonl or .jsonl.xz with a text key")
            add("--workers", type=int, default=os.cpu_count())
            add("--copies", type=int, default=1, help="how often to repeat the documents")
            add("--hub", help="a dataset of the hub to read as well")
        if name == "runs":
            add("logs", type=Path, nargs="+")
            for option in ("commit", "machine", "date", "torch", "command"):
                add(f"--{option}", help="of the runs")
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
