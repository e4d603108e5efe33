"""
Train GPT-2 from scratch, in one file that reads from top to bottom.

    python train_gpt2.py --quickstart                             a small GPT, offline, on any CPU
    python fineweb.py && python train_gpt2.py                     GPT-2 124M, FineWeb-Edu, one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt2.py        the same run on eight GPUs
    python train_gpt2.py --resume                                 continue the newest checkpoint
    python train_gpt2.py --sample --init_from log/model_19073.pt  print what a trained model writes
    python train_gpt2.py --help                                   list every flag

The file follows the order of a lecture: the model, generation, data, the learning rate schedule,
devices and processes, checkpoints, evaluation, the log, training, and the command line. Three
appendices come last: the loss as a Triton kernel, the optimizer Muon, and weights in Hugging Face's
format.

Shapes are written as (B, T, C): B sequences of T tokens with C channels each. V is the vocabulary
size, nh the number of attention heads, hs the size of a head, and N = B * T a number of tokens. A
flag has the same name on the command line, in `args` and in a checkpoint.

Sources: GPT-2 (Radford et al. 2019) for the model, GPT-3 (Brown et al. 2020, arXiv:2005.14165) for
the hyperparameters, build-nanogpt and llm.c (both at github.com/karpathy) for the file formats.
"""

import argparse
import errno
import gc
import json
import math
import os
import re
import shlex
import signal
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, NoReturn
from zipfile import ZipFile, is_zipfile
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint as recompute_in_backward

import fineweb
import hellaswag

# require(condition, message) raises UserError(message) unless the condition holds; main prints it
# as one line. atomic_write gives a file its name only once the file is complete
from fineweb import UserError, atomic_write, require

try:
    import triton  # comes with PyTorch for NVIDIA GPUs; appendix A uses it
    import triton.language as tl
except ImportError:
    triton = None

# -----------------------------------------------------------------------------
# the model

# name: (layers, heads, channels, context in tokens, peak learning rate). Names with d are shapes of
# GPT-2 from llm.c, of which OpenAI released d12, d24, d36 and d48. Names with gpt3 are shapes of
# GPT-3 from table 2.1 of its paper, and c384 from llm.c. tiny is the quickstart's. Two shapes of
# the table cannot be right and are corrected: 2048 channels do not divide into 24 heads, nor 5140
# channels into heads of 128. The learning rates follow the table; a size that it lacks has the rate
# of a similar one
SIZES = {
    "tiny": (4, 4, 128, 256, 6e-4),
    "d6": (6, 6, 384, 1024, 6e-4),        "gpt3:c384": (6, 6, 384, 2048, 6e-4),
    "d12": (12, 12, 768, 1024, 6e-4),     "gpt3:c768": (12, 12, 768, 2048, 6e-4),  # 124M
    "d24": (24, 16, 1024, 1024, 3e-4),    "gpt3:c1024": (24, 16, 1024, 2048, 3e-4),  # 355M
    "d36": (36, 20, 1280, 1024, 2.5e-4),  "gpt3:c1536": (24, 16, 1536, 2048, 2.5e-4),  # 774M, 760M
    "d48": (48, 25, 1600, 1024, 2e-4),    "gpt3:c2048": (24, 16, 2048, 2048, 2e-4),  # 1.6B, 1.3B
    "d60": (60, 30, 1920, 1024, 1.6e-4),  "gpt3:c2560": (32, 32, 2560, 2048, 1.6e-4),  # 2.8B, 2.7B
    "d72": (72, 30, 2880, 1024, 1.2e-4),  "gpt3:c4096": (32, 32, 4096, 2048, 1.2e-4),  # 7.3B, 6.7B
    "d84": (84, 36, 3456, 1024, 1e-4),    "gpt3:c5120": (40, 40, 5120, 2048, 1e-4),  # 12.2B, 13B
    "gpt3:c12288": (96, 96, 12288, 2048, 0.6e-4),  # 175B
}  # fmt: skip


@dataclass
class GPTConfig:
    """The shape of a GPT, and the tokenizer whose tokens it reads. The defaults are GPT-2 124M.
    Checkpoints hold it. A field that an older checkpoint lacks gets its default."""

    n_layer: int = 12  # blocks
    n_head: int = 12  # attention heads of a block
    n_embd: int = 768  # C, the channels of the residual stream
    block_size: int = 1024  # the context: how many tokens the model can attend to
    vocab_size: int = 50257  # 50,000 BPE merges + 256 bytes + 1 <|endoftext|>
    tokenizer: str = "gpt2"
    eot: int = 50256  # <|endoftext|>, which precedes every document and ends a sample


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which every token attends to itself and to the tokens before it."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # q, k and v of all heads
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        B, T, C = x.shape  # T is 1 where a cache continues
        hs = C // self.n_head  # channels of a head
        q, k, v = self.c_attn(x).split(C, dim=2)  # (B, T, C) each
        q = q.view(B, T, self.n_head, hs).transpose(1, 2)  # (B, nh, T, hs)
        k = k.view(B, T, self.n_head, hs).transpose(1, 2)
        v = v.view(B, T, self.n_head, hs).transpose(1, 2)
        if cache is not None:
            if cache:  # not empty: it holds the keys and values of all earlier tokens
                k = torch.cat((cache[0], k), dim=2)
                v = torch.cat((cache[1], v), dim=2)
            cache[:] = [k, v]  # for the next call
        # is_causal lets query i attend to keys 0 to i. That is right for a whole sequence, but
        # wrong for queries that follow cached keys. A call that continues a cache therefore has a
        # single query, which may attend to every key and needs no mask
        assert T == 1 or k.size(2) == T
        # this function scales by 1 / sqrt(hs), takes the softmax and multiplies by v
        y = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)  # (B, nh, T, hs)
        y = y.transpose(1, 2).reshape(B, T, C)  # put the heads side by side again
        return self.c_proj(y)  # mixes the heads


class MLP(nn.Module):
    """Two linear layers with a GELU between them, applied to each token separately."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)  # 4 C channels, as in GPT-2
        # init_weights looks for this name
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        # GPT-2 was trained with the tanh approximation of GELU
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """Attention, in which tokens exchange information, then an MLP. Each of the two reads a
    LayerNorm of the residual stream x, (B, T, C), and adds its output to x."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        # The residual stream x is not normalized between blocks. In the backward pass each "x +"
        # hands the gradient on to the earlier blocks unchanged
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2. Its parameters have the names that Hugging Face's GPT-2 gives them. Its matrices have
    the layout of nn.Linear, (out, in), where Hugging Face stores (in, out)."""

    def __init__(self, config: GPTConfig, recompute: bool = False):
        super().__init__()
        self.config = config
        # Compute each block again in the backward pass: a third more work, much less memory
        self.recompute = recompute
        C = config.n_embd
        # Pad the vocabulary to a multiple of 128, from 50257 to 50304. A row of logits is then a
        # multiple of 256 bytes in 16 bits, and matrix products are faster on aligned rows
        padded_vocab_size = math.ceil(config.vocab_size / 128) * 128
        modules = {
            "wte": nn.Embedding(padded_vocab_size, C),  # token embeddings
            "wpe": nn.Embedding(config.block_size, C),  # position embeddings
            "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            "ln_f": nn.LayerNorm(C),
        }
        self.transformer = nn.ModuleDict(modules)
        self.lm_head = nn.Linear(C, padded_vocab_size, bias=False)
        # Use one matrix for input and output (Press & Wolf 2017, arXiv:1608.05859): tokens with
        # similar meanings should have similar rows in both, and it saves 39M parameters. To untie
        # the matrices, delete this line. Training and checkpoints need no other change, but GPT-2's
        # own weights, which are tied, can then not be loaded, and --export_hf refuses the model
        self.lm_head.weight = self.transformer.wte.weight
        self.init_weights()

    def init_weights(self) -> None:
        """Draw the initial weights as build-nanogpt does. The weights of LayerNorms stay 1."""
        # 2 * n_layer projections add their outputs to the residual stream. Dividing their standard
        # deviation by sqrt(2 * n_layer) makes the variance of the final sum independent of n_layer
        residual_std = 0.02 * (2 * self.config.n_layer) ** -0.5
        # The tied matrix is listed under both of its names and therefore drawn twice, as in
        # build-nanogpt, so that a seed gives the same weights there and here
        for name, p in self.named_parameters(remove_duplicate=False):
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, std=residual_std)
            elif p.dim() >= 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        # The padded rows belong to no token. linear_cross_entropy masks their logits, so they get
        # no gradient and stay zero
        for matrix in (self.transformer.wte.weight, self.lm_head.weight):
            matrix.data[self.config.vocab_size :] = 0

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        reduction: str = "mean",
        cache: list[list[Tensor]] | None = None,
    ) -> Tensor:
        """Return the float32 logits (B, T, V) of the next tokens, given idx (B, T) int64.

        With targets (B, T) int64, return the cross entropy in nats instead: the mean over tokens,
        or with reduction="none" one value per token, (B, T). Targets of -1 do not count. A cache is
        a list with one list per layer, empty at first. After a call, a layer's list holds the keys
        and the values of all tokens so far, (B, nh, tokens, hs) each. A later call has T = 1: one
        token that follows all cached ones."""
        # The cache holds all earlier tokens, so their number is the position of the next one
        start = cache[0][0].size(2) if cache and cache[0] else 0
        pos = torch.arange(start, start + idx.size(1), device=idx.device)  # (T,)
        # What a token is and where it stands are added up in the same C channels
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)  # (B, T, C)
        # Under bfloat16 autocast (Run.autocast), keep the residual stream in bfloat16 too:
        # additions and LayerNorms are limited by memory bandwidth, so this saves 7% of the time at
        # equal loss. Under float16 autocast it stays in float32, because its sum could exceed
        # float16's largest number, 65504
        device = x.device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16:
            x = x.bfloat16()
        for i, block in enumerate(self.transformer.h):
            if self.recompute and self.training:
                # use_reentrant=False is the variant that works with DDP and torch.compile
                x = recompute_in_backward(block, x, use_reentrant=False)
            else:
                x = block(x, cache[i] if cache else None)
        # Autocast lets LayerNorm return float32, but the loss kernel of appendix A takes bfloat16
        x = self.transformer.ln_f(x).to(x.dtype)
        V = self.config.vocab_size
        if targets is None:
            return self.lm_head(x)[..., :V].float()  # without the padded columns
        losses = linear_cross_entropy(x.flatten(0, 1), self.lm_head.weight, targets.flatten(), V)
        if reduction == "none":
            return losses.view_as(targets)
        return losses.sum() / (targets != -1).sum()  # not .mean(), which would count all targets

    @classmethod
    def from_pretrained(cls, name: str) -> "GPT":
        """Return a pretrained model in evaluation mode. `name` is whatever --init_from takes, such
        as "gpt2". hellaswag.py uses this."""
        source = load_source(name)
        model = cls(GPTConfig(**source["config"]))
        model.load_weights(source["model"])
        return model.eval()

    def weight_names(self) -> list[str]:
        """Return the names of what a checkpoint holds of this model: its state dict, but a tied
        matrix only once, under the name that named_parameters gives it."""
        once = {name for name, _ in [*self.named_parameters(), *self.named_buffers()]}
        return [name for name in self.state_dict() if name in once]

    def check_weights(self, weights: dict[str, Tensor]) -> None:
        """Raise UserError unless the weights have this model's weight_names, and their shapes."""
        state = self.state_dict()
        expected = {name: state[name].shape for name in self.weight_names()}
        found = {name: p.shape for name, p in weights.items()}
        only_here = sorted(expected.items() - found.items())[:2]
        only_there = sorted(found.items() - expected.items())[:2]
        differing = f"expected {only_here}, found {only_there}"
        require(expected == found, f"weights of another model: {differing}")

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Copy weights, by name, into the model."""
        self.check_weights(weights)
        # Not strict, because the second name of a tied matrix is missing
        self.load_state_dict(weights, strict=False)

    def configure_optimizers(
        self, weight_decay: float, learning_rate: float, optimizer: str = "adamw"
    ) -> list[torch.optim.Optimizer]:
        """Return a list of optimizers that together update every parameter once: AdamW, with the
        betas and eps of the GPT-3 paper, or for "muon" two: Muon (appendix B) for the matrices of
        the blocks and AdamW for the rest. Muon is made for matrices that map one hidden vector to
        another; embeddings are tables, of which a batch uses some rows. Matrices and embeddings
        decay, which keeps them small. Biases and LayerNorms do not, because decay would pull the
        scales of LayerNorms away from 1."""
        matrices, vectors, hidden, qkv = [], [], [], []
        for name, p in self.named_parameters():  # a tied matrix once
            if p.dim() < 2:  # biases and LayerNorm weights
                vectors.append(p)
            elif optimizer == "adamw" or ".h." not in name:
                matrices.append(p)
            elif name.endswith("c_attn.weight"):
                assert p.size(0) == 3 * p.size(1)  # Muon cuts it into three equal parts
                qkv.append(p)
            else:
                hidden.append(p)
        # A group of parameters has its own settings; the learning rate is set before every step
        groups = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        # Fused: one pass over a tensor does its whole update, on CUDA, MPS and CPU alike
        adamw = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=True)
        if optimizer == "adamw":
            return [adamw]
        # c_attn is three matrices on top of each other, for q, k and v. If they were made
        # orthogonal as one matrix, the largest of them would take most of the update
        groups = [{"params": hidden, "stacked": 1}, {"params": qkv, "stacked": 3}]
        return [adamw, Muon(groups, lr=learning_rate, weight_decay=weight_decay)]


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, V: int) -> Tensor:
    """Return the cross entropy in nats, (N,) float32, of the logits x @ weight.T with targets (N,)
    int64, for x (N, C) and weight (padded V, C). Columns from V on are padding and get probability
    0. A target of -1 gives a loss of 0."""
    # Appendix A computes the same, but faster. Delete these two lines to change the loss
    if triton and x.is_cuda and x.dtype == torch.bfloat16:
        return FusedCrossEntropy.apply(x, weight, targets, V)
    logits = F.linear(x, weight)  # (N, padded V), the largest tensor of all
    # Keep the padded columns out of the softmax: the logits of OpenAI's GPT-2 are often near -40,
    # so padded logits of 0 would take nearly all of the probability. Mask the columns rather than
    # slice them off: a slice leaves rows unaligned, and torch.compile fuses the mask into the loss
    is_padding = torch.arange(len(weight), device=x.device) >= V
    logits = logits.masked_fill(is_padding, -math.inf).float()
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")


# -----------------------------------------------------------------------------
# generation


def next_token(
    logits: Tensor, temperature: float, top_k: int, generator: torch.Generator
) -> Tensor:
    """Draw one token per row of logits (B, V) float32, from the row's top_k most likely tokens, or
    from all tokens if top_k is 0. Return the tokens, (B, 1) int64."""
    if temperature == 0:  # greedy: the most likely token
        return logits.argmax(dim=-1, keepdim=True)
    k = min(top_k or math.inf, logits.size(-1))
    values, tokens = logits.topk(k)  # (B, k) each, the most likely first
    # A temperature below 1 favours the likely tokens. A diverged model has logits of nan, on which
    # multinomial would fail
    probs = F.softmax((values / temperature).nan_to_num(), dim=-1)
    choice = torch.multinomial(probs, 1, generator=generator)  # (B, 1), a rank below k
    return tokens.gather(-1, choice)  # the token of that rank


@torch.no_grad()
def generate(model: GPT, tokens: Tensor, args: Namespace) -> Tensor:
    """Continue tokens (B, T) int64 by up to args.max_new_tokens and return (B, T + new) int64. A
    row that has produced <|endoftext|> is filled up with <|endoftext|>.

    While the text fits into args.seq_len, each step computes only its new token and reuses the
    cached keys and values of the others. After that the model sees the last seq_len tokens. Every
    step then gives each of them a new position, so the whole window is computed again."""
    eot = model.config.eot  # <|endoftext|>
    prompt_length = tokens.size(1)
    # Sampling has its own generator, so it does not change the random numbers of training
    generator = torch.Generator(tokens.device).manual_seed(args.seed)
    cache = [[] for _ in model.transformer.h]  # a list per layer, empty at first
    uncached = tokens  # tokens whose keys and values are not in the cache yet
    for _ in range(args.max_new_tokens):
        if tokens.size(1) > args.seq_len:
            logits = model(tokens[:, -args.seq_len :])  # (B, T, V)
        else:
            logits = model(uncached, cache=cache)  # (B, 1, V) after the first call
        uncached = next_token(logits[:, -1], args.temperature, args.top_k, generator)
        # What a row draws after its <|endoftext|> is thrown away
        ended = (tokens[:, prompt_length:] == eot).any(dim=1, keepdim=True)  # (B, 1)
        tokens = torch.cat((tokens, uncached.masked_fill(ended, eot)), dim=1)
        # Several processes do not stop early: a sharded model needs all of them in every step
        if (tokens[:, -1] == eot).all() and not dist.is_initialized():
            break
    return tokens


# -----------------------------------------------------------------------------
# data

HOW_TO_GET_DATA = (
    "`python fineweb.py` downloads FineWeb-Edu, `python fineweb.py --files` tokenizes your own"
    " text, and `python train_gpt2.py --quickstart` needs no data"
)


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turn any error in the `with` block into a UserError that names the file. Every file format
    raises other exceptions, and their messages often do not name the file."""
    try:
        yield
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"{path} cannot be read: {reason}") from error


