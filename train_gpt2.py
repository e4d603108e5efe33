"""
Train GPT-2 from nothing, in one file that reads from top to bottom.

    python train_gpt2.py --quickstart                             a small GPT, offline, on any CPU
    python fineweb.py && python train_gpt2.py                     GPT-2 124M, FineWeb-Edu, one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt2.py        the same run on eight GPUs
    python train_gpt2.py --resume                                 go on from the newest checkpoint
    python train_gpt2.py --sample --init_from log/model_19073.pt  what a trained model writes
    python train_gpt2.py --help                                   every flag

In the order of a lecture: the model, generation, data, schedules, runtime, checkpoints, weights of
other programs, evaluation, log, training, command line.

Shapes are written (B, T, C): B sequences of T tokens with C channels; V is the vocabulary, nh the
number of heads, hs the size of one. A flag, its variable and its key in a checkpoint share a name.
Sources: GPT-2 (Radford et al. 2019) for the model, GPT-3 (Brown et al. 2020, arXiv:2005.14165) for
the hyperparameters, build-nanogpt and llm.c for the file formats.
"""

import argparse
import json
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO
from zipfile import is_zipfile
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint as recompute_in_backward

import fineweb
import hellaswag

try:  # comes with PyTorch for GPUs
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# -----------------------------------------------------------------------------
# the model

# name: (layers, heads, channels, context in tokens, peak learning rate). Left: GPT-2's as llm.c has
# them, from d60 on not OpenAI's. Right: GPT-3's, and all learning rates, from table 2.1 of its
# paper but for two misprints: 24 heads for 2048 channels, 5140 channels that 128 does not divide.
SIZES = {
    "tiny": (4, 4, 128, 256, 6e-4),
    "d6": (6, 6, 384, 1024, 6e-4),        "gpt3:c384": (6, 6, 384, 2048, 6e-4),
    "d12": (12, 12, 768, 1024, 6e-4),     "gpt3:c768": (12, 12, 768, 2048, 6e-4),  # 124M
    "d24": (24, 16, 1024, 1024, 3e-4),    "gpt3:c1024": (24, 16, 1024, 2048, 3e-4),  # 355M
    "d36": (36, 20, 1280, 1024, 2.5e-4),  "gpt3:c1536": (24, 16, 1536, 2048, 2.5e-4),  # 774, 760M
    "d48": (48, 25, 1600, 1024, 2e-4),    "gpt3:c2048": (24, 16, 2048, 2048, 2e-4),  # 1.6B, 1.3B
    "d60": (60, 30, 1920, 1024, 1.6e-4),  "gpt3:c2560": (32, 32, 2560, 2048, 1.6e-4),  # 2.8B, 2.7B
    "d72": (72, 30, 2880, 1024, 1.2e-4),  "gpt3:c4096": (32, 32, 4096, 2048, 1.2e-4),  # 7.3B, 6.7B
    "d84": (84, 36, 3456, 1024, 1e-4),    "gpt3:c5120": (40, 40, 5120, 2048, 1e-4),  # 12.2B, 13B
    "gpt3:c12288": (96, 96, 12288, 2048, 0.6e-4),  # 175B
}  # fmt: skip


@dataclass
class GPTConfig:
    """The shape of a GPT and the tokenizer it reads with. The defaults are GPT-2 124M's."""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024  # context: the most tokens the position embedding knows
    vocab_size: int = 50257  # 50,000 BPE merges + 256 bytes + 1 <|endoftext|>
    tokenizer: str = "gpt2"
    eot: int = 50256  # <|endoftext|>: opens every document, ends a sample


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a token sees itself and the tokens before it."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # q, k, v of all heads at once
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).split(C, dim=2)  # three of (B, T, C), then of (B, nh, T, hs)
        q, k, v = [t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in qkv]
        if cache:  # k and v of the tokens before these
            k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
        if cache is not None:
            cache[:] = k, v
        # is_causal lines the first query up with the first key, right for a whole sequence alone:
        # after S - T cached keys, query i sees S - T + i + 1 of them. One alone sees all
        S = k.size(2)
        mask = causal_lower_right(T, S) if 1 < T < S else None
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=T == S)
        y = y.transpose(1, 2).reshape(B, T, C)  # heads side by side again
        return self.c_proj(y)


class MLP(nn.Module):
    """Two matrices with a GELU between them, applied to each token alone."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        # the tanh approximation, because GPT-2 was trained with it
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """Attention, where tokens look at each other, and an MLP; each adds to the residual stream."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2, with Hugging Face's parameter names and matrices as nn.Linear has them: (out, in)."""

    def __init__(self, config: GPTConfig, recompute: bool = False):
        super().__init__()
        self.config = config
        self.recompute = recompute  # blocks run again in the backward pass, nothing of them is kept
        C = config.n_embd
        V = math.ceil(config.vocab_size / 128) * 128  # 50257 -> 50304: matrix units like it
        modules = {
            "wte": nn.Embedding(V, C),
            "wpe": nn.Embedding(config.block_size, C),
            "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            "ln_f": nn.LayerNorm(C),
        }
        self.transformer = nn.ModuleDict(modules)
        self.lm_head = nn.Linear(C, V, bias=False)
        # tokens that are alike should be alike going in and coming out, and the matrix is 30% of
        # the 124M parameters: one for both (Press & Wolf 2017, arXiv:1608.05859)
        self.lm_head.weight = self.transformer.wte.weight
        self.apply(self._init_weights)
        self.transformer.wte.weight.data[config.vocab_size :] = 0  # padding: rows of no token

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, CausalSelfAttention | MLP):
            # 2 n_layer of these add to the residual stream; scaled, their sum does not grow with it
            module.c_proj.weight.data *= (2 * self.config.n_layer) ** -0.5

    def forward(self, idx, targets=None, reduction="mean", cache=None, positions=None) -> Tensor:
        """Return float32 logits (B, T, V) of the next token, without padding, for idx (B, T) int64.
        With targets (B, T) int64 return the cross entropy instead, in nats: its mean, or (B, T)
        with reduction="none". A target of -1 counts for nothing.
        A cache, at first an empty list for each layer, collects keys and values, (B, nh, T, hs)
        each; idx then continues the tokens that it has seen.
        With positions (N,) int64 of the B * T, logits (N, V) and targets (N,) are theirs alone."""
        start = cache[0][0].size(2) if cache and cache[0] else 0
        pos = torch.arange(start, start + idx.size(1), device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)  # (B, T, C)
        # the residual stream too, as adding it up and normalising it is a matter of bytes moved: 5%
        # of all time, and no worse loss. float16 has not the range for it
        kind = x.device.type
        half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16
        dtype = torch.bfloat16 if half else x.dtype
        x = x.to(dtype)
        for i, block in enumerate(self.transformer.h):
            if self.recompute and torch.is_grad_enabled():
                x = recompute_in_backward(block, x, use_reentrant=False)
            else:
                x = block(x, cache[i] if cache else None)
        x = self.transformer.ln_f(x).to(dtype)
        if positions is not None:
            x = x.flatten(0, 1)[positions]  # (N, C)
        V = self.config.vocab_size
        if targets is None:
            return self.lm_head(x)[..., :V].float()
        losses = linear_cross_entropy(x.flatten(0, -2), self.lm_head.weight, targets.flatten(), V)
        return (
            losses.view_as(targets) if reduction == "none" else losses.sum() / (targets != -1).sum()
        )

    @classmethod
    def from_pretrained(cls, source: str | dict) -> "GPT":
        """Return the model of a name as --init_from takes it, or of what load_source made of it."""
        source = load_source(source) if isinstance(source, str) else source
        model = cls(GPTConfig(**source["config"]))
        model.load_state_dict(source["model"])
        return model

    def configure_optimizers(self, weight_decay: float, learning_rate: float) -> torch.optim.AdamW:
        """Return AdamW with GPT-3's betas and eps. Matrices and embeddings decay, biases and
        LayerNorms do not. Fused, one kernel for many tensors, on CUDA, MPS and CPU alike."""
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, learning_rate, (0.9, 0.95), 1e-8, weight_decay, fused=True)


