# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.9.1", "numpy", "tiktoken>=0.9", "tqdm", "transformers", "datasets"]
# ///
"""
HellaSwag: which of four endings of a text does a model find most likely?

    python hellaswag.py -m gpt2                           GPT-2 124M from Hugging Face
    python hellaswag.py -m FOLDER -n 1000                 a transformers model, 1,000 examples
    torchrun --nproc_per_node=8 hellaswag.py -m gpt2-xl   eight GPUs share the examples
    python train_gpt2.py --init_from log --max_steps 0    this project's, on a GPU

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
import json
import os
import re
import sys
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
import tiktoken
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

DATASET = "Rowan/hellaswag"  # the author's, on Hugging Face's hub. GitHub has blocked his file
FILE = Path(__file__).resolve().parent / "hellaswag" / "hellaswag_val.jsonl"
BATCH_TOKENS = {"cuda": 2**12, "mps": 2**12, "cpu": 2**10}  # in a forward pass


class UserError(OSError):
    """A mistake that the user can put right, mostly in a file. train_gpt2.py prints it as one line,
    like any OSError, and so does the command line below."""


def require(condition, message) -> None:
    """Raise UserError with the message unless the condition holds."""
    if not condition:
        raise UserError(message)


def fetch() -> Path:
    """Return the path of the validation file, downloaded once. Failing raises ConnectionError."""
    if FILE.is_file():
        return FILE
    from datasets import load_dataset  # takes seconds, and the file may be there

    try:
        examples = load_dataset(DATASET, split="validation")
    except Exception as error:  # of many kinds, by the libraries that datasets uses
        advice = f"train with --hellaswag off, or save a copy as {FILE}"
        raise ConnectionError(f"HellaSwag cannot be downloaded ({error}): {advice}") from error
    FILE.parent.mkdir(exist_ok=True)
    temporary = FILE.with_suffix(f".{os.getpid()}.tmp")
    examples.to_json(temporary)  # one on each line
    temporary.replace(FILE)  # other processes see the whole file or none
    return FILE


def iterate_examples(path="val"):
    """Yield the examples of a .jsonl file, or of "val", the file that fetch returns: dicts of ctx,
    endings and label, mostly with ctx_a and ctx_b, the parts of ctx, and activity_label."""
    with open(fetch() if path == "val" else path, "rb") as file:
        for line in file:
            is_line = not line.startswith((b"[", b"\x1f\x8b", b"PAR1"))
            require(is_line, "expected an example a line, and no array, .gz or .parquet file")
            if not line.isspace():
                yield json.loads(line)


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
    # Removed marks leave spaces. Those at the end of the context are part of the endings' tokens
    context = text.rstrip()
    return context, text[len(context) :] + " ", [clean(ending) for ending in example["endings"]]


def render_example(example, tokenizer=None, convention="build-nanogpt"):
    """Return data (a dict), tokens, mask and label (int). Tokens and mask are 4 lists of integers,
    each with a length of its own: the context and one of the endings, where the mask is 1."""
    encode = (tokenizer or tiktoken.get_encoding("gpt2")).encode_ordinary
    context, space, endings = split_text(example, convention)
    has_label = str(example.get("label", "")) != ""
    require(has_label, "the test split has no labels: use the validation split")
    label = int(example["label"])  # the original file has numbers, some copies have texts
    is_whole = context and all(endings) and len(endings) == 4 and label in range(4)
    require(is_whole, "expected a context, 4 endings and a label from 0 to 3")
    # GPT-2's tokenizer splits texts before spaces, so both parts have the tokens of the whole
    start = encode(context)
    ends = [encode(space + ending) for ending in endings]
    data = {"label": label, "ctx_tokens": start, "ending_tokens": ends}
    data["characters"] = [len(ending) for ending in endings]
    tokens = [start + end for end in ends]
    mask = [[0] * len(start) + [1] * len(end) for end in ends]
    return data, tokens, mask, label


def token_losses(logits, targets):
    """Return the cross entropy of each token, (B, T) float32, 0 where the target is -1."""
    logits = logits.flatten(0, 1).float()  # bfloat16 has 3 digits: many endings would tie
    losses = F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="none")
    return losses.view(targets.shape)


@dataclass(frozen=True)
class Examples:
    """The rows of n examples, as a model reads them: 4 for each example, one for each ending."""

    convention: str
    rows: list  # (index, inputs (T,), targets (T,)): targets are -1 in the context. Longest first
    lengths: torch.Tensor  # (n, 4) by which acc_norm divides
    labels: torch.Tensor  # (n,)


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


def load(path, tokenizer, block_size, convention="build-nanogpt", limit=None) -> Examples:
    """Return the first `limit` examples of a .jsonl file, or all. Of a row longer than block_size,
    only the end is kept. An error names the first example that cannot be rendered."""
    inputs, targets, lengths = [], [], []  # of the rows
    labels = []
    try:
        for example in islice(iterate_examples(path), limit):
            data, tokens, _, label = render_example(example, tokenizer, convention)
            for row, end in zip(tokens, data["ending_tokens"], strict=True):
                # At position i, token i + 1 is predicted, if it is of the ending
                inputs.append(row[-1 - block_size : -1])
                targets.append([-1] * (len(inputs[-1]) - len(end)) + end[-block_size:])
                lengths.append(min(len(end), block_size))
            if convention == "harness":
                lengths[-4:] = data["characters"]
            labels.append(label)
    except (UserError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path}: example {len(labels) + 1} is malformed ({error!r})") from error
    require(labels, f"{path} holds no examples")
    # Rows are parts of two large tensors, because 80,000 small ones would take a second
    sizes = [len(row) for row in inputs]
    x = torch.from_numpy(np.fromiter(chain(*inputs), np.int64)).split(sizes)
    y = torch.from_numpy(np.fromiter(chain(*targets), np.int64)).split(sizes)
    rows = sorted(zip(range(len(x)), x, y, strict=True), key=lambda row: -len(row[1]))
    return Examples(convention, rows, torch.tensor(lengths).view(-1, 4), torch.tensor(labels))


@torch.no_grad()
def score(model, examples, device, rank=0, world_size=1, bar=False) -> Score:
    """Return how many endings a model chooses correctly. `model(x, y)` takes inputs and targets,
    (B, T) each, and returns token_losses. Every process must call this. On a terminal, `bar` shows
    how far it is."""
    rows = examples.rows
    limit = BATCH_TOKENS.get(torch.device(device).type, 2**12)
    starts = [0]  # of the batches
    while starts[-1] < len(rows):
        longest = len(rows[starts[-1]][1])  # T: rows are padded to the length of their first one
        starts.append(starts[-1] + max(1, limit // longest))
    sums = torch.zeros(len(rows), device=device)  # the loss of each ending, in nats
    steps = range(rank, len(starts) - 1, world_size)  # this process's batches
    hidden = None if bar and rank == 0 else True  # None hides it in a log file
    for batch in tqdm(steps, examples.convention, unit="batch", disable=hidden):
        indices, x, y = zip(*rows[starts[batch] : starts[batch + 1]], strict=True)
        x = pad_sequence(x, batch_first=True)
        y = pad_sequence(y, batch_first=True, padding_value=-1)
        sums[torch.tensor(indices, device=device)] = model(x.to(device), y.to(device)).sum(dim=1)
    if world_size > 1:
        dist.all_reduce(sums)  # an ending is zero in all processes but one
    # acc_norm divides by tokens, as build-nanogpt's get_most_likely_row, or by characters (harness)
    sums = sums.cpu().double().view(-1, 4)
    acc = (sums.argmin(dim=1) == examples.labels).sum()
    acc_norm = ((sums / examples.lengths).argmin(dim=1) == examples.labels).sum()
    return Score(examples.convention, len(examples.labels), int(acc), int(acc_norm))


def load_model(name, device, dtype):
    """Return a model, as score takes it, and the length of its context."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of reading the weights, which takes seconds
    is_model = Path(name, "config.json").is_file() or not Path(name).exists()  # or one on the hub
    advice = f"for a checkpoint, python train_gpt2.py --init_from {name} --max_steps 0"
    require(is_model, f"{name} is no model of transformers ({advice})")
    try:
        ids = AutoTokenizer.from_pretrained(name)("Hello world").input_ids  # [] if it has none
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device)
    except Exception as error:  # of any kind, if it is a model of another family
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{name} cannot be loaded as a language model: {reason}") from error
    config = model.config
    is_gpt2 = ids == [15496, 995] or (ids == [] and config.model_type == "gpt2")
    require(is_gpt2, f"{name} is a {config.model_type} with another tokenizer than GPT-2")
    may_be_gpt2 = 50257 <= config.vocab_size <= 51200  # of which only 50257 are tokens
    require(may_be_gpt2, f"{name} has {config.vocab_size} tokens, GPT-2 has 50257")
    # cuDNN's attention spends time on a plan for every new shape
    torch.backends.cuda.enable_cudnn_sdp(False)
    if dtype == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported(False):
        dtype = "bfloat16"

    def losses(x, y):
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            return token_losses(model(x, use_cache=False).logits[..., :50257], y)

    return losses, getattr(config, "max_position_embeddings", 1024)