class Shard(NamedTuple):
    """Where a file has its tokens, which are uint16. The file is opened anew for every window,
    because a process may keep only about a thousand files open."""

    path: Path
    offset: int  # bytes before the first token
    tokens: int  # how many there are


def open_shard(path: Path) -> Shard:
    """Look at a shard: a .npy file, or one of llm.c's .bin files. Raises UserError if the file is
    damaged or is not a shard."""
    with reading(path):
        if path.suffix == ".bin":
            # The header is 256 int32: a magic number, version 1, the number of tokens, then zeros
            header = np.fromfile(path, np.int32, 3).tolist()
            count = (path.stat().st_size - 256 * 4) // 2  # 4 bytes an int32, 2 bytes a token
            expected = [20240520, 1, count]
            is_whole = header == expected and count >= 0
            require(is_whole, f"its header is {header}, its size asks for {expected}")
            return Shard(path, 256 * 4, count)
        tokens = np.load(path, mmap_mode="r")
        found = f"{tokens.ndim}-D {tokens.dtype}"
        require(found == "1-D uint16", f"it holds a {found} array, expected 1-D uint16")
        return Shard(path, tokens.offset, len(tokens))


def read_tokens(shard: Shard, start: int, count: int) -> np.ndarray:
    """Return `count` tokens of a shard, (count,) uint16, or fewer if the file has become shorter.
    Files are read and not mapped: a mapped file that somebody truncates would end the process with
    SIGBUS, without a word."""
    with reading(shard.path):  # it may have been deleted
        offset = shard.offset + 2 * start  # bytes
        return np.fromfile(shard.path, np.uint16, count, offset=offset)


def open_shards(data_dir: str, split: str) -> dict[str, Shard]:
    """Return the split's shards, which have train or val in their name, sorted by name."""
    require(Path(data_dir).is_dir(), f"there is no folder {data_dir}; {HOW_TO_GET_DATA}")
    shards = {}
    for path in sorted(Path(data_dir).glob(f"*{split}*")):
        if path.suffix in (".npy", ".bin") and path.is_file():
            # With both words in its name, a file would be read for training and for validation
            both = "train" in path.name and "val" in path.name
            require(not both, f"{path} is named after both splits; rename it to one of them")
            twin = path.with_suffix(".bin").name  # sorted before a .npy of the same name
            require(twin not in shards, f"{path} and {twin} hold the same tokens; delete one")
            shards[path.name] = open_shard(path)
    require(bool(shards), f"{data_dir} holds no {split} shards (.npy, .bin); {HOW_TO_GET_DATA}")
    return shards


@lru_cache(maxsize=8)
def permutation(n: int, seed: int | None, *key: int) -> np.ndarray:
    """Return a random order of range(n) that depends on the arguments alone, or range(n) itself if
    seed is None."""
    if seed is None:
        return np.arange(n)
    # RandomState, because NumPy promises that its numbers never change between versions
    return np.random.RandomState((seed, *key)).permutation(n)


@dataclass
class DataLoaderLite:
    """Serve batches of (B, T) tokens; every process gets its share. (The name is build-nanogpt's.)

    Each shard is cut into windows of T inputs and one more token, the last target, so neighbouring
    windows share a token. What is left at the end of a shard, at most T tokens, is not used.
    A window may hold several documents, whose tokens attend to each other, as in GPT-3's training.

    All processes read one common sequence of windows, and an optimizer step takes the same windows
    from it for every B and every number of processes. With a seed, each epoch shuffles the shards,
    and the windows inside each shard; without one, the order is that of the files."""

    shards: dict[str, Shard]  # by file name
    B: int  # windows in a batch
    T: int  # inputs in a window
    V: int  # every token is below it
    seed: int | None  # None: no shuffling
    run: "Run"

    def __post_init__(self):
        self.names = list(self.shards)
        self.windows_per_shard = count_windows(self.shards, self.T)
        self.windows = int(self.windows_per_shard.sum())  # in an epoch
        # One thread loads the next batch while the GPU computes
        self.worker = ThreadPoolExecutor(1)
        self.damage = ""  # what is wrong with the shards
        self.reset()

    def reset(self, position: int = 0) -> None:
        """Go to window `position` of the run, and start to load the batch that begins there."""
        self.position = position  # a count of windows: all that resuming needs
        first = position + self.run.rank * self.B  # process r takes the r-th B windows
        self.pending = self.worker.submit(self._load, first)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, (B, T) int64 each, on the device. If a shard has been damaged
        since the start, note it in self.damage and return zeros. The caller computes with them all
        the same, so that all processes leave the training loop together, and drops the result."""
        try:
            x, y = self.pending.result()
        except UserError as error:  # raised in the thread
            self.damage = str(error)
            x = y = torch.zeros(self.B, self.T, dtype=torch.int64)
        self.reset(self.position + self.B * self.run.world_size)
        device = self.run.device
        return x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    def _load(self, first: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, (B, T) int64 each, of windows first to first + B - 1."""
        windows = [self._window(i) for i in range(first, first + self.B)]
        # uint16 saves disk space, but embeddings and cross_entropy need int64
        rows = torch.from_numpy(np.stack(windows).astype(np.int64))  # (B, T + 1)
        x = rows[:, :-1].contiguous()
        y = rows[:, 1:].contiguous()  # the target of each token is the token after it
        if self.run.device.type == "cuda":
            # Only from pinned memory does a copy to the GPU run asynchronously
            return x.pin_memory(), y.pin_memory()
        return x, y

    def _window(self, number: int) -> np.ndarray:
        """Return window `number` of the run, (T + 1,) uint16."""
        epoch, i = divmod(number, self.windows)  # a batch may reach into the next epoch
        shard_order = permutation(len(self.names), self.seed, epoch)
        # ends[k] is the number of windows in the first k + 1 shards of this epoch
        ends = self.windows_per_shard[shard_order].cumsum()
        place = int(np.searchsorted(ends, i, side="right"))
        shard = int(shard_order[place])
        name = self.names[shard]
        window_order = permutation(int(self.windows_per_shard[shard]), self.seed, epoch, shard)
        first = ends[place] - len(window_order)  # windows in the shards before this one
        start = int(window_order[i - first]) * self.T
        tokens = read_tokens(self.shards[name], start, self.T + 1)
        require(
            len(tokens) == self.T + 1, f"{name} has been cut short: no token at {start + self.T}"
        )
        # A token beyond the vocabulary would show on a GPU as a failed assertion in some kernel
        found = f"a token at {start} or after is not below {self.V}"
        require(tokens.max() < self.V, f"{name} is damaged: {found}")
        return tokens


def open_data(
    args: Namespace, config: GPTConfig, run: "Run"
) -> tuple[DataLoaderLite, DataLoaderLite]:
    """Return the loaders of the training data and of the validation data."""
    B, T, V = args.batch_size, args.seq_len, config.vocab_size
    train_shards = open_shards(args.data_dir, "train")
    val_shards = train_shards  # without validation, a stand-in that is never used
    if args.val_every:
        val_shards = open_shards(args.data_dir, "val")
    seed = args.seed if args.shuffle else None
    train_loader = DataLoaderLite(train_shards, B, T, V, seed, run)
    return train_loader, DataLoaderLite(val_shards, B, T, V, None, run)