# -----------------------------------------------------------------------------
# the loss. The logits are the largest tensor of all: 6.6 GB of bfloat16 for GPT-2 at B = 64. With
# PyTorch's cross entropy, compiled, loss and gradient take 10.7 ms of an H100; with the kernel
# below, which puts their gradient in their place, 4.8, where a copy takes 4.4


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, V: int) -> Tensor:
    """Return the cross entropy, in nats, (N,) float32, of the logits x @ weight.T with targets
    (N,) int64, below V, for x (N, C) and weight (Vp, C). Columns from V on are padding, of no
    probability; a target of -1 has no loss."""
    # float16 has not the range, and float32 may mean a GPU too old for Triton
    if triton and x.is_cuda and x.dtype == torch.bfloat16:
        return FusedCrossEntropy.apply(x, weight, targets, V)
    # to cut the padding off would leave rows unaligned, compiled it is free to mask it
    padding = torch.arange(len(weight), device=x.device) >= V
    logits = F.linear(x, weight).masked_fill(padding, -math.inf).float()
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")


class FusedCrossEntropy(torch.autograd.Function):
    """linear_cross_entropy on a GPU. A row of the logits' gradient is softmax(logits) minus
    onehot(target), times the gradient of the row's loss: that factor, of no bearing on the rest of
    the row, waits for the matrix products. No second derivative."""

    @staticmethod
    def forward(ctx, x, weight, targets, V):
        w = weight.to(x.dtype)
        logits = x @ w.T
        losses = torch.empty(len(x), device=x.device)
        cross_entropy_kernel[(len(x),)](logits, targets, losses, V, len(w), num_warps=16)
        ctx.save_for_backward(x, w, logits)
        return losses

    @staticmethod
    def backward(ctx, grad):
        x, w, dlogits = ctx.saved_tensors
        grad = grad[:, None]  # (N, 1) float32
        dweight = torch.mm(dlogits.T, (x * grad).to(x.dtype), out_dtype=torch.float32)
        return (dlogits @ w * grad).to(x.dtype), dweight, None, None


if triton:

    @triton.jit
    def load_block(
        row, start: tl.constexpr, V: tl.constexpr, size: tl.constexpr, keep: tl.constexpr
    ):
        """Return row[start : start + size] as float32, -inf from V on. A mask costs time, so only
        the last block has one."""
        columns = start + tl.arange(0, size)
        if start + size <= V:
            x = tl.load(row + columns, eviction_policy=keep)
        else:
            x = tl.load(row + columns, columns < V, -float("inf"), eviction_policy=keep)
        return x.to(tl.float32)

    @triton.jit
    def cross_entropy_kernel(logits, targets, losses, V: tl.constexpr, Vp: tl.constexpr):
        """Put the gradient in the place of one row of logits (N, Vp), and its loss into losses."""
        size: tl.constexpr = 16384  # columns at a time
        n = tl.program_id(0).to(tl.int64)  # N * Vp is beyond int32
        row, target = logits + n * Vp, tl.load(targets + n)
        at_target = row + tl.maximum(target, 0)
        x_target = tl.load(at_target).to(tl.float32)
        # 1. m, the largest logit, and s, the sum of exp(x - m), at once: whenever a block has a
        #    larger one, the sum so far shrinks to be relative to it
        m, s = -float("inf"), 0.0
        for start in tl.static_range(0, V, size):
            x = load_block(row, start, V, size, "evict_last")
            larger = tl.maximum(m, tl.max(x, 0))
            s = s * tl.exp(m - larger) + tl.sum(tl.exp(x - larger), 0)
            m = larger
        log_sum = m + tl.log(s)
        tl.store(losses + n, tl.where(target < 0, 0.0, log_sum - x_target))
        # 2. softmax: x is still in the GPU's cache. Without a target all is 0
        log_sum = tl.where(target < 0, float("inf"), log_sum)
        for start in tl.static_range(0, Vp, size):
            p = tl.exp(load_block(row, start, V, size, "evict_first") - log_sum)
            columns = start + tl.arange(0, size)
            p = p.to(logits.dtype.element_ty)
            tl.store(row + columns, p, columns < Vp, eviction_policy="evict_first")
        # 3. minus onehot, once all threads have stored theirs
        tl.debug_barrier()
        p = tl.exp(x_target - log_sum) - tl.where(target < 0, 0.0, 1.0)
        tl.store(at_target, p.to(logits.dtype.element_ty))


# -----------------------------------------------------------------------------
# generation


def next_token(logits: Tensor, temperature: float, top_k: int, generator) -> Tensor:
    """Draw one of the top_k (0: all) tokens for each row of logits (B, V): (B, 1) int64."""
    if temperature == 0:  # the likeliest
        return logits.argmax(dim=-1, keepdim=True)
    values, tokens = logits.topk(min(top_k or math.inf, logits.size(-1)))
    probs = F.softmax(values / temperature, dim=-1)
    return tokens.gather(-1, torch.multinomial(probs, 1, generator=generator))


@torch.no_grad()
def generate(model: GPT, tokens: Tensor, args: argparse.Namespace) -> Tensor:
    """Continue tokens (B, T) int64 by args.max_new_tokens: (B, T + new). A row that has reached
    <|endoftext|> repeats it. Past args.seq_len tokens the window slides: its first token leaves,
    all positions change, and the cache is of no more use."""
    eot, start = model.config.eot, tokens.size(1)
    generator = torch.Generator(tokens.device).manual_seed(args.seed)  # training's is left alone
    cache, fresh = [[] for _ in model.transformer.h], tokens  # fresh: not in the cache yet
    for _ in range(args.max_new_tokens):
        full = tokens.size(1) > args.seq_len
        logits = model(tokens[:, -args.seq_len :]) if full else model(fresh, cache=cache)
        fresh = next_token(logits[:, -1], args.temperature, args.top_k, generator)
        ended = (tokens[:, start:] == eot).any(dim=1, keepdim=True)  # (B, 1)
        tokens = torch.cat((tokens, fresh.masked_fill(ended, eot)), dim=1)
        if (tokens[:, -1] == eot).all():
            break
    return tokens


# -----------------------------------------------------------------------------
# data


