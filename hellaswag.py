"""
HellaSwag: which of four endings of a text does a model find most likely?

    python hellaswag.py -m gpt2 -d cuda                   GPT-2 124M from Hugging Face
    python hellaswag.py -m FOLDER -n 1000                 a transformers model, 1,000 examples
    torchrun --nproc_per_node=8 hellaswag.py -m gpt2-xl   eight GPUs share the examples
    python train_gpt2.py --init_from log --max_steps 0    a checkpoint of this project

Guessing scores 0.25, people score 0.95. There are 10,042 validation examples (Zellers et al. 2019,
arXiv:1905.07830) and two conventions, whose numbers must not be compared with each other:

    build-nanogpt  takes the context as it is. acc_norm chooses the ending with the lowest mean loss
                   per token; train_gpt2.py logs it as `hella`.
                   GPT-2 124M: acc 0.2859, acc_norm 0.2955; XL: 0.3842, 0.4893.
    harness        EleutherAI's lm-evaluation-harness puts the activity before the context and
                   removes marks like [header]. acc_norm chooses the highest log-probability per
                   character. GPT-2 124M: 0.2892, 0.3114; XL: 0.4004, 0.5089.
"""

import argparse
import hashlib
import json
import os
import re
import sys
import urllib.request
from dataclasses import dataclass
from functools import lru_cache
from http.client import HTTPException
from itertools import islice
from pathlib import Path

import numpy as np
import tiktoken
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
FILE = Path(__file__).resolve().parent / "hellaswag" / "hellaswag_val.jsonl"
# Tokens in a forward pass. Their logits are 0.8 GB in bfloat16 on a GPU, 0.2 GB in float32 on a CPU
BATCH_TOKENS = {"cuda": 2**13, "mps": 2**12, "cpu": 2**10}


class UserError(ValueError):
    """A mistake that the user can put right. The command line prints it as one line."""


def require(condition, message) -> None:
    """Raise UserError with the message unless the condition holds."""
    if not condition:
        raise UserError(message)


def fetch() -> Path:
    """Return the validation file, downloaded once. Raises ConnectionError if that fails."""
    if FILE.is_file():
        return FILE
    try:
        with urllib.request.urlopen(URL, timeout=30) as response:  # seconds; raises unless 200
            data = response.read()
        # A proxy's login page also arrives with status 200, and must not be kept as the data
        if hashlib.sha256(data).hexdigest() != SHA256:
            raise OSError(f"{len(data)} bytes arrived that are not the file")
        FILE.parent.mkdir(exist_ok=True)
        temporary = FILE.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_bytes(data)
        temporary.replace(FILE)  # other processes see the whole file or none
    except (OSError, HTTPException) as error:  # HTTPException: fewer bytes than announced
        message = f"HellaSwag cannot be downloaded ({error}): save {URL} as {FILE}"
        raise ConnectionError(message) from error
    return FILE


def iterate_examples(path="val"):
    """Yield the examples of a .jsonl file, or of "val", the file that fetch returns: dicts of ctx,
    endings and label, mostly with ctx_a and ctx_b, the parts of ctx, and activity_label."""
    with open(fetch() if path == "val" else path, "rb") as file:
        yield from map(json.loads, file)


def clean(text):
    """Return the text without the marks of WikiHow articles, exactly as the harness does."""
    text = text.strip().replace(" [title]", ". ")
    # Double spaces are replaced once, so that three become two
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def split_text(example, convention):
    """Return the context, the space between it and the endings, and the endings."""
    text = example["ctx"]
    if convention == "build-nanogpt":
        return text, " ", example["endings"]
    if "ctx_b" in example:  # it begins the sentence that the ending continues
        text = f"{example['ctx_a']} {example['ctx_b'].capitalize()}"
    text = clean(f"{example['activity_label']}: {text}")
    # Where a mark was removed, spaces are left. At the end of the context they are no token of it
    context = text.rstrip()
    return context, text[len(context) :] + " ", [clean(ending) for ending in example["endings"]]