def count_windows(shards: dict[str, Shard], T: int) -> np.ndarray:
    """Return how many windows of T + 1 tokens, overlapping by one, each shard has, (n,) int64."""
    counts = np.array([max(0, shard.tokens - 1) // T for shard in shards.values()])
    found = f"neither {min(shards)} nor another shard of its split has T + 1 = {T + 1} tokens"
    advice = "add text, lower --seq_len, or do without validation by --val_every 0"
    require(counts.any(), f"{found}: {advice}")
    return counts


# -----------------------------------------------------------------------------
# the learning rate, and which updates to skip


# t goes from 0, at the end of the warmup, to 1, at the end of the run. Each function returns a
# share of the way from min_lr to max_lr: 0 is min_lr, and 1 is max_lr. Add a function here to add a
# schedule. wsd stands for warmup, stable, decay (arXiv:2405.18392)
SCHEDULES = {
    "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t)),
    "linear": lambda t: 1 - t,
    "constant": lambda t: 1.0,
    "wsd": lambda t: 1 - math.sqrt(max(0, 5 * t - 4)),  # constant until the last fifth
}


def get_lr(step: int, args: Namespace) -> float:
    """Return the learning rate of update number `step`, counted from 0."""
    if step < args.warmup_steps:  # step + 1, because a first rate of 0 would waste the update
        return args.max_lr * (step + 1) / args.warmup_steps
    t = (step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    return args.min_lr + SCHEDULES[args.schedule](t) * (args.max_lr - args.min_lr)


def judge(values: Tensor, recent: Tensor, args: Namespace) -> tuple[Tensor, Tensor]:
    """Return whether to skip the update of a step, () bool, and the new `recent`.

    `values` (4,) float32 has the loss, the gradient norm, and alarms for a signal and for damaged
    data. `recent` (2, 128) float32 has the last 128 losses and norms, nan where there are none yet.
    An update is skipped if data is damaged, if loss or norm is not finite, or if one of them is an
    outlier: it exceeds the mean of its last 128 values by more than --skip_loss_z or --skip_grad_z
    standard deviations. All of this is computed on the GPU, so that Python need not wait for it.
    Source: llm.c."""
    latest = values[:2]  # loss and norm
    is_sound = latest.isfinite().all() & (values[3] == 0)
    longer = torch.cat((recent[:, 1:], latest[:, None]), dim=1)  # (2, 128)
    deviations, means = torch.std_mean(longer, dim=1, correction=0)  # (2,) each
    # A z-score is nan until there are 128 values, and if all are equal. nan > limit is False
    z_loss, z_norm = (latest - means) / deviations
    is_outlier = z_loss > (args.skip_loss_z or math.inf)
    is_outlier |= z_norm > (args.skip_grad_z or math.inf)
    # `recent` takes in outliers too, but neither value of a step that is not sound
    return ~is_sound | is_outlier, torch.where(is_sound, longer, recent)


# -----------------------------------------------------------------------------
# devices, precision, processes


def first_given(value, default):
    """Return the value, or the default if it is None. 0 and False are values that were given."""
    return default if value is None else value


def is_main() -> bool:
    """Return whether this process is the first or the only one, which prints and writes files."""
    return os.environ.get("RANK", "0") == "0"


def print0(*lines: str) -> None:
    """Print lines from the first process only."""
    if is_main():
        fineweb.say(*lines)


@dataclass(frozen=True)
class Run:
    """Where and how this process of a training run computes. setup_run makes it. Its methods work
    alike for one process and for many, so the training loop need not distinguish them."""

    device: torch.device
    dtype: str  # bfloat16, float16, tf32 or float32
    compile: bool  # whether training and validation run compiled
    rank: int  # of this process; 0 prints and writes files
    world_size: int  # the number of processes
    runs_ahead: bool = False  # Python starts a step before it has the previous step's results

    def autocast(self) -> torch.autocast:
        """Return the context in which matrix products and attention run in 16 bits, if dtype asks
        for it. Weights and their gradients stay in float32."""
        # tf32 and float32 need no autocast
        half = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(self.dtype)
        return torch.autocast(self.device.type, dtype=half, enabled=half is not None)

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Autocast without torch.compile, for inputs whose shapes change from call to call. cuDNN's
        attention is excluded, because it spends time on a plan for every new shape."""
        backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with torch.compiler.set_stance("force_eager"), sdpa_kernel(backends), self.autocast():
            yield

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over all processes, bit for bit the same in each. `values` is
        overwritten. Reading the result on the CPU waits until every process has made this call:
        the training loop does so for every step, and therefore needs no other barrier."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values / self.world_size

    def mark(self) -> "torch.cuda.Event | float":
        """Return a mark that the device reaches when it has done all that it was told so far."""
        if self.device.type != "cuda":  # Python reads each result before it goes on
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: "torch.cuda.Event | float", end: "torch.cuda.Event | float") -> float:
        """Wait until the device reaches the mark `end`. Return the seconds since `begin`."""
        if self.device.type != "cuda":
            return end - begin
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def agree(self, condition: bool) -> bool:
        """Return whether the condition holds in every process. They wait for each other."""
        return self.mean(torch.tensor(float(condition), device=self.device)).item() == 1

    def gather(self, value) -> list:
        """Return the values of all processes, the same list in each."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Let the first process run the `with` block before the others do, so that it can make
        files that they only read. If it fails, torchrun ends the others."""
        if self.rank == 0:
            yield
        self.agree(True)  # the others wait here for the first
        if self.rank > 0:
            yield


def local(p: Tensor) -> Tensor:
    """Return this process's part of a parameter that --zero shards (a DTensor), or all of another
    tensor."""
    return p.to_local() if isinstance(p, DTensor) else p


def gathered(p: Tensor) -> Tensor:
    """Return the whole of a tensor, sharded or not. Every process must call this."""
    return p.full_tensor() if isinstance(p, DTensor) else p


def cut_local(whole: Tensor, p: Tensor) -> Tensor:
    """Cut a whole tensor in the way that p is sharded, and return this process's part."""
    if not isinstance(p, DTensor):
        return whole
    # src_data_rank=None: every process has the whole and cuts it, so that nothing is sent
    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None).to_local()


def setup_run(args: Namespace) -> Run:
    """Choose device and precision, and connect to the other processes if torchrun started some."""
    # torchrun sets these variables: RANK numbers the processes of all machines, from 0 on, and
    # WORLD_SIZE says how many there are
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    device = choose_device(args.device)
    # Tensor cores multiply float16 since Volta, compute capability (7, 0), and bfloat16 since
    # Ampere, (8, 0). Triton, which torch.compile uses, needs Volta as well
    capability = (0, 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        capability = torch.cuda.get_device_capability(device)
    require(
        rank < world_size, f"RANK is {rank} and WORLD_SIZE {world_size}: start it with torchrun"
    )
    if world_size > 1:
        # A restarted group must not find the addresses that the dead group left in torchrun's store
        store, _, _ = next(dist.rendezvous("env://"))  # at the address that torchrun has set
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(attempt, store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(minutes=30),  # compilation and downloads can take long
        )
        # Compile the model as one graph, not cut into DDP's buckets: 2% faster on four H200
        torch._dynamo.config.optimize_ddp = False
    dtype = args.dtype
    if dtype == "auto":
        if capability >= (8, 0):
            dtype = "bfloat16"
        elif capability >= (7, 0):
            dtype = "float16"
        else:
            dtype = "float32"
    # "high" lets float32 matrix products use TF32
    torch.set_float32_matmul_precision("highest" if dtype == "float32" else "high")
    # In PyTorch 2.11 the key of the cache of compiled graphs lacks autocast's dtype. A bfloat16 run
    # after a float16 run would be given the float16 graph and would not learn. Add dtype to the key
    torch.compiler.config.cache_key_tag = dtype
    # Compilation fuses small operations into few kernels, which saves memory traffic
    can_compile = capability >= (7, 0) and triton is not None
    compile = first_given(args.compile, can_compile)
    return Run(device, dtype, compile, rank, world_size, runs_ahead=device.type == "cuda")


def choose_device(name: str) -> torch.device:
    """Return the device that --device names. Under torchrun each process has a GPU of its own;
    otherwise CUDA_VISIBLE_DEVICES selects one."""
    # an NVIDIA or AMD GPU is "cuda", Apple's is "mps"
    best = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    require(name in ("auto", "cpu", best.type), f"there is no device {name} here, only {best.type}")
    device = best if name == "auto" else torch.device(name)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # on this machine
    require(processes <= count, f"{processes} processes need a GPU each, but there are {count}")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


# -----------------------------------------------------------------------------
# checkpoints

FULL = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)  # whole tensors, on the CPU
# the fields of State that a checkpoint holds as they are
PROGRESS = ("step", "position", "skipped")


@dataclass
class State:
    """All that the next optimizer step depends on. A checkpoint holds it, so that a resumed run
    continues bit for bit."""

    model: GPT
    optimizers: list[torch.optim.Optimizer]  # each has parameters of its own
    scaler: torch.amp.GradScaler  # of float16's losses
    recent: Tensor  # (2, 128), the losses and norms of the last 128 steps, see judge
    # finish_update changes these together. A save waits until it has done so for every update
    step: int = 0  # updates done
    position: int = 0  # windows used
    skipped: int = 0  # updates skipped in a row

    def restore(self, checkpoint: dict) -> None:
        """Continue from a checkpoint, whose weights the model already has."""
        for name in PROGRESS:
            setattr(self, name, checkpoint.get(name, 0))  # older checkpoints lack `skipped`
        if "recent" in checkpoint:
            self.recent = checkpoint["recent"].to(self.recent.device)
        if checkpoint["scaler"]:  # empty unless the run used float16
            self.scaler.load_state_dict(checkpoint["scaler"])
        saved = checkpoint["optimizer"]
        if saved:  # empty before the first update
            groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
            try:
                for old, group in zip(saved["param_groups"], groups, strict=True):
                    # The code and the flags decide these, for example betas and weight_decay
                    old |= {name: value for name, value in group.items() if name != "params"}
                dcp.set_optimizer_state_dict(self.model, self.optimizers, saved, options=FULL)
            except (KeyError, ValueError) as error:  # in a fork with another one
                found = "its optimizer's state does not fit this code's optimizer"
                raise UserError(f"the checkpoint cannot be resumed: {found}: {error!r}") from error


def make_state(model: GPT, args: Namespace, run: Run) -> State:
    """Return the state before the first update of the model."""
    optimizers = model.configure_optimizers(args.weight_decay, args.max_lr, args.optimizer)
    # float16 rounds small gradients to 0 and overflows at 65504. The scaler therefore multiplies
    # the loss by a large factor. Where a gradient overflows, the norm is infinite, the update is
    # skipped and the factor is halved; after 2000 good steps it is doubled. It is off for other
    # dtypes
    scaler = torch.amp.GradScaler(run.device.type, enabled=run.dtype == "float16")
    recent = torch.full((2, 128), math.nan, device=run.device)
    return State(model, optimizers, scaler, recent)


def save_checkpoint(state: State, args: Namespace, run: Run, **rest) -> None:
    """Write the state, the flags and `rest` to log_dir, and delete what --keep does not keep. Every
    process must call this. The first one writes, and if it cannot, all of them raise OSError. The
    layout does not depend on the number of GPUs or on compilation, so any machine can resume."""
    finite = torch.stack([local(p).isfinite().all() for p in state.model.parameters()]).all()
    if not run.agree(finite):
        where = f"the weights are not finite at step {state.step}"
        raise FloatingPointError(f"{where}; {last_good(args)}")
    checkpoint = {
        "model": dcp.get_model_state_dict(state.model, options=FULL),
        "optimizer": {},  # empty before the first update, when PyTorch would do a step to make one
        "scaler": state.scaler.state_dict(),
        **{name: getattr(state, name) for name in PROGRESS},
        "recent": state.recent.cpu(),
        "config": asdict(state.model.config),  # these two rebuild the model and the run
        "args": vars(args),
        "hardware": [run.world_size, run.device.type],  # if it differs, --resume chooses B again
        **rest,
    }
    if any(optimizer.state for optimizer in state.optimizers):
        checkpoint["optimizer"] = dcp.get_optimizer_state_dict(
            state.model, state.optimizers, options=FULL
        )
    names = state.model.weight_names()
    problem = ""
    if run.rank == 0:
        checkpoint["model"] = {name: checkpoint["model"][name] for name in names}
        path = Path(args.log_dir, f"model_{state.step:05d}.pt")
        try:
            with atomic_write(path) as file:
                torch.save(checkpoint, file)
            print0(f"saved {path}")
        except (OSError, RuntimeError) as error:
            # torch.save hides the reason, such as a full disk, behind a RuntimeError
            problem = f"{path} cannot be written: {error.__context__ or error}"
    # Everybody waits for the file: when one process has ended, torchrun soon kills the others
    problem = max(run.gather(problem))
    if problem:
        raise OSError(problem)
    prune(state, args, run)


def load_checkpoint(path: str | Path) -> dict:
    """Return the contents of a checkpoint, with its tensors memory-mapped on the CPU. Raises
    UserError if the file is not a whole checkpoint."""
    # open comes first: it names a missing permission, which is_zipfile would call damage
    with reading(path), open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - 2**16))
        file.read()  # is_zipfile looks here, and hides an error of the disk
        require(is_zipfile(file), "it is not a checkpoint, or only a part of one")
        damaged = ZipFile(file).testzip()  # compares all checksums, 2 GB per second
        require(damaged is None, f"its part {damaged} is damaged")
        # weights_only: no code in the file is executed
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        missing = {"model", "config", "args"} - checkpoint.keys()
        require(not missing, f"it has no {missing}, so it is not a checkpoint of this script")
        with torch.device("meta"):  # shapes without memory
            GPT(GPTConfig(**checkpoint["config"])).check_weights(checkpoint["model"])
        return checkpoint


def list_checkpoints(log_dir: str) -> list[Path]:
    """Return the checkpoints in log_dir, oldest first."""
    # stem[6:] is the step, which follows "model_"
    paths = [path for path in Path(log_dir).glob("model_*.pt") if path.stem[6:].isdecimal()]
    return sorted(paths, key=lambda path: int(path.stem[6:]))


def prune(state: State, args: Namespace, run: Run) -> None:
    """Delete all but the newest args.keep checkpoints, or none if args.keep is 0. While updates are
    skipped, delete none: the run may be diverging, and its older checkpoints the last good ones."""
    if run.rank == 0 and args.keep and state.skipped == 0:
        for old in list_checkpoints(args.log_dir)[: -args.keep]:
            old.unlink()


def last_good(args: Namespace) -> str:
    """Return a hint, for an error message, at the newest checkpoint before updates were skipped."""
    for path in reversed(list_checkpoints(args.log_dir)):
        with suppress(UserError):  # it is damaged
            if load_checkpoint(path).get("skipped", 0) == 0:
                return f"the last good checkpoint is {path}: delete newer ones before you resume"
    return "there is no good checkpoint"