def run(argv) -> None:
    """Score the model that the command line names by both conventions."""
    best = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    # Without a usage, argparse reports a mistake in one line
    parser = argparse.ArgumentParser(description="Score HellaSwag", usage=argparse.SUPPRESS)
    add = parser.add_argument
    add("-m", "--model", default="gpt2", help="name or folder of a model with GPT-2's tokenizer")
    devices = sorted({"auto", "cpu", best.type})
    add("-d", "--device", default="auto", choices=devices, help="auto is a GPU, if there is one")
    dtypes = ("auto", "float32", "bfloat16")
    add("--dtype", default="auto", choices=dtypes, help="auto is bfloat16 on GPUs that have it")
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
    model, block_size = load_model(args.model, device, args.dtype)
    gpt2 = tiktoken.get_encoding("gpt2")
    for convention in ("build-nanogpt", "harness"):
        examples = load(path, gpt2, block_size, convention, args.examples)
        result = score(model, examples, device, rank, world_size, bar=True)
        if rank == 0:
            print(result, flush=True)
    if world_size > 1:
        dist.destroy_process_group()
        os._exit(0)  # at once, as a thread of PyTorch could crash a normal exit


def main(argv=None) -> None:
    """Run the command line, and exit with 2 after a user's mistake, or with 130 after Ctrl-C."""
    try:
        run(argv)
    except OSError as error:
        print("hellaswag.py:", *str(error).split(), file=sys.stderr)  # one line
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)  # 128 plus SIGINT's number


if __name__ == "__main__":
    main()
