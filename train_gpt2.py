# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.9", "numpy", "tiktoken", "transformers"]
# ///
"""
Train GPT-2 from scratch, in one file that reads from top to bottom.

    python train_gpt2.py --quickstart                             a small GPT, offline, on any CPU
    python fineweb.py && python train_gpt2.py                     GPT-2 124M, FineWeb-Edu, one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt2.py        the same run on eight GPUs
    python train_gpt2.py --resume                                 continue the newest checkpoint
    python train_gpt2.py --sample --init_from log/model_19073.pt  print what a trained model writes
    python train_gpt2.py --init_from log --max_steps 0            evaluate a trained model

The file follows the order of a lecture, from the model to the command line. Three appendices come
last: the loss as a Triton kernel, the optimizer Muon, and weights in Hugging Face's format.

Shapes are written as (B, T, C): B sequences of T tokens with C channels each. V is the vocabulary
size, nh the number of heads, hs the size of a head, and N = B * T. `args` are the flags, `process`
says where and how this process computes, and `state` is what a step changes.

Sources: GPT-2 (Radford et al. 2019) for the model, GPT-3 (arXiv:2005.14165) for hyperparameters,
build-nanogpt and llm.c (github.com/karpathy) for the file formats."""

import argparse
import ast
import json
import math
import os
import pickle
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from random import Random

import numpy as np
import tiktoken
import torch  # 2.9 or newer
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import skip_init
from torch.utils.checkpoint import checkpoint as recompute_in_backward

try:
    import triton  # comes with PyTorch for NVIDIA GPUs; appendix A uses it
    import triton.language as tl
except ImportError:
    triton = None

# ---- the model ----------------------------------------------------------------------------------

# name: (layers, heads, channels, context in tokens, peak learning rate). Except tiny, names are
# llm.c's. GPT-2 came as d12, d24, d36 and d48. The rates are like those of GPT-3's table 2.1
SIZES = {
    "tiny": (4, 4, 128, 256, 1.2e-3),  # for a CPU
    "d6": (6, 6, 384, 1024, 6e-4),  # 30M parameters
    "d12": (12, 12, 768, 1024, 6e-4),  # 124M
    "d24": (24, 16, 1024, 1024, 3e-4),  # 355M
    "d36": (36, 20, 1280, 1024, 2.5e-4),  # 774M
    "d48": (48, 25, 1600, 1024, 2e-4),  # 1.6B
    "d72": (72, 30, 2880, 1024, 1.2e-4),  # 7.3B
    "gpt3:c768": (12, 12, 768, 2048, 6e-4),  # 125M
    "gpt3:c2048": (24, 16, 2048, 2048, 2e-4),  # 1.3B
}


@dataclass
class GPTConfig:
    """The shape of a GPT, and the tokenizer whose tokens it reads. The defaults are GPT-2 124M.
    Checkpoints hold it. A flag that you add under the name of a field sets this field."""

    n_layer: int = 12  # blocks
    n_head: int = 12  # attention heads of a block
    n_embd: int = 768  # C, the channels of the residual stream
    block_size: int = 1024  # the context: the largest T
    vocab_size: int = 50257  # 50,000 BPE merges + 256 bytes + 1 <|endoftext|>
    tokenizer: str = "gpt2"
    eot: int = 50256  # <|endoftext|>, which precedes every document and ends a sample


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which every token attends to itself and to the tokens before it."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.n_head = config.n_head
        self.sizes = [config.n_embd] * 3  # the channels of q, k and v, of all heads
        # skip_init makes a layer without drawing weights: GPT.init_weights does that, once
        self.c_attn = skip_init(nn.Linear, config.n_embd, sum(self.sizes))
        self.c_proj = skip_init(nn.Linear, config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        hs = C // self.n_head  # channels of a head
        q, k, v = self.c_attn(x).split(self.sizes, dim=2)  # (B, T, C) each
        q = q.view(B, T, self.n_head, hs).transpose(1, 2)  # (B, nh, T, hs)
        k = k.view(B, T, self.n_head, hs).transpose(1, 2)
        v = v.view(B, T, self.n_head, hs).transpose(1, 2)
        # This function scales by 1 / sqrt(hs), lets query i see keys 0 to i only, takes the softmax
        # and multiplies by v, without ever storing the (T, T) matrix: FlashAttention
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, nh, T, hs)
        y = y.transpose(1, 2).reshape(B, T, C)  # put the heads side by side again
        return self.c_proj(y)  # mixes the heads


