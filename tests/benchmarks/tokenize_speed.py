"""Measure fineweb.py against tiktoken itself and against build-nanogpt's way, in one run.

python tests/benchmarks/tokenize_speed.py                      # documents of $GPT2_TEST_DATA
python tests/benchmarks/tokenize_speed.py --files docs.jsonl   # or any other
python tests/benchmarks/tokenize_speed.py --repeats 5 --workers 8

Prints GPT-2 tokens per second, start-up excluded, the best of a few runs in turns, of
  alone: as many independent tiktoken processes as fineweb.py has workers, documents in memory,
  half:  build-nanogpt's way: half the cores, Pool.imap in chunks of 16, np.array of every list,
  ours:  fineweb.py from file to finished shards, the rate that it prints itself,
and the two ratios, and fineweb.py's peak memory (Linux), reading .jsonl
and .parquet, and the .parquet through the datasets library, streamed and copied first.
"""

import argparse
import json
import lzma
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tiktoken

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("GPT2_TEST_DATA", ROOT.parent / "shared/data"))


def load_texts(path: str) -> list[str]:
    with open(path, encoding="utf-8", newline="\n") as file:
        return [json.loads(line)["text"] for line in file]


def count_alone(texts: list[str], ready, counts) -> None:
    """Encode texts, from when every process is ready."""
    enc = tiktoken.get_encoding("gpt2")
    ready.wait()
    counts.put(sum(len(enc.encode_ordinary(text)) for text in texts))


def run_alone(texts: list[str], workers: int) -> float:
    """Return the tokens per second of independent processes, from common start to last end."""
    spawn = multiprocessing.get_context("spawn")
    ready, counts = spawn.Barrier(workers + 1), spawn.Queue()
    shares = [texts[k::workers] for k in range(workers)]
    processes = [spawn.Process(target=count_alone, args=(share, ready, counts)) for share in shares]
    for process in processes:
        process.start()
    ready.wait()
    start = time.perf_counter()
    tokens = sum(counts.get() for _ in processes)
    seconds = time.perf_counter() - start
    for process in processes:
        process.join()
    return tokens / seconds


def tokenize_half(document: dict) -> np.ndarray:
    """One document as build-nanogpt tokenises it: a list, an int64 array, a check, uint16."""
    enc = tiktoken.get_encoding("gpt2")
    tokens = np.array([enc.eot_token, *enc.encode_ordinary(document["text"])])
    assert tokens.min() >= 0 and tokens.max() < 2**16
    return tokens.astype(np.uint16)


def run_half(texts: list[str]) -> float:
    """Return the tokens per second of half the cores, document by document to one buffer."""
    buffer, filled = np.empty(10**8, dtype=np.uint16), 0  # 100M tokens, a shard
    documents = ({"text": text} for text in texts)
    with multiprocessing.get_context("spawn").Pool(max(1, os.cpu_count() // 2)) as pool:
        pool.map(tokenize_half, [{"text": "warm"}] * 64, chunksize=1)
        start = time.perf_counter()
        for tokens in pool.imap(tokenize_half, documents, chunksize=16):
            buffer[filled : filled + len(tokens)] = tokens
            filled += len(tokens)
        return filled / (time.perf_counter() - start)


def run_ours(source: list[str], workers: int) -> tuple[float, dict[str, int]]:
    """Return the rate that fineweb.py prints, and its processes' peak memory in bytes."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(ROOT / "fineweb.py"), *source, "--out", f"{out}/shards"]
        command += ["--workers", str(workers), "--val_tokens", "1000000"]
        environment = os.environ | {"HF_HOME": f"{out}/hf", "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        peaks = {}
        while process.poll() is None:
            for pid in [process.pid, *list_children(process.pid)]:
                peaks[pid] = max(peaks.get(pid, 0), read_peak(pid))
            time.sleep(0.05)
        printed = process.stdout.read()
    assert process.returncode == 0, printed
    parent = peaks.pop(process.pid)
    rate = re.search(r"([\d.]+)M tokens/s", printed)
    assert rate, f"too short a run to have a steady rate:\n{printed}"
    return float(rate[1]) * 1e6, {"parent": parent, "worker": max(peaks.values(), default=0)}


def list_children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def read_peak(pid: int) -> int:
    """Return a process's peak resident memory in bytes, 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(peak[1]) * 1024 if peak else 0


def write_parquet(texts: list[str], path: Path) -> None:
    """Write the texts as one .parquet file, in row groups of FineWeb's 1000 rows."""
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir()
    parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=1000)


def find_documents(folder: str) -> str:
    """Unpack the 100 MB of documents of the test data to a temporary folder, once."""
    path = Path(folder) / "docs.jsonl"
    path.write_bytes(lzma.decompress((DATA / "corpus/docs_100MB.jsonl.xz").read_bytes()))
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--files", help=".jsonl with a text key (default: the test data's 100 MB)")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if (DATA / "tiktoken_cache").exists():
        os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(DATA / "tiktoken_cache"))
    tiktoken.get_encoding("gpt2")  # fails here, not in every worker, where it cannot be had
    with tempfile.TemporaryDirectory() as folder:
        files = args.files or find_documents(folder)
        texts = load_texts(files)
        alone, half, ours = [], [], []
        for _ in range(args.repeats):  # in turns: a busy moment of the machine hits all three
            alone.append(run_alone(texts, args.workers))
            half.append(run_half(texts))
            rate, peaks = run_ours(["--files", files], args.workers)
            ours.append(rate)
        write_parquet(texts, Path(folder, "parquet", "docs.parquet"))
        parquet = ["--dataset", f"{folder}/parquet"]
        memory = {
            ".jsonl": peaks,
            ".parquet": run_ours(["--files", f"{folder}/parquet/*"], args.workers)[1],
            "streamed": run_ours(parquet, args.workers)[1],
            "copied": run_ours([*parquet, "--no-streaming"], args.workers)[1],
        }
    for name, rates in (("alone", alone), ("half", half), ("ours", ours)):
        print(f"{name:5} {max(rates) / 1e6:6.2f}M tokens/s  of", *(f"{r / 1e6:.2f}" for r in rates))
    print(f"ours / alone {max(ours) / max(alone):.2f}, ours / half {max(ours) / max(half):.2f}")
    for source, peaks in memory.items():
        sizes = (f"{name} {peak / 2**20:.0f} MiB" for name, peak in peaks.items())
        print(f"peak memory {source:9}", ", ".join(sizes))


if __name__ == "__main__":
    main()