def render_example(example, tokenizer=None, convention="build-nanogpt"):
    """Return data (a dict), tokens (4, N) int64, mask (4, N) int64 and label (int). A row is the
    context and one of the endings, padded with zeros; mask is 1 at the endings."""
    encode = (tokenizer or tiktoken.get_encoding("gpt2")).encode_ordinary
    context, space, endings = split_text(example, convention)
    label = int(example["label"])  # the original file has numbers, some copies have texts
    is_whole = context and all(endings) and len(endings) == 4 and label in range(4)
    require(is_whole, "expected a context, 4 endings and a label from 0 to 3")
    # GPT-2 splits a text before its spaces, so both parts together have the tokens of the whole
    start = encode(context)
    data = {"label": label, "ctx_tokens": start}
    data["ending_tokens"] = [encode(space + ending) for ending in endings]
    data["characters"] = [len(ending) for ending in endings]
    longest = len(start) + max(map(len, data["ending_tokens"]))
    tokens = np.zeros((4, longest), np.int64)
    mask = np.zeros_like(tokens)
    for i, ending in enumerate(data["ending_tokens"]):
        end = len(start) + len(ending)
        tokens[i, :end] = start + ending
        mask[i, len(start) : end] = 1
    return data, torch.from_numpy(tokens), torch.from_numpy(mask), label


def shift(tokens, mask):
    """Return the targets (4, N - 1): at position i token i + 1, or -1 where its mask is 0."""
    return tokens[:, 1:].masked_fill(mask[:, 1:] == 0, -1)


def token_losses(logits, targets):
    """Return the cross entropy of each token, (B, T) float32, 0 where the target is -1."""
    logits = logits.flatten(0, 1).float()  # bfloat16 has 3 digits: many endings would tie
    losses = F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="none")
    return losses.view(targets.shape)


def get_most_likely_row(tokens, mask, logits) -> int:
    """Return which of 4 rows has the lowest mean loss where mask is 1, given logits (4, N, V)."""
    targets = shift(tokens, mask)
    losses = token_losses(logits[:, :-1], targets)  # the last logits predict nothing
    # The lowest loss is the highest probability: a loss is minus its logarithm
    return int((losses.sum(dim=1) / (targets >= 0).sum(dim=1)).argmin())


@dataclass(frozen=True)
class Score:
    """How many of n examples a model answers correctly."""

    convention: str
    n: int
    acc: int  # choosing by the log-probability of the whole ending
    acc_norm: int  # choosing by the log-probability per token or per character

    def __str__(self) -> str:
        text = f"{self.convention:13}"
        for name, correct in (("acc", self.acc), ("acc_norm", self.acc_norm)):
            p = correct / self.n
            error = (p * (1 - p) / self.n) ** 0.5  # the standard error of a proportion
            text += f" | {name} {correct}/{self.n} = {p:.4f} +- {error:.4f}"
        return text


def make_batches(rows, batch_tokens):
    """Return batches: the indices (B,) of some rows, their inputs (B, T) and targets (B, T)."""
    rows = sorted(rows, key=lambda row: -len(row[1]))  # equal lengths need no padding
    batches = []
    while rows:
        size = max(1, batch_tokens // len(rows[0][1]))  # B: rows as long as the first one
        indices, x, y = zip(*rows[:size], strict=True)
        x = pad_sequence(x, batch_first=True)
        y = pad_sequence(y, batch_first=True, padding_value=-1)
        batches.append((torch.tensor(indices), x, y))
        rows = rows[size:]
    return batches


@lru_cache  # this takes seconds; an evaluation finds what the one before it has made
def load(path, tokenizer, convention, block_size, examples, batch_tokens):
    """Return batches, the lengths (n, 4) by which acc_norm divides, and the labels (n,). An example
    is valid if it renders; the first one that does not is named."""
    rows = []  # index, inputs (T,) and targets (T,), 4 for each example
    lengths = []
    labels = []
    try:
        for example in islice(iterate_examples(path), examples):
            data, tokens, mask, label = render_example(example, tokenizer, convention)
            targets = shift(tokens, mask)
            for i, ending in enumerate(data["ending_tokens"]):
                end = len(data["ctx_tokens"]) + len(ending) - 1  # the last token is never an input
                kept = slice(max(0, end - block_size), end)  # the end of a row that is too long
                rows.append((len(rows), tokens[i, kept], targets[i, kept]))
                lengths.append(min(len(ending), block_size))  # as many tokens are predicted
            if convention == "harness":
                lengths[-4:] = data["characters"]
            labels.append(label)
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path}: example {len(labels) + 1} is malformed ({error!r})") from error
    require(labels, f"{path} holds no examples")
    return make_batches(rows, batch_tokens), torch.tensor(lengths).view(-1, 4), torch.tensor(labels)


