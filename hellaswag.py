"""
HellaSwag: four endings for a text, one of them right; which does a model find likeliest?

    python hellaswag.py -m gpt2 -d cuda                 GPT-2 124M from Hugging Face
    python hellaswag.py -m log/model_19073.pt           a checkpoint of train_gpt2.py
    torchrun --nproc_per_node=8 hellaswag.py -m gpt2-xl

Chance is 0.25, people reach 0.95. Two conventions are in use, whose numbers do not compare:

    build-nanogpt  the context as it is, context and " " + ending encoded apart; acc_norm is the
                   lowest mean loss per token. GPT-2 124M: acc 0.2859, acc_norm 0.2955; XL: 0.3842,
                   0.4893. Its acc_norm is what train_gpt2.py logs as `hella`.
    harness        EleutherAI's lm-evaluation-harness: the activity before the context, marks like
                   [header] removed, the whole text encoded at once and split where the context
                   ends; acc_norm is the highest probability per character. GPT-2 124M: 0.2892,
                   0.3114; XL: 0.4004, 0.5089.

In order: the data, the two conventions, batches, scoring, command line.
Source: Zellers et al. 2019, arXiv:1905.07830. 10,042 validation examples.
"""

import argparse
import hashlib
import io
import json
import math
import os
import re
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path

import numpy as np
import tiktoken
import torch
import torch.distributed as dist
from torch.nn import functional as F

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
FILE = Path(__file__).resolve().parent / "hellaswag" / "hellaswag_val.jsonl"
CONVENTIONS = ("build-nanogpt", "harness")
BATCH_TOKENS = 2**14  # of a forward pass: ~2 GB of logits, at the positions of endings alone

# -----------------------------------------------------------------------------
# the data


def fetch(path: str | Path | None = None) -> Path:
    """Return the validation file: path, or the one beside this script, which is downloaded once.

    Raises ConnectionError where that fails, ValueError if path is not there.
    """
    if path is not None and not Path(path).is_file():
        raise ValueError(f"HellaSwag: there is no file {path}")
    if path is not None or FILE.is_file():
        return Path(path or FILE)
    hint = f"put {URL} at {FILE}, or name it to hellaswag.py by --data"
    try:
        with urllib.request.urlopen(URL, timeout=30) as response:  # seconds; raises unless 200
            data = response.read()
    except (OSError, HTTPException) as error:  # HTTPException: fewer bytes than were announced
        raise ConnectionError(f"HellaSwag cannot be downloaded ({error}): {hint}") from error
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise ConnectionError(f"HellaSwag's download, {len(data)} bytes, is not the file: {hint}")
    FILE.parent.mkdir(exist_ok=True)
    write_whole(FILE, data)
    return FILE


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that has its name only once it is whole, whoever else writes it too."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def iterate_examples(path: str | Path = "val") -> Iterator[dict]:
    """Yield the examples of a .jsonl file, or of "val", the one that fetch returns.

    An example has ctx (or ctx_a, ctx_b and activity_label), endings (4 texts) and label (0 to 3).
    Raises ValueError naming the line that is not one.
    """
    path = fetch() if str(path) == "val" else Path(path)
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                example = json.loads(line)
                right = len(example["endings"]) == 4 and int(example["label"]) in range(4)
                assert right and "ctx" in example
            except (ValueError, KeyError, TypeError, AssertionError) as error:
                what = "not an example with ctx, 4 endings and a label"
                raise ValueError(f"{path}, line {number}: {what} ({error!r})") from error
            yield example


# -----------------------------------------------------------------------------
# the two conventions: from an example to four rows of tokens


@dataclass
class Row:
    """One ending after its context, as tokens."""

    tokens: list[int]
    start: int  # of the ending
    length: int  # of the ending, by which acc_norm divides: tokens, or characters