# -----------------------------------------------------------------------------
# evaluation. Each function takes the model without its DDP wrapper, because the wrapper's forward
# pass may communicate. The processes can then run batches of different shapes without waiting for
# each other, and meet once, when validate or hellaswag.score adds up what each has computed. A
# model that --zero shards communicates in every forward pass, to gather the weights. Therefore both
# functions see to it that every process computes the same number of batches


@torch.no_grad()
def validate(
    model: GPT,
    loader: DataLoaderLite,
    tokens: int,
    run: Run,
    must_stop: Callable[[int], bool] = lambda batch: False,
) -> float | None:
    """Return the mean loss in nats per token over the first tokens // T windows of the split, at
    least one and at most all. These windows are the same for every B and number of processes.
    Return None if must_stop, which is asked before each batch, says so."""
    model.eval()
    loader.reset()
    windows = min(max(1, tokens // loader.T), loader.windows)  # of all processes together
    rows = run.rank * loader.B + torch.arange(loader.B, device=run.device)[:, None]  # (B, 1)
    sums = []
    for batch, first in enumerate(range(0, windows, loader.B * run.world_size)):
        if must_stop(batch):
            return None
        x, y = loader.next_batch()
        # Rows beyond the last window do not count
        y = y.masked_fill(first + rows >= windows, -1)
        with run.autocast():  # the shapes never change, so the model is compiled for them once
            sums.append(model(x, y, reduction="none").sum())
    # The sum is taken in float64, and on the CPU, because an MPS device has no float64
    total = torch.stack(sums).cpu().double().sum().float().to(run.device)
    if loader.damage:
        total += math.nan  # which every process then sees in the mean
    model.train()
    return run.mean(total).item() * run.world_size / (windows * loader.T)


def find_hellaswag(args: Namespace, run: Run) -> Path | None:
    """Return HellaSwag's file, downloaded if necessary, or None if it is switched off or cannot be
    downloaded."""
    if args.hellaswag_every == 0:
        return None
    try:
        return hellaswag.fetch_once(run)
    except ConnectionError as error:
        print0(f"note: HellaSwag is skipped: {error}")
        return None


def score_hellaswag(
    model: GPT, path: Path, run: Run, must_stop: Callable[[int], bool]
) -> tuple[float, str] | None:
    """Return the share of HellaSwag's examples whose right ending has the lowest mean loss per
    token, as build-nanogpt counts it, and a line to print. Each process scores a share of them.
    Return None if must_stop, which is asked before each batch, says so."""
    model.eval()
    start = time.perf_counter()
    with run.eager():
        score = hellaswag.score(model, path, "build-nanogpt", run.device, must_stop=must_stop)
    model.train()
    if score is None:
        return None
    seconds = time.perf_counter() - start
    line = f"HellaSwag: {score.acc_norm} of {score.n} = {score.share:.4f} in {seconds:.1f} s"
    return score.share, line


def print_samples(model: GPT, args: Namespace, run: Run) -> None:
    """Print args.num_samples continuations of args.prompt, each up to its <|endoftext|>. Every
    process computes the same samples, and the first one prints them."""
    tokenizer = fineweb.get_tokenizer(model.config.tokenizer)
    eot = model.config.eot
    # An empty prompt is <|endoftext|> alone, with which every document begins
    prompt = tokenizer.encode(args.prompt, allowed_special="all") or [eot]
    tokens = torch.tensor([prompt] * args.num_samples, device=run.device)  # (num_samples, T)
    model.eval()
    with run.eager():
        rows = generate(model, tokens, args)[:, len(prompt) :].tolist()
    model.train()
    for i, row in enumerate(rows):
        text = tokenizer.decode(row).split("<|endoftext|>")[0]
        print0(f"sample {i}: {args.prompt}{text}".rstrip())


# -----------------------------------------------------------------------------
# the log, and how much of the GPU's peak speed is used

# Peak TFLOP/s in 16 bits, TF32 and float32. The first key that occurs in the GPU's name counts.
# Source: NVIDIA's data sheets, for dense matrix products that accumulate in float32. GPUs before
# Ampere have no TF32 and compute in float32 instead.
PEAK_TFLOPS = {
    "B200": (2250, 1125, 75),      "H200 NVL": (835, 417, 60),     "H200": (989, 494, 67),
    "H100 PCIe": (756, 378, 51),   "H100 NVL": (835, 417, 60),     "H100": (989, 494, 67),
    "A100": (312, 156, 19.5),      "L40S": (362, 183, 91.6),       "L4": (121, 60, 30.3),
    "A10G": (70, 35, 31.2),        "V100": (125, 15.7, 15.7),      "T4": (65, 8.1, 8.1),
    "RTX 5090": (210, 105, 105),   "RTX 4090": (165, 83, 82.6),    "RTX 3090": (71, 36, 35.6),
}  # fmt: skip


def peak_tokens_per_second(model: GPT, T: int, run: Run) -> float | None:
    """Return the tokens per second at which the model FLOPs utilization (MFU) would be 100% on all
    GPUs together, or None for an unknown GPU. Source: llm.c."""
    # 1. For every token, a weight of a matrix product takes part in one multiplication and one
    #    addition in the forward pass, and in twice as many in the backward pass: 6 per weight
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    # 2. Attention: q @ k and att @ v are 2 * C * T each per layer and token, times 3 as above, and
    #    divided by 2 because the causal mask leaves half of it
    flops_per_token = 6 * weights + 6 * model.config.n_layer * model.config.n_embd * T
    # which of the three peaks counts
    column = {"bfloat16": 0, "float16": 0, "tf32": 1, "float32": 2}[run.dtype]
    gpu = torch.cuda.get_device_name() if run.device.type == "cuda" else ""
    for name, peaks in PEAK_TFLOPS.items():
        if re.search(rf"\b{name}\b", gpu):
            return run.world_size * peaks[column] * 1e12 / flops_per_token
    return None


class Log:
    """log.txt in log_dir, written by the first process. A record is a line: step, stream, value."""

    def __init__(self, args: Namespace, start: int, model: GPT, run: Run):
        """Put log_dir in order and open the log, without its records of step `start` and later,
        which the run writes again. With --overwrite, delete the old run."""
        self.args = args
        self.start = start
        self.peak = peak_tokens_per_second(model, args.seq_len, run)
        self.file = None
        if run.rank > 0:
            return
        path = Path(args.log_dir, "log.txt")
        if args.overwrite:
            if path.exists():
                print0(f"replacing the run in {args.log_dir}")
            for old in [*list_checkpoints(args.log_dir), path]:
                old.unlink(missing_ok=True)
        for old in list_checkpoints(args.log_dir):
            if int(old.stem[6:]) > start:  # it is damaged, or --resume would have continued it
                old.rename(f"{old}.damaged")
        for partial in path.parent.glob("model_*.pt.*.tmp"):  # left behind by a killed process
            partial.unlink()
        # Half a line, left by a crash, and anything else that is no record is dropped
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        with atomic_write(path) as file:
            file.writelines(line for line in lines if is_record_before(line, start))
        # An unbuffered file gets every record in a single write, so a killed run leaves whole ones
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115
        if start == 0:  # readers of the log need these to count tokens and to compare losses
            tokens, V = args.total_batch_size, model.config.vocab_size
            self.record(0, total_batch_size=str(tokens), vocab_size=str(V))

    def record(self, step: int, **values: str) -> None:
        """Append a record for each stream=value."""
        lines = [f"{step} {stream} {value}\n" for stream, value in values.items()]
        if self.file:
            self.file.write("".join(lines).encode())

    def record_evaluation(self, step: int, stream: str, value: float, line: str) -> None:
        """Append the record of an evaluation, and print a line about it."""
        self.record(step, **{stream: f"{value:.4f}"})
        print0(f"step {step:5d}/{self.args.max_steps} | {line}")

    def record_step(self, step: int, loss: float, norm: float, lr: float, dt: float) -> str:
        """Append the records of an update that took dt seconds. Return them as a line to read."""
        ms = f"{1000 * dt:.2f}"
        self.record(step, train=f"{loss:.6f}", lr=f"{lr:.4e}", norm=f"{norm:.4f}", dt=ms)
        line = f"step {step:5d}/{self.args.max_steps} | loss: {loss:.6f} | lr {lr:.4e}"
        tokens_per_second = self.args.total_batch_size / dt
        line += f" | norm: {norm:.4f} | dt: {ms}ms | tok/sec: {tokens_per_second:.0f}"
        if self.peak is not None:
            line += f" | mfu: {100 * tokens_per_second / self.peak:.1f}%"
        return line


def is_record_before(line: bytes, start: int) -> bool:
    """Return whether a line of log.txt is a whole record of a step before start."""
    step = line.split(b" ")[0]
    return line.endswith(b"\n") and step.isdigit() and int(step) < start


# -----------------------------------------------------------------------------
# training


@torch.no_grad()
def shard(whole: GPT, args: Namespace, run: Run) -> GPT:
    """Return a sharded model with the weights that `whole` has in the first process. In the others,
    `whole` has only shapes."""
    with torch.device("meta"):
        model = GPT(whole.config, args.recompute)
    # FSDP2 leaves each GPU a part of every parameter, of its gradient and of its optimizer state,
    # and gathers the weights of a block when they are needed. --zero 2 keeps them gathered until
    # the backward pass; --zero 3 frees them after the forward pass and gathers them again. The last
    # call takes the parameters outside the blocks, such as the tied matrix
    mesh = init_device_mesh(run.device.type, (run.world_size,))
    for part in [*model.transformer.h, model]:
        if run.compile and part is not model:
            part.compile(dynamic=False)  # gathering cannot be a part of a compiled graph
        fully_shard(part, mesh=mesh, reshard_after_forward=args.zero == 3)
    model.to_empty(device=run.device)  # memory for this process's parts
    # In the first process. In the others they are only shapes. A fork may have buffers, too
    weights = dict(whole.named_parameters()) | dict(whole.named_buffers())
    # Send them one after another, so that no GPU holds all of them
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        weight = torch.empty(p.shape, dtype=p.dtype, device=run.device)
        if run.rank == 0:
            weight.copy_(weights[name])
        dist.broadcast(weight, src=0)
        local(p).copy_(cut_local(weight, p))
    return model


def make_model(config: GPTConfig, source: dict, args: Namespace, run: Run) -> tuple[GPT, nn.Module]:
    """Return the model, and the same model as the training loop calls it, with DDP around it if
    several processes have a copy each. Evaluation and checkpoints use the former."""
    # The weights are drawn on the CPU, so that a seed gives the same ones on every device. After
    # that PyTorch's global generator is not used: there is no dropout, and the data order and the
    # samples have generators of their own. So a checkpoint needs no random state. A fork with
    # dropout stays exact, on the same number of processes, if every step begins with
    # torch.manual_seed(hash((args.seed, step, run.rank)))
    torch.manual_seed(args.seed)
    is_whole = run.rank == 0 or not args.zero
    with torch.device("cpu" if is_whole else "meta"):  # meta: shapes without memory
        model = GPT(config, args.recompute)
    if source and is_whole:  # the checkpoint to resume, or the model of --init_from
        model.load_weights(source["model"])
    if args.zero:
        model = shard(model, args, run)
        return model, model
    model.to(run.device)
    if run.compile:
        # Every batch has the same shape. Compiling in place lets the parameters keep their names
        model.compile(dynamic=False)
    if run.world_size == 1:
        return model, model
    # DDP gives every process the weights of the first one, and averages the gradients. With bucket
    # views it needs no second copy of the gradients
    return model, DDP(model, gradient_as_bucket_view=True)


def is_due(step: int, every: int, args: Namespace) -> bool:
    """Return whether something that happens every `every` steps is due. 0 means never; anything
    else is also due after the last update."""
    return every > 0 and (step % every == 0 or step == args.max_steps)


def is_evaluated(step: int, args: Namespace) -> bool:
    """Return whether the model is evaluated, saved or sampled from before update `step`."""
    intervals = (args.val_every, args.hellaswag_every, args.sample_every, args.save_every)
    return any(is_due(step, every, args) for every in intervals)


def check_gradients(model: GPT) -> None:
    """Fail if a parameter got no gradient: checkpoints would lack its moments, and a run could not
    resume from them."""
    for name, p in model.named_parameters():
        is_used = p.grad is not None or not p.requires_grad
        assert is_used, f"the loss does not depend on {name}: delete or freeze it"


def update_weights(
    optimizers: list[torch.optim.Optimizer], lr: float, skip: Tensor, run: Run
) -> None:
    """Update every parameter at this learning rate, unless `skip`, () bool, is true."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        # Fused AdamW on CUDA, and Muon, read found_inf and change nothing where it is 1. They have
        # PyTorch's attribute for that. For any other optimizer, Python waits for `skip`, and some
        # of them refuse found_inf. (Apple's kernels ignore it, and scaler.step would know of
        # overflows alone)
        reads_found_inf = getattr(optimizer, "_step_supports_amp_scaling", False)
        if reads_found_inf:
            optimizer.found_inf = skip.float()
        if (run.runs_ahead and reads_found_inf) or not skip:
            optimizer.step()


class Update(NamedTuple):
    """A step that the device has been told to compute. Its results may not have arrived yet."""

    step: int  # its number, counted from 0
    lr: float
    position: int  # of the loader after it
    results: Tensor  # (5,) float32: loss, norm, stop, damaged, skipped
    begin: "torch.cuda.Event | float"  # from Run.mark
    end: "torch.cuda.Event | float"


def finish_update(update: Update, state: State, log: Log, args: Namespace, run: Run) -> bool:
    """Wait for the results of an update, take them into the state and the log, and return whether
    the run must stop: on a signal, or on damaged data, whose update does not count as done."""
    dt = run.seconds(update.begin, update.end)
    loss, norm, stop, damaged, skipped = update.results.tolist()
    if damaged:
        return True
    # An update that was skipped has used up its data and its step all the same
    state.step = update.step + 1
    state.position = update.position
    state.skipped = state.skipped + 1 if skipped else 0
    line = log.record_step(update.step, loss, norm, update.lr, dt)
    if skipped:  # it may look like any other update, if it was an outlier
        log.record(update.step, skipped="1")
        line += " | update skipped"
    print0(line)
    if state.skipped >= 20:  # float16's scaler may need 16 skips to halve 2**16 to 1
        found = f"20 updates were skipped in a row, with loss {loss} and norm {norm}"
        raise FloatingPointError(f"{found}; {last_good(args)}")
    if update.step == log.start + 10:  # compilation and warming up are over
        left = timedelta(seconds=round(dt * (args.max_steps - state.step)))
        print0(f"about {left} left, without evaluation")
    return stop > 0


def train(args: Namespace, config: GPTConfig, source: dict, checkpoint: dict, run: Run) -> int:
    """Train and return the exit status: 0, 1 for damaged data, or 128 plus the number of a signal.
    settle_args has decided the flags. `source` has the first weights, `checkpoint` is what to
    resume. Either may be {}; when resuming, both are the same."""
    train_loader, val_loader = open_data(args, config, run)
    names, sample = identify(train_loader.shards)
    data = {"data": names, "data_sample": sample}
    if args.val_every:
        data["val_data"] = ", ".join(identify(val_loader.shards))
    check_run(args, data, checkpoint, run)
    B, T = args.batch_size, args.seq_len
    grad_accum_steps = args.total_batch_size // (B * T * run.world_size)
    # Fetch what evaluation needs now, so that nobody waits for a download in mid-training
    hellaswag_file = find_hellaswag(args, run)
    if args.sample_every:
        with run.main_first():
            fineweb.get_tokenizer(config.tokenizer)

    # The model, and all else that the next step depends on
    raw_model, model = make_model(config, source, args, run)
    state = make_state(raw_model, args, run)
    if checkpoint:
        state.restore(checkpoint)
    optimizers = state.optimizers
    scaler = state.scaler
    start = state.step  # 0 unless the run resumes
    train_loader.reset(state.position)

    # Once every process knows its first batch to be sound, everything has been checked, and
    # --overwrite may delete an earlier run
    train_loader.pending.result()
    run.agree(True)  # waits for all of them
    log = Log(args, start, raw_model, run)
    prune(state, args, run)  # an earlier process may have been killed before it did
    print0(*describe(args, raw_model, data["data"], train_loader, val_loader, run))
    if start:
        print0(f"resumed at step {start}")
    signals = catch_signals()  # empty until one arrives

    def is_interrupted(batch: int = 0) -> bool:
        """Return whether any process has received a signal. On a GPU, an evaluation asks this in
        every eighth batch only, because the GPU idles until Python has the answer."""
        is_asked = batch % 8 == 0 or run.device.type == "cpu"
        return is_asked and not run.agree(not signals)

    # A run that a signal ended in a validation has saved without a val loss
    lacks_val_loss = bool(checkpoint) and checkpoint.get("val_loss") is None
    unread = deque()  # updates whose results Python has not read yet
    must_stop = False
    # One iteration more than there are updates: each begins with the evaluation of the model after
    # `step` updates, so that the last iteration evaluates the last update and then ends
    for step in range(start, args.max_steps + 1):
        # first the evaluation
        val_loss = None  # stays None unless it is measured at this step
        if is_due(step, args.val_every, args):
            val_loss = validate(raw_model, val_loader, args.val_tokens, run, is_interrupted)
            if val_loss is None:
                break
            log.record_evaluation(step, "val", val_loss, f"val loss: {val_loss:.4f}")
        if hellaswag_file and is_due(step, args.hellaswag_every, args):
            result = score_hellaswag(raw_model, hellaswag_file, run, is_interrupted)
            if result is None:
                break
            log.record_evaluation(step, "hella", *result)
        # Samples of new weights are noise, and are printed only by a run of no step at all
        may_sample = step > 0 or source or args.max_steps == 0
        if is_due(step, args.sample_every, args) and may_sample:
            print_samples(raw_model, args, run)
        # A signal during an evaluation, which may take long, does not wait for another step
        if is_evaluated(step, args) and is_interrupted():
            break
        is_new = step > start or (lacks_val_loss and val_loss is not None)
        if is_due(step, args.save_every, args) and is_new:
            save_checkpoint(state, args, run, **data, val_loss=val_loss)
        if step == args.max_steps:
            break

        # one optimizer step, on the mean gradient of total_batch_size tokens
        if not unread:  # with a GPU: the first step, or one after an evaluation, which is not timed
            begin = run.mark()
        if args.overfit_one_batch:
            train_loader.reset()  # to the first window
        # Not model.zero_grad(): after an evaluation, --zero 2 can hold whole weights in the model,
        # and then only the optimizers have the parts that the gradients belong to
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_sum = torch.zeros((), device=run.device)  # stays on the GPU: nobody waits for it
        # A micro-step adds the gradient of B sequences, as many as the memory has room for
        for micro_step in range(grad_accum_steps):
            x, y = train_loader.next_batch()  # (B, T) int64 each
            # DDP averages the gradients over the processes only if this is True: in the last
            # micro-step. (Without DDP it has no effect; --zero averages in every micro-step)
            model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
            with run.autocast():
                # Gradients of micro-steps add up, and the step needs their mean
                loss = model(x, y) / grad_accum_steps
            scaler.scale(loss).backward()
            loss_sum += loss.detach()
        if step == start:
            check_gradients(raw_model)
        for optimizer in optimizers:
            scaler.unscale_(optimizer)  # the norm is that of the true gradients
        # Clip the norm, so that one bad batch cannot throw the weights far off. GPT-3 clips to 1.0.
        # The norm before clipping is returned
        norm = gathered(nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip or math.inf))

        # All processes get the same values, so they agree whether to update and whether to stop.
        # The last two are above 0 if any process has received a signal or met damaged data
        damage = train_loader.damage or val_loader.damage
        alarms = [torch.full_like(norm, float(bool(reason))) for reason in (signals, damage)]
        values = run.mean(torch.stack((loss_sum, norm, *alarms)))
        skip, state.recent = judge(values, state.recent, args)
        lr = get_lr(step, args)
        update_weights(optimizers, lr, skip, run)
        scaler.update()

        # With a GPU, Python reads the results of a step only after it has started the next one: a
        # GPU that waited for Python would idle for 2 ms a step. An evaluation needs all results
        results = torch.stack((*values, skip)).to("cpu", non_blocking=run.runs_ahead)
        end = run.mark()  # after the copy: who waits for the mark can read the results
        unread.append(Update(step, lr, train_loader.position, results, begin, end))
        begin = end
        unread_limit = int(run.runs_ahead and not is_evaluated(step + 1, args))
        while len(unread) > unread_limit:
            must_stop |= finish_update(unread.popleft(), state, log, args, run)
        if must_stop:
            val_loss = None  # the last one is of an earlier step
            break

    while unread:  # the step that was started before Python knew that it must stop
        must_stop |= finish_update(unread.popleft(), state, log, args, run)
    problem = max(run.gather(train_loader.damage or val_loader.damage))  # "" where there is none
    require(not problem or state.step > start, problem)  # without an update, nothing to save
    # A signal during an evaluation has promised a save, too
    must_stop = must_stop or is_interrupted()
    is_saved = bool(checkpoint) and state.step == start  # it is what was resumed
    if (must_stop or problem) and not is_saved:
        save_checkpoint(state, args, run, **data, val_loss=val_loss)
    if problem:
        return report(problem, 1)
    if must_stop:
        print0("to continue, run the same command with --resume (and without --overwrite)")
        return (128 + signals[0]) if signals else 0  # 0: another process got the signal
    print0(f"done: the log is {Path(args.log_dir, 'log.txt')}")
    if list_checkpoints(args.log_dir):
        log_dir = shlex.quote(args.log_dir)
        print0(f"next: python train_gpt2.py --sample --init_from {log_dir} --seed 1")
    return 0


# -----------------------------------------------------------------------------
# the command line, which decides what a run is, and the checks that train makes before it starts

# --quickstart: 0.9M parameters learn to write like the documentation that comes with every Python
QUICKSTART = {
    "data_dir": "pydocs", "log_dir": "log/quickstart", "model": "tiny", "seq_len": 64,
    "total_batch_size": 768, "max_steps": 1400, "optimizer": "muon", "val_every": 350,
    "val_tokens": 50000, "hellaswag_every": 0, "sample_every": 700, "prompt": "Return ",
    "temperature": 0.5, "max_new_tokens": 160,
}  # fmt: skip
# Defaults with --optimizer muon, from runs in tests/benchmarks/README.md. settle_args has others
MUON = {"schedule": "wsd", "weight_decay": 0.2, "min_lr": 0.0}


def auto_or_int(text: str) -> int | None:
    """Return the number in the text, or None for auto."""
    return None if text == "auto" else int(text)


def size_name(text: str) -> str:
    """Return the name in SIZES that is meant: llm.c also writes gpt2:d12 for d12."""
    return text.removeprefix("gpt2:")


# heading: {flag: (default, help)}. A flag with a type in place of a default is None unless it is
# given. For most of these, settle_args then decides from the model, the data and the hardware
FLAGS = {
    "data and model": {
        "data_dir": ("edu_fineweb10B", "folder of shards"),
        "log_dir": ("log", "folder for log.txt and checkpoints"),
        "model": (size_name, f"size: {', '.join(SIZES)} (default: d12)"),
        "init_from": ("scratch", "gpt2, gpt2-medium, gpt2-large, gpt2-xl, a checkpoint, a folder"),
    },
    "batch and length": {
        "batch_size": (auto_or_int, "B: sequences per GPU and micro-step (default: what fits)"),
        "seq_len": (int, "T: tokens in a sequence (default: the model's context)"),
        "total_batch_size": (2**19, "tokens per optimizer step, over all GPUs"),  # 524288
        "max_steps": (19073, "optimizer steps"),  # 10B tokens / 2**19
        "epochs": (float, "set max_steps so that the data is read this many times"),
    },
    "optimizer": {
        "optimizer": ("adamw", "muon learns faster; it changes defaults of the flags below"),
        "warmup_steps": (int, "of a rising rate (default: 715, fewer in a shorter run; muon: 10)"),
        "max_lr": (float, "peak learning rate (default: GPT-3's for this size; muon: 10 x that)"),
        "min_lr": (float, "learning rate at the end (default: a tenth of max_lr; muon: 0)"),
        "schedule": ("cosine", "how the learning rate decays (muon: wsd)"),
        "weight_decay": (0.1, "of matrices and embeddings (muon: 0.2)"),
        "grad_clip": (1.0, "largest gradient norm, 0: any"),
        "seed": (1337, "of the initial weights, the data order and the samples"),
        "shuffle": (True, "read the data in a new order every epoch"),
    },
    "precision, speed and memory": {
        "device": ("auto", "where to compute"),
        "dtype": ("auto", "precision of matrix products"),
        "compile": (bool, "use torch.compile (default: on NVIDIA GPUs)"),
        "recompute": (False, "save memory: compute each block again in the backward pass"),
        "zero": (0, "1, 2: shard gradients and optimizer state over the GPUs; 3: weights, too"),
    },
    "evaluation": {
        "val_every": (250, "validate every this many steps, 0: never"),
        "val_tokens": (20 * 2**19, "tokens to validate on"),
        "hellaswag_every": (int, "score HellaSwag, 0: never (default: 250, on a CPU 0)"),
        "sample_every": (250, "print samples, 0: never"),
    },
    "checkpoints": {
        "save_every": (5000, "save every this many steps, 0: never"),
        "keep": (0, "how many of the newest checkpoints to keep, 0: all"),
        "resume": (False, "continue log_dir's newest checkpoint"),
        "overwrite": (bool, "delete the run in log_dir first"),
    },
    "debugging and outliers": {
        "overfit_one_batch": (False, "train on the first batch only, to debug"),
        "skip_loss_z": (0.0, "skip updates whose loss is this many deviations too high, 0: none"),
        "skip_grad_z": (0.0, "the same for the gradient norm"),
    },
    "other things to do": {
        "quickstart": (False, "train a small GPT on Python's documentation, offline"),
        "sample": (False, "print what the model of --init_from writes, then exit"),
        "export_hf": (str, "folder: write the model of --init_from for transformers, then exit"),
    },
    "samples": {
        "prompt": ("Hello, I'm a language model,", "what they begin with"),
        "num_samples": (4, "how many"),
        "max_new_tokens": (64, "tokens to add to the prompt"),
        "temperature": (1.0, "0: always the most likely token"),
        "top_k": (50, "draw from this many most likely tokens, 0: from all"),
    },
}
CHOICES = {
    "optimizer": ("adamw", "muon"),
    "schedule": tuple(SCHEDULES),
    "zero": (0, 1, 2, 3),
    "device": ("auto", "cuda", "mps", "cpu"),
    "dtype": ("auto", "bfloat16", "float16", "tf32", "float32"),
}
# --resume refuses to change these, because the result would be another run. The two about data are
# no flags: identify makes them
FIXED = (
    "data", "data_sample", "init_from", "model", "seq_len", "total_batch_size", "optimizer",
    "schedule", "seed", "shuffle",
)  # fmt: skip
# The values of these flags in checkpoints that were made before the flags existed
BEFORE = {"optimizer": "adamw", "zero": 0}
# These concern one start of the program, so --resume does not take them from the checkpoint
LOCAL = ("log_dir", "resume", "overwrite", "quickstart", "device", "sample", "export_hf")
# --sample takes these from the run that made the model, unless the command line gives them
SAMPLING = ("prompt", "num_samples", "max_new_tokens", "temperature", "top_k", "seq_len")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of FLAGS."""
    parser = argparse.ArgumentParser(usage="python train_gpt2.py [flags]", allow_abbrev=False)
    parser.error = fineweb.refuse_arguments  # raises UserError instead of exiting
    for heading, flags in FLAGS.items():
        group = parser.add_argument_group(heading)
        # --epochs is another way of saying --max_steps
        exclusive = group.add_mutually_exclusive_group()
        for flag, (default, text) in flags.items():
            options = {"help": text, "type": default}
            if not callable(default):  # it is a value, which has the flag's type
                options = {"help": f"{text} (default: {default})", "type": type(default)}
                options["default"] = default
            if options["type"] is bool:  # --flag and --no-flag
                options["action"] = argparse.BooleanOptionalAction
                del options["type"]
            if flag in CHOICES:
                options["choices"] = CHOICES[flag]
            where = exclusive if flag in ("max_steps", "epochs") else group
            where.add_argument(f"--{flag}", **options)
    return parser


def parse_args(argv: list[str] | None, stored: dict = {}) -> Namespace:  # noqa: B006
    """Return the flags. A value comes from the first of these that has it: the command line,
    `stored` (the flags of a checkpoint), MUON, QUICKSTART, FLAGS. Raises UserError for an unknown
    flag or an impossible value."""
    parser = make_parser()
    args = parser.parse_args(argv)  # a first time, to look for --quickstart
    if args.quickstart:
        parser.set_defaults(**QUICKSTART)
    if parser.parse_args(argv).optimizer == "muon":  # parsed again: --quickstart may choose it
        parser.set_defaults(**MUON)
    kept = vars(args).keys() - set(LOCAL)
    parser.set_defaults(**{flag: value for flag, value in stored.items() if flag in kept})
    args = parser.parse_args(argv)
    for flag, value in vars(args).items():
        least = 0
        if flag in ("batch_size", "seq_len", "total_batch_size", "num_samples"):
            least = 1
        if isinstance(value, int | float):  # nan fails both comparisons
            require(least <= value < math.inf, f"{flag} is {value}, expected at least {least}")
    require(args.export_hf != "", "--export_hf needs the name of a folder")
    # NumPy's generators take 32 bits
    require(args.seed < 2**32, f"seed is {args.seed}, expected less than 2**32")
    # The quickstart replaces its own earlier run, so nothing else may live in its folder
    if args.quickstart and Path(args.log_dir) == Path(QUICKSTART["log_dir"]):
        is_own_data = Path(args.data_dir) == Path(QUICKSTART["data_dir"])
        require(is_own_data, "--quickstart with other data needs a --log_dir of its own")
        if args.overwrite is None:
            args.overwrite = not args.resume
    require(not (args.resume and args.overwrite), "give --resume or --overwrite, not both")
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    hint = "torchrun has started the processes again: --resume continues what they have saved"
    require(not (args.overwrite and is_restart), f"{hint}, --overwrite would delete it")
    return args


def settle_args(args: Namespace, checkpoint: dict, run: Run) -> tuple[Namespace, GPTConfig, dict]:
    """Return the flags with their defaults decided, the model's config, and the source of its
    weights, {} for new ones. Nothing changes the flags later. (--device, --dtype and --compile may
    still be "auto" or None: `run` holds what became of them.)"""
    new = Namespace(**vars(args))
    new.model, config, source, T = settle_model(args, checkpoint)
    # T: fewer tokens than the context need less memory, more would have no position
    new.seq_len = first_given(args.seq_len, T)
    context = config.block_size
    require(new.seq_len <= context, f"seq_len {new.seq_len} is longer than the context, {context}")
    if args.epochs is not None:  # as many whole steps as fit into the epochs
        # windows of T tokens; the rest of each shard is not used
        train_shards = open_shards(args.data_dir, "train")
        windows = int(count_windows(train_shards, new.seq_len).sum())
        steps = args.epochs * windows * new.seq_len / args.total_batch_size
        new.max_steps = max(1, int(steps))
        new.epochs = None  # max_steps says it now
    # A model from a folder may have a size that is not in SIZES, and gets the learning rate of d12
    rate = SIZES.get(new.model, SIZES["d12"])[-1]
    # 715 steps of 2**19 tokens are 375M tokens, as in GPT-3; a shorter run has the same share
    warmup = round(715 * min(1, new.max_steps / 19073))
    if args.optimizer == "muon":
        # Both values come from measurements, see tests/benchmarks/README.md. Muon needs
        # hardly any warmup
        rate *= 10
        warmup = min(10, warmup)
    new.max_lr = first_given(args.max_lr, rate)
    new.warmup_steps = first_given(args.warmup_steps, warmup)
    too_long = f"warmup_steps {new.warmup_steps} is more than max_steps {new.max_steps}"
    require(new.warmup_steps <= new.max_steps, too_long)
    needs = "it shards a model over several processes, in bfloat16, tf32 or float32"
    require(not args.zero or (run.world_size > 1 and run.dtype != "float16"), f"--zero: {needs}")
    # GPT-3 decays to a tenth
    new.min_lr = first_given(args.min_lr, 0.1 * new.max_lr)
    rises = f"min_lr {new.min_lr} is above max_lr {new.max_lr}"
    require(checkpoint or new.min_lr <= new.max_lr, rises)  # some old runs rise
    every = 0 if run.device.type == "cpu" else 250  # HellaSwag takes half an hour on a CPU
    new.hellaswag_every = first_given(args.hellaswag_every, every)
    # last, because it depends on nearly all of the above
    new.batch_size = choose_batch_size(new, config, run)
    return new, config, source


def settle_model(args: Namespace, checkpoint: dict) -> tuple[str, GPTConfig, dict, int]:
    """Return the name of the model's size, its config, what its weights come from, and the default
    of T. The weights come from the checkpoint to resume, from --init_from, or are new: {}."""
    meta = read_meta(args.data_dir)  # a new model gets the data's vocabulary
    if args.init_from == "scratch" and not checkpoint:
        model = first_given(args.model, "d12")
        hint = "OpenAI's GPT-2 is --init_from gpt2"
        require(model in SIZES, f"model {model} is none of {', '.join(SIZES)}; {hint}")
        n_layer, n_head, n_embd, block_size, _ = SIZES[model]
        shape = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "block_size": block_size}
        return model, GPTConfig(**shape, **meta), {}, block_size
    source = checkpoint or load_source(args.init_from)
    config = GPTConfig(**source["config"])
    tokenizer = meta.get("tokenizer", "gpt2")
    found = f"the model reads {config.tokenizer} tokens, {args.data_dir} has {tokenizer} tokens"
    require(config.tokenizer == tokenizer, found)
    size = source["args"]["model"]
    fits = checkpoint or args.model in (None, size)  # check_run refuses another size
    require(fits, f"--init_from {args.init_from} is a {size}: give --model {size}")
    return first_given(args.model, size), config, source, source["args"]["seq_len"]


def read_meta(data_dir: str) -> dict:
    """Return tokenizer, vocab_size and eot from the folder's meta.json, {} if it has none and so
    holds GPT-2 tokens. Raises UserError if fineweb.py has not finished the folder."""
    path = Path(data_dir) / "meta.json"  # written by fineweb.py
    # fineweb.py --part leaves one of these for each part, until --merge makes them one dataset
    parts = list(Path(data_dir).glob("meta-*.json"))
    if not path.exists():
        require(not parts, f"{data_dir} holds parts: `python fineweb.py --merge --out {data_dir}`")
        return {}
    with reading(path):
        meta = json.loads(path.read_text())
        # Only fineweb.py writes its progress; a file written by hand has none
        is_done = meta.get("progress", {}).get("done", True)
        require(is_done, "the shards are still being built: run fineweb.py again to finish them")
        listed = meta.get("shards") or {}
        missing = [name for name in listed if not Path(data_dir, name).exists()]
        if missing:
            found = f"{len(missing)} of the shards in its meta.json, such as {missing[0]}"
            print0(f"warning: {data_dir} lacks {found}")
        V, eot = meta["vocab_size"], meta["eot"]
        is_valid = isinstance(V, int) and isinstance(eot, int) and 0 <= eot < V <= 2**16
        require(is_valid, f"vocab_size {V} and eot {eot} do not fit tokens of 16 bits")
        return {"tokenizer": str(meta["tokenizer"]), "vocab_size": V, "eot": eot}


def estimate_memory(config: GPTConfig, B: int, args: Namespace, run: Run) -> int:
    """Estimate the bytes of GPU memory that training needs with B sequences in a forward pass."""
    with torch.device("meta"):  # shapes without memory
        parameters = sum(p.numel() for p in GPT(config).parameters())
    # 1. float32 weights, gradients and AdamW's two moments take 16 bytes per parameter. Autocast's
    #    16-bit copies of the weights, and of some gradients, take about 4 more. With --zero only
    #    the 16 bytes count, divided by the processes; 1 and 2 add gathered weights, 4 bytes each
    fixed = 20 * parameters
    if args.zero:
        fixed = 16 * parameters // run.world_size
    if args.zero in (1, 2):
        fixed += 4 * parameters
    # 2. A block keeps 16 C values of every token for the backward pass: two residual sums, two
    #    LayerNorm outputs, q, k and v, attention's output, and 4 C each before and after GELU.
    #    Autocast keeps some of them in float32, which counts as 20 C values of 2 bytes
    size = 4  # bytes per value, or per logit
    block = 16 * config.n_embd * 4  # bytes per token
    if run.dtype in ("bfloat16", "float16"):
        size = 2
        block = 20 * config.n_embd * 2
    per_token = config.n_layer * block
    if args.recompute:  # every block's input, and all values of one block at a time
        per_token = config.n_layer * config.n_embd * size + block
    # 3. The logits. Without the kernel and without compilation, copies of them are kept as well:
    #    12 bytes per logit were measured
    uses_kernel = triton is not None and run.dtype == "bfloat16"
    compiles_loss = run.compile and not args.zero  # --zero compiles only the blocks
    logit_size = size if compiles_loss or uses_kernel else 12
    per_token += config.vocab_size * logit_size
    return fixed + B * args.seq_len * per_token


def choose_batch_size(args: Namespace, config: GPTConfig, run: Run) -> int:
    """Return B, the sequences in a micro-step of one process: --batch_size, or for auto the largest
    power of two that fits into a GPU, and on a CPU the largest number with up to 8192 tokens. A
    micro-step is one forward and backward pass; the gradients of grad_accum_steps of them add up to
    one optimizer step."""
    T = args.seq_len
    total = args.total_batch_size  # tokens
    sequences, rest = divmod(total, T * run.world_size)  # sequences of each process in a step
    factors = f"seq_len {T} x {run.world_size} processes"
    require(rest == 0, f"total_batch_size {total} is not a multiple of {factors}")
    if args.batch_size is not None:
        found = f"batch_size {args.batch_size} does not divide the {sequences} sequences"
        require(sequences % args.batch_size == 0, f"{found} that a process has in a step")
        return args.batch_size
    if run.device.type != "cuda":
        # 8192 tokens at a time keep a CPU busy, and memory is seldom the limit
        most = max(1, 8192 // T)
        return max(B for B in range(1, most + 1) if sequences % B == 0)
    # Beyond 128 sequences an H100 gets no faster
    powers_of_two = [2**i for i in range(8) if sequences % 2**i == 0]
    memory = 0.9 * torch.cuda.get_device_properties(run.device).total_memory  # bytes, 10% spare
    fitting = [B for B in powers_of_two if estimate_memory(config, B, args, run) <= memory]
    advice = "use --recompute, a shorter --seq_len or a smaller --model"
    require(fitting, f"not even one sequence of {T} tokens fits into this GPU's memory: {advice}")
    return max(fitting)


def describe(
    args: Namespace,
    model: GPT,
    data: str,
    train_loader: DataLoaderLite,
    val_loader: DataLoaderLite,
    run: Run,
) -> list[str]:
    """Return the lines that a run starts with. `data` is identify's first fingerprint."""
    B, T, total = args.batch_size, args.seq_len, args.total_batch_size
    device = torch.cuda.get_device_name() if run.device.type == "cuda" else run.device.type
    parameters = sum(p.numel() for p in model.parameters())
    epochs_per_step = total / (train_loader.windows * T)  # usually far below 1
    epochs = args.max_steps * epochs_per_step
    last_lr = get_lr(args.max_steps, args)
    lines = [
        f"device | {run.world_size} x {device}, {run.dtype}, compile {run.compile}",
        f"model  | {args.model}, {parameters:,} parameters; data {args.data_dir}, {data}",
        f"step   | {total:,} tokens in micro-steps of B {B} x T {T} x {run.world_size} processes",
        f"run    | {args.max_steps:,} steps, {epochs:.2f} epochs; learning rate {args.max_lr:g},"
        f" {args.warmup_steps} steps of warmup, {args.schedule} to {last_lr:g}",
    ]
    val_tokens = val_loader.windows * T  # in the whole split
    if args.val_every and val_tokens < args.val_tokens:
        found = f"the validation split has {val_tokens:,} tokens"
        lines.append(f"note: {found}, fewer than --val_tokens {args.val_tokens:,}")
    if model.config.block_size > T and not args.quickstart:
        lines.append(f"warning: this run trains no positions from {T} on")
    if epochs > 4:  # Muennighoff et al. 2023, arXiv:2305.16264
        lines.append("warning: after 4 epochs, repeated data teaches less and less")
    if epochs_per_step > 0.2:
        found = f"a step sees {epochs_per_step:.1f} epochs of the data"
        lines.append(f"warning: {found}; a smaller --total_batch_size gives more steps")
    hours = 6 * parameters * args.max_steps * total / 1e11 / 3600  # 6 FLOPs a weight, 0.1 TFLOP/s
    if run.device.type == "cpu" and hours > 1:
        lines.append(f"warning: about {hours:,.0f} hours on a CPU; --quickstart takes two minutes")
    return lines


def identify(shards: dict[str, Shard]) -> tuple[str, str]:
    """Return two fingerprints of a split: of the names and lengths of its shards, and of 16 pieces
    of each shard."""
    # Reading all of 20 GB would take minutes; names, sizes and a sample take milliseconds
    sizes = {name: shard.tokens for name, shard in shards.items()}
    checksum = crc32(repr(list(sizes.items())).encode())
    sample = 0
    for shard in shards.values():
        for piece in range(16):
            start = piece * shard.tokens // 16
            count = min(256, shard.tokens - start)
            sample = crc32(read_tokens(shard, start, count).tobytes(), sample)
    data = f"{sum(sizes.values()):,} tokens in {len(sizes)} shards, {checksum:08x}"
    return data, f"{sample:08x}"


def check_run(args: Namespace, data: dict[str, str], checkpoint: dict, run: Run) -> None:
    """Raise UserError if the processes do not have the same flags, data and checkpoint, or if the
    checkpoint is of another run. Print what else has changed since it was saved."""
    step = checkpoint.get("step", 0)
    here = vars(args) | data
    # Machines may differ in where they keep the data, but in nothing that shapes the run
    view = here | {"step": step, "dtype": run.dtype, "data_dir": "", "log_dir": ""}
    views = run.gather(view)
    differing = []
    for key in view:
        values = sorted({str(other.get(key)) for other in views})
        if len(values) > 1:
            differing.append(f"{key} is {' or '.join(values)}")
    found = f"the processes have different checkpoints, data or flags: {'; '.join(differing)}"
    require(not differing, found)
    if not checkpoint:
        return
    # A flag that an older checkpoint lacks has its value in BEFORE, or else counts as unchanged
    there = BEFORE | checkpoint["args"]
    there |= {key: checkpoint[key] for key in data if key in checkpoint}

    def differences(keys: Iterable[str]) -> str:
        differing = [key for key in keys if key in there and here[key] != there[key]]
        return ", ".join(f"{key} is {here[key]}, was {there[key]}" for key in differing)

    refused = differences(FIXED)
    require(not refused, f"--resume: {args.log_dir} holds another run: {refused}")
    announced = differences(sorted(here.keys() - {*FIXED, *LOCAL}))
    if announced:
        print0(f"note: changed since the checkpoint: {announced}")
    require(step <= args.max_steps, f"{args.log_dir} is at step {step}, beyond {args.max_steps}")


def run_command(argv: list[str] | None) -> int:
    """Do what the command line asks for and return the exit status."""
    args = parse_args(argv)
    if args.sample or args.export_hf:
        require(args.init_from != "scratch", "--sample and --export_hf need a model: --init_from")
        source = load_source(args.init_from)
        stored = {flag: value for flag, value in source["args"].items() if flag in SAMPLING}
        return use_model(parse_args(argv, stored), source)
    with locked(args.log_dir):
        return start_training(argv, args)


def find_checkpoint(args: Namespace) -> dict:
    """Return the newest readable checkpoint with --resume, or {} for a run that starts from the
    beginning. Raises UserError if log_dir holds a run and the flags do not say what to do with
    it."""
    paths = list_checkpoints(args.log_dir)
    if not args.resume:
        is_free = not paths and not Path(args.log_dir, "log.txt").exists()
        choice = "--resume continues it, --overwrite deletes it, another --log_dir leaves it alone"
        require(is_free or args.overwrite, f"{args.log_dir} holds a run: {choice}")
        doomed = [path.resolve() for path in (Path(args.log_dir), *paths)]
        is_doomed = args.init_from != "scratch" and Path(args.init_from).resolve() in doomed
        hint = f"--overwrite would delete {args.init_from}; give another --log_dir"
        require(not (args.overwrite and is_doomed), hint)
        return {}
    for path in reversed(paths):
        try:  # a power failure can damage the newest file
            checkpoint = load_checkpoint(path)
            missing = {"step", "position", "optimizer", "scaler", "data"} - checkpoint.keys()
            require(not missing, f"{path} has no {missing}")
            step = checkpoint["step"]
            require(step == int(path.stem[6:]), f"{path} is not of that step, but of {step}")
            return checkpoint
        except UserError as error:
            # Without permission, or with a failing disk, nobody knows whether the file is damaged,
            # and an older one would cost steps. (zipfile calls some damage an OSError, too)
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno not in (None, errno.EINVAL):
                raise
            print0(f"warning: {error}; trying the checkpoint before it")
    # Without any checkpoint --resume starts a new run, so that one command serves every start
    if not paths and Path(args.log_dir, "log.txt").exists():
        print0(f"note: {args.log_dir} has no checkpoint; starting from step 0")
    hint = "another --log_dir starts a new run, --overwrite deletes this one"
    require(not paths, f"no checkpoint in {args.log_dir} can be read; {hint}")
    return {}


@contextmanager
def locked(folder: str) -> Iterator[None]:
    """Make the folder and hold its lock, which the system releases when the process ends, however
    it ends. Raises UserError if another process holds the lock."""
    require(not Path(folder).is_file(), f"{folder} is a file, expected a folder or a new name")
    Path(folder).mkdir(parents=True, exist_ok=True)
    if os.name != "posix" or not is_main():
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)  # a folder can be locked like a file
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"another process is training in {folder}") from error
    try:
        yield
    finally:
        os.close(descriptor)