def require(condition: bool, message: str) -> None:
    """Raise a ValueError that tells the user what was found and expected, unless all is well."""
    if not condition:
        raise ValueError(message)


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Make whatever fails a ValueError that names path: the messages of libraries do not."""
    try:
        yield
    except Exception as error:  # each format has errors of its own
        reason = str(error).split("\n")[0]
        raise ValueError(f"{path} cannot be read: {reason}") from error


def read_meta(data_dir: str) -> dict:
    """Return tokenizer, vocab_size and eot of the folder's meta.json; GPT-2's where it has none."""
    path, meta = Path(data_dir) / "meta.json", asdict(GPTConfig())
    with reading(path):
        meta = json.loads(path.read_text()) if path.exists() else meta
        return {key: meta[key] for key in ("tokenizer", "vocab_size", "eot")}


def read_shard(path: Path) -> np.ndarray:
    """Return a shard's tokens, (n,) uint16, memory-mapped: a .npy file, or a .bin as in llm.c,
    256 int32 (20240520, version 1, n, zeros) before them. Raises ValueError if it is not whole."""
    with reading(path):
        if path.suffix == ".bin":
            header = np.fromfile(path, np.int32, 3).tolist()
            expected = [20240520, 1, (path.stat().st_size - 256 * 4) // 2]  # 2 bytes a token
            require(header == expected, f"header {header}, expected {expected} by the file's size")
            return np.memmap(path, np.uint16, "r", offset=256 * 4)
        tokens = np.load(path, mmap_mode="r")
        found = f"{tokens.ndim}-D {tokens.dtype}"
        require(found == "1-D uint16", f"{found}, expected 1-D uint16")
        return tokens


def open_shards(data_dir: str, split: str) -> dict[str, np.ndarray]:
    """Return the shards whose name holds split, "train" or "val", by name and in its order."""
    paths = [p for p in Path(data_dir).glob(f"*{split}*") if p.suffix in (".npy", ".bin")]
    what = "no file" if Path(data_dir).is_dir() else "no such folder, so no file"
    build = "`python fineweb.py` downloads them, with --files it makes them of your texts,"
    build += " `python train_gpt2.py --quickstart` needs none"
    require(bool(paths), f"data_dir {data_dir}: {what} *{split}*.npy or *{split}*.bin; {build}")
    for path in paths:
        require(not ("train" in path.name and "val" in path.name), f"{path} names both splits")
    return {path.name: read_shard(path) for path in sorted(paths)}


def summarize(shards: dict[str, np.ndarray]) -> str:
    """Return what the data is, in words, the same for the same names and sizes: for resume."""
    sizes = {name: len(tokens) for name, tokens in shards.items()}
    crc = crc32(repr(list(sizes.items())).encode())
    return f"{sum(sizes.values()):,} tokens in {len(sizes)} shards, {crc:08x}"


@lru_cache(maxsize=8)
def permutation(n: int, *key: int | None) -> np.ndarray:
    """Return an order of range(n), a function of n and key alone; a seed of None leaves it be."""
    if key[0] is None:
        return np.arange(n)
    return np.random.RandomState(key).permutation(n)  # frozen, as numpy's newer generators are not


class DataLoaderLite:
    """Serve windows of T tokens, and the one after, in batches of (B, T): the same windows in the
    same order whatever B and the number of processes. One cursor counts the windows that all
    processes have had; each takes its B of the next B * num_processes. With a seed, every epoch
    has a new order of shards, and of windows within each."""

    def __init__(self, B, T, process_rank, num_processes, shards, vocab_size, seed, device):
        self.B, self.T, self.process_rank, self.num_processes = B, T, process_rank, num_processes
        self.names, self.shards = list(shards), list(shards.values())
        self.vocab_size, self.seed, self.device = vocab_size, seed, device
        self.counts = np.array([max(0, len(tokens) - 1) // T for tokens in self.shards])
        self.windows = int(self.counts.sum())  # in an epoch
        what = f"{self.names[0]} has not T + 1 = {T + 1} tokens"
        require(self.windows > 0, f"{what}: more text, or a shorter --seq_len")
        self.scanned = set()
        self.worker = ThreadPoolExecutor(1)  # has the next batch ready before the GPU asks
        self.reset()

    def reset(self, position: int = 0) -> None:
        """Move the cursor to where position windows are behind it."""
        self.position = position
        self.pending = self.worker.submit(self._load, position + self.process_rank * self.B)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, (B, T) int64 each, on the device."""
        x, y = self.pending.result()
        self.reset(self.position + self.B * self.num_processes)
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def _load(self, first: int) -> list[Tensor]:
        rows = np.stack([self._window(i) for i in range(first, first + self.B)]).astype(np.int64)
        xy = [torch.from_numpy(part).contiguous() for part in (rows[:, :-1], rows[:, 1:])]
        # only from pinned memory is a copy to the GPU asynchronous
        return [part.pin_memory() for part in xy] if self.device.type == "cuda" else xy

    def _window(self, i: int) -> np.ndarray:
        """Return the i-th window of the run, (T + 1,) uint16."""
        epoch, i = divmod(i, self.windows)
        order = permutation(len(self.shards), self.seed, epoch)
        ends = self.counts[order].cumsum()
        place = int(np.searchsorted(ends, i, side="right"))
        shard = int(order[place])
        tokens, count = self.shards[shard], int(self.counts[shard])
        start = int(permutation(count, self.seed, epoch, shard)[i - ends[place]])  # from its end
        if shard not in self.scanned:  # once, 12 ms per 100M tokens: a GPU would not say which
            largest, what = int(tokens.max()), f"{self.names[shard]} is damaged or mislabelled"
            require(largest < self.vocab_size, f"{what}: token {largest} of {self.vocab_size}")
            self.scanned.add(shard)
        return tokens[start * self.T : (start + 1) * self.T + 1]


# -----------------------------------------------------------------------------
# schedules: the learning rate, and which updates to leave out


def get_lr(step: int, args: argparse.Namespace) -> float:
    """Return the learning rate of update number step, from 0: linear warmup, then args.schedule
    down to min_lr. wsd keeps max_lr until the last fifth. Source: arXiv:2405.18392 for wsd."""
    if step < args.warmup_steps:
        return args.max_lr * (step + 1) / args.warmup_steps  # + 1: no update is for nothing
    flat_until = max(args.warmup_steps, int(0.8 * args.max_steps) if args.schedule == "wsd" else 0)
    if args.schedule == "constant" or step < flat_until:
        return args.max_lr
    ratio = (step - flat_until) / max(1, args.max_steps - flat_until)  # 0 to 1
    cosine = 0.5 * (1 + math.cos(math.pi * ratio))
    coeff = {"cosine": cosine, "linear": 1 - ratio, "wsd": 1 - math.sqrt(ratio)}[args.schedule]
    return args.min_lr + coeff * (args.max_lr - args.min_lr)


def fill_schedule(args: argparse.Namespace, windows: int) -> None:
    """Set the flags that follow from the model's size and from the windows in an epoch."""
    if args.epochs is not None:
        args.max_steps = max(1, int(args.epochs * windows * args.seq_len / args.total_batch_size))
    if args.warmup_steps is None:  # 375M tokens, as in GPT-3, or as much of a shorter run
        args.warmup_steps = round(715 * min(1, args.max_steps / 19073))
    steps = f"max_steps {args.max_steps}"
    require(args.warmup_steps <= args.max_steps, f"warmup_steps {args.warmup_steps} > {steps}")
    args.max_lr = SIZES.get(args.model, [6e-4])[-1] if args.max_lr is None else args.max_lr
    args.min_lr = 0.1 * args.max_lr if args.min_lr is None else args.min_lr


def z_score(window: list[float], value: float) -> float:
    """Return how many standard deviations value is above the mean of the last 128, it included;
    nan until there were as many, and for a value that is not finite. Source: llm.c."""
    if not math.isfinite(value):
        return math.nan
    full = len(window) == 128
    window[:] = [*window[-127:], value]
    deviation = float(np.std(window)) if full else 0.0
    return (value - float(np.mean(window))) / deviation if deviation > 0 else math.nan


# -----------------------------------------------------------------------------
# runtime: device, precision, processes


