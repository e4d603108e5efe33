"""Measure fineweb.py beside independent tiktoken processes and beside another version of itself.

python tests/benchmarks/tokenize_speed.py docs.jsonl
python tests/benchmarks/tokenize_speed.py docs.jsonl.xz --workers 16 --copies 8 --old old_fineweb.py

Prints GPT-2 tokens per second, in turns on the same machine, of
  tiktoken: as many independent processes as there are workers, each with its share of the documents
            in memory: no reading, no writing, no order, so this is the ceiling
  new, old: fineweb.py from file to finished shards, less the time that one document takes (imports,
            vocabulary, start of the workers), from .jsonl and, if pyarrow is there, .parquet
then the ratios of the medians, and the peak memory of all processes of a run (Linux).
"""

import argparse
import json
import lzma
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import tiktoken

ROOT = Path(__file__).resolve().parents[2]


def encode_share(texts: list[str], ready, counts) -> None:
    """Encode texts, from when every process is ready."""
    enc = tiktoken.get_encoding("gpt2")
    enc.encode_ordinary("warm")
    ready.wait()
    counts.put(sum(len(enc.encode_ordinary(text)) for text in texts))


def run_tiktoken(texts: list[str], workers: int) -> float:
    """Return the tokens per second of independent processes, from common start to last end."""
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


def run_fineweb(script: str, documents: str, workers: int) -> tuple[float, int, int]:
    """Return seconds, tokens and peak memory in bytes of one run."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, script, "--files", documents, "--out", f"{out}/shards"]
        command += ["--workers", str(workers), "--val_tokens", "1000000"]
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


def write_documents(source: str, copies: int, folder: str) -> tuple[dict[str, str], list[str]]:
    """Unpack and repeat the documents; return their files by format, and their texts."""
    opener = {".xz": lzma.open}.get(Path(source).suffix, open)
    with opener(source, "rb") as file:
        once = file.read()
    files = {"jsonl": f"{folder}/docs.jsonl"}
    with open(files["jsonl"], "wb") as file:
        for _ in range(copies):
            file.write(once)
    texts = [json.loads(line)["text"] for line in once.split(b"\n") if line] * copies
    if find_spec("pyarrow"):
        import pyarrow
        from pyarrow import parquet

        files["parquet"] = f"{folder}/docs.parquet"
        table = pyarrow.table({"text": texts})
        parquet.write_table(table, files["parquet"], row_group_size=1000)  # as FineWeb's
    with open(f"{folder}/one.jsonl", "w", encoding="utf-8") as file:
        file.write('{"text": "' + "one document of a few words " * 20 + '"}\n')
    return files, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("documents", help=".jsonl or .jsonl.xz with a text key")
    parser.add_argument("--old", help="another fineweb.py to compare with")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--copies", type=int, default=1, help="how often to repeat the documents")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    scripts = {"new": str(ROOT / "fineweb.py")}
    if args.old:
        scripts["old"] = args.old
    rates, peaks = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        files, texts = write_documents(args.documents, args.copies, folder)
        for turn in range(args.turns):  # in turns: a busy moment of the machine hits all
            rates.setdefault("tiktoken", []).append(run_tiktoken(texts, args.workers))
            for name, script in scripts.items():
                idle, _, _ = run_fineweb(script, f"{folder}/one.jsonl", args.workers)
                for suffix, path in files.items():
                    seconds, tokens, peak = run_fineweb(script, path, args.workers)
                    rates.setdefault(f"{name} {suffix}", []).append(tokens / (seconds - idle))
                    peaks[f"{name} {suffix}"] = max(peak, peaks.get(f"{name} {suffix}", 0))
                    print(f"turn {turn}, {name} {suffix}: {seconds:.2f} s, {idle:.2f} s of start")
    ceiling = statistics.median(rates["tiktoken"])
    print(
        f"{args.workers} workers, {os.cpu_count()} cores, {sum(map(len, texts)) / 1e6:.0f}M chars"
    )
    for name, values in rates.items():
        middle = statistics.median(values)
        each = " ".join(f"{value / 1e6:.2f}" for value in values)
        line = (
            f"{name:12} {middle / 1e6:6.2f}M tokens/s ({each})  {middle / ceiling:.2f} of tiktoken"
        )
        print(line, f" {peaks[name] / 2**20:.0f} MiB" if name in peaks else "")
    for suffix in files:
        if args.old:
            pair = [statistics.median(rates[f"{name} {suffix}"]) for name in ("new", "old")]
            print(f"new / old, {suffix}: {pair[0] / pair[1]:.2f}")


if __name__ == "__main__":
    main()