def clean(text: str) -> str:
    """Return the text without marks of the WikiHow articles, as the harness does."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def render_rows(example: dict, tokenizer: tiktoken.Encoding, convention: str) -> list[Row]:
    """Return an example's four rows, for one of CONVENTIONS."""
    if convention == "build-nanogpt":
        context = tokenizer.encode_ordinary(example["ctx"])
        endings = [tokenizer.encode_ordinary(" " + ending) for ending in example["endings"]]
        return [Row(context + ending, len(context), len(ending)) for ending in endings]
    text = example["ctx"]
    if "ctx_b" in example:
        text = example["ctx_a"] + " " + example["ctx_b"].capitalize()
    if "activity_label" in example:
        text = f"{example['activity_label']}: {text}"
    text, endings = clean(text), [clean(ending) for ending in example["endings"]]
    context = text.rstrip()  # blanks at its end go to the endings, where they belong to tokens
    start = len(tokenizer.encode_ordinary(context))
    wholes = [tokenizer.encode_ordinary(f"{text} {ending}") for ending in endings]
    return [Row(w, start, len(ending)) for w, ending in zip(wholes, endings, strict=True)]


def render_example(example: dict, tokenizer: tiktoken.Encoding | None = None):
    """Return data, tokens (4, N) int64, mask (4, N) int64, 1 at the ending, and label (int), by
    build-nanogpt's convention. Rows are padded with zeros to the longest."""
    rows = render_rows(example, tokenizer or tiktoken.get_encoding("gpt2"), "build-nanogpt")
    tokens = torch.zeros(4, max(len(row.tokens) for row in rows), dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = torch.tensor(row.tokens)
        mask[i, row.start : len(row.tokens)] = 1
    ctx_tokens, ending_tokens = rows[0].tokens[: rows[0].start], [r.tokens[r.start :] for r in rows]
    data = {
        "label": int(example["label"]),
        "ctx_tokens": ctx_tokens,
        "ending_tokens": ending_tokens,
    }
    return data, tokens, mask, data["label"]


def get_most_likely_row(tokens: torch.Tensor, mask: torch.Tensor, logits: torch.Tensor) -> int:
    """Return the row of tokens (4, N) with the lowest mean loss where mask is 1, given logits
    (4, N, V) of any precision; the losses are float32."""
    losses = F.cross_entropy(logits[:, :-1].float().mT, tokens[:, 1:], reduction="none")
    counted = mask[:, 1:]
    return int(((losses * counted).sum(dim=1) / counted.sum(dim=1)).argmin())


@dataclass
class Rows:
    """All examples' rows, rendered: 4 consecutive ones are an example."""

    tokens: np.ndarray  # uint16, of all rows on end
    ends: np.ndarray  # of each row in tokens
    starts: np.ndarray  # of each ending in its row
    lengths: np.ndarray  # of each ending, to divide by
    labels: np.ndarray  # of each example


@lru_cache
def load_rows(path: Path, tokenizer_name: str, convention: str) -> Rows:
    """Return the file's rows. Encoding takes seconds, so they are kept beside the file too."""
    from fineweb import get_tokenizer

    digest = hashlib.sha256(path.read_bytes() + Path(__file__).read_bytes()).hexdigest()[:16]
    kept = path.with_name(f"{path.stem}.{tokenizer_name}.{convention}.{digest}.npz")
    if kept.is_file():
        try:
            with np.load(kept) as arrays:
                return Rows(**arrays)
        except Exception:  # damaged: made anew
            kept.unlink(missing_ok=True)
    tokenizer, rows, labels = get_tokenizer(tokenizer_name), [], []
    for example in iterate_examples(path):
        rows += render_rows(example, tokenizer, convention)
        labels.append(int(example["label"]))
    arrays = {
        "tokens": np.concatenate([np.array(row.tokens, np.uint16) for row in rows]),
        "ends": np.cumsum([len(row.tokens) for row in rows]),
        "starts": np.array([row.start for row in rows]),
        "lengths": np.array([row.length for row in rows]),
        "labels": np.array(labels),
    }
    with suppress(OSError):  # a folder that is not ours to write to
        kept_bytes = io.BytesIO()
        np.savez(kept_bytes, **arrays)
        write_whole(kept, kept_bytes.getvalue())
    return Rows(**arrays)


# -----------------------------------------------------------------------------
# batches


@dataclass
class Batch:
    """n groups of k rows whose first P tokens are alike, and computed once for all k."""

    rows: torch.Tensor  # (n * k,) int64: their numbers
    prefix: torch.Tensor  # (n, P) int64: the beginnings
    tails: torch.Tensor  # (n * k, W) int64: the rest of each row, padded with zeros
    first: torch.Tensor  # (n * k,) bool: whether a tail's first token is of an ending
    positions: torch.Tensor  # (N,) int64: where in tails[:, 1:] the other tokens of endings are


def collate(group: list[tuple], P: int, block_size: int, device) -> Batch:
    """Return a batch of groups (longest row, row numbers, rows, starts of endings)."""
    rows = [row for _, _, rows, _ in group for row in rows]
    starts = [start for _, _, _, starts in group for start in starts]
    width = math.ceil((max(longest for longest, *_ in group) - P) / 4) * 4  # few different shapes
    width = min(width, block_size + 1 - P)
    tails = np.zeros((len(rows), width), np.int64)
    counted = np.zeros((len(rows), width), bool)
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        tails[i, : len(row) - P] = row[P:]
        counted[i, start - P : len(row) - P] = True
    prefix = np.stack([alike[0][:P] for _, _, alike, _ in group])
    numbers = np.concatenate([numbers for _, numbers, _, _ in group])
    positions = counted[:, 1:].ravel().nonzero()[0]
    arrays = (numbers, prefix, tails, counted[:, 0], positions)
    return Batch(*(torch.from_numpy(array).to(device) for array in arrays))


@lru_cache
def pack(
    path: Path, tokenizer: str, convention: str, block_size: int, n: int, device
) -> list[Batch]:
    """Return the rows of the first n examples in batches of about BATCH_TOKENS tokens."""
    data, groups = load_rows(path, tokenizer, convention), defaultdict(list)
    # what the model cannot see is cut off on the left; the last token is only ever a target
    surplus = np.maximum(0, np.diff(data.ends, prepend=0) - (block_size + 1))
    starts = np.maximum(1, data.starts - surplus)
    rows = np.split(data.tokens.astype(np.int64), data.ends[:-1])
    rows = [row[left:] for row, left in zip(rows, surplus, strict=True)]
    for numbers in np.arange(4 * n).reshape(n, 4):
        alike = [rows[i] for i in numbers]
        P = min(*starts[numbers], *(len(row) - 1 for row in alike))
        same = np.all([row[:P] == alike[0][:P] for row in alike], axis=0)
        P = P if same.all() else int(same.argmin())
        P -= P % 8 if P > 8 else 0  # few different ones; what it cuts off is computed four times
        for part in [numbers] if P else numbers[:, None]:  # nothing alike: each row for itself
            group = [rows[i] for i in part]
            key = P or min(starts[part[0]], len(group[0]) - 1), len(part)
            groups[key].append((max(map(len, group)), part, group, starts[part]))
    batches = []
    for (P, k), group in sorted(groups.items()):
        group.sort(key=lambda item: -item[0])  # of nearly one length: little padding
        while group:
            size = max(1, BATCH_TOKENS // (P + k * (group[0][0] - P)))
            batches.append(collate(group[:size], P, block_size, device))
            group = group[size:]
    return batches


# -----------------------------------------------------------------------------
# scoring


@dataclass(frozen=True)
class Score:
    """How many of n examples a model gets right by either measure."""

    convention: str
    n: int
    acc: int  # by the ending's whole probability
    acc_norm: int  # by its probability per token or character

    @property
    def share(self) -> float:
        """acc_norm as a share of one."""
        return self.acc_norm / self.n

    def __str__(self) -> str:
        parts = []
        for name, right in (("acc", self.acc), ("acc_norm", self.acc_norm)):
            p = right / self.n
            error = math.sqrt(p * (1 - p) / self.n)  # standard error of a share of n
            parts.append(f"{name} {right}/{self.n} = {p:.4f} +- {error:.4f}")
        return f"{self.convention:13} | {' | '.join(parts)}"


def sum_losses(model, batch: Batch) -> torch.Tensor:
    """Return each row's summed loss over its ending, (n * k,) float32, in nats."""
    (n, P), (nk, W), positions = batch.prefix.shape, batch.tails.shape, batch.positions
    cache = [[] for _ in range(model.config.n_layer)]
    # 1. the beginnings, once each; their last position foretells the tails' first tokens
    last = torch.arange(P - 1, n * P, P, device=positions.device).repeat_interleave(nk // n)
    first = model(batch.prefix, batch.tails[:, 0], "none", cache, last) * batch.first
    # 2. the tails, each after the keys and values of its beginning
    for layer in cache:
        layer[:] = [x.repeat_interleave(nk // n, dim=0) for x in layer]
    targets = batch.tails[:, 1:].flatten()[positions]
    losses = torch.zeros(nk * (W - 1), device=positions.device)
    losses[positions] = model(batch.tails[:, :-1], targets, "none", cache, positions)
    return first + losses.view(nk, W - 1).sum(dim=1)


@torch.no_grad()
def score(model, path: Path, convention: str, device, examples: int = 10**9) -> Score:
    """Score train_gpt2.py's GPT on the file's first examples. Call it under the model's autocast,
    on every process of a group: each does as many forward passes, of a share of the batches."""
    config, grouped = model.config, dist.is_initialized()
    data = load_rows(path, config.tokenizer, convention)
    n = min(examples, len(data.labels))
    batches = pack(path, config.tokenizer, convention, config.block_size, n, device)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    losses = torch.zeros(4 * n, device=device)
    for i in range(0, len(batches), world_size):
        batch = batches[min(i + rank, len(batches) - 1)]
        sums = sum_losses(model, batch)
        if i + rank < len(batches):  # not a spare one, computed to keep step with the others
            losses[batch.rows] = sums
    if world_size > 1:
        dist.all_reduce(losses)  # of which a row has one, and else zeros
    losses = losses.cpu().double().view(n, 4).numpy()
    means = losses / data.lengths[: 4 * n].reshape(n, 4)
    right = [int((x.argmin(axis=1) == data.labels[:n]).sum()) for x in (losses, means)]
    return Score(convention, n, *right)


# -----------------------------------------------------------------------------
# command line


def main(argv: list[str] | None = None) -> None:
    """Run the command line that the top of this file shows."""
    import fineweb
    import train_gpt2

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1], allow_abbrev=False)
    add = parser.add_argument
    add(
        "-m",
        "--model",
        default="gpt2",
        help="as train_gpt2.py's --init_from (default: %(default)s)",
    )
    add("-d", "--device", default="auto", help="cuda, mps or cpu (default: %(default)s)")
    add("--dtype", default="auto", help="as train_gpt2.py's (default: %(default)s)")
    add("--data", help="the validation file (default: downloaded once)")
    add("-n", "--examples", type=int, default=10**9, help="the first so many (default: all)")
    parser.error, status = fineweb.refuse_arguments, 0
    try:
        args = parser.parse_args(argv)
        run = train_gpt2.setup_run(argparse.Namespace(**vars(args), compile=False))
        model = train_gpt2.GPT.from_pretrained(args.model).to(run.device)
        if run.rank == 0:
            fetch(args.data)
        run.mean(torch.zeros((), device=run.device))  # the others wait for it
        path = fetch(args.data)
        for convention in CONVENTIONS:
            with run.autocast():
                run.print(str(score(model, path, convention, run.device, args.examples)))
    except (ValueError, ConnectionError) as error:
        status = 2
        if os.environ.get("RANK", "0") == "0":
            print(f"hellaswag.py: {error}", file=sys.stderr)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(status)


if __name__ == "__main__":
    main()