@dataclass(frozen=True)
class Run:
    """Where this process runs. Made once; its methods do the same in every mode."""

    device: torch.device
    dtype: str
    compile: bool
    rank: int
    world_size: int

    def autocast(self) -> torch.autocast:
        """Return the context in which matrix products run in 16 bits, if dtype says so."""
        half = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(self.dtype)
        return torch.autocast(self.device.type, dtype=half, enabled=half is not None)

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Make the context, autocast too, for shapes that come up too seldom to compile for, or to
        let cuDNN plan an attention for."""
        backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with torch.compiler.set_stance("force_eager"), sdpa_kernel(backends), self.autocast():
            yield

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over all processes, the same bits on each; they wait for each other."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values / self.world_size

    def print(self, *lines: str) -> None:
        """Print lines once, not once a process."""
        if self.rank == 0:
            print(*lines, sep="\n", flush=True)


def setup_run(args: argparse.Namespace) -> Run:
    """Choose device and precision, and join torchrun's other processes if there are any."""
    world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    here = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    known = args.device.split(":")[0] in ("auto", "cpu", here.type)
    require(known, f"device {args.device} is not here: auto would take {here.type}")
    device = here if args.device == "auto" else torch.device(args.device)
    capability = (0, 0)
    if device.type == "cuda":
        index = int(os.environ["LOCAL_RANK"]) if world_size > 1 else device.index or 0
        count = torch.cuda.device_count()
        require(index < count, f"process {index} finds no GPU of its own: there are {count}")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        capability = torch.cuda.get_device_capability(device)
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    # matrix units take bfloat16 since Ampere (8, 0), float16 since Volta (7, 0), which is also the
    # oldest that Triton, and so torch.compile, makes kernels for
    half = "bfloat16" if capability >= (8, 0) else "float16"
    dtype = half if capability >= (7, 0) else "float32"
    dtype = dtype if args.dtype == "auto" else args.dtype
    torch.set_float32_matmul_precision("highest" if dtype == "float32" else "high")
    # torch's cache of compiled graphs leaves autocast's dtype out of its key (seen with 2.11): a
    # bfloat16 run after a float16 one would get that one's graph, and learn nothing
    torch.compiler.config.cache_key_tag = dtype
    compiled = capability >= (7, 0) and triton is not None
    compiled = compiled if args.compile is None else args.compile
    return Run(device, dtype, compiled, rank, world_size)


