"""Time a step and measure the loss of nanoGPT's CPU recipe on TinyShakespeare, as bytes.

    python tests/benchmarks/shakespeare_cpu.py input.txt [--max_steps 2000]

4 layers, 4 heads, 128 channels, 12 sequences of 64 tokens a step; the last tenth of the text is for
validation, all of it. nanoGPT's side of the comparison, in a checkout of it with the same text:

    python train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 \\
        --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 \\
        --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "--model tiny --seq_len 64 --batch_size 12 --total_batch_size 768 --warmup_steps 100"
RECIPE += " --max_lr 1e-3 --val_every 2000 --sample_every 0 --save_every 0"
RECIPE += " --device cpu --dtype float32"


def write_shards(text: Path, folder: Path) -> None:
    """Split text nine to one into byte-level shards."""
    tokens = np.fromfile(text, np.uint8).astype(np.uint16)
    cut = int(0.9 * len(tokens))
    np.save(folder / "text_train_000001.npy", tokens[:cut])
    np.save(folder / "text_val_000000.npy", tokens[cut:])
    meta = {"tokenizer": "bytes", "vocab_size": 257, "eot": 256}
    (folder / "meta.json").write_text(json.dumps(meta))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--max_steps", type=int, default=2000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_shards(args.text, Path(folder))
        where = ["--data_dir", folder, "--log_dir", f"{folder}/log"]
        command = [sys.executable, "train_gpt2.py", *where, *RECIPE.split()]
        command += ["--max_steps", str(args.max_steps)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        records = [line.split() for line in Path(folder, "log/log.txt").read_text().splitlines()]
    ms = [float(value) for _, stream, value in records if stream == "dt"]
    val = [value for _, stream, value in records if stream == "val"]
    print(
        f"{len(ms)} steps: median {statistics.median(ms):.1f} ms, val loss {val[-1]} nats per byte"
    )


if __name__ == "__main__":
    main()