def start_training(argv: list[str] | None, args: Namespace) -> int:
    """Find the checkpoint to resume, settle where to compute, train, and return the exit status."""
    checkpoint = find_checkpoint(args)
    is_chosen = args.batch_size is not None  # by this command line, not by an earlier start
    # The flags of the checkpoint are the defaults of a second parsing
    stored = (BEFORE | checkpoint["args"]) if checkpoint else {}
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if checkpoint.get("hardware") != [world_size, choose_device(args.device).type]:
        stored.pop("batch_size", None)  # it need not suit other hardware
    if world_size == 1:
        stored.pop("zero", None)  # one process cannot shard
    old_lr = stored.get("max_lr")
    if old_lr and args.max_lr not in (None, old_lr):  # the last rate keeps its proportion to it
        stored["min_lr"] = args.max_lr * min(1, stored["min_lr"] / old_lr)
    args = parse_args(argv, stored)
    run = setup_run(args)
    if args.quickstart and Path(args.data_dir) == Path(QUICKSTART["data_dir"]):
        with run.main_first():
            if run.rank == 0:  # if the shards are complete, this prints so and returns
                fineweb.main(["--dataset", "pydocs", "--out", args.data_dir])
    while True:
        settled, config, source = settle_args(args, checkpoint, run)
        try:
            return train(settled, config, source, checkpoint, run)
        except torch.OutOfMemoryError:
            # Another program may use the same GPU. B is halved if nobody has chosen it and no step
            # is done. Processes of a group cannot do this one by one
            smaller = settled.batch_size // 2
            path = Path(args.log_dir, "log.txt")  # not there if not even the model has fitted
            log = path.read_text(errors="replace") if path.exists() else ""
            has_begun = f"\n{checkpoint.get('step', 0)} train " in f"\n{log}"
            if has_begun or is_chosen or run.world_size > 1 or settled.batch_size % 2 == 1:
                raise
            print0(f"note: {settled.batch_size} sequences need too much memory; trying {smaller}")
        args.batch_size = smaller
        gc.collect()  # a compiled model refers to itself, and keeps its memory until then


