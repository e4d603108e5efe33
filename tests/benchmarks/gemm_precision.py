"""
Time the matrix products of a GPT's forward pass in float32, in TF32, and with 16-bit numbers in and
float32 out: what precision gives on this GPU, and what it costs in exactness.

    python tests/benchmarks/gemm_precision.py [--model d12] [-b 4] [-t 256]

An error is the norm of the difference from float64, relative to the result's.
"""

import argparse
import math
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt2


def time_ms(work, repeats: int = 20) -> float:
    """Return the median time of work() in ms."""
    events = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="d12", choices=train_gpt2.SIZES)
    parser.add_argument("-b", "--batch_size", type=int, default=4)
    parser.add_argument("-t", "--seq_len", type=int, default=256)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU: a CPU's matrix products have one speed")
    C, N = train_gpt2.SIZES[args.model][2], args.batch_size * args.seq_len
    V = math.ceil(train_gpt2.GPTConfig().vocab_size / 128) * 128
    run = train_gpt2.setup_run(argparse.Namespace(device="auto", dtype="auto", compile=False))
    half = torch.float16 if run.dtype == "float32" else getattr(torch, run.dtype)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {N} tokens, 16 bits: {half}")
    print(f"{'product':26}{'':8}{'ms':>9}{'TFLOP/s':>9}{'error':>10}")
    shapes = {
        "c_attn": (C, 3 * C),
        "attn.c_proj": (C, C),
        "c_fc": (C, 4 * C),
        "mlp.c_proj": (4 * C, C),
    }
    for name, (K, M) in (shapes | {"lm_head": (C, V)}).items():
        torch.manual_seed(0)
        a, b = torch.randn(N, K, device="cuda"), torch.randn(K, M, device="cuda")
        exact = a.double() @ b.double()
        a16, b16 = a.to(half), b.to(half)
        products = {
            "float32": ("highest", lambda a=a, b=b: a @ b),
            "TF32": ("high", lambda a=a, b=b: a @ b),
            "16 bits": ("high", lambda a=a16, b=b16: torch.mm(a, b, out_dtype=torch.float32)),
        }
        for kind, (precision, product) in products.items():
            torch.set_float32_matmul_precision(precision)
            error = ((product() - exact).norm() / exact.norm()).item()
            ms = time_ms(product)
            what = f"{name} {N}x{K}x{M}" if kind == "float32" else ""
            print(f"{what:26}{kind:8}{ms:9.3f}{2 * N * K * M / ms / 1e9:9.1f}{error:10.1e}")


if __name__ == "__main__":
    main()