@torch.no_grad()
def score(
    losses,  # all that is known of a model: inputs and targets (B, T) in, as token_losses out
    path,  # of a .jsonl file
    tokenizer,  # a tiktoken.Encoding
    block_size,  # the longest T; of a longer row, the end is kept
    device,
    convention="build-nanogpt",  # or harness
    examples=None,  # how many, from the first on; None: all
    rank=0,  # of this process, among
    world_size=1,  # processes that call this together
) -> Score:
    """Return how many endings are chosen rightly. Every process of a group must call this."""
    limit = BATCH_TOKENS[torch.device(device).type]
    batches, lengths, labels = load(path, tokenizer, convention, block_size, examples, limit)
    sums = torch.zeros(lengths.numel(), device=device)  # the loss of each ending, in nats
    steps = range(0, len(batches), world_size)
    for step in tqdm(steps, convention, leave=False, delay=2, disable=rank > 0 or None):
        # The forward pass of a sharded model communicates, so all processes compute equally many
        # batches: the last one again if none is left
        index = min(step + rank, len(batches) - 1)
        rows, x, y = batches[index]
        result = losses(x.to(device), y.to(device)).sum(dim=1)
        if index == step + rank:
            sums[rows.to(device)] = result
    if world_size > 1:
        dist.all_reduce(sums)  # an ending is zero in all processes but one
    sums = sums.cpu().double().view(-1, 4)
    acc = (sums.argmin(dim=1) == labels).sum()
    acc_norm = ((sums / lengths).argmin(dim=1) == labels).sum()
    return Score(convention, len(labels), int(acc), int(acc_norm))


def load_model(name, device, dtype):
    """Return the function `losses` that score takes, and the length of the model's context."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device)
    config = model.config
    require(config.vocab_size >= 50257, f"{name} has {config.vocab_size} tokens, GPT-2 has 50257")
    # cuDNN's attention spends time on a plan for every new shape
    torch.backends.cuda.enable_cudnn_sdp(False)
    if dtype == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported(False):
        dtype = "bfloat16"

    def losses(x, y):
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            return token_losses(model(x, use_cache=False).logits, y)

    return losses, config.max_position_embeddings


def run(argv) -> None:
    """Score the model that the command line names by both conventions."""
    best = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    # Without a usage, argparse reports a mistake in one line
    parser = argparse.ArgumentParser(description="Score HellaSwag", usage=argparse.SUPPRESS)
    add = parser.add_argument
    add("-m", "--model", default="gpt2", help="name or folder of a model with GPT-2's tokenizer")
    add("-d", "--device", default="auto", choices=("auto", "cpu", best.type))
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    add("--data", help="the validation file (default: downloaded once)")
    add("-n", "--examples", type=int, help="how many to score (default: all)")
    args = parser.parse_args(argv)
    require(args.examples is None or args.examples > 0, f"-n {args.examples}: expected 1 or more")
    # torchrun sets these variables. Every process has a GPU of its own
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(best.type if args.device == "auto" else args.device)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if world_size > 1:
        dist.init_process_group(dist.get_default_backend_for_device(device))

    path = args.data or fetch()  # all processes may do this at once, as the file appears whole
    losses, block_size = load_model(args.model, device, args.dtype)
    fixed = (path, tiktoken.get_encoding("gpt2"), block_size, device)
    for convention in ("build-nanogpt", "harness"):
        result = score(losses, *fixed, convention, args.examples, rank, world_size)
        if rank == 0:
            print(result, flush=True)
    if world_size > 1:
        dist.destroy_process_group()


def main(argv=None) -> None:
    """Run the command line, and exit with 2 after a mistake that the user can put right."""
    try:
        run(argv)
    except (UserError, OSError) as error:
        print("hellaswag.py:", *str(error).split(), file=sys.stderr)  # one line
        sys.exit(2)


if __name__ == "__main__":
    main()