def use_model(args: Namespace, source: dict) -> int:
    """Export the model of --init_from, sample from it, or both, and return the exit status 0."""
    config = GPTConfig(**source["config"])
    context = config.block_size
    require(
        args.seq_len <= context, f"seq_len {args.seq_len} is longer than the context, {context}"
    )
    model = GPT(config)
    model.load_weights(source["model"])
    if args.export_hf:
        require(not Path(args.export_hf).is_file(), f"--export_hf {args.export_hf} is a file")
        # --init_from would then take the folder for the export
        is_run = list_checkpoints(args.export_hf)
        require(not is_run, f"--export_hf {args.export_hf} holds a run: name another folder")
        export_hf(model, args.export_hf)
        print0(f"wrote {args.export_hf} for transformers")
        trained = source["args"]["seq_len"]
        if trained < context:
            print0(f"note: its run trained only {trained} positions; longer texts may go wrong")
    if args.sample:
        run = setup_run(args)
        print_samples(model.to(run.device), args, run)
    return 0


def catch_signals() -> list[int]:
    """Return a list to which signals are appended when they arrive: SIGTERM from a scheduler or
    kill, SIGINT from Ctrl-C, SIGHUP from a terminal that is closed. The second Ctrl-C ends the
    program at once. Other signals may come twice, and are ignored then: a scheduler sends SIGTERM
    to every process, and torchrun passes on its own."""
    received = []
    note = b"\nSaving a checkpoint after this step or batch. A second Ctrl-C ends without saving.\n"

    def catch(signum, frame):
        received.append(signum)
        signal.signal(signum, signal.SIG_DFL if signum == signal.SIGINT else signal.SIG_IGN)
        if is_main():
            with suppress(OSError):  # nobody reads stderr
                os.write(2, note)  # print is not safe in a signal handler

    signums = [signal.SIGTERM, signal.SIGINT]
    # Windows has no SIGHUP, and nohup has it ignored
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signums.append(signal.SIGHUP)
    for signum in signums:
        signal.signal(signum, catch)
    return received


