"""
HellaSwag: which of four endings of a text does a model find most likely?

    python hellaswag.py -m gpt2 -d cuda                 GPT-2 124M from Hugging Face
    python hellaswag.py -m log/model_19073.pt           a checkpoint of train_gpt2.py
    torchrun --nproc_per_node=8 hellaswag.py -m gpt2-xl

Guessing scores 0.25, people score 0.95. Two conventions are in use. Their numbers differ and must
not be compared with each other:

    build-nanogpt  The context is taken as it is, and context and " " + ending are encoded
                   separately. acc_norm chooses the ending with the lowest mean loss per token.
                   GPT-2 124M: acc 0.2859, acc_norm 0.2955; XL: 0.3842, 0.4893. This acc_norm is
                   what train_gpt2.py logs as `hella`.
    harness        EleutherAI's lm-evaluation-harness puts the activity before the context, removes
                   marks like [header], encodes the whole text at once and splits it where the
                   context ends. acc_norm chooses the highest log-probability per character.
                   GPT-2 124M: 0.2892, 0.3114; XL: 0.4004, 0.5089.

The file holds, in this order, the data, the two conventions, the scoring and the command line.
Source: Zellers et al. 2019, arXiv:1905.07830. There are 10,042 validation examples.
"""

import argparse
import hashlib
import itertools
import json
import math
import re
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path

import numpy as np
import tiktoken
import torch
import torch.distributed as dist
from torch.nn import functional as F

import fineweb
from fineweb import UserError, atomic_write, require

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
FILE = Path(__file__).resolve().parent / "hellaswag" / "hellaswag_val.jsonl"
CONVENTIONS = ("build-nanogpt", "harness")
# Tokens in a forward pass. Their logits are 0.8 GB in bfloat16 on a GPU, and 0.2 GB in float32 on a
# CPU, which is slow to allocate more
BATCH_TOKENS = {"cuda": 2**13, "mps": 2**12, "cpu": 2**10}

# -----------------------------------------------------------------------------
# the data


def fetch(path: str | Path | None = None) -> Path:
    """Return the validation file: path, or the file beside this script, downloaded if necessary.

    Raises UserError if path is not a file, and ConnectionError if the download fails.
    """
    if path is not None:
        require(Path(path).is_file(), f"there is no HellaSwag file {path}")
        return Path(path)
    if FILE.is_file():
        return FILE  # its sha256 was compared when it was downloaded
    hint = f"save {URL} as {FILE}, or pass another place to hellaswag.py with --data"
    try:
        with urllib.request.urlopen(URL, timeout=30) as response:  # seconds; raises unless 200
            data = response.read()
    except (OSError, HTTPException) as error:  # HTTPException: fewer bytes than announced
        raise ConnectionError(f"HellaSwag cannot be downloaded ({error}): {hint}") from error
    # A proxy's login page also arrives with status 200, and must not be kept as the data
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise ConnectionError(f"the download of {len(data)} bytes is not HellaSwag: {hint}")
    try:
        FILE.parent.mkdir(exist_ok=True)
        with atomic_write(FILE) as file:
            file.write(data)
    except OSError as error:  # a folder that this user may not write to
        raise ConnectionError(f"HellaSwag cannot be saved ({error}): {hint}") from error
    return FILE


def fetch_once(run, path: str | None = None) -> Path:
    """Fetch in the first process of a train_gpt2.Run, and after that in the others, which then find
    the file. If any of them fails, for whatever reason, raises ConnectionError in all of them."""
    problem = ""
    with run.main_first():
        try:
            path = fetch(path)
        except (UserError, ConnectionError) as error:
            problem = str(error)
    # If only one process knew of a failure, the others would wait for it and end with a traceback
    problem = max(run.gather(problem))
    if problem:
        raise ConnectionError(problem)
    return path


def iterate_examples(path: str | Path = "val") -> Iterator[dict]:
    """Yield the examples of a .jsonl file, or of "val", the file that fetch returns.

    An example has ctx, or ctx_a and ctx_b, of which ctx is made; endings, 4 texts; label, 0 to 3;
    and perhaps activity_label. Raises UserError naming the first line that is not an example.
    """
    if str(path) == "val":
        path = fetch()
    with open(path, "rb") as file:  # as bytes: what is not UTF-8 then fails in its own line
        for number, line in enumerate(file, 1):
            if line.strip():
                yield parse_example(line, f"{path}, line {number}")


def parse_example(line: bytes, where: str) -> dict:
    """Return the example in a line. Raises UserError naming the place if there is none."""
    try:
        example = json.loads(line)
        if "ctx" not in example:
            example["ctx"] = f"{example['ctx_a']} {example['ctx_b']}".strip()
        texts = [example["ctx"], *example["endings"], example.get("activity_label", "")]
        if "ctx_b" in example:
            texts += [example["ctx_a"], example["ctx_b"]]
        label = str(example["label"])  # the original file has numbers, some copies have texts
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{where}: not an example of HellaSwag ({error!r})") from error
    # "abcd" would pass for four endings, and an empty ending has no length to divide by
    is_example = isinstance(example["endings"], list) and len(example["endings"]) == 4
    is_example = is_example and label in ("0", "1", "2", "3")
    is_example = is_example and all(isinstance(text, str) for text in texts)
    is_example = is_example and all(clean(ending) for ending in example["endings"])
    require(is_example, f"{where}: expected a text ctx, 4 texts as endings and a label from 0 to 3")
    return example