class MLP(nn.Module):
    """Two linear layers with a GELU between them, applied to each token separately."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = skip_init(nn.Linear, config.n_embd, 4 * config.n_embd)  # 4 C, as in GPT-2
        self.c_proj = skip_init(nn.Linear, 4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        # GPT-2 was trained with the tanh approximation of GELU
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """Attention, where tokens exchange information, then an MLP. Both add to the stream x."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        # Both read x through a LayerNorm, which brings every token to one scale. x itself is not
        # normalized, so that each "x +" hands the gradient on to the earlier blocks unchanged
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    """GPT-2, without dropout. Parameters have the names that Hugging Face's GPT-2 gives them, but
    the matrices of blocks are (out, in), as in nn.Linear, where Hugging Face stores (in, out)."""

    def __init__(self, config, recompute=False, residual_dtype=torch.float32, seed=1337):
        super().__init__()
        self.config = config
        self.recompute = recompute  # compute blocks again in the backward pass, to save memory
        self.residual_dtype = residual_dtype  # bfloat16 is faster on a GPU
        C = config.n_embd
        # Pad the vocabulary to a multiple of 128, from 50257 to 50304. In 16 bits, a row of logits
        # is then a multiple of 256 bytes, and matrix products are faster on aligned rows
        padded_vocab_size = math.ceil(config.vocab_size / 128) * 128
        parts = {
            "wte": skip_init(nn.Embedding, padded_vocab_size, C),  # token embeddings
            "wpe": skip_init(nn.Embedding, config.block_size, C),  # position embeddings
            "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            "ln_f": nn.LayerNorm(C),  # before the logits
        }
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = skip_init(nn.Linear, C, padded_vocab_size, bias=False)
        # Use one matrix for input and output (Press & Wolf 2017, arXiv:1608.05859): tokens with
        # similar meanings should have similar rows in both, and this saves 39M parameters
        self.lm_head.weight = self.transformer.wte.weight
        if seed is not None:  # None: the weights are loaded or drawn later, see make_state
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int):
        """Draw all linear layers and embeddings. The rest is as its constructor has set it."""
        # 2 * n_layer projections add their outputs to the residual stream. Dividing their standard
        # deviation by sqrt(2 * n_layer) makes the variance of the final sum independent of n_layer
        residual_std = 0.02 * (2 * self.config.n_layer) ** -0.5
        for name, p in self.named_parameters():  # a tied matrix once, under its first name, wte's
            layer = self.get_submodule(name.rpartition(".")[0])
            if not isinstance(layer, nn.Linear | nn.Embedding):
                continue
            std = 0.0 if name.endswith("bias") else 0.02
            if name.endswith("c_proj.weight"):
                std = residual_std
            # The numbers depend on seed and name alone, so a new layer leaves those of others alone
            generator = torch.Generator().manual_seed(Random(f"{seed} {name}").getrandbits(63))
            value = torch.empty(p.shape, device="cpu").normal_(std=std, generator=generator)
            if layer in (self.transformer.wte, self.lm_head):
                # The padded rows belong to no token. Their logits are masked, so they stay zero
                value[self.config.vocab_size :] = 0
            p.copy_(shard_as(p, value))
            del value  # before the next one is made, to save memory

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the float32 logits (B, T, V) of the next tokens, given idx (B, T) int64. With
        targets (B, T) int64, return the cross entropy of every token in nats instead, (B, T)
        float32. It is 0 where the target is -1. New weights give ln V, 10.8, or a little more."""
        pos = torch.arange(idx.size(1), device=idx.device)  # (T,)
        # What a token is and where it stands are added up in the same C channels
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)  # (B, T, C)
        x = x.to(self.residual_dtype)
        for block in self.transformer.h:
            if self.recompute and torch.is_grad_enabled():
                x = recompute_in_backward(block, x, use_reentrant=False)
            else:
                x = block(x)
        # Autocast lets LayerNorm return float32, but the loss kernel of appendix A takes bfloat16
        x = self.transformer.ln_f(x).to(x.dtype)
        V = self.config.vocab_size
        if targets is None:
            return self.lm_head(x)[..., :V].float()  # without the padded columns
        losses = head_cross_entropy(x.flatten(0, 1), self.lm_head.weight, targets.flatten(), V)
        return torch.view_copy(losses, targets.shape)  # a copy: FSDP2 warns of views

    @classmethod
    def from_pretrained(cls, name: str) -> "GPT":
        """Return a pretrained model, such as "gpt2" or whatever --init_from takes."""
        source = load_source(name)
        model = cls(GPTConfig(**source["config"]), seed=None)
        load_weights(model, source["model"])
        return model.eval()

    def configure_optimizers(self, weight_decay, learning_rate, optimizer="adamw") -> list:
        """Return optimizers that together update every parameter once: AdamW, with GPT-3's betas,
        or Muon and AdamW. Add others here. A group can have an "lr_share", see update_weights."""
        # How a parameter is updated depends on what it does, not on its shape
        in_blocks = {m for b in self.modules() if isinstance(b, Block) for m in b.modules()}
        attention, hidden, projections, embeddings, vectors = [], [], [], [], []
        for name, p in self.named_parameters():  # a tied matrix once
            if not p.requires_grad:  # if you freeze some
                continue
            layer = self.get_submodule(name.rpartition(".")[0])
            if name.endswith("bias") or not isinstance(layer, nn.Linear | nn.Embedding):
                vectors.append(p)  # biases, LayerNorms, and each nn.Parameter that you add
            elif isinstance(layer, nn.Embedding) or layer not in in_blocks:
                embeddings.append(p)  # and a head that is not tied
            elif name.endswith("c_proj.weight"):
                projections.append(p)  # writes into the residual stream
            elif name.endswith("c_attn.weight"):
                attention.append(p)  # q, k and v, three matrices in one
            else:
                hidden.append(p)
        # These betas average 10 and 20 gradients. Fused means that one pass does the whole update
        settings = {"lr": learning_rate, "betas": (0.9, 0.95), "fused": True}
        # Matrices and embeddings decay, to stay small. The scales of LayerNorms should stay near 1
        decay = {"params": embeddings, "weight_decay": weight_decay}
        no_decay = {"params": vectors, "weight_decay": 0.0}
        if optimizer == "adamw":
            decay["params"] += attention + hidden + projections
            return [torch.optim.AdamW([decay, no_decay], **settings)]
        if optimizer == "muon":
            # Muon (appendix B) is for matrices that map a hidden vector to another, not for tables
            settings["betas"] = (0.9, 0.98)  # 10 and 50 gradients: beside Muon, this ends lower
            adamw = torch.optim.AdamW([g for g in (decay, no_decay) if g["params"]], **settings)
            groups = [{"params": hidden}]
            # Projections write into one stream, where updates and rounding errors add up
            groups.append({"params": projections, "lr_share": 1 / self.config.n_layer})
            groups.append({"params": attention, "rows": self.transformer.h[0].attn.sizes})
            # Muon first: while it keeps a GPU busy, Python prepares what follows
            return [Muon(groups, lr=learning_rate, weight_decay=weight_decay), adamw]
        raise UserError(f"--optimizer {optimizer}: expected adamw or muon")


def head_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, V: int) -> Tensor:
    """Return the cross entropy in nats, (N,) float32, of the logits x @ weight.T, for x (N, C) and
    weight (padded V, C), with targets (N,) int64. It is 0 where a target is -1."""
    # Appendix A computes the same in less time. To change the loss, delete this `if`, and let
    # choose_batch_size count 16 bytes for a logit
    if triton and x.is_cuda and x.dtype == torch.bfloat16:
        return fused_cross_entropy(x, weight, targets, V)[0]
    logits = F.linear(x, weight)  # (N, padded V), the largest tensor of all
    # Keep the padded columns out of the softmax: OpenAI's logits are often near -40, and a 0 would
    # take nearly all of the probability. torch.compile makes this mask free; a slice is unaligned
    is_padding = torch.arange(len(weight), device=x.device) >= V
    logits = logits.masked_fill(is_padding, -math.inf).float()
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")


# ---- generation ---------------------------------------------------------------------------------


@torch.no_grad()
def generate(model: GPT, tokens: Tensor, args) -> Tensor:
    """Continue tokens (B, T) int64 by args.max_new_tokens and return (B, T + new) int64."""
    # Its own generator: sampling changes nothing in training, and equal weights draw equal texts
    generator = torch.Generator(tokens.device).manual_seed(args.seed)
    for _ in range(args.max_new_tokens):
        logits = model(tokens[:, -args.seq_len :])[:, -1]  # (B, V): what follows the last token
        values, choices = logits.sort(descending=True)  # (B, V) each
        # A temperature below 1 makes likely tokens likelier, and 0 leaves only the likeliest
        k = 1 if args.temperature == 0 else args.top_k or None
        probs = F.softmax(values[:, :k] / max(args.temperature, 1e-6), dim=-1)
        index = torch.multinomial(probs, 1, generator=generator)  # (B, 1), below k
        tokens = torch.cat((tokens, choices.gather(-1, index)), dim=1)
    return tokens


@lru_cache
def get_tokenizer(name: str) -> tiktoken.Encoding:
    """Return a tokenizer, whose ids fit into uint16: GPT-2's, downloaded once, or fineweb.py's."""
    files = "vocab.bpe as 6d1cbeee0f20b3d9449abfede4726ed8212e3aee and encoder.json as "
    files += "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6 in the folder TIKTOKEN_CACHE_DIR"
    with loading(f"the tokenizer {name} (without a network, save {files})"):
        if name == "gpt2":
            return tiktoken.get_encoding("gpt2")
        import fineweb

        return fineweb.get_tokenizer(name)


# ---- data ---------------------------------------------------------------------------------------


class UserError(Exception):
    """A mistake that the user can put right. main prints its message as one line."""


def require(condition: bool, message: str):
    """Raise UserError with the message unless the condition holds."""
    if not condition:
        raise UserError(message)


@contextmanager
def loading(what):
    """Raise UserError, which names `what`, a path or a description, if it cannot be loaded."""
    try:
        yield
    except (OSError, EOFError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise UserError(f"{what} cannot be loaded: {error!r:.200}") from error


def read_header(path: Path) -> tuple[int, int]:
    """Return where the uint16 tokens of a shard begin, in bytes, and how many tokens it has."""
    with loading(path):
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r")
        else:
            # llm.c's .bin: 256 int32 (magic number, version, number of tokens, zeros), then tokens
            header = np.fromfile(path, np.int32, 256)
            tokens = np.memmap(path, np.uint16, mode="r", offset=header.nbytes)
            is_whole = header[:3].tolist() == [20240520, 1, len(tokens)]
            require(is_whole, f"{path} is not a .bin shard of version 1, or it was cut short")
    found = f"{tokens.ndim}-D {tokens.dtype}"
    require(found == "1-D uint16", f"{path} holds a {found} array, expected 1-D uint16")
    return tokens.offset, len(tokens)


def read_meta(data_dir: str) -> dict:
    """Return tokenizer, vocab_size and eot from fineweb.py's meta.json, or {} without one."""
    # Without one, the shards hold GPT-2's tokens. Data made in N parts has N meta-I-of-N.json files
    meta = {}
    paths = sorted(Path(data_dir).glob("meta[.-]*json"))
    for path in paths:
        with loading(path):
            meta = json.loads(path.read_text())
        is_done = meta.get("progress", {"done": True})["done"]
        require(is_done, f"{path} is not finished: run its fineweb.py command again")
        parts = int(path.stem.partition("-of-")[2] or 1)
        require(len(paths) == parts, f"{data_dir} has {len(paths)} of {parts} parts")
    return {key: meta[key] for key in ("tokenizer", "vocab_size", "eot") if key in meta}


@lru_cache(maxsize=2)
def window_order(n: int, seed: int, epoch: int) -> np.ndarray:
    """Return the windows 0 to n - 1, shuffled as these numbers alone decide, (n,) uint32."""
    # RandomState, because NumPy promises that its numbers never change between versions
    return np.random.RandomState((seed, epoch)).permutation(np.arange(n, dtype=np.uint32))