def main(argv: list[str] | None = None) -> None:
    """Run the command line shown at the top of this file. The exit status is 0 for success, 1 if
    training failed, 2 for a mistake that the user can put right, and 128 plus the number of the
    signal after SIGTERM, SIGINT or SIGHUP."""
    fineweb.protect_output()
    try:
        status = run_command(argv)
    except (UserError, ConnectionError) as error:
        status = report(error, 2)  # the user can put it right
    except (FloatingPointError, OSError) as error:
        status = report(error, 1)  # it diverged, or a disk is full
    except torch.OutOfMemoryError as error:
        status = report(f"{error} A smaller --batch_size or --recompute needs less memory.", 1)
    except KeyboardInterrupt:
        status = report("interrupted", 128 + signal.SIGINT)
    leave(status)


def report(problem: object, status: int, script: str = "train_gpt2.py") -> int:
    """Print the problem as one line and return the exit status. Processes other than the first wait
    before they print: if the first has met the same problem, it has printed it, and torchrun ends
    the others while they wait."""
    if not is_main():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(10)  # seconds; torchrun looks at its processes ten times a second
    with suppress(OSError):  # nobody reads stderr
        print(f"{script}: {problem}", file=sys.stderr)
    return status


def leave(status: int) -> NoReturn:
    """End this process with the exit status, and its part in a group of processes."""
    if dist.is_initialized():
        dist.destroy_process_group()
        # On the usual way out, a thread of PyTorch that still runs sometimes aborts the process.
        # All work is done and on the disk
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


# -----------------------------------------------------------------------------
# appendix A: the loss as one kernel. The logits are the largest tensor of all, 6.6 GB in bfloat16
# for GPT-2 124M at B = 64. PyTorch's compiled cross entropy takes 10.7 ms on an H100 for the loss
# and its gradient. The kernel takes 4.8 ms, because it reads the logits once and writes the
# gradient over them. For comparison, copying the logits takes 4.4 ms