# -----------------------------------------------------------------------------
# the two conventions: from an example to four rows of tokens


@dataclass
class Row:
    """A context followed by one of the endings, as tokens."""

    tokens: list[int]
    start: int  # index of the ending's first token
    length: int  # of the ending, in tokens or in characters; acc_norm divides by it


def clean(text: str) -> str:
    """Return the text without the marks of WikiHow articles, as the harness does."""
    # The harness does this in the same order, and replaces double spaces once, so that three become
    # two. Scores compare only if every character is the same
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def render_rows(example: dict, tokenizer: tiktoken.Encoding, convention: str) -> list[Row]:
    """Return the four rows of an example by one of the CONVENTIONS."""
    rows = []
    if convention == "build-nanogpt":
        # The ending is encoded with the space before it, because GPT-2's tokens begin with spaces
        context = tokenizer.encode_ordinary(example["ctx"])
        for ending in example["endings"]:
            tokens = tokenizer.encode_ordinary(" " + ending)
            rows.append(Row(context + tokens, len(context), len(tokens)))
        return rows
    text = example["ctx"]
    if "ctx_b" in example:
        # ctx_b begins the sentence that the ending continues
        text = example["ctx_a"] + " " + example["ctx_b"].capitalize()
    if "activity_label" in example:
        text = f"{example['activity_label']}: {text}"
    text = clean(text)
    # Blanks at the end of the context belong to the endings, whose first tokens include them
    start = len(tokenizer.encode_ordinary(text.rstrip()))
    for ending in example["endings"]:
        ending = clean(ending)
        rows.append(Row(tokenizer.encode_ordinary(f"{text} {ending}"), start, len(ending)))
    return rows


