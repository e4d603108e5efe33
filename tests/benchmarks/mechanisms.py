"""The mechanisms of train_gpt2.py, each with a way to take it away, for `measure.py price`."""

from pathlib import Path
from typing import NamedTuple

SCRIPT = (Path(__file__).resolve().parents[2] / "train_gpt2.py").read_text()


class Row(NamedTuple):
    """A mechanism, and how to take it away: by flags, or by another text in the script."""

    name: str
    spans: list  # the lines that are there for it: from a line with this text to one with that text
    without: str = ""
    base: str = ""  # flags of both runs
    edits: tuple = ()  # (old text, new text) pairs; each old text occurs once in the script
    measures: str = "speed"  # speed (with memory), loss, or both


MUON = "--optimizer muon"
PLAIN_LOSS = ("if triton and x.is_cuda and x.dtype == torch.bfloat16:", "if False:")
FLOAT32_STREAM = (
    'torch.bfloat16 if process.dtype == "bfloat16" else torch.float32',
    "torch.float32",
)
TO_KERNEL = ("self.transformer.ln_f(x).to(x.dtype)", "self.transformer.ln_f(x).to(torch.bfloat16)")
SDPA = "F.scaled_dot_product_attention(q, k, v, is_causal=True)"
SCORES = (
    "(q @ k.mT / hs**0.5).masked_fill(torch.ones(T, T, device=x.device).triu(1) > 0, -math.inf)"
)
FUSED = '"betas": (0.9, 0.95), "fused": True}'
NESTEROV = 'torch._foreach_lerp_(updates, averages, group["momentum"])'
OWN_MUON = "Muon(groups, lr=learning_rate, weight_decay=weight_decay)"
THEIRS = f"torch.optim.{OWN_MUON[:-1]}, momentum=0.9, adjust_lr_fn='match_rms_adamw')"
TIE = "self.lm_head.weight = self.transformer.wte.weight"
# the best settings tried
ADAMW = "--optimizer adamw --max_lr 4e-3 --schedule wsd --final_lr_frac 0 --warmup_steps 52"

ROWS = [
    Row(
        "TF32 instead of float32",
        [("# high: TF32", "torch.set_float32_matmul_precision")],
        "--dtype float32",
        "--dtype tf32",
    ),
    Row(
        "bfloat16 instead of TF32",
        [
            ("def autocast(", "return torch.autocast("),
            ("# Triton and tensor cores", 'dtype = "bfloat16"'),
        ],
        "--dtype tf32",
    ),
    Row(
        "torch.compile",
        [
            ("compile = args.compile  #", "compile = capability"),
            ("model.compile(dynamic", "model.compile(dynamic"),
        ],
        "--no-compile",
    ),
    Row(
        "FlashAttention",
        [("# This is softmax(", SDPA)],
        edits=((SDPA, f"{SCORES}.softmax(-1) @ v"),),
    ),
    Row(
        "residual stream in bfloat16",
        [("# A bfloat16 residual stream", "residual_dtype = torch.bfloat16 if"), TO_KERNEL[:1] * 2],
        edits=(FLOAT32_STREAM, TO_KERNEL),
    ),
    Row(
        "loss kernel",
        [
            ("# ---- appendix A", "fused_loss.register_autograd"),
            ("# Appendix A is faster", "return fused_loss"),
        ],
        edits=(PLAIN_LOSS,),
    ),
    Row(
        "the last two together",
        [],
        edits=(PLAIN_LOSS, FLOAT32_STREAM),
    ),
    Row(
        "padded vocabulary",
        [("# Pad 50257 to", "padded_vocab_size = math.ceil")],
        edits=(("math.ceil(config.vocab_size / 128) * 128", "config.vocab_size"),),
    ),
    Row(
        "fused AdamW",
        [("# These betas average", FUSED)],
        edits=((FUSED, FUSED.replace("True", "False")),),
    ),
    Row(
        "pinned memory",
        [("is_cuda = self.process.device.type", "rows = rows.pin_memory()")],
        edits=(("rows = rows.pin_memory()", "pass"),),
    ),
    Row(
        "recompute",
        [("if self.recompute and", "x = recompute_in_backward")],
        "--no-recompute",
        "--recompute",
    ),
    Row(
        "tied embeddings",
        [("# Use one matrix for", TIE)],
        edits=((TIE, "pass"),),
        measures="both",
    ),
    Row(
        "Muon instead of AdamW",
        [
            ("# ---- appendix B", "    return x"),
            ("# Muon (appendix B)", "return [Muon"),
        ],
        ADAMW,
        MUON,
        measures="both",
    ),
    Row(
        "our own Muon instead of torch.optim's",
        [("class Muon(", "torch._foreach_copy_(matrices")],
        base=MUON,
        edits=((OWN_MUON, THEIRS),),
        measures="both",
    ),
    Row(
        "q, k and v apart in Muon",
        [("# q, k and v apart", "matrices += p.grad.split")],
        base=MUON,
        edits=(('group.get("split_sizes", len(p))', "len(p)"),),
        measures="both",
    ),
    Row(
        "Nesterov's momentum",
        [("# Nesterov's momentum", NESTEROV)],
        edits=((NESTEROV, "torch._foreach_copy_(updates, averages)"),),
        measures="loss",
    ),
    Row(
        "a share of the rate for projections",
        [
            ('elif name.endswith("c_proj', "projections.append"),
            ("# All projections add", '"lr_share": 1 /'),
        ],
        edits=(('"lr_share": 1 / self.config.n_layer', '"lr_share": 1.0'),),
        measures="loss",
    ),
    Row(
        "warmup",
        [("# It rises while", "return args.max_lr *")],
        "--warmup_steps 0",
        measures="loss",
    ),
    Row(
        "warmup, with AdamW",
        [],
        "--warmup_steps 0",
        ADAMW,
        measures="loss",
    ),
    Row(
        "decay of the rate",
        [('"linear": lambda', '"linear": lambda')],
        "--schedule constant",
        measures="loss",
    ),
    Row(
        "weight decay",
        [("# Matrices and embeddings decay", "decay = {")],
        "--weight_decay 0",
        measures="loss",
    ),
    Row(
        "gradient clipping",
        [("if args.grad_clip > 0 and norm", "clip_grads_with_norm_")],
        "--grad_clip 0",
        measures="loss",
    ),
    Row(
        "shuffling",
        [("def window_order(", "return np.random.RandomState")],
        "--no-shuffle",
        measures="loss",
    ),
    Row(
        "smaller residual projections at the start",
        [
            ("# 2 * n_layer projections", "residual_std = "),
            ('if name.endswith("c_proj', "std = residual_std"),
        ],
        "--no-zero_init",
        "--no-zero_init",
        edits=(("std = residual_std", "std = 0.02"),),
        measures="loss",
    ),
]


def change(script: str, edits) -> str:
    """Return the script with other texts: (old, new) pairs, of which each old one occurs once."""
    for old, new in edits:
        assert script.count(old) == 1, f"the script has {script.count(old)} times {old}"
        script = script.replace(old, new)
    return script


def count_lines(spans) -> int:
    """Return how many lines of the script the spans have."""
    lines = SCRIPT.splitlines()
    total = 0
    for first, last in spans:
        start = next(i for i, line in enumerate(lines) if first in line)
        total += next(i for i, line in enumerate(lines) if last in line and i >= start) - start + 1
    return total