class DataLoaderLite:
    """Serve a process its batches of (B, T) tokens. A window is T inputs and the token after
    them, the last target, which also begins the next window. Documents in a window see each other,
    as in GPT-3. Training reads all windows in an order that the seed decides, new in each epoch."""

    def __init__(self, split: str, B: int, config, args, process):
        self.B = B
        self.T = args.seq_len
        self.seed = args.seed if split == "train" and args.shuffle else None
        self.process = process
        self.ahead = {}  # {(start, stop): batch}, loaded early
        files = [path for path in Path(args.data_dir).glob("*") if path.suffix in (".npy", ".bin")]
        word = rf"(?<![a-z]){split}(?![a-z])"  # train or val, and not the val in retrieval
        paths = sorted(path for path in files if re.search(word, path.stem, re.IGNORECASE))
        advice = "`python fineweb.py` makes some, `python train_gpt2.py --quickstart` needs none"
        require(paths, f"{args.data_dir} holds no {split} shards (.npy, .bin): {advice}")
        tokenizer = read_meta(args.data_dir).get("tokenizer", "gpt2")
        found = f"{args.data_dir} has tokens of {tokenizer}"
        require(tokenizer == config.tokenizer, f"{found}, the model reads {config.tokenizer}")
        self.shards = [(path, *read_header(path)) for path in paths]
        self.lengths = {path.name: n for path, _, n in self.shards}  # in tokens
        counts = [max(0, n - 1) // self.T for _, _, n in self.shards]  # of windows
        self.firsts = np.cumsum([0, *counts])  # the number of windows before each shard
        self.windows = int(self.firsts[-1])  # in an epoch
        require(self.windows > 0, f"no {split} shard has {self.T + 1} tokens: lower --seq_len")

    def batches(self, windows: range) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this process's batches of these windows: inputs and targets, (B, T) int64 each, on
        the device. All processes get equally many; spare rows have targets of -1."""
        for start in windows[:: self.B * self.process.world_size]:
            yield self.ahead.pop((start, windows.stop), None) or self.load(start, windows.stop)
        # While the GPU computes with the last batch, load the one with which the next step begins
        following = (windows.stop, windows.stop + len(windows))
        self.ahead = {following: self.load(*following)}

    def load(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return this process's rows of the batch of windows from `start` on, but before `stop`."""
        mine = start + self.process.rank * self.B  # this process's first window
        rows = np.stack([self.get_window(min(mine + i, stop - 1)) for i in range(self.B)])
        rows = torch.from_numpy(rows.astype(np.int64))  # (B, T + 1), as cross_entropy needs int64
        if self.process.device.type == "cuda":
            rows = rows.pin_memory()  # only from there, a copy to the GPU runs asynchronously
        rows = rows.to(self.process.device, non_blocking=rows.is_pinned())
        x = rows[:, :-1].clone()  # not a view, because y is written to below
        y = rows[:, 1:].contiguous()  # the target of each token is the token after it
        y[max(0, stop - mine) :] = -1
        return x, y

    def get_window(self, number: int) -> np.ndarray:
        """Return window `number` of the run, (T + 1,) uint16. The number alone says where it is."""
        epoch, i = divmod(number, self.windows)  # a batch may reach into the next epoch
        if self.seed is not None:
            i = int(window_order(self.windows, self.seed, epoch)[i])
        shard = int(np.searchsorted(self.firsts, i, side="right")) - 1
        path, offset, _ = self.shards[shard]
        offset += 2 * self.T * (i - int(self.firsts[shard]))  # a token has 2 bytes
        return np.fromfile(path, np.uint16, self.T + 1, offset=offset)  # takes 10 us


def get_windows(step: int, args) -> range:
    """Return the numbers of the windows that all processes read in a step, resumed or not."""
    S = args.total_batch_size // args.seq_len  # sequences
    first = 0 if args.overfit_one_batch else step * S
    return range(first, first + S)


# ---- the learning rate --------------------------------------------------------------------------

# t goes from 0, at the end of the warmup, to 1, at the end of the run. A schedule returns 1 for
# max_lr, 0 for the final rate. Add yours here. wsd: warmup, stable, decay (arXiv:2405.18392)
SCHEDULES = {
    "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t)),
    "linear": lambda t: 1 - t,
    "constant": lambda t: 1.0,
    "wsd": lambda t: 1 - math.sqrt(max(0, 5 * t - 4)),  # constant until the last fifth
}


def get_lr(step: int, args) -> float:
    """Return the learning rate of update number `step`, counted from 0."""
    # The rate rises while the optimizer's averages are still those of a few gradients, and falls
    # towards the end, because smaller updates reach lower losses
    if step < args.warmup_steps:  # step + 1, because a first rate of 0 would waste the update
        return args.max_lr * (step + 1) / args.warmup_steps
    t = (step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    final_lr = args.final_lr_frac * args.max_lr
    return final_lr + SCHEDULES[args.schedule](t) * (args.max_lr - final_lr)


# ---- devices, precision, processes --------------------------------------------------------------

SCRIPT = Path(__file__).read_text("utf-8")  # as it runs: the file may be edited meanwhile


def read_section(script: str, title: str) -> str:
    """Return the syntax tree, without comments, of the section of a script that has this title."""
    parts = ["#" + part for part in script.split("\n# ---- ") if part.startswith(title)]
    return ast.dump(ast.parse("".join(parts)))


def print0(line):
    """Print a line, at once, from the first process only."""
    if os.environ.get("RANK", "0") == "0":
        try:
            print(line, flush=True)
        except OSError:  # `| tee` has ended by the same Ctrl-C, or the terminal is closed
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@dataclass(frozen=True)
class Process:
    """Where and how this process computes. The methods work alike for one process and for many."""

    device: torch.device
    device_name: str  # of a GPU, or cpu or mps
    dtype: str  # bfloat16, float16, tf32 or float32
    compile: bool  # whether training and validation run compiled
    hellaswag_every: int  # steps; 0: never
    rank: int  # of this process; 0 prints and writes files
    world_size: int  # the number of processes

    def autocast(self) -> torch.autocast:
        """Return the context in which matrix products run in 16 bits. Weights stay in float32."""
        half = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(self.dtype)
        return torch.autocast(self.device.type, dtype=half, enabled=half is not None)

    @contextmanager
    def eager(self) -> Iterator:
        """Autocast without torch.compile and cuDNN's attention, which are slow at new lengths."""
        backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with torch.compiler.set_stance("force_eager"), sdpa_kernel(backends), self.autocast():
            yield

    def gather(self, value=None) -> list:
        """Wait for all processes, and return the list of their values, in the order of ranks."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values


def whole(p: Tensor) -> Tensor:
    """Return the whole of a tensor, sharded (a DTensor) or not. All processes must call this."""
    return p.full_tensor() if isinstance(p, DTensor) else p


def shard_as(p: Tensor, value: Tensor) -> Tensor:
    """Return a whole tensor in the form of p: if p is sharded, this process's part of it."""
    if not isinstance(p, DTensor):
        return value
    return distribute_tensor(value.to(p.device), p.device_mesh, p.placements, src_data_rank=None)


def setup_process(args) -> Process:
    """Choose device and precision, and connect to the other processes if torchrun started some."""
    rank = int(os.environ.get("RANK", 0))  # torchrun sets it, counting over all machines
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    best = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    require(args.device in ("auto", "cpu", best.type), f"--device: this machine has {best.type}")
    device = best if args.device == "auto" else torch.device(args.device)
    device_name = device.type  # "cuda" is an NVIDIA or AMD GPU, "mps" Apple's
    capability = (0, 0)
    if device.type == "cuda":  # LOCAL_RANK counts on this machine alone
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        device_name = torch.cuda.get_device_name(device)
        capability = torch.cuda.get_device_capability(device)
    if world_size > 1:
        store, _, _ = next(dist.rendezvous("env://"))  # at the address that torchrun has set
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun's store outlives a restart, with the old addresses. (See .github/CLUSTERS.md)
            store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        backend = dist.get_default_backend_for_device(device)  # nccl or gloo
        wait = timedelta(hours=1)  # while the first process writes a large checkpoint
        dist.init_process_group(backend, None, wait, world_size, rank, store)
        # Compile the model as one graph: cut into DDP's buckets, it would be slower
        torch._dynamo.config.optimize_ddp = False
    # Tensor cores multiply float16 since Volta, compute capability (7, 0), and bfloat16 since
    # Ampere, (8, 0). Triton, which torch.compile uses, needs Volta as well
    dtype = args.dtype
    if dtype == "auto":
        dtype = "float16" if capability >= (7, 0) else "float32"
        if capability >= (8, 0):
            dtype = "bfloat16"
    # high: TF32, with 10 bits of mantissa, in float32 matrix products
    torch.set_float32_matmul_precision("highest" if dtype == "float32" else "high")
    # PyTorch's cache of compiled graphs knows neither autocast's dtype (in 2.11) nor the code of a
    # kernel. Without this tag, a start could get the graph of another dtype, or of an old loss
    torch.compiler.config.cache_key_tag = dtype + read_section(SCRIPT, "appendix A")
    compile = args.compile  # fuses small operations into few kernels, which saves memory traffic
    if compile is None:
        compile = capability >= (7, 0) and triton is not None
    hellaswag_every = args.hellaswag_every
    if hellaswag_every is None:
        # HellaSwag takes half an hour on a CPU, and needs hellaswag.py beside this script
        can_score = device.type == "cuda" and Path(__file__).with_name("hellaswag.py").exists()
        hellaswag_every = args.val_every * can_score
    return Process(device, device_name, dtype, compile, hellaswag_every, rank, world_size)


# ---- evaluation ---------------------------------------------------------------------------------


def validate(model, loader, tokens: int, process) -> float:
    """Return the mean loss in nats per token over the split's first `tokens // T` windows."""
    windows = min(max(1, tokens // loader.T), loader.windows)  # at least one, at most all
    sums = []
    for x, y in loader.batches(range(windows)):
        with process.autocast():  # the shapes never change, so the model is compiled for them once
            sums.append(model(x, y).sum().detach())  # a number, which keeps no activations
    total = torch.stack(sums).cpu().double().sum().item()  # on the CPU: MPS has no float64
    return sum(process.gather(total)) / (windows * loader.T)


def print_samples(model, args, process):
    """Print args.num_samples continuations of args.prompt, each up to its <|endoftext|>."""
    tokenizer = get_tokenizer(model.config.tokenizer)
    # An empty prompt is <|endoftext|> alone, with which every document begins
    prompt = tokenizer.encode(args.prompt, allowed_special="all") or [model.config.eot]
    tokens = torch.tensor([prompt], device=process.device).repeat(args.num_samples, 1)
    with process.eager():
        rows = generate(model, tokens, args)[:, len(prompt) :].tolist()
    for i, row in enumerate(rows):
        text = tokenizer.decode(row).split("<|endoftext|>")[0]
        print0(f"sample {i}: {args.prompt}{text}".rstrip())


def is_due(step, every, args) -> bool:
    """Return whether a task is due that is done every `every` steps (0: never) and at the end."""
    return every > 0 and (step % every == 0 or step == args.max_steps)


def evaluate(model, step, loader, examples, log, process):
    """Validate, score HellaSwag's examples and print samples, whichever are due."""
    args = log.args
    is_new = step == 0 and args.init_from == "scratch"  # untrained weights write noise
    model.eval()
    if is_due(step, args.val_every, args):
        # With gradients, as in training, one compiled graph serves both
        with torch.set_grad_enabled(process.compile and args.max_steps > 0):
            val = f"{validate(model, loader, args.val_tokens, process):.4f}"
        log.record(step, f"val loss: {val}", val=val)
    if is_due(step, process.hellaswag_every, args) and not is_new:
        import hellaswag

        with process.eager():
            where = (process.device, process.rank, process.world_size)
            score = hellaswag.score(model, examples, *where)
        hella = f"{score.acc_norm / score.n:.4f}"  # build-nanogpt's way, see hellaswag.py
        log.record(step, f"HellaSwag: {hella}", hella=hella)
    if is_due(step, args.sample_every, args) and not is_new:
        print_samples(model, args, process)
    model.train()
    log.begin = time.perf_counter()  # dt counts no saving and no evaluation


# ---- the log, and how much of the GPU's peak speed is used --------------------------------------

# Peak TFLOP/s of dense 16-bit matrix products (NVIDIA). The first key found in the name counts
PEAK_TFLOPS = {
    "B200": 2250, "H200 NVL": 835, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989,
    "A100": 312, "L40S": 362, "L40": 181, "L4": 121, "A10G": 70, "V100": 125, "T4": 65,
    "RTX 5090": 210, "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip


def peak_tokens_per_second(model, T: int, process):
    """Return the tokens per second at which the model FLOPs utilization (MFU) would be 100%."""
    # For every token, a weight of a matrix product takes part in a multiplication and an addition,
    # and in twice as many in the backward pass: 6 operations
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    # Attention: q @ k and att @ v are 2 * C * T each, times 3 as above, half of it masked (llm.c)
    flops_per_token = 6 * weights + 6 * model.config.n_layer * model.config.n_embd * T
    for name, tflops in PEAK_TFLOPS.items():
        if re.search(rf"\b{name}\b", process.device_name):
            return process.world_size * tflops * 1e12 / flops_per_token
    return None


class Log:
    """The console, which shows about one step a second, and log.txt, which has them all. Its lines
    are records: step, stream (such as train, val or dt), value."""

    def __init__(self, state, args, process):
        self.args = args
        self.peak = peak_tokens_per_second(state.model, args.seq_len, process)
        self.times = deque(maxlen=100)  # seconds that the last steps took
        self.begin = time.perf_counter()  # when the step began, in seconds
        self.shown = 0.0  # when the console showed a step
        self.file = None
        if process.rank > 0 or args.max_steps == 0:  # an evaluation writes nothing
            return
        path = Path(args.log_dir, "log.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        V = state.model.config.vocab_size  # for readers that compare losses
        records = [f"0 total_batch_size {args.total_batch_size}\n", f"0 vocab_size {V}\n"]
        if state.step > 0 and path.exists():  # keep what is older than the checkpoint
            lines = re.findall(r"^\d+ \S+ \S+\n", path.read_text(), re.MULTILINE)
            records = [line for line in lines if int(line.split()[0]) < state.step]
        with atomic_write(path) as file:
            file.write("".join(records).encode())
        self.file = path.open("a")

    def record(self, step: int, line: str, **values):
        """Print a line about a step, unless it is empty, and record each stream=value."""
        if line:
            print0(f"step {step:5d}/{self.args.max_steps} | {line}")
        if self.file:
            self.file.writelines(f"{step} {stream} {value}\n" for stream, value in values.items())
            self.file.flush()

    def record_step(self, step: int, loss: float, lr: float, norm: float, is_skipped: bool):
        """Record a step of training, which ends now."""
        now = time.perf_counter()
        dt = now - self.begin  # seconds
        self.begin = now
        self.times.append(dt)
        values = {"train": f"{loss:.6f}", "lr": f"{lr:.4e}", "norm": f"{norm:.4f}"}
        values["dt"] = f"{1000 * dt:.2f}"  # milliseconds
        steps_left = self.args.max_steps - step - 1
        line = ""
        if now > self.shown + 0.9 or steps_left == 0 or is_skipped:
            self.shown = now
            line = "loss: {train} | lr {lr} | norm: {norm} | dt: {dt}ms".format(**values)
            speed = self.args.total_batch_size / dt  # tokens per second
            line += f" | tok/sec: {speed:.0f}"
            if self.peak:
                line += f" | mfu: {100 * speed / self.peak:.1f}%"
            if is_skipped:
                line += " | update skipped"
            left = timedelta(seconds=round(np.median(self.times) * steps_left))
            line += f" | {left} left"  # hours, minutes and seconds
        self.record(step, line, **values)


# ---- checkpoints --------------------------------------------------------------------------------

FULL = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True, strict=False)


def list_checkpoints(log_dir) -> list:
    """Return the checkpoints in log_dir, oldest first."""
    paths = {path.stem.removeprefix("model_"): path for path in Path(log_dir).glob("model_*.pt")}
    return [paths[step] for step in sorted(filter(str.isdecimal, paths), key=int)]


@contextmanager
def atomic_write(path: Path) -> Iterator:
    """Open a binary file for writing that appears under its name only once it is whole."""
    temporary = path.with_name(f"unfinished{path.suffix}")  # written over after a kill
    with open(temporary, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())  # or a crash of the machine could leave the name without the bytes
    os.replace(temporary, path)


@dataclass
class State:
    """What a step changes: all that the next one depends on, besides the flags and the data."""

    model: GPT
    optimizers: list
    scaler: torch.amp.GradScaler
    step: int = 0  # updates done, with those that were skipped


def save_checkpoint(state, data: dict, args, process):
    """Write the state to log_dir, and delete the checkpoints that --keep does not keep. The tensors
    in it are the same for any number of GPUs, with or without --zero and compilation."""
    # Every process takes part in gathering the tensors; only the first one gets them
    weights = dcp.get_model_state_dict(state.model, options=FULL)
    moments = dcp.get_optimizer_state_dict(state.model, state.optimizers, options=FULL)
    if process.rank == 0:
        if state.model.lm_head.weight is state.model.transformer.wte.weight:
            # Tied, but gathered as two copies: give one copy both names, to write it once
            weights["lm_head.weight"] = weights["transformer.wte.weight"]
        checkpoint = {"step": state.step, "model": weights, "optimizer": moments}
        checkpoint |= {"scaler": state.scaler.state_dict(), "dtype": process.dtype, "data": data}
        checkpoint |= {"config": asdict(state.model.config), "args": vars(args), "script": SCRIPT}
        path = Path(args.log_dir, f"model_{state.step:05d}.pt")
        with atomic_write(path) as file:
            torch.save(checkpoint, file)
        print0(f"saved {path}")
        if args.keep > 0:
            for old in list_checkpoints(args.log_dir)[: -args.keep]:
                old.unlink()
    process.gather()  # all wait for the file, because torchrun ends all when one has ended


def restore_state(state, saved: dict):
    """Set everything but the weights, which are loaded already, to what a checkpoint holds."""
    # Bit for bit with the same B and dtype in one or two processes (GPUs: deterministic mode)
    state.step = saved["step"]
    if state.scaler.is_enabled() and saved["scaler"]:
        state.scaler.load_state_dict(saved["scaler"])
    groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
    for old, group in zip(saved["optimizer"]["param_groups"], groups, strict=True):
        # The code and the flags decide these, for example betas and weight_decay
        old.update({name: value for name, value in group.items() if name != "params"})
        group.update({name: old[name] for name in old.keys() - group.keys()})  # keys you add
    dcp.set_optimizer_state_dict(state.model, state.optimizers, saved["optimizer"], options=FULL)
    # On a CPU, these are parts of the mapped file. Copy them, so that deleting it frees the disk
    for optimizer in state.optimizers:
        for kept in optimizer.state.values():
            kept.update({name: x.clone() for name, x in kept.items() if torch.is_tensor(x)})


def load_weights(model, weights: dict):
    """Set all weights of a model, sharded or not, to the whole tensors of a checkpoint."""
    others = sorted(model.state_dict().keys() ^ weights.keys())  # in one only: dcp ignores them
    require(not others, f"not the weights of a {type(model).__name__}: {others[:3]} differ")
    with loading(f"a {type(model).__name__} with these weights"):
        dcp.set_model_state_dict(model, weights, options=FULL)


def load_checkpoint(path: Path) -> dict:
    """Return the contents of a checkpoint, with its tensors memory-mapped on the CPU."""
    with loading(path):
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # runs no code
    is_ours = isinstance(saved, dict) and saved.keys() >= {"model", "config", "args"}
    require(is_ours, f"{path} is not a checkpoint of this script")
    unknown = sorted(saved["config"].keys() - GPTConfig.__dataclass_fields__)
    require(not unknown, f"{path} has a model with {unknown}: use the script that trained it")
    # With the same weights, other code may compute something else
    theirs = read_section(saved.get("script", SCRIPT), "the model")
    if theirs != read_section(SCRIPT, "the model"):
        print0(f"warning: {path} is of a script with another model section: use that script")
    return saved


def load_source(name: str) -> dict:
    """Return what --init_from names: "config", "model" (the weights) and "args" (the flags)."""
    path = [Path(name), *list_checkpoints(name)][-1]  # a log_dir stands for its newest one
    if path.is_file():
        return load_checkpoint(path)
    expected = f"--init_from {name}: expected gpt2 ... gpt2-xl, a checkpoint, log_dir or HF folder"
    require(name in HUGGING_FACE or Path(name, "config.json").is_file(), expected)
    return load_hf(name)


# ---- setup --------------------------------------------------------------------------------------


def make_config(args, source) -> GPTConfig:
    """Return the model's config: the source's, or the size's with the data's vocabulary."""
    flags = {f: value for f, value in vars(args).items() if f in GPTConfig.__dataclass_fields__}
    if source:
        trained = GPTConfig(**source["config"])
        config = replace(trained, **flags)
        changed = dict(asdict(config).items() - asdict(trained).items())
        if args.model != source["args"]["model"]:
            changed["model"] = args.model
        require(not changed, f"the flags describe another model than the weights: {changed}")
    else:
        require(args.model in SIZES, f"--model {args.model}: expected one of {', '.join(SIZES)}")
        config = replace(GPTConfig(*SIZES[args.model][:4]), **read_meta(args.data_dir) | flags)
    require(0 < args.seq_len <= config.block_size, f"--seq_len: expected 1 to {config.block_size}")
    return config


def choose_batch_size(config, args, process) -> int:
    """Return B, the sequences in a micro-step of one process. B changes nothing but rounding."""
    if args.max_steps == 0:  # an evaluation, which needs little memory
        return args.batch_size or 16
    T = args.seq_len
    sequences, rest = divmod(args.total_batch_size, T)
    require(sequences and not rest, f"--total_batch_size: expected a multiple of --seq_len {T}")
    require(sequences >= process.world_size, f"--total_batch_size: only {sequences} sequences")
    most = args.batch_size or max(1, 8192 // T)  # 8192 tokens at a time keep a CPU busy
    if process.device.type == "cuda" and not args.batch_size:
        parameters = sum(p.numel() for p in GPT(config, seed=None).parameters())
        shards = process.world_size if args.zero > 0 else 1
        # Bytes: float32 weights, gradients and AdamW's two moments take 16 for a parameter,
        # and copies, in 16 bits or gathered, up to 4
        weights = (16 / shards + 4) * parameters
        # Of every token, a block keeps 16 C values for the backward pass: two residual sums, two
        # LayerNorms, q, k and v, attention's output, 4 C on each side of GELU. float16 takes 20
        blocks = 20 * config.n_layer  # with any dtype, to be safe
        if args.recompute:  # every block's input, and all values of one block at a time
            blocks = 20 + config.n_layer
        size = 2 if process.dtype in ("bfloat16", "float16") else 4
        # The kernel has one copy of the logits. PyTorch's loss also has some in float32
        logits = 2 if triton and process.dtype == "bfloat16" else 16
        sequence = (size * blocks * config.n_embd + logits * config.vocab_size) * T  # bytes
        memory = 0.9 * torch.cuda.mem_get_info(process.device)[0]  # of the free bytes, 10% spare
        most = min(128, int((memory - weights) / sequence))  # an H100 gets no faster beyond 128
        require(most > 0, "no sequence fits: use --recompute, --zero 3 or a smaller --model")
    # Divide the sequences evenly over the processes, and their shares over few micro-steps
    share = math.ceil(sequences / process.world_size)
    return math.ceil(share / math.ceil(share / most))


def make_state(config, source, args, process) -> State:
    """Return the state in which the run starts: new, or loaded from the source."""
    # With bfloat16 the residual stream is bfloat16 too: additions and LayerNorms are limited by
    # memory bandwidth, and this saves 4 to 6% of the time. float16 could overflow
    residual_dtype = torch.bfloat16 if process.dtype == "bfloat16" else torch.float32
    torch.manual_seed(args.seed)  # for a constructor that draws weights itself
    # Made on the CPU and not yet written to, weights take no memory, however large the model is
    model = GPT(config, args.recompute, residual_dtype, seed=None)
    if args.zero > 0 and process.world_size > 1:
        # Split parameters, gradients and optimizer states over the processes (FSDP2). 2 keeps a
        # block's gathered weights until the backward pass. The last call shards what is in no block
        require(process.dtype != "float16", "--zero needs --dtype bfloat16, tf32 or float32")
        mesh = dist.init_device_mesh(process.device.type, (process.world_size,))
        for part in [*model.transformer.h, model]:
            if process.compile and part is not model:
                part.compile(dynamic=False)  # by itself: a graph cannot gather
            fully_shard(part, mesh=mesh, reshard_after_forward=args.zero == 3)
    else:
        model.to(process.device)
        if process.compile:
            model.compile(dynamic=False)  # in place: parameters keep their names
    if source:
        load_weights(model, source["model"])
    else:
        model.init_weights(args.seed)
    optimizers = model.configure_optimizers(args.weight_decay, args.max_lr, args.optimizer)
    # float16 rounds small gradients to 0, so the scaler multiplies the loss by a large factor. If a
    # gradient overflows, the update is skipped and the factor is halved. Other dtypes need none
    scaler = torch.amp.GradScaler(process.device.type, enabled=process.dtype == "float16")
    state = State(model, optimizers, scaler)
    if args.resume:
        restore_state(state, source)
    return state


def prepare(args, source, process) -> tuple:
    """Do all that can fail before the first step, then --overwrite. Return what `train` takes."""
    if process.rank > 0:
        process.gather()  # wait: the first process downloads, and the others find the files
    if args.quickstart and args.max_steps > 0 and args.data_dir == QUICKSTART["data_dir"]:
        import fineweb

        fineweb.main(["--dataset", "pydocs", "--out", args.data_dir])
    config = make_config(args, source)
    if args.max_steps > 0:
        DataLoaderLite("train", 1, config, args, process)  # fails before any download
    if args.sample_every > 0 or process.hellaswag_every > 0:
        get_tokenizer(config.tokenizer)
    train_loader = val_loader = examples = None  # what is not needed
    if process.hellaswag_every > 0:
        import hellaswag

        path = hellaswag.fetch()
        with loading(path):  # of examples beyond seq_len, the end is kept
            examples = hellaswag.load(path, get_tokenizer(config.tokenizer), args.seq_len)
    if process.rank == 0:
        process.gather()  # now the others
    B = min(process.gather(choose_batch_size(config, args, process)))  # GPUs may differ
    if args.max_steps > 0:
        train_loader = DataLoaderLite("train", B, config, args, process)
        x, _ = next(train_loader.batches(get_windows(0, args)))  # is the data readable?
        require(x.max() < config.vocab_size, f"{args.data_dir} has tokens of another vocabulary")
    if args.val_every > 0:
        val_loader = DataLoaderLite("val", B, config, args, process)
    if args.resume:
        require(train_loader.lengths == source["data"], f"--resume: {args.data_dir} has other data")
    # Each machine has its own command line. They must agree, but for the names of folders
    facts = {"step": source.get("step", 0), "precision": process.dtype}
    facts["shards"] = [loader.lengths for loader in (train_loader, val_loader) if loader]
    facts |= vars(args) | {"data_dir": 0, "log_dir": 0, "hellaswag_every": process.hellaswag_every}
    everyone = process.gather(facts)
    for name in facts:
        found = [each[name] for each in everyone]
        require(found.count(found[0]) == len(found), f"processes differ in {name}: {found!r:.300}")
    state = make_state(config, source, args, process)
    process.gather()  # all wait: where one has failed, none goes on
    if args.overwrite and process.rank == 0:
        for path in [*list_checkpoints(args.log_dir), Path(args.log_dir, "log.txt")]:
            path.unlink(missing_ok=True)
    return state, train_loader, val_loader, examples


# ---- training -----------------------------------------------------------------------------------


def catch_signals(received: list):
    """Append to the list the signals of a scheduler, of Ctrl-C and of a terminal that is closed."""

    def catch(signum, frame):  # print is not safe in here
        received.append(signum)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with suppress(OSError):
            os.write(2, b"\nsaving after this step (a second Ctrl-C ends at once, unsaved)\n")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup does with SIGHUP
            signal.signal(number, catch)


def update_weights(optimizers, lr: float):
    """Update every parameter at this learning rate, times the lr_share that its group may have."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_share", 1.0)
        optimizer.step()


def train(args, process, state, train_loader, val_loader, examples) -> int:
    """Train, and return the exit status: 0, or 128 plus the number of a signal."""
    model = state.model  # what the training loop calls
    if process.world_size > 1 and args.zero == 0:
        model = DDP(state.model, gradient_as_bucket_view=True)  # averages gradients, kept once
    log = Log(state, args, process)
    signals = []
    if train_loader:
        n = sum(p.numel() for p in state.model.parameters())
        print0(f"{args.model}, {n:,} parameters, on {process.world_size} x {process.device_name}")
        total = args.max_steps * args.total_batch_size
        epochs = get_windows(args.max_steps - 1, args).stop / train_loader.windows
        plan = f"{args.max_steps} steps of {args.total_batch_size:,} tokens, {total:,} in all"
        print0(f"{plan}, {epochs:.2f} epochs, {process.dtype}, B {train_loader.B}")
        if process.device.type == "cpu" and n > 10**7:
            print0("this takes long on a CPU: --quickstart trains a model that suits it")
        catch_signals(signals)

    # First save and evaluate the model after `step` updates, if due. The last iteration ends there
    intervals = (args.save_every, args.val_every, process.hellaswag_every, args.sample_every)
    start = state.step  # 0, or that of the checkpoint
    must_stop = 0.0  # above 0 once a process has received a signal
    skipped = 0  # updates in a row
    for step in range(start, args.max_steps + 1):
        if must_stop or any(is_due(step, every, args) for every in intervals):
            if step > start and (must_stop or is_due(step, args.save_every, args)):
                save_checkpoint(state, train_loader.lengths, args, process)
            if not must_stop or step == args.max_steps:
                evaluate(state.model, step, val_loader, examples, log, process)
        if must_stop or step == args.max_steps:
            break

        # 1. Accumulate the gradient of total_batch_size tokens, in micro-steps of B sequences
        torch.manual_seed(args.seed + step * process.world_size + process.rank)  # for dropout
        windows = get_windows(step, args)
        grad_accum_steps = math.ceil(len(windows) / (train_loader.B * process.world_size))
        # DDP and FSDP average over the processes, which makes this the mean over all tokens
        scale = process.world_size / (len(windows) * args.seq_len)
        loss_sum = 0.0  # of this process's tokens
        for micro_step, (x, y) in enumerate(train_loader.batches(windows)):  # (B, T) each
            # DDP averages gradients in the last micro-step only, as with no_sync(); FSDP in all
            model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
            with process.autocast():
                micro_loss = model(x, y).sum() * scale
            state.scaler.scale(micro_loss).backward()
            loss_sum += micro_loss.detach()

        # 2. Wait for the results, by which all processes decide alike whether to skip and to stop
        for optimizer in state.optimizers:
            state.scaler.unscale_(optimizer)
        gradients = (p.grad for p in model.parameters() if p.grad is not None)
        total_norm = nn.utils.get_total_norm(gradients)
        received = torch.full_like(loss_sum, len(signals))
        results = torch.stack((loss_sum, whole(total_norm), received)) / process.world_size
        if process.world_size > 1:
            dist.all_reduce(results)
        loss, norm, must_stop = results.tolist()

        # 3. Clip the gradient, as one bad batch could throw the weights off, and update the weights
        lr = get_lr(step, args)
        skipped = 0 if math.isfinite(loss + norm) else skipped + 1
        if skipped == 0:
            if norm > args.grad_clip > 0:
                nn.utils.clip_grads_with_norm_(model.parameters(), args.grad_clip, total_norm)
            update_weights(state.optimizers, lr)
        model.zero_grad()  # now, so that an evaluation has the gradients' memory (not with DDP)
        state.scaler.update()
        state.step = step + 1
        log.record_step(step, loss, lr, norm, skipped > 0)
        # 20, because float16's scaler may need 16 skipped updates to halve 2**16 to 1
        require(skipped < 20, "20 updates in a row were not finite: try a lower --max_lr")

    if step < args.max_steps:
        print0(f"to continue, start {sys.argv[0]} with --resume --log_dir {args.log_dir}")
        return 128 + (signals or [signal.SIGTERM])[0]  # another process may have got the signal
    if args.max_steps > 0:
        print0(f"done: the log is {args.log_dir}/log.txt")
        if args.save_every > 0:  # another seed writes other texts
            print0(f"next: python {sys.argv[0]} --sample --init_from {args.log_dir} --seed 1")
    return 0


# ---- the command line ---------------------------------------------------------------------------

# --quickstart: 0.9M parameters, too few to need a GPU, learn to write like Python's documentation
QUICKSTART = {
    "data_dir": "pydocs", "log_dir": "log/quickstart", "model": "tiny", "seq_len": 64,
    "total_batch_size": 768, "max_steps": 1250, "optimizer": "muon", "val_every": 250,
    "val_tokens": 50000, "hellaswag_every": 0, "sample_every": 625, "prompt": "Return ",
    "temperature": 0.5, "max_new_tokens": 160, "device": "cpu",
}  # fmt: skip

# heading: {flag: (type or choices, default, help)}. To add a flag, add a line; its heading says if
# the value in a checkpoint is kept. A None is replaced in derive_defaults or setup_process
FLAGS = {
    "the model: kept with its weights; --resume refuses other values": {
        "model": (str, "d12", f"size of a new model: {', '.join(SIZES)}"),
        "seq_len": (int, None, "T: tokens in a sequence (default: the model's context)"),
    },
    "what the run is: --resume refuses other values": {
        "total_batch_size": (int, None, "tokens per step (default: what suits max_steps)"),
        "optimizer": (str, "adamw", "adamw, or muon, which changes defaults of the recipe"),
        "schedule": (tuple(SCHEDULES), "cosine", "how the learning rate decays (muon: linear)"),
        "seed": (int, 1337, "random seed of the weights, the data order and the samples"),
        "shuffle": (bool, True, "read the data in a new order every epoch"),
        "overfit_one_batch": (bool, False, "train on the first batch only, to debug"),
    },
    "the recipe: --resume keeps it, unless you give another value": {
        "data_dir": (str, "edu_fineweb10B", "folder that fineweb.py made; --resume: same texts"),
        "max_steps": (int, 19073, "optimizer steps, 0: only evaluate"),  # 10B tokens / 2**19
        "warmup_steps": (int, None, "steps of rising rate (default: a third, up to 715; muon: 60)"),
        "max_lr": (float, None, "peak rate (default: GPT-3's for the size; muon: 10 times that)"),
        "final_lr_frac": (float, 0.1, "rate where the decay ends, as a share of max_lr (muon: 0)"),
        "weight_decay": (float, 0.1, "weight decay of matrices and embeddings (muon: 0.2)"),
        "grad_clip": (float, 1.0, "clip the gradient norm to this, 0: never"),
    },
    "evaluation, samples and checkpoints: --resume keeps these, unless you give other values": {
        "val_every": (int, None, "validate every this many steps (default: 131M tokens; 0: never)"),
        "val_tokens": (int, 20 * 2**19, "tokens to validate on"),
        "hellaswag_every": (int, None, "score HellaSwag (default: val_every, on CUDA; 0: never)"),
        "sample_every": (int, None, "print samples (default: every 131M tokens; 0: never)"),
        "prompt": (str, "Hello, I'm a language model,", "what samples begin with"),
        "num_samples": (int, 4, "how many samples to print"),
        "max_new_tokens": (int, 64, "tokens to add to the prompt"),
        "temperature": (float, 1.0, "0: always the most likely token"),
        "top_k": (int, 50, "draw from this many most likely tokens, 0: from all"),
        "save_every": (int, 1000, "save every this many steps and at the end, 0: on signals only"),
        "keep": (int, 2, "how many checkpoints to keep, 0: all; adamw: 12 bytes a parameter"),
    },
    "the machine: --resume keeps what you gave; what the script chose, it chooses again": {
        "device": (("auto", "cuda", "mps", "cpu"), "auto", "where to compute"),
        "dtype": (("auto", "bfloat16", "float16", "tf32", "float32"), "auto", "precision"),
        "compile": (bool, None, "use torch.compile (default: on CUDA, if Triton is installed)"),
        "batch_size": (int, 0, "B: at most this many sequences at a time, 0: what fits"),
        "recompute": (bool, False, "save memory: compute blocks again in the backward pass"),
        "zero": ((0, 2, 3), 0, "shard all state over GPUs; 3 also frees gathered weights early"),
    },
    "what to do now: for this command only": {
        "log_dir": (str, "log", "for log.txt and checkpoints: a folder that all machines see"),
        "init_from": (str, "scratch", "gpt2 ... gpt2-xl, a checkpoint, a log_dir, an HF folder"),
        "resume": (bool, False, "continue log_dir's newest checkpoint; without one, start"),
        "overwrite": (bool, False, "delete the run in log_dir first"),
        "quickstart": (bool, False, "a small GPT on Python's documentation; alone, it starts anew"),
        "sample": (bool, False, "print what the model of --init_from writes, then exit"),
        "export_hf": (str, None, "folder: write the model of --init_from for transformers"),
    },
}
MODEL, RUN, RECIPE, EVALUATION, MACHINE, _ = FLAGS  # the headings


def parse(argv: list, *defaults: dict) -> argparse.Namespace:
    """Return every flag: from argv, or else from the last of the defaults that has it, or FLAGS."""
    # SUPPRESS leaves out the usage, so that a mistake is reported in one line
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    examples = __doc__[: __doc__.index("The file follows")]
    parser = argparse.ArgumentParser("train_gpt2.py", argparse.SUPPRESS, examples, **style)
    for heading, flags in FLAGS.items():
        group = parser.add_argument_group(heading)
        for flag, (kind, default, text) in flags.items():
            options = {"help": text if default is None else f"{text} (default: {default})"}
            if kind is bool:
                options["action"] = argparse.BooleanOptionalAction
            elif isinstance(kind, tuple):
                options.update(choices=kind, type=type(kind[0]))
            else:
                options["type"] = kind
            group.add_argument(f"--{flag}", default=default, **options)
    for known in defaults:
        parser.set_defaults(**known)
    return parser.parse_args(argv)


def decide_args(argv: list) -> tuple:
    """Return every flag, and the source of the weights, {} for new ones. A flag is taken from the
    first that has it: the command line, the source, QUICKSTART, derive_defaults, FLAGS."""
    args = parse(argv)
    preset = QUICKSTART if args.quickstart else {}
    if args.sample or args.export_hf:  # no training. The last value counts
        argv = [*argv, "--max_steps=0", "--val_every=0", "--hellaswag_every=0", "--sample_every=1"]
    source, kept = find_source(parse(argv, preset))
    args = parse(argv, preset, kept)
    args = parse(argv, derive_defaults(args), preset, kept)
    if argv == ["--quickstart"]:  # with any other flag, only --overwrite replaces a run
        args.overwrite = True
    check_args(args)
    if args.resume and not list_checkpoints(args.log_dir):
        print0(f"{args.log_dir} has no checkpoint: a new run begins")
        args.resume = False
    if args.resume:
        check_resume(args, source)
    return args, source


def find_source(args) -> tuple[dict, dict]:
    """Return what the weights come from, {} for new ones, and those of its flags that are kept."""
    checkpoints = list_checkpoints(args.log_dir)
    if args.resume and checkpoints:
        source = load_checkpoint(checkpoints[-1])
        headings = [MODEL, RUN, RECIPE, EVALUATION, MACHINE]
    elif args.init_from != "scratch" or args.sample or args.export_hf:
        source = load_source(args.init_from)
        headings = [MODEL] if args.max_steps > 0 else [MODEL, RUN, RECIPE, EVALUATION]
    else:
        return {}, {}
    flags = [flag for heading in headings for flag in FLAGS[heading] if flag in source["args"]]
    return source, {flag: source["args"][flag] for flag in flags}


def derive_defaults(args) -> dict:
    """Return the defaults that depend on other flags."""
    *_, context, gpt3_rate = SIZES.get(args.model, SIZES["d12"])  # a folder's model has no size
    # Short runs end lower with small batches: 2000 steps of 2**16 tokens, 4000 of 2**17, 19073 of
    # 2**19 = 524288, as GPT-3's. (27.5 is 2**19 / 19073.) See tests/benchmarks/runs
    exponent = round(math.log2(27.5 * max(1, args.max_steps)))
    tokens = args.total_batch_size or 2 ** min(19, max(15, exponent))
    # An evaluation every 131M tokens, which are 250 steps of 2**19, takes about 4% of the time
    every = max(1, 250 * 2**19 // tokens)
    # GPT-3 warms up for 375M tokens, 715 steps of 2**19; a short run for a third of its steps
    recipe = {"max_lr": gpt3_rate, "warmup_steps": min(715, args.max_steps // 3)}
    if args.optimizer == "muon":  # from tests/benchmarks/runs/search.csv
        recipe = {"max_lr": 10 * gpt3_rate, "warmup_steps": min(60, args.max_steps // 3)}
        recipe |= {"schedule": "linear", "weight_decay": 0.2, "final_lr_frac": 0.0}
    sizes = {"seq_len": context, "total_batch_size": tokens}
    return recipe | sizes | {"val_every": every, "sample_every": every}


def check_args(args):
    """Raise UserError for impossible values, and where the run would damage another one."""
    for flag, value in vars(args).items():
        is_possible = not isinstance(value, int | float) or 0 <= value < math.inf
        require(is_possible, f"--{flag} {value}: expected a finite number >= 0")
    modes = (args.resume, args.overwrite, args.max_steps == 0)
    require(sum(modes) < 2, "--resume, --overwrite and --max_steps 0 (--sample) exclude each other")
    is_free = not list_checkpoints(args.log_dir) and not Path(args.log_dir, "log.txt").exists()
    choice = "--resume continues it, --overwrite deletes it, another --log_dir leaves it alone"
    require(is_free or any(modes), f"{args.log_dir} holds a run: {choice}")
    is_elastic = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False"  # machines may join
    is_once = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0" and not is_elastic
    require(is_once or not args.overwrite, "torchrun would repeat --overwrite: use --resume")
    path = Path(args.init_from).resolve()
    is_own = path.exists() and Path(args.log_dir).resolve() in (path, path.parent)
    require(not (is_own and args.overwrite), "this would delete what --init_from names")


def check_resume(args, source):
    """Raise UserError if the flags would make the run in log_dir another run."""
    known = {flag: row[1] for flags in FLAGS.values() for flag, row in flags.items()}
    unknown = sorted(source["args"].keys() - known)
    require(not unknown, f"--resume: {args.log_dir} holds a run with {unknown}, not in this script")
    for flag in [*FLAGS[MODEL], *FLAGS[RUN]]:
        new = getattr(args, flag)
        old = source["args"].get(flag, known[flag])  # an older script may not have had the flag
        require(new == old, f"--resume: {args.log_dir} holds a run with --{flag} {old}, not {new}")
    found = f"{args.log_dir} is at step {source['step']}"
    require(source["step"] <= args.max_steps, f"{found}, beyond --max_steps {args.max_steps}")
    print0(f"{found} of {args.max_steps}, so far in {source['dtype']}")


def main(argv=None):
    """Run the command line and exit: with 0, 2 for a UserError, or 128 plus a signal's number."""
    try:
        args, source = decide_args(sys.argv[1:] if argv is None else argv)
        if args.export_hf:
            export_hf(GPT.from_pretrained(args.init_from), args.export_hf)
            print0(f"wrote {args.export_hf}, a model of sequences of {args.seq_len} tokens")
            sys.exit(0)
        process = setup_process(args)
        prepared = prepare(args, source, process)
        del source  # a mapped file: until then, deleting it would free no disk
        status = train(args, process, *prepared)
        if process.world_size > 1:
            dist.destroy_process_group()
    except (UserError, ConnectionError) as error:  # the latter from hellaswag.py
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        status = 2
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        # Without Python's cleanup, which could wait for the others, or crash in a thread of PyTorch
        os._exit(status)
    sys.exit(status)


# ---- appendix A: the loss as one kernel ---------------------------------------------------------
# The logits are the largest tensor, 6.6 GB in bfloat16 at B 64. This kernel overwrites them with
# the gradient. With PyTorch's compiled loss instead, a step takes 3 to 4% longer on an H100
if triton:

    @triton.jit
    def load_block(
        row, start: tl.constexpr, V: tl.constexpr, size: tl.constexpr, eviction: tl.constexpr
    ):
        """Return row[start : start + size] in float32, with -inf from V on."""
        # Only the last block is masked, because a mask costs time in this kernel
        columns = start + tl.arange(0, size)
        if start + size <= V:
            x = tl.load(row + columns, eviction_policy=eviction)
        else:
            x = tl.load(row + columns, columns < V, -float("inf"), eviction_policy=eviction)
        return x.to(tl.float32)

    @triton.jit
    def cross_entropy_kernel(logits, targets, losses, V: tl.constexpr, padded_V: tl.constexpr):
        """Replace one row of logits (N, padded V) by its gradient, and write the row's loss."""
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
        #    stored this element in 2
        tl.debug_barrier()
        p = tl.exp(x_target - log_sum) - tl.where(target < 0, 0.0, 1.0)
        tl.store(at_target, p.to(logits.dtype.element_ty))

    # A graph with this operator can be cached. With an autograd.Function, it would not be
    @torch.library.triton_op("gpt2::cross_entropy", mutates_args=())
    def fused_cross_entropy(
        x: Tensor, weight: Tensor, targets: Tensor, V: int
    ) -> tuple[Tensor, Tensor]:
        """Return the losses, (N,), and their gradients, (N, padded V): softmax - onehot."""
        logits = x @ weight.to(x.dtype).T
        losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
        kernel = torch.library.wrap_triton(cross_entropy_kernel)
        kernel[(len(x),)](logits, targets, losses, V, len(weight), num_warps=16)
        return losses, logits  # the kernel has put the gradient in their place

    def keep_for_backward(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2], output[1])
        ctx.set_materialize_grads(False)  # no zeros, 6.6 GB, for the output that is not used

    def backward_cross_entropy(ctx, grad: Tensor, _) -> tuple:
        """Return the gradients of x and of the weight, given that of the losses, (N,) float32."""
        x, weight, dlogits = ctx.saved_tensors
        grad = grad[:, None]  # (N, 1)
        # grad multiplies x, (N, C), rather than dlogits, (N, padded V), which is far larger
        dweight = torch.mm(dlogits.T, (x * grad).to(x.dtype), out_dtype=torch.float32)
        dx = (dlogits @ weight.to(x.dtype) * grad).to(x.dtype)
        return dx, dweight, None, None

    fused_cross_entropy.register_autograd(backward_cross_entropy, setup_context=keep_for_backward)


# ---- appendix B: Muon ---------------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized. Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon, and
    for the scale of the updates Liu et al. 2025, arXiv:2502.16982."""

    # The gradient of a matrix has few large singular values and many small ones, so a step along it
    # moves the matrix in few directions. Muon averages the gradients and then makes all singular
    # values about 1, so that every direction learns. Matrices of one shape are stacked, to be fast

    def __init__(self, params: list, lr: float, weight_decay: float, momentum: float = 0.9):
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__([group for group in params if group["params"]], defaults)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure=None):
        """Update every matrix. On the way, its gradient is overwritten by the update."""
        updates = {}
        matrices = []  # parts of the updates, which are made orthogonal in place
        for group in self.param_groups:
            averages = [self.state[p]["momentum_buffer"] for p in group["params"]]
            gradients = [p.grad for p in group["params"]]
            torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
            # Nesterov's momentum: the average as it would be after the same gradient once more
            torch._foreach_lerp_(gradients, averages, group["momentum"])
            for p in group["params"]:
                updates[p] = whole(p.grad)
                # c_attn is divided into q, k and v. If they were made orthogonal as one matrix, the
                # largest of them would take most of the update
                matrices += updates[p].split(group.get("rows", len(p)))
        for shape in sorted({matrix.shape for matrix in matrices}):
            make_orthogonal([matrix for matrix in matrices if matrix.shape == shape])
        for group in self.param_groups:
            parts = [shard_as(p, updates[p]) for p in group["params"]]
            torch._foreach_mul_(group["params"], 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(group["params"], parts, alpha=-group["lr"])


def make_orthogonal(matrices: list):
    """Overwrite matrices of one shape by their orthogonalized versions, scaled to be updates."""
    first = matrices[0]
    # bfloat16 is exact enough. A CPU and a GPU without it compute faster in float32
    has_bfloat16 = first.is_cuda and torch.cuda.get_device_capability() >= (8, 0)
    dtype = torch.bfloat16 if has_bfloat16 else torch.float32
    stack = first.new_empty(len(matrices), *first.shape, dtype=dtype)
    torch._foreach_copy_(stack.unbind(), matrices)
    if dist.is_initialized():  # every process computes a share of them
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        updates = torch.zeros_like(stack)
        updates[mine] = orthogonalize(stack[mine])
        dist.all_reduce(updates)  # each matrix is zero in all processes but one
    else:
        updates = orthogonalize(stack)
    # An orthogonal matrix has entries of root mean square max(rows, columns) ** -0.5. Scale them
    # to 0.2, as large as AdamW's updates are, so that one rate serves both optimizers
    updates *= 0.2 * max(stack.shape[1:]) ** 0.5
    torch._foreach_copy_(matrices, updates.unbind())


def orthogonalize(stack: Tensor) -> Tensor:
    """Return matrices with the singular vectors of those in the stack, (n, rows, columns), but with
    singular values near 1. Each of five steps of a Newton-Schulz iteration applies the polynomial
    3.4445 s - 4.7750 s^3 + 2.0315 s^5 to all singular values s, without computing them. All but
    tiny ones end between 0.7 and 1.2. Source: as for Muon."""
    is_tall = stack.size(1) > stack.size(2)
    x = stack.mT if is_tall else stack  # x @ x.mT is then the smaller of two products
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)  # no singular value is above 1 now
    for _ in range(5):
        a = x @ x.mT  # s^2
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)  # -4.7750 s^2 + 2.0315 s^4
        b.diagonal(dim1=1, dim2=2).add_(3.4445)  # adding 3.4445 x below would copy x
        x = b @ x
    return x.mT if is_tall else x


# ---- appendix C: weights in Hugging Face's format, in and out -----------------------------------

HUGGING_FACE = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


def change_layout(weights: dict, rows: int) -> dict:
    """Change from Hugging Face's layout to ours, or from ours to theirs: transpose the matrices of
    the blocks, and pad or cut the embeddings of tokens to this number of rows."""
    changed = {}
    for name, p in weights.items():
        if name.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight")):
            p = p.T  # (in, out) there, (out, in) here
        if name in ("transformer.wte.weight", "lm_head.weight"):
            p = F.pad(p, (0, 0, 0, rows - len(p)))  # a negative number cuts
        changed[name] = p
    return changed


def load_hf(name: str) -> dict:
    """Return what load_source does for a GPT-2 of transformers: a folder, or a name on the hub."""
    from transformers import AutoConfig, GPT2LMHeadModel  # training does not need transformers

    with loading(name):
        c = AutoConfig.from_pretrained(name)  # reads config.json, which names no tokenizer
    tokenizer = {50257: "gpt2", 257: "bytes"}.get(c.vocab_size)
    found = f"{name} is a {c.model_type} model with {c.vocab_size} tokens"
    require(c.model_type == "gpt2" and tokenizer, f"{found}, expected gpt2 with 50257 or 257")
    with loading(name):
        theirs = GPT2LMHeadModel.from_pretrained(name, dtype=torch.float32)
    shape = (c.n_layer, c.n_head, c.n_embd, c.n_positions)
    ours = GPT(GPTConfig(*shape, c.vocab_size, tokenizer, eot=c.vocab_size - 1), seed=None)
    weights = change_layout(theirs.state_dict(), len(ours.lm_head.weight))
    load_weights(ours, weights)
    require(same_outputs(ours, theirs), f"{name} has other logits than this script's GPT")
    sizes = [size for size, values in SIZES.items() if values[:4] == shape] or [name]
    args = {"model": sizes[0], "seq_len": c.n_positions}
    return {"config": asdict(ours.config), "model": weights, "args": args}


def export_hf(model, folder):
    """Write a folder that transformers loads offline, if it computes the same logits from it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    require(not Path(folder).is_file(), "--export_hf: expected a folder, found a file")
    c = model.config
    shape = {"n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd}
    shape |= {"n_positions": c.block_size, "vocab_size": c.vocab_size}
    theirs = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=c.eot, eos_token_id=c.eot))
    load_weights(theirs, change_layout(model.state_dict(), c.vocab_size))
    require(same_outputs(model, theirs), "not a GPT-2: its logits or losses differ in transformers")
    theirs.save_pretrained(folder)  # config.json and model.safetensors
    export_tokenizer(c, folder)


@torch.no_grad()
def same_outputs(ours: GPT, theirs: nn.Module) -> bool:
    """Return whether both models compute the same logits and losses for a text of many tokens."""
    c = ours.config
    x = torch.arange(c.block_size)[None] % c.vocab_size  # (1, T)
    logits = theirs.eval()(x).logits  # (1, T, V)
    losses = F.cross_entropy(logits[0], x[0], reduction="none")  # (T,)
    errors = [ours.eval()(x) - logits, ours(x, x)[0] - losses]
    return all(error.abs().max() < 1e-4 * logits.abs().max() for error in errors)


def export_tokenizer(config, folder: str):
    """Write the tokenizer as a GPT2Tokenizer."""
    from transformers import GPT2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode, generate_merges

    tokenizer = get_tokenizer(config.tokenizer)
    spelling = bytes_to_unicode()  # Hugging Face writes each byte as a printable character
    tokens = [tokenizer.decode_single_token_bytes(rank) for rank in range(config.eot)]
    vocabulary = {b.decode("latin-1").translate(spelling): i for i, b in enumerate(tokens)}
    merges = generate_merges(vocabulary, None)  # from the ranks: tiktoken stores no merges
    vocabulary["<|endoftext|>"] = config.eot
    GPT2Tokenizer(vocabulary, merges).save_pretrained(folder)


if __name__ == "__main__":
    if hasattr(sys.stdout, "reconfigure"):  # not every console can print what a model writes
        sys.stdout.reconfigure(errors="replace")
    main()