class FusedCrossEntropy(torch.autograd.Function):
    """linear_cross_entropy for bfloat16 on a GPU. The gradient of a row of logits is softmax(row) -
    onehot(target), times the gradient of the row's loss. The kernel stores it without that last
    factor, a number per row, by which backward multiplies. There is no second derivative."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, V: int) -> Tensor:
        w = weight.to(x.dtype)  # (padded V, C) bfloat16
        logits = x @ w.T  # (N, padded V)
        losses = torch.empty(len(x), device=x.device)  # float32
        cross_entropy_kernel[(len(x),)](logits, targets, losses, V, len(w), num_warps=16)
        ctx.save_for_backward(x, w, logits)  # the kernel has put the gradient in their place
        return losses

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, w, dlogits = ctx.saved_tensors  # dlogits without the factor grad
        grad = grad[:, None]  # (N, 1) float32
        # grad multiplies x, (N, C), rather than dlogits, (N, padded V), which is far larger
        dweight = torch.mm(dlogits.T, (x * grad).to(x.dtype), out_dtype=torch.float32)
        dx = (dlogits @ w * grad).to(x.dtype)
        return dx, dweight, None, None


if triton:

    @triton.jit
    def load_block(
        row, start: tl.constexpr, V: tl.constexpr, size: tl.constexpr, eviction: tl.constexpr
    ):
        """Return row[start : start + size] in float32, with -inf from V on. Only the last block is
        masked, because masking costs time. `eviction` tells the GPU's cache how long to keep it."""
        columns = start + tl.arange(0, size)
        if start + size <= V:
            x = tl.load(row + columns, eviction_policy=eviction)
        else:
            x = tl.load(row + columns, columns < V, -float("inf"), eviction_policy=eviction)
        return x.to(tl.float32)

    @triton.jit
    def cross_entropy_kernel(logits, targets, losses, V: tl.constexpr, padded_V: tl.constexpr):
        """Replace one row of logits (N, padded V) by its gradient and write the row's loss. Each
        program of the grid handles one row."""
        size: tl.constexpr = 16384  # columns per block
        n = tl.program_id(0).to(tl.int64)  # int64, because n * padded_V can exceed 2**31
        row = logits + n * padded_V
        target = tl.load(targets + n)  # -1: this row has no loss
        at_target = row + tl.maximum(target, 0)
        x_target = tl.load(at_target).to(tl.float32)
        # 1. In one pass, compute m, the largest logit, and s, the sum of exp(x - m). When a block
        #    raises m, multiply the sum so far by exp(old m - new m)
        m = -float("inf")
        s = 0.0
        for start in tl.static_range(0, V, size):
            x = load_block(row, start, V, size, "evict_last")
            larger = tl.maximum(m, tl.max(x, 0))
            s = s * tl.exp(m - larger) + tl.sum(tl.exp(x - larger), 0)
            m = larger
        log_sum = m + tl.log(s)
        tl.store(losses + n, tl.where(target < 0, 0.0, log_sum - x_target))
        # 2. Overwrite the row, which is still in the GPU's cache, with its softmax. A row without a
        #    target gets log_sum = inf, so that exp(x - log_sum) is 0 everywhere
        log_sum = tl.where(target < 0, float("inf"), log_sum)
        for start in tl.static_range(0, padded_V, size):
            p = tl.exp(load_block(row, start, V, size, "evict_first") - log_sum)
            columns = start + tl.arange(0, size)
            p = p.to(logits.dtype.element_ty)
            tl.store(row + columns, p, columns < padded_V, eviction_policy="evict_first")
        # 3. Subtract 1 at the target. The barrier comes first, because another thread may have
        #    stored this element in 2.
        tl.debug_barrier()
        p = tl.exp(x_target - log_sum) - tl.where(target < 0, 0.0, 1.0)
        tl.store(at_target, p.to(logits.dtype.element_ty))


# -----------------------------------------------------------------------------
# appendix B: Muon


class Muon(torch.optim.Optimizer):
    """The gradient of a matrix has few large singular values and many small ones, so a step along
    it moves the matrix in few directions. Muon averages the gradients and then makes all singular
    values about 1, so that every direction learns. Source: Jordan et al. 2024,
    kellerjordan.github.io/posts/muon, and for the scale Liu et al. 2025, arXiv:2502.16982.

    torch.optim.Muon handles one matrix after another, which costs a thousand kernel launches. Here
    matrices of one shape are stacked, and each process makes its share of a stack orthogonal."""

    def __init__(self, groups: list[dict], lr: float, weight_decay: float, momentum: float = 0.95):
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self._step_supports_amp_scaling = True  # step reads found_inf
        self.found_inf = torch.zeros((), device=groups[0]["params"][0].device)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every matrix, those of the same shape together. Where found_inf is 1, nothing
        changes: every gradient counts as equal to its average, and the rate is 0."""
        for group in self.param_groups:
            rate = group["lr"] * (1 - self.found_inf)
            for shape in sorted({p.shape for p in group["params"]}):
                params = [p for p in group["params"] if p.shape == shape]
                updates = rate * self.orthogonal_updates(params, group)
                for p, update in zip(params, updates, strict=True):
                    local(p).mul_(1 - rate * group["weight_decay"]).sub_(cut_local(update, p))

    def orthogonal_updates(self, params: list[Tensor], group: dict) -> Tensor:
        """Take the gradients into the averages, and return the updates (n, rows, columns) of n
        parameters of one shape, to be multiplied by the learning rate."""
        averages = []
        for p in params:
            if p not in self.state:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            average = self.state[p]["momentum_buffer"]
            gradient = torch.where(self.found_inf > 0, average, p.grad)
            average.lerp_(gradient, 1 - group["momentum"])
            # Nesterov's momentum: the average as it would be after the same gradient once more
            ahead = gradient.lerp(average, group["momentum"])
            # bfloat16 is exact enough. A CPU and a GPU without it compute faster in float32
            if p.is_cuda and torch.cuda.get_device_capability() >= (8, 0):
                ahead = ahead.bfloat16()
            averages.append(gathered(ahead))
        rows, columns = params[0].shape
        rows //= group["stacked"]
        stack = torch.stack(averages).view(-1, rows, columns)
        # An orthogonal matrix has entries of root mean square max(rows, columns) ** -0.5. Scale
        # them to 0.2, as large as AdamW's updates are, so that one rate serves both optimizers
        scale = 0.2 * max(rows, columns) ** 0.5
        return scale * orthogonalize_shared(stack).view(len(params), -1, columns)


def orthogonalize_shared(stack: Tensor) -> Tensor:
    """Return orthogonalize(stack), of which every process computes a share."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size == 1:
        return orthogonalize(stack)
    share = math.ceil(len(stack) / world_size)  # matrices for each process
    padded = F.pad(stack, (0, 0, 0, 0, 0, share * world_size - len(stack)))
    mine = orthogonalize(padded.chunk(world_size)[dist.get_rank()]).contiguous()
    shares = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(shares, mine)
    return torch.cat(shares)[: len(stack)]  # without the padding


def orthogonalize(stack: Tensor) -> Tensor:
    """Return matrices with the singular vectors of those in the stack, (n, rows, columns), but with
    singular values near 1. Five steps of a Newton-Schulz iteration do this without computing the
    vectors: each applies the polynomial 3.4445 s - 4.7750 s^3 + 2.0315 s^5 to every singular value
    s. Together they bring all but tiny values to between 0.7 and 1.2. Source: as for Muon."""
    is_tall = stack.size(1) > stack.size(2)
    x = stack.mT if is_tall else stack  # x @ x.mT is then the smaller of two products
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)  # no singular value is above 1 now
    for _ in range(5):
        a = x @ x.mT  # s^2
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)  # -4.7750 s^2 + 2.0315 s^4
        x = torch.baddbmm(x, b, x, beta=3.4445)
    return x.mT if is_tall else x


# -----------------------------------------------------------------------------
# appendix C: weights in Hugging Face's format, in and out

HUGGING_FACE = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
CONV1D = ("c_attn.weight", "c_fc.weight", "c_proj.weight")  # stored as (in, out) there


def load_source(name: str) -> dict:
    """Return {"config", "model", "args"} of what --init_from names: one of HUGGING_FACE, a folder
    in that format, a checkpoint, or a log_dir, which stands for its newest checkpoint. "model" has
    the weights by name; "args" has at least model, the size, and seq_len."""
    if name in HUGGING_FACE or Path(name, "config.json").is_file():
        return load_hf(name)
    path = Path(name)
    if path.is_dir():
        checkpoints = list_checkpoints(name)
        require(bool(checkpoints), f"the folder {name} holds no checkpoint and no config.json")
        path = checkpoints[-1]
    message = f"{name} is neither a checkpoint nor a folder nor one of {', '.join(HUGGING_FACE)}"
    require(path.is_file(), message)
    return load_checkpoint(path)


def load_hf(name: str) -> dict:
    """Return what load_source does for a GPT-2 of transformers: a folder, or a name on the hub.
    Raises UserError for any other model."""
    from transformers import AutoConfig, GPT2LMHeadModel  # training does not need transformers

    with reading(name):
        c = AutoConfig.from_pretrained(name)  # reads config.json
        require(c.model_type == "gpt2", f"it is a {c.model_type} model, expected gpt2")
        # transformers would draw random numbers for missing weights, and only warn
        theirs, loading = GPT2LMHeadModel.from_pretrained(name, output_loading_info=True)
        problems = {kind: sorted(names) for kind, names in loading.items() if names}
        require(not problems, f"its weights do not fit: {problems}")
    # config.json does not name the tokenizer
    tokenizer = {50257: "gpt2", 257: "bytes"}.get(c.vocab_size)
    require(tokenizer, f"{name} has a vocabulary of {c.vocab_size}, expected 50257 or 257")
    shape = {"n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd}
    shape |= {"block_size": c.n_positions, "vocab_size": c.vocab_size, "eot": c.vocab_size - 1}
    config = GPTConfig(**shape, tokenizer=tokenizer)
    weights = {}
    for key, p in theirs.named_parameters():  # a tied matrix once
        weights[key] = p.detach().T if key.endswith(CONV1D) else p.detach()
    wte = weights["transformer.wte.weight"]
    weights["transformer.wte.weight"] = F.pad(wte, (0, 0, 0, -c.vocab_size % 128))  # add rows of 0
    # Check that both compute the same logits: the activation or a scale may differ from GPT-2's
    ours = GPT(config)
    ours.load_weights(weights)
    T = min(64, config.block_size)
    require(same_logits(ours, theirs, T), f"{name} has other logits than this script's GPT")
    known = (c.n_layer, c.n_head, c.n_embd, c.n_positions)
    size = next((size for size, values in SIZES.items() if values[:4] == known), name)
    args = {"model": size, "seq_len": config.block_size}
    return {"config": asdict(config), "model": weights, "args": args}


def export_hf(model: GPT, folder: str) -> None:
    """Write a folder that transformers loads offline: the weights in float32, without padding, and
    the tokenizer. Raises UserError, and writes nothing, unless transformers computes the same
    logits from these weights: a model that is no longer a GPT-2 cannot be exported."""
    from transformers import GPT2Config, GPT2LMHeadModel

    c = model.config
    shape = {"n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd}
    shape |= {"n_positions": c.block_size, "vocab_size": c.vocab_size}
    theirs = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=c.eot, eos_token_id=c.eot))
    expected = theirs.state_dict()
    weights = {}
    for name, p in model.state_dict().items():
        if name.endswith(CONV1D):
            p = p.T
        weights[name] = p[: len(expected.get(name, p))]  # cuts the padded rows off
    # A fork that has other parameters fails here, one that computes otherwise in same_logits
    is_gpt2 = {n: p.shape for n, p in weights.items()} == {n: p.shape for n, p in expected.items()}
    if is_gpt2:
        theirs.load_state_dict(weights)
        is_gpt2 = same_logits(model, theirs, c.block_size)
    require(is_gpt2, "this model is not a GPT-2: transformers does not compute its logits")
    theirs.save_pretrained(folder)  # config.json and model.safetensors
    export_tokenizer(c, folder)


@torch.no_grad()
def same_logits(ours: GPT, theirs: nn.Module, T: int) -> bool:
    """Return whether both models compute the same logits for T random tokens, to rounding."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(ours.config.vocab_size, (1, T), generator=generator)
    logits = ours.eval()(tokens)  # (1, T, V)
    error = (theirs.eval()(tokens).logits - logits).abs().max() / logits.abs().max()
    return error.item() < 1e-4


def export_tokenizer(config: GPTConfig, folder: str) -> None:
    """Write the tokenizer as a GPT2Tokenizer. Its merges are computed from the tokens' ranks,
    because tiktoken does not store them."""
    from transformers import GPT2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode, generate_merges

    tokenizer = fineweb.get_tokenizer(config.tokenizer)
    spelling = bytes_to_unicode()  # Hugging Face writes each byte as a printable character
    vocabulary = {}  # spelling: token
    for rank in range(config.eot):
        token = tokenizer.decode_single_token_bytes(rank)
        vocabulary["".join(spelling[byte] for byte in token)] = rank
    merges = generate_merges(vocabulary, None)
    vocabulary["<|endoftext|>"] = config.eot
    GPT2Tokenizer(vocabulary, merges).save_pretrained(folder)


if __name__ == "__main__":
    main()