def fits(model: GPT, B: int, T: int, run: Run) -> bool:
    """Return whether a forward and backward pass of (B, T) fits the GPU of every process."""
    full = torch.zeros((), device=run.device)
    try:  # in place of what is not there yet: AdamW's two moments, and 5% for all the rest
        spare = [torch.empty_like(p) for p in model.parameters() for _ in range(2)]
        total = torch.cuda.get_device_properties(run.device).total_memory  # bytes
        spare.append(torch.empty(total // 20, dtype=torch.uint8, device=run.device))
        tokens = torch.zeros(B, T, dtype=torch.int64, device=run.device)
        with run.autocast():
            loss = model(tokens, tokens.clone())  # one tensor twice would be a graph of its own
        loss.backward()
    except torch.OutOfMemoryError:
        full += 1
        torch.compiler.reset()  # it keeps 8 graphs at most, and this one is of no use
    spare = loss = None
    model.zero_grad()
    torch.cuda.empty_cache()
    return run.mean(full).item() == 0


def choose_batch_size(model: GPT, args: argparse.Namespace, checkpoint: dict, run: Run) -> int:
    """Return B, the sequences of a process and micro-step; a step is made of whole micro-steps."""
    T, total, cuda = args.seq_len, args.total_batch_size, run.device.type == "cuda"
    sequences, rest = divmod(total, T * run.world_size)  # of one process, in a step
    what = f"seq_len {T} x {run.world_size} processes"
    nearest = max(1, sequences) * T * run.world_size
    require(rest == 0, f"total_batch_size {total} is no multiple of {what}; {nearest} is")
    divisors = [B for B in range(1, sequences + 1) if sequences % B == 0]
    if args.batch_size != "auto":
        what = f"{sequences} sequences a step and process; these do: {divisors}"
        require(args.batch_size in divisors, f"batch_size {args.batch_size} does not divide {what}")
        return args.batch_size
    if checkpoint.get("world_size") == run.world_size:  # to go on bit for bit
        return checkpoint["args"]["batch_size"]
    most = 128 if cuda else max(1, 8192 // T)
    powers = [2**i for i in range(14) if 2**i <= most and 2**i in divisors]
    found = next((B for B in powers[::-1] if not cuda or fits(model, B, T, run)), 0)
    require(found > 0, f"no sequence of {T} tokens fits this GPU; --recompute needs less memory")
    return found


# -----------------------------------------------------------------------------
# checkpoints

FULL = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)  # whole, however sharded


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that gets its name, in place of an older one, only once it is whole."""
    with open(path.with_suffix(".tmp"), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())  # on the disk before it gets its name
    os.replace(path.with_suffix(".tmp"), path)


def save_checkpoint(path: Path, model: nn.Module, optimizer, run: Run, **rest) -> None:
    """Write path: the same file whatever parallelism and compile. rest is plain numbers, strings,
    lists and dicts. All processes call this, the first one writes."""
    weights, moments = dcp.get_state_dict(model, optimizer, options=FULL)
    if run.rank == 0:
        del weights["lm_head.weight"]  # it is wte's
        with replacing(path) as file:
            torch.save({"model": weights, "optimizer": moments, **rest}, file)
    run.print(f"saved {path}")


def load_checkpoint(path: str | Path) -> dict:
    """Return a checkpoint, its tensors on the CPU. Raises ValueError if path is not a whole one."""
    with reading(path):
        require(is_zipfile(path), "it is no checkpoint, or not a whole one")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        checkpoint["model"]["lm_head.weight"] = checkpoint["model"]["transformer.wte.weight"]
        return checkpoint


def list_checkpoints(log_dir: str) -> list[Path]:
    """Return the checkpoints in log_dir, oldest first."""
    paths = [path for path in Path(log_dir).glob("model_*.pt") if path.stem[6:].isdecimal()]
    return sorted(paths, key=lambda path: int(path.stem[6:]))


def find_checkpoint(args: argparse.Namespace, run: Run) -> dict:
    """Return the checkpoint to resume, {} for none. No run may be lost or mixed up unasked."""
    holds_run = list_checkpoints(args.log_dir) or (Path(args.log_dir) / "log.txt").exists()
    choice = "--resume continues it, --overwrite deletes it, another --log_dir leaves it alone"
    allowed = not holds_run or args.resume or args.overwrite
    require(allowed, f"log_dir {args.log_dir} holds a run: {choice}")
    for path in reversed(list_checkpoints(args.log_dir) if args.resume else []):
        try:
            return load_checkpoint(path)
        except ValueError as error:  # a disk that lost its last writes has an older one
            run.print(f"warning: {error}; trying the one before")
    return {}


def check_resume(checkpoint: dict, config: GPTConfig, args: argparse.Namespace, data: str) -> None:
    """Raise ValueError, naming what differs, if checkpoint belongs to another run than this."""
    flags = ("seq_len", "seed", "total_batch_size", "shuffle")
    here = asdict(config) | {flag: getattr(args, flag) for flag in flags} | {"data": data}
    there = checkpoint["args"] | checkpoint["config"] | {"data": checkpoint["data"]}
    differ = [f"{key} is {here[key]}, was {there[key]}" for key in here if here[key] != there[key]]
    require(not differ, f"--resume: {args.log_dir} holds another run: {'; '.join(differ)}")


# -----------------------------------------------------------------------------
# weights from and to other programs

HUGGING_FACE = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
CONV1D = ("c_attn.weight", "c_fc.weight", "c_proj.weight")  # Hugging Face has these as (in, out)


def load_source(name: str) -> dict:
    """Return config, model (its weights) and args (model, seq_len) of what --init_from names: one
    of HUGGING_FACE, a folder in its format, a model .bin of llm.c's, one of our checkpoints or the
    log_dir with it, of which the newest counts."""
    foreign = name in HUGGING_FACE or name.endswith(".bin") or Path(name, "config.json").is_file()
    if not foreign:
        path = [Path(name), *list_checkpoints(name)][-1]
        what = f"{name} is no checkpoint, holds none and is none of"
        require(path.is_file(), f"{what} {', '.join(HUGGING_FACE)}")
        return load_checkpoint(path)
    shape, V, weights = load_llmc(name) if name.endswith(".bin") else load_hf(name)
    tokenizer = {50257: "gpt2", 257: "bytes"}.get(V)  # which these formats do not name
    require(tokenizer is not None, f"{name} has a vocabulary of {V}, expected GPT-2's 50257")
    config = GPTConfig(*shape, V, tokenizer, V - 1)
    size = next((size for size, known in SIZES.items() if known[:4] == shape), name)
    wte = weights["transformer.wte.weight"]
    wte = F.pad(wte, (0, 0, 0, -len(wte) % 128))  # llm.c's has its padding already
    weights |= {"transformer.wte.weight": wte, "lm_head.weight": wte}
    args = {"model": size, "seq_len": config.block_size}
    return {"config": asdict(config), "model": weights, "args": args}


def load_hf(name: str) -> tuple[tuple, int, dict[str, Tensor]]:
    """Return shape (n_layer, n_head, n_embd, block_size), vocabulary size and weights of a GPT-2 in
    Hugging Face's format, a folder or on its hub."""
    from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel

    with reading(name):
        theirs = AutoConfig.from_pretrained(name)
        require(theirs.model_type == "gpt2", f"a {theirs.model_type} model, expected gpt2")
        for key in ("activation_function", "layer_norm_epsilon", "scale_attn_weights", "n_inner",
                    "scale_attn_by_inverse_layer_idx", "tie_word_embeddings"):  # fmt: skip
            found, expected = getattr(theirs, key), getattr(GPT2Config(), key)
            require(found in (expected, 4 * theirs.n_embd), f"{key} {found}, expected {expected}")
        model, report = GPT2LMHeadModel.from_pretrained(name, output_loading_info=True)
        amiss = {what: sorted(names) for what, names in report.items() if names}
        require(not amiss, f"weights that do not fit: {amiss}")
        shape = (theirs.n_layer, theirs.n_head, theirs.n_embd, theirs.n_positions)
        weights = {n: p.T if n.endswith(CONV1D) else p for n, p in model.state_dict().items()}
        return shape, theirs.vocab_size, weights


def export_hf(model: GPT, folder: str) -> None:
    """Write a folder that transformers loads offline: the weights, without padding, as float32,
    and the tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode, generate_merges

    c = model.config
    sizes = {"n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd}
    sizes |= {"n_positions": c.block_size, "vocab_size": c.vocab_size}
    theirs = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=c.eot, eos_token_id=c.eot))
    weights = {n: p.T if n.endswith(CONV1D) else p for n, p in model.state_dict().items()}
    for name in ("transformer.wte.weight", "lm_head.weight"):
        weights[name] = weights[name][: c.vocab_size]
    theirs.load_state_dict(weights)
    theirs.save_pretrained(folder)
    # byte pairs merge in the order of their tokens; Hugging Face spells a byte as a character
    tokenizer, spelling = fineweb.get_tokenizer(c.tokenizer), bytes_to_unicode()
    tokens = [tokenizer.decode_single_token_bytes(token) for token in range(c.eot)]
    vocab = {"".join(spelling[b] for b in token): rank for rank, token in enumerate(tokens)}
    merges = generate_merges(vocab, None)
    GPT2Tokenizer({**vocab, "<|endoftext|>": c.eot}, merges).save_pretrained(folder)


def list_llmc(model: GPT) -> dict[str, Tensor]:
    """Return the parameters in llm.c's order: a kind for all layers before the next."""
    kinds = [name for name, _ in model.transformer.h[0].named_parameters()]
    blocks = [f"h.{layer}.{kind}" for kind in kinds for layer in range(model.config.n_layer)]
    names = ("wte.weight", "wpe.weight", *blocks, "ln_f.weight", "ln_f.bias")
    return {f"transformer.{name}": model.transformer.get_parameter(name) for name in names}


def load_llmc(path: str) -> tuple[tuple, int, dict[str, Tensor]]:
    """Return what load_hf does, float32, of a model .bin: 256 int32, then the numbers."""
    with reading(path):
        header = np.fromfile(path, np.int32, 256).tolist()
        magic, version, T, V, L, nh, C = header[:7]
        found = f"magic {magic}, version {version}"
        require(magic == 20240326 and version in (3, 5), f"{found}, expected 20240326, 3 or 5")
        with torch.device("meta"):
            params = list_llmc(GPT(GPTConfig(L, nh, C, T, V)))
        bits, dtype = (np.int32, torch.float32) if version == 3 else (np.int16, torch.bfloat16)
        numbers = torch.from_numpy(np.fromfile(path, bits, offset=256 * 4)).view(dtype).float()
        parts = numbers.split([p.numel() for p in params.values()])  # fails unless all are there
        weights = {n: part.view_as(params[n]) for n, part in zip(params, parts, strict=True)}
        return (L, nh, C, T), V, weights


def export_llmc(model: GPT, path: str, dtype: str) -> None:
    """Write llm.c's model .bin: version 5 if dtype is bfloat16, else 3, float32."""
    c, header, Vp = model.config, np.zeros(256, np.int32), len(model.lm_head.weight)
    version, stored = (5, torch.bfloat16) if dtype == "bfloat16" else (3, torch.float32)
    header[:8] = 20240326, version, c.block_size, c.vocab_size, c.n_layer, c.n_head, c.n_embd, Vp
    with replacing(Path(path)) as file:
        file.write(header.tobytes())
        for p in list_llmc(model).values():
            file.write(p.detach().to(stored).view(torch.uint8).numpy().tobytes())


# -----------------------------------------------------------------------------
# evaluation


@torch.no_grad()
def validate(model: GPT, loader: DataLoaderLite, windows: int, run: Run) -> float:
    """Return the mean loss, nats a token, of the first windows, whatever B and world size."""
    loader.reset()
    sums = []
    rows = torch.arange(loader.B, device=run.device)[:, None] + run.rank * loader.B  # (B, 1)
    for first in range(0, windows, loader.B * run.world_size):
        x, y = loader.next_batch()
        y = y.masked_fill(first + rows >= windows, -1)  # as many batches on each, some rows spare
        with run.autocast():
            sums.append(model(x, y, reduction="none").sum())
    total = torch.stack(sums).cpu().double().sum().float().to(run.device)
    return run.mean(total).item() * run.world_size / (windows * loader.T)


def find_hellaswag(args: argparse.Namespace, run: Run) -> Path | None:
    """Return HellaSwag's file, downloaded once by the first process, None where that fails."""
    if args.hellaswag_every is None:  # seconds on a GPU, half an hour on a CPU
        args.hellaswag_every = 0 if run.device.type == "cpu" else 250
    found = torch.zeros((), device=run.device)
    if args.hellaswag_every and run.rank == 0:
        try:
            found += hellaswag.fetch().is_file()
        except ConnectionError as error:
            run.print(f"note: HellaSwag is skipped: {error}")
    return hellaswag.fetch() if run.mean(found).item() > 0 else None  # the others have waited


def score_hellaswag(model: GPT, path: Path, run: Run) -> tuple[float, str]:
    """Return HellaSwag's acc_norm, as build-nanogpt counts it, and a line about it."""
    begun = time.perf_counter()
    with run.eager():
        score = hellaswag.score(model, path, "build-nanogpt", run.device)
    took = f"in {time.perf_counter() - begun:.1f} s"
    return score.share, f"HellaSwag: {score.acc_norm} of {score.n} = {score.share:.4f} {took}"


def print_samples(model: GPT, args: argparse.Namespace, run: Run) -> None:
    """Print args.num_samples continuations of args.prompt, each up to its <|endoftext|>."""
    tokenizer, eot = fineweb.get_tokenizer(model.config.tokenizer), model.config.eot
    prompt = tokenizer.encode(args.prompt, allowed_special="all") or [eot]
    tokens = torch.tensor([prompt] * args.num_samples, device=run.device)
    with run.eager():
        rows = generate(model, tokens, args)[:, len(prompt) :].tolist()
    for i, row in enumerate(rows):
        text = tokenizer.decode(row[: row.index(eot)] if eot in row else row)
        run.print(f"sample {i}: {args.prompt}{text}")


def use(args: argparse.Namespace, run: Run) -> int:
    """Sample from the model of --init_from, or write it in another format; the exit status is 0."""
    require(args.init_from != "scratch", "--sample and --export need a model: --init_from")
    is_file = bool(args.export_hf) and Path(args.export_hf).is_file()
    require(not is_file, f"--export_hf {args.export_hf} is a file, expected a folder or a new name")
    source = load_source(args.init_from)
    model = GPT.from_pretrained(source)
    if args.export_hf:
        export_hf(model, args.export_hf)
        run.print(f"wrote {args.export_hf}, for transformers")
    if args.export_llmc:
        export_llmc(model, args.export_llmc, args.dtype)
        run.print(f"wrote {args.export_llmc}, for llm.c")
    if args.sample:
        args.seq_len = args.seq_len or source["args"]["seq_len"]
        print_samples(model.to(run.device), args, run)
    return 0


# -----------------------------------------------------------------------------
# log and speed

# dense peak TFLOP/s by a part of the GPU's name, first match: 16 bits, tf32, float32. Source:
# NVIDIA's data sheets (matrix units without sparsity, accumulating in float32; float32 without).
# No tf32 before Ampere.
PEAK_TFLOPS = {
    "B200": (2250, 1125, 75),      "H200": (989, 494, 67),         "H100 PCIe": (756, 378, 51),
    "H100 NVL": (835, 417, 60),    "H100": (989, 494, 67),         "A100": (312, 156, 19.5),
    "L40S": (362, 183, 91.6),      "L4": (121, 60, 30.3),          "A10G": (70, 35, 31.2),
    "RTX 5090": (210, 105, 105),   "RTX 4090": (165, 83, 82.6),    "RTX 3090": (71, 36, 35.6),
    "V100": (125, 15.7, 15.7),     "T4": (65, 8.1, 8.1),
}  # fmt: skip


def peak_tok_per_sec(config: GPTConfig, T: int, run: Run) -> float:
    """Return the tokens a second at 100% MFU on all GPUs, nan for an unknown one. Source: llm.c."""
    L, C = config.n_layer, config.n_embd
    N = 12 * L * C * C + config.vocab_size * C  # parameters in matrix products, the head's too
    # 1. a parameter multiplies and adds, forward and twice backward: 6 N
    # 2. q @ k and att @ v: 2 * 2 * C * T a layer, 3 times as above, half of it behind the mask
    flops_per_token = 6 * N + 6 * L * C * T
    gpu = torch.cuda.get_device_name() if run.device.type == "cuda" else ""
    peaks = next((peaks for part, peaks in PEAK_TFLOPS.items() if part in gpu), [math.nan] * 3)
    column = {"bfloat16": 0, "float16": 0, "tf32": 1, "float32": 2}[run.dtype]
    return run.world_size * peaks[column] * 1e12 / flops_per_token


class Log:
    """log.txt, a line `{step} {stream} {value}` a record, written by the first process."""

    def __init__(self, args: argparse.Namespace, start: int, run: Run):
        """Make log_dir ready: no run that --overwrite deletes, no records from step start on."""
        path = Path(args.log_dir) / "log.txt" if run.rank == 0 else Path(os.devnull)
        if run.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            old = list_checkpoints(args.log_dir) if args.overwrite else []
            if old:
                run.print(f"note: the run in {args.log_dir} is deleted")
            for unwanted in [*path.parent.glob("*.tmp"), *old]:
                unwanted.unlink()
            path.touch()
            lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last is half a line
            with replacing(path) as file:
                file.writelines(line + b"\n" for line in lines if int(line.split()[0]) < start)
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115 unbuffered: whole or not

    def record(self, step: int, **values: str) -> None:
        """Append a record for each stream=value."""
        lines = (f"{step} {stream} {value}\n" for stream, value in values.items())
        self.file.write("".join(lines).encode())


# -----------------------------------------------------------------------------
# training


def choose_model(args: argparse.Namespace, meta: dict, checkpoint: dict) -> tuple[GPTConfig, dict]:
    """Return the config and the checkpoint that the weights come from, {} for new; set seq_len."""
    if args.init_from == "scratch":
        args.model, source = args.model.removeprefix("gpt2:"), checkpoint
        hint = "OpenAI's GPT-2 is --init_from gpt2"
        require(args.model in SIZES, f"model {args.model} is none of {', '.join(SIZES)}; {hint}")
        config = GPTConfig(*SIZES[args.model][:4], **meta)
    else:
        source = checkpoint or load_source(args.init_from)
        config, args.model = GPTConfig(**source["config"]), source["args"]["model"]
        what = f"{args.init_from} reads {config.tokenizer} tokens, {args.data_dir} has"
        require(config.tokenizer == meta["tokenizer"], f"{what} {meta['tokenizer']}")
    args.seq_len = args.seq_len or (source["args"]["seq_len"] if source else config.block_size)
    what = f"the {config.block_size} tokens that {args.model} can see"
    require(args.seq_len <= config.block_size, f"seq_len {args.seq_len} is longer than {what}")
    return config, source


def describe(args, model: GPT, data: str, loader, val_windows: int, run: Run) -> list[str]:
    """Return the lines that a run starts with."""
    B, T, world, context = args.batch_size, args.seq_len, run.world_size, model.config.block_size
    device = f"{run.device.type.upper()}, {torch.get_num_threads()} threads"
    device = torch.cuda.get_device_name() if run.device.type == "cuda" else device
    epochs = args.max_steps * args.total_batch_size / (loader.windows * T)
    val_all = " (all of it)" if val_windows < args.val_tokens // T else ""
    parameters = sum(p.numel() for p in model.parameters())
    lines = [
        f"device | {world} x {device}, {run.dtype}, compile {'on' if run.compile else 'off'}",
        f"model  | {args.model}, {parameters:,} parameters",
        f"data   | {args.data_dir}: {data}; validation on {val_windows * T:,}{val_all}",
        f"batch  | {args.total_batch_size:,} tokens = B {B} x T {T} x {world} processes x "
        f"{args.total_batch_size // (B * T * world)} micro-steps",
        f"run    | {args.max_steps:,} steps, {epochs:.2f} epochs; {args.warmup_steps} of warmup to "
        f"learning rate {args.max_lr:g}, {args.schedule} to {args.min_lr:g}",
    ]
    if context > T and not args.quickstart:
        lines.append(f"warning: T {T} leaves the model's positions {T} to {context - 1} untrained")
    if epochs > 4:
        lines.append(f"warning: {epochs:.1f} epochs; after 4, repeated data teaches little")
    if epochs > 0.2 * args.max_steps:
        share = f"{epochs / args.max_steps:.1f} epochs"
        lines.append(f"warning: {share} a step; a smaller --total_batch_size makes more of them")
    days = 6 * parameters * args.max_steps * args.total_batch_size / 1e12 / 86400  # at 1 TFLOP/s
    if run.device.type == "cpu" and days > 1:
        lines.append(f"warning: {days:.0f} days or more on a CPU; --quickstart takes two minutes")
    return lines


def catch_signals(run: Run) -> list[int]:
    """Return a list that SIGTERM and SIGINT go to, once each; a second of a kind ends all."""
    received, note = [], b"\nsaving after this step; once more ends it now, unsaved\n"

    def catch(signum, frame):
        received.append(signum)
        signal.signal(signum, signal.SIG_DFL)
        os.write(2, note if run.rank == 0 else b"")  # print may be at work where this breaks in

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, catch)
    return received


def train(args: argparse.Namespace, run: Run) -> int:
    """Train as the flags say and return the exit status: 0, or 128 + the signal that ended it."""
    # what to train, on what, from where
    meta = read_meta(args.data_dir)
    train_shards = open_shards(args.data_dir, "train")
    val_shards = open_shards(args.data_dir, "val") if args.val_every else train_shards
    checkpoint = find_checkpoint(args, run)
    config, source = choose_model(args, meta, checkpoint)
    data = summarize(train_shards)
    if checkpoint:
        check_resume(checkpoint, config, args, data)
    if args.sample_every:
        fineweb.get_tokenizer(config.tokenizer)  # not to be had: now, not after 250 steps

    # the model: the same seed gives the same weights on every device
    torch.manual_seed(args.seed)
    raw_model = GPT(config, args.recompute)
    raw_model.to(run.device)
    if run.compile:
        raw_model.compile(dynamic=False)
    B, T = choose_batch_size(raw_model, args, checkpoint, run), args.seq_len
    args.batch_size, grad_accum_steps = B, args.total_batch_size // (B * T * run.world_size)
    model = DDP(raw_model, gradient_as_bucket_view=True) if run.world_size > 1 else raw_model

    # data, optimizer and all else that the next step depends on
    place, seed = (B, T, run.rank, run.world_size), args.seed if args.shuffle else None
    train_loader = DataLoaderLite(*place, train_shards, config.vocab_size, seed, run.device)
    val_loader = DataLoaderLite(*place, val_shards, config.vocab_size, None, run.device)
    val_windows = min(max(1, args.val_tokens // T), val_loader.windows)
    hellaswag_file = find_hellaswag(args, run)
    fill_schedule(args, train_loader.windows)
    optimizer = raw_model.configure_optimizers(args.weight_decay, args.max_lr)
    scaler = torch.amp.GradScaler(run.device.type, enabled=run.dtype == "float16")
    start, val_loss = checkpoint.get("step", 0), checkpoint.get("val_loss")
    loss_window, norm_window = checkpoint.get("loss_window", []), checkpoint.get("norm_window", [])
    beyond = f"{args.log_dir} is at step {start}, beyond max_steps {args.max_steps}"
    require(start <= args.max_steps, f"--resume: {beyond}")
    if checkpoint:
        dcp.set_optimizer_state_dict(model, optimizer, checkpoint["optimizer"], options=FULL)
        if checkpoint["scaler"]:  # {} where that run had none
            scaler.load_state_dict(checkpoint["scaler"])
        train_loader.reset(checkpoint["position"])
    if source:
        raw_model.load_state_dict(source["model"])

    def save(step: int) -> None:
        rest = {"step": step, "position": train_loader.position, "data": data}
        rest |= {"loss_window": loss_window, "norm_window": norm_window, "val_loss": val_loss}
        rest |= {"scaler": scaler.state_dict(), "config": asdict(config), "args": vars(args)}
        path = Path(args.log_dir) / f"model_{step:05d}.pt"
        save_checkpoint(path, model, optimizer, run, world_size=run.world_size, **rest)
        if run.rank == 0 and args.keep:
            for old in list_checkpoints(args.log_dir)[: -args.keep]:
                old.unlink()

    log = Log(args, start, run)
    peak, skipping = peak_tok_per_sec(config, T, run), args.skip_loss_z or args.skip_grad_z
    run.print(*describe(args, raw_model, data, train_loader, val_windows, run))
    signals, skipped, times = catch_signals(run), 0, []
    t0 = time.perf_counter()
    for step in range(start, args.max_steps + 1):
        last, counter = step == args.max_steps, f"step {step:5d}/{args.max_steps}"
        every = (args.val_every, args.hellaswag_every, args.sample_every, args.save_every)
        due = [n > 0 and (step % n == 0 or last) for n in every]
        val_due, hellaswag_due, sample_due, save_due = due
        if any(due):
            if val_due:
                val_loss = validate(raw_model, val_loader, val_windows, run)
                run.print(f"{counter} | val loss: {val_loss:.4f}")
                log.record(step, val=f"{val_loss:.4f}")
            if hellaswag_due and hellaswag_file:
                share, line = score_hellaswag(raw_model, hellaswag_file, run)
                run.print(f"{counter} | {line}")
                log.record(step, hella=f"{share:.4f}")
            if sample_due and (step > 0 or last):
                print_samples(raw_model, args, run)
            if save_due and step > start:
                save(step)
            t0 = time.perf_counter()  # all of these have waited for the device
        if last:
            break

        # one optimizer step: the mean gradient of total_batch_size tokens
        if args.overfit_one_batch:
            train_loader.reset()
        optimizer.zero_grad()
        loss_sum = torch.zeros((), device=run.device)
        for micro_step in range(grad_accum_steps):
            x, y = train_loader.next_batch()
            # DDP then averages gradients over processes once a step, not once a micro-step
            model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
            with run.autocast():
                loss = model(x, y) / grad_accum_steps  # backward sums, the step wants the mean
            scaler.scale(loss).backward()
            loss_sum += loss.detach()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip or math.inf)

        # here alone the host waits for the device: all processes agree whether to update
        stop = loss_sum.new_tensor(float(len(signals)))
        loss, norm, stop = run.mean(torch.stack((loss_sum, norm, stop))).tolist()
        z_loss, z_norm = z_score(loss_window, loss), z_score(norm_window, norm)
        outlier = 0 < args.skip_loss_z < z_loss or 0 < args.skip_grad_z < z_norm
        lr = get_lr(step, args)
        for group in optimizer.param_groups:
            group["lr"] = lr
        update = math.isfinite(loss + norm) and not outlier
        if update:
            scaler.step(optimizer)
        scaler.update()
        dt, t0 = time.perf_counter() - t0, time.perf_counter()

        tok_per_sec, ms = args.total_batch_size / dt, f"{1000 * dt:.2f}"
        log.record(step, train=f"{loss:.6f}", lr=f"{lr:.4e}", norm=f"{norm:.4f}", dt=ms)
        z = [f" ({z:+.2f}z)" if skipping else "" for z in (z_loss, z_norm)]
        line = f"{counter} | loss: {loss:.6f}{z[0]} | lr {lr:.4e} | norm: {norm:.4f}{z[1]}"
        line += f" | dt: {ms}ms | tok/sec: {tok_per_sec:.0f}"
        line += "" if math.isnan(peak) else f" | mfu: {100 * tok_per_sec / peak:.1f}%"
        run.print(line if update else f"{line} | update skipped")
        skipped = 0 if update else skipped + 1
        if skipped == 100:
            raise FloatingPointError(f"100 updates skipped in a row: loss {loss}, norm {norm}")
        times.append(dt)
        if len(times) == 10:
            left = timedelta(seconds=round((args.max_steps - step) * float(np.median(times))))
            run.print(f"time to go, evaluation apart: {left}")
        if stop:
            save(step + 1)
            run.print("to go on: the same command, with --resume")
            return 128 + signals[0] if signals else 0

    unit = "byte" if config.tokenizer == "bytes" else "token"
    result = f"; val loss {val_loss:.4f} nats per {unit}" if val_loss else ""
    run.print(f"done: log in {Path(args.log_dir) / 'log.txt'}{result}")
    if list_checkpoints(args.log_dir):
        usual, command = parse_args([]), ["--sample", "--init_from", args.log_dir, "--seed", "1"]
        for flag in ("prompt", "temperature", "max_new_tokens"):
            if getattr(args, flag) != getattr(usual, flag):
                command += [f"--{flag}", str(getattr(args, flag))]
        run.print(f"next: python train_gpt2.py {shlex.join(command)}")
    return 0


# -----------------------------------------------------------------------------
# command line

# --quickstart: 0.9M parameters learn to write like the documentation that every Python carries
QUICKSTART = {
    "data_dir": "pydocs", "log_dir": "log/quickstart", "model": "tiny", "seq_len": 48,
    "total_batch_size": 768, "max_steps": 1600, "max_lr": 4e-3, "val_every": 400,
    "val_tokens": 50000, "hellaswag_every": 0, "sample_every": 800, "prompt": "Return ",
    "temperature": 0.5, "max_new_tokens": 160,
}  # fmt: skip


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Return the flags. Raises ValueError for one that is unknown or has an impossible value."""
    parser = argparse.ArgumentParser(usage="python train_gpt2.py [flags]", allow_abbrev=False)
    parser.error = lambda message: require(False, f"{message}; --help lists the flags")
    flags, d = parser.add_argument_group("flags"), "(default: %(default)s)"
    add, on_off = flags.add_argument, {"action": argparse.BooleanOptionalAction}
    add("--data_dir", default="edu_fineweb10B", help=f"folder of shards {d}")
    add("--log_dir", default="log", help=f"folder for log.txt and checkpoints {d}")
    add("--model", default="d12", help=f"{', '.join(SIZES)} {d}")
    add("--init_from", default="scratch", help=f"{', '.join(HUGGING_FACE)}, a folder or file {d}")
    add("--batch_size", default="auto", help=f"B: sequences per GPU and micro-step {d}")
    add("--seq_len", type=int, help="T: tokens of a sequence (default: all that the model can see)")
    add("--total_batch_size", type=int, default=2**19, help=f"tokens per step, on all GPUs {d}")
    steps = flags.add_mutually_exclusive_group()  # 19073 of 2**19 tokens are 10B
    steps.add_argument("--max_steps", type=int, default=19073, help=f"optimizer steps {d}")
    steps.add_argument("--epochs", type=float, help="sets max_steps from the data instead")
    add("--warmup_steps", type=int, help="(default: 715, or the same share of a shorter run)")
    add("--max_lr", type=float, help="peak learning rate (default: GPT-3's for the size)")
    add("--min_lr", type=float, help="where the schedule ends (default: a tenth of max_lr)")
    add("--schedule", default="cosine", choices=("cosine", "linear", "constant", "wsd"), help=d)
    add("--weight_decay", type=float, default=0.1, help=f"of matrices and embeddings {d}")
    add("--grad_clip", type=float, default=1.0, help=f"largest gradient norm, 0: any {d}")
    add("--seed", type=int, default=1337, help=d)
    add("--shuffle", default=True, help="a new order of the data every epoch", **on_off)
    add("--device", default="auto", help=f"cuda, mps or cpu {d}")
    dtypes = ("auto", "bfloat16", "float16", "tf32", "float32")
    add("--dtype", default="auto", choices=dtypes, help=f"of the matrix products {d}")
    add("--compile", help="(default: on for CUDA)", **on_off)
    add("--recompute", default=False, help="activations again in the backward pass", **on_off)
    add("--val_every", type=int, default=250, help=f"steps, 0: never {d}")
    add("--val_tokens", type=int, default=20 * 2**19, help=f"of the val split {d}")
    add("--hellaswag_every", type=int, help="steps, 0: never (default: 250, on a CPU 0)")
    add("--sample_every", type=int, default=250, help=f"steps, 0: never {d}")
    add("--save_every", type=int, default=5000, help=f"steps, 0: never {d}")
    add("--keep", type=int, default=0, help=f"keep the newest checkpoints only, 0: all {d}")
    add("--resume", default=False, help="go on from log_dir's newest checkpoint, if any", **on_off)
    add("--overwrite", help="delete the run in log_dir", **on_off)
    add("--overfit_one_batch", action="store_true", help="the first one, for debugging")
    add("--skip_loss_z", type=float, default=0, help=f"skip losses so many deviations up {d}")
    add("--skip_grad_z", type=float, default=0, help=f"the same for the gradient norm {d}")
    add("--quickstart", action="store_true", help="a small GPT on Python's documentation, offline")
    add("--sample", action="store_true", help="print what the model of --init_from writes")
    add("--export_hf", metavar="DIR", help="write it as a folder that transformers loads")
    add("--export_llmc", metavar="FILE", help="write it for llm.c, bfloat16 with that --dtype")
    add("--prompt", default="Hello, I'm a language model,", help=d)
    add("--num_samples", type=int, default=4, help=d)
    add("--max_new_tokens", type=int, default=64, help=d)
    add("--temperature", type=float, default=1.0, help=f"0: always the likeliest token {d}")
    add("--top_k", type=int, default=50, help=f"draw from so many, 0: all {d}")
    if "--quickstart" in argv:
        parser.set_defaults(**QUICKSTART)
    args = parser.parse_args(argv)
    if args.batch_size != "auto":
        require(args.batch_size.isdecimal(), f"batch_size {args.batch_size}: a number, or auto")
        args.batch_size = int(args.batch_size)
    for flag, value in vars(args).items():
        least = 1 if flag in ("batch_size", "seq_len", "total_batch_size", "num_samples") else 0
        valid = isinstance(value, str | None) or value >= least
        require(valid, f"{flag} is {value}, expected at least {least}")
    own = args.quickstart and Path(args.log_dir) == Path(QUICKSTART["log_dir"])
    other = Path(args.data_dir) != Path(QUICKSTART["data_dir"])
    require(not (own and other), "--quickstart with other data needs another --log_dir")
    args.overwrite = own and not args.resume if args.overwrite is None else args.overwrite
    require(not (args.resume and args.overwrite), "--resume or --overwrite, not both")
    return args


def main(argv: list[str] | None = None) -> None:
    """Run the command line that the top of this file shows."""
    try:
        args = parse_args(sys.argv[1:] if argv is None else argv)
        run = setup_run(args)
        if args.quickstart and Path(args.data_dir) == Path(QUICKSTART["data_dir"]):
            if run.rank == 0:  # goes on where it was interrupted; when all is there, only says so
                fineweb.main(["--dataset", "pydocs", "--out", args.data_dir])
            run.mean(torch.zeros((), device=run.device))  # the other processes wait
        using = args.sample or args.export_hf or args.export_llmc
        status = use(args, run) if using else train(args, run)
    except (ValueError, ConnectionError, FileNotFoundError) as error:  # for the user to put right
        status, line = 2, error
    except (FloatingPointError, OSError) as error:
        status, line = 1, error
    except torch.OutOfMemoryError as error:
        status, line = 1, f"{error} A smaller --batch_size or --recompute needs less memory."
    if status in (1, 2) and os.environ.get("RANK", "0") == "0":
        print(f"train_gpt2.py: {line}", file=sys.stderr)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(status)


if __name__ == "__main__":
    main()