def render_example(example: dict, tokenizer: tiktoken.Encoding | None = None):
    """Return data (a dict), tokens (4, N) int64, mask (4, N) int64 and label (int) by
    build-nanogpt's convention. Rows are padded with zeros; mask is 1 at the endings."""
    rows = render_rows(example, tokenizer or tiktoken.get_encoding("gpt2"), "build-nanogpt")
    tokens = torch.zeros(4, max(len(row.tokens) for row in rows), dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = torch.tensor(row.tokens)
        mask[i, row.start : len(row.tokens)] = 1
    data = {
        "label": int(example["label"]),
        "ctx_tokens": rows[0].tokens[: rows[0].start],
        "ending_tokens": [row.tokens[row.start :] for row in rows],
    }
    return data, tokens, mask, data["label"]


def get_most_likely_row(tokens: torch.Tensor, mask: torch.Tensor, logits: torch.Tensor) -> int:
    """Return the row of tokens (4, N) with the lowest mean loss where mask is 1, given logits
    (4, N, V) of any precision. The losses are computed in float32."""
    # The logits at position i predict the token at i + 1, so the last ones predict nothing
    losses = F.cross_entropy(logits[:, :-1].float().mT, tokens[:, 1:], reduction="none")
    counted = mask[:, 1:]
    return int(((losses * counted).sum(dim=1) / counted.sum(dim=1)).argmin())


@lru_cache
def load_rows(
    path: Path, tokenizer_name: str, convention: str, block_size: int, examples: int
) -> tuple[list[Row], np.ndarray]:
    """Return the rows of the file's first examples, 4 for each, and the labels, (n,) int64. Of a
    row longer than the context, the end is kept. That takes a second, and the process remembers
    it."""
    tokenizer = fineweb.get_tokenizer(tokenizer_name)
    rows = []
    labels = []
    for example in itertools.islice(iterate_examples(path), examples):
        for row in render_rows(example, tokenizer, convention):
            cut = max(0, len(row.tokens) - (block_size + 1))
            row.tokens = row.tokens[cut:]
            row.start = max(1, row.start - cut)  # nothing predicts a row's first token
            if convention == "build-nanogpt":  # the mean is over the tokens that are predicted
                row.length = max(1, len(row.tokens) - row.start)
            rows.append(row)
        labels.append(int(example["label"]))
    require(rows, f"{path} holds no examples")
    return rows, np.array(labels)


# -----------------------------------------------------------------------------
# scoring


@dataclass(frozen=True)
class Score:
    """How many of n examples a model answers correctly, by both measures."""

    convention: str
    n: int
    acc: int  # choosing by the log-probability of the whole ending
    acc_norm: int  # choosing by the log-probability per token or per character

    @property
    def share(self) -> float:
        """acc_norm as a fraction of 1."""
        return self.acc_norm / self.n

    def __str__(self) -> str:
        parts = [f"{self.convention:13}"]
        for name, correct in (("acc", self.acc), ("acc_norm", self.acc_norm)):
            p = correct / self.n
            error = math.sqrt(p * (1 - p) / self.n)  # the standard error of a proportion
            parts.append(f"{name} {correct}/{self.n} = {p:.4f} +- {error:.4f}")
        return " | ".join(parts)


@lru_cache
def make_batches(
    path: Path, tokenizer: str, convention: str, block_size: int, examples: int, batch_tokens: int
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return the rows of the first examples in batches of at most batch_tokens tokens: the numbers
    (B,) of the rows, their tokens (B, T) and their targets (B, T), all int64. A target is -1
    outside the ending, and there is no loss. Rows are sorted by length, so that a batch needs
    little padding."""
    rows, _ = load_rows(path, tokenizer, convention, block_size, examples)
    lengths = np.array([len(row.tokens) for row in rows])
    order = np.argsort(-lengths, kind="stable")
    batches = []
    first = 0
    while first < len(rows):
        width = int(lengths[order[first]])  # of the longest row
        numbers = order[first : first + max(1, batch_tokens // width)]
        tokens = np.zeros((len(numbers), width), np.int64)
        targets = np.full((len(numbers), width), -1)
        for i, number in enumerate(numbers):
            row = rows[number].tokens
            start = rows[number].start
            tokens[i, : len(row)] = row
            targets[i, start - 1 : len(row) - 1] = row[start:]  # position i predicts token i + 1
        # the last token is never an input, only a target
        batch = (numbers, tokens[:, :-1], targets[:, :-1])
        batches.append(tuple(torch.from_numpy(array) for array in batch))
        first += len(numbers)
    return batches


@torch.no_grad()
def score(
    model,
    path: Path,
    convention: str,
    device,
    examples: int = 10**9,
    must_stop: Callable[[int], bool] = lambda batch: False,
) -> Score | None:
    """Score a GPT of train_gpt2.py on the first examples of the file. Every process of a group
    calls this, inside Run.eager. A process computes its share of the batches, and all compute
    equally many, because the forward pass of a sharded model communicates. Return None if
    must_stop, which is asked before each batch, says so."""
    config = model.config
    selection = (path, config.tokenizer, convention, config.block_size, examples)
    rows, labels = load_rows(*selection)
    n = len(labels)
    batches = make_batches(*selection, BATCH_TOKENS[torch.device(device).type])
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    losses = torch.zeros(4 * n, device=device)  # summed over each ending, in nats
    # The processes take batches in turns. Neighbours cost about the same, being sorted by length
    for first in range(0, len(batches), world_size):
        if must_stop(first // world_size):
            return None
        i = min(first + rank, len(batches) - 1)  # the last batch again if there is no other
        numbers, tokens, targets = batches[i]
        each = model(tokens.to(device), targets.to(device), reduction="none")  # (B, T) float32
        if i == first + rank:
            losses[numbers.to(device)] = each.sum(dim=1)
    if world_size > 1:
        dist.all_reduce(losses)  # a row is zero in all processes but one
    # The lowest loss is the highest probability: the loss is minus its logarithm
    sums = losses.cpu().double().view(n, 4).numpy()  # an MPS device has no float64
    means = sums / np.array([row.length for row in rows]).reshape(n, 4)
    acc = int((sums.argmin(axis=1) == labels).sum())
    acc_norm = int((means.argmin(axis=1) == labels).sum())
    return Score(convention, n, acc, acc_norm)


# -----------------------------------------------------------------------------
# command line


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Return the flags. Raises UserError for an unknown flag or an impossible value."""
    import train_gpt2

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1], allow_abbrev=False)
    parser.error = fineweb.refuse_arguments
    add = parser.add_argument
    model = "what --init_from of train_gpt2.py takes (default: %(default)s)"
    add("-m", "--model", default="gpt2", help=model)
    choices = train_gpt2.CHOICES
    add("-d", "--device", default="auto", choices=choices["device"], help="where to compute")
    add("--dtype", default="auto", choices=choices["dtype"], help="precision of matrix products")
    add("--data", help="the validation file (default: downloaded once)")
    add("-n", "--examples", type=int, default=10**9, help="how many to score (default: all)")
    args = parser.parse_args(argv)
    most = 10**9
    require(0 < args.examples <= most, f"--examples is {args.examples}, expected 1 to {most}")
    args.compile = False  # rows differ in length: every batch has another shape
    return args


def run_command(argv: list[str] | None) -> None:
    """Score the model that the command line names, by both conventions."""
    import train_gpt2

    args = parse_args(argv)
    run = train_gpt2.setup_run(args)
    model = train_gpt2.GPT.from_pretrained(args.model).to(run.device)
    path = fetch_once(run, args.data)
    for convention in CONVENTIONS:
        with run.eager():
            result = score(model, path, convention, run.device, args.examples)
        train_gpt2.print0(str(result))


def main(argv: list[str] | None = None) -> None:
    """Run the command line shown at the top of this file and exit: 0 done, 2 for a mistake that the
    user can put right or a download that failed."""
    import train_gpt2

    fineweb.protect_output()
    status = 0
    try:
        run_command(argv)
    except (UserError, OSError) as error:
        status = train_gpt2.report(error, 2, "hellaswag.py")
    train_gpt2.leave(status)


if __name__ == "__main__":
    main()
