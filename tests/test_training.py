"""Promise 4, and the recipe: what an update is, which updates are skipped, what a run writes."""

import functools
import itertools
import math
import os
import re
import sys
from argparse import Namespace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import (
    DATA,
    SMALL,
    load,
    main,
    make_process,
    needs_data,
    new_model,
    read_log,
    state,
    steps,
    write_meta,
)
from test_hellaswag import make_examples, write
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim import SGD

import fineweb
import hellaswag
import train_gpt2
from train_gpt2 import DEFAULTS, GPT, Muon, get_lr

# of a run of ten steps: seed 1337, data of write_shards, 2 layers, 2 heads, 32 channels, T=16
GOLDEN = [5.555872, 5.223955, 4.872314, 4.361290, 3.934858]
GOLDEN += [3.585283, 3.331900, 3.185685, 3.087472, 3.022887]
NORM = 2.4313  # of the first gradient


def train(flags: str, log_dir="log") -> dict:
    """Train in this process and return log.txt. Nothing is validated unless the flags say so."""
    assert main(f"--val_every 0 {flags} --log_dir {log_dir}") == 0
    return read_log(log_dir)


def test_ten_golden_losses(shards):
    log = train("--max_steps 10 --warmup_steps 2")
    assert [log["train"][step] for step in range(10)] == pytest.approx(GOLDEN, abs=2e-4)
    assert log["norm"][0] == pytest.approx(NORM, rel=1e-3)


@pytest.mark.slow
@needs_data
def test_the_quickstarts_recipe_learns_as_well_as_it_did(tmp_path):
    """20 seeds ended at 2.229 ± 0.007 nats a byte; unshuffled at 2.36, with half the rate at 2.34."""
    play = ["--files", str(DATA / "tinyshakespeare.txt"), "--tokenizer", "bytes"]
    fineweb.main([*play, "--out", str(tmp_path / "play")])
    flags = f"--quickstart --data_dir {tmp_path / 'play'} --log_dir {tmp_path / 'log'}"
    flags += " --val_every 200 --max_steps 200 --total_batch_size 768 --val_tokens 50000"
    with pytest.raises(SystemExit, match="0"):
        train_gpt2.main(f"{flags} --num_samples 0".split())
    assert read_log(tmp_path / "log")["val"][200] < 2.25


def test_evaluations_and_samples_change_nothing_of_the_training(shards, monkeypatch):
    lengths, modes, forward = itertools.cycle(range(3, 8)), set(), GPT.forward

    def spy(self, *args, **options):
        modes.add((self.training, torch.is_grad_enabled()))
        return forward(self, *args, **options)

    def score(model, examples, device, rank, world_size):
        with torch.no_grad():  # HellaSwag's batches have many shapes
            model(torch.zeros(2, next(lengths), dtype=torch.int64, device=device))
        return Namespace(acc_norm=3, n=4)

    fake = Namespace(fetch=lambda: "path", load=Mock(return_value="examples"), score=score)
    monkeypatch.setitem(sys.modules, "hellaswag", fake)
    monkeypatch.setattr(GPT, "forward", spy)
    off = train("--max_steps 6 --seq_len 8", "a")
    often = "--val_every 1 --num_samples 2 --hellaswag on --save_every 1"
    on = train(f"--max_steps 6 --seq_len 8 {often}", "b")
    assert fake.load.call_args.args[2] == 8
    assert on["train"] == off["train"] and on["norm"] == off["norm"]
    assert on["hella"] == dict.fromkeys(range(7), 0.75) and list(on["val"]) == list(range(7))
    assert state("a", 6) == state("b", 6)
    # (training mode, gradients on): dropout, say, in training alone
    assert modes == {(True, True), (False, True), (False, False)}


@pytest.mark.slow
def test_compilation_changes_nothing_of_the_training(shards, monkeypatch):
    """Validation takes the same graph, but keeps no activations, and, alone, computes no gradients."""
    backend = CompileCounterWithBackend("aot_eager")
    compile = functools.partialmethod(torch.nn.Module.compile, backend=backend)
    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    kept, stack = [], torch.stack
    spy = lambda xs: kept.extend((x, torch.is_grad_enabled()) for x in xs) or stack(xs)  # noqa: E731
    monkeypatch.setattr(torch, "stack", spy)
    logs, counts = {}, {}
    often = "--recompute --val_every 1 --num_samples 2"
    modes = {
        "eager": f"--compile off {often}",
        "on": f"--compile on {often}",
        "off": "--compile on",
    }
    for name, flags in modes.items():
        torch.compiler.reset()
        backend.clear()
        logs[name] = train(f"--max_steps 4 {flags}", name)
        counts[name] = backend.frame_count
        assert load(name, 4)["model"].keys() == GPT(SMALL).state_dict().keys()
    assert logs["on"]["train"] == logs["off"]["train"]
    assert state("on", 4) == state("off", 4)
    for stream in ("train", "val", "norm"):
        assert logs["on"][stream] == pytest.approx(logs["eager"][stream], abs=1e-4, rel=1e-3)
    assert counts == {"eager": 0, "on": 1, "off": 1}
    assert {x.requires_grad for x, _ in kept} == {False}
    kept.clear()
    assert main("--max_steps 0 --compile on --init_from on") == 0
    assert kept and not any(is_on for _, is_on in kept)


@pytest.mark.parametrize("own, n, epochs", [("", 48, 1), ("--overfit_one_batch", 16, 3)])
def test_each_window_is_read_once(shards, monkeypatch, own, n, epochs):
    read, get = {True: [], False: []}, train_gpt2.DataLoaderLite.get_window
    spy = lambda self, n: (read[self.seed is None].append(n), get(self, n))[1]  # noqa: E731
    monkeypatch.setattr(train_gpt2.DataLoaderLite, "get_window", spy)
    train(f"--max_steps 3 --val_every 3 --batch_size 4 {own}")
    assert read == {False: [*range(n)] * epochs, True: [*range(40)] * 2}


def test_the_console_shows_a_step_a_second(shards, monkeypatch, capsys, break_losses):
    """And the first, last and skipped ones. log.txt has all. A validation of 9 s is not in dt."""
    break_losses(lambda n, losses: losses * math.nan if n == 6 else losses)
    # It is read twice a step: a step begins when the one before it ends. Step 6 takes 8 s more
    ticks = (100 + n / 4 + 8 * (n >= 43) for n in itertools.count(1) for _ in range(2))
    clock = itertools.chain([100.0], ticks)
    monkeypatch.setattr(train_gpt2.time, "perf_counter", lambda: next(clock))
    validate = lambda *_: (sum(next(clock) for _ in range(72)), 1.0)  # noqa: E731
    monkeypatch.setattr(train_gpt2, "validate", validate)
    monkeypatch.setattr(train_gpt2, "peak_tokens_per_second", lambda *_: 2048)
    log = train("--max_steps 15 --val_every 15")
    assert list(log["train"]) == list(range(15)) and list(log["val"]) == [0, 15]
    number = r"\d+\.\d{4}"
    form = rf"0 total_batch_size 256\n0 vocab_size 257\n0 val {number}\n0 bpb {number}\n0 train \d\.\d{{6}}\n"
    form += rf"0 lr \d\.\d{{4}}e-\d\d\n0 norm {number}\n0 dt 250\.00\n1 train "
    assert re.match(form, Path("log/log.txt").read_text())
    out = capsys.readouterr().out
    assert "2 layers, 38,272 parameters, tokens of bytes, on 1 x cpu\n" in out
    assert "15 steps of 256 tokens, 3,840 in all, 1.74 epochs, float32, B 16\n" in out
    line = rf"step +(\d+)/15 \| loss: \d\.\d{{6}} \| lr \d\.\d{{4}}e-\d\d \| norm: {number} "
    line += r"\| dt: 250\.00ms \| tok/sec: 1024 \| mfu: 50\.0%(?: \| 0:00:0(\d) left)?\n"
    assert re.findall(line, out) == [("0", ""), ("4", "2"), ("10", "1"), ("14", "0")]
    skipped = r"step     6/15 \| loss: nan .*: 8250\.00ms \| .* \| update skipped \| 0:01:06 left\n"
    assert re.search(skipped, out)
    assert out.count(" | loss: ") == 5
    assert re.search(rf"step    15/15 \| val loss: {number} \| bits per byte: {number}\n", out)


def test_bits_per_byte_are_those_of_the_text(shards):
    """All bits of the targets, over the bytes of their text. <|endoftext|> and no target have none."""
    text = ["", "ab", "c", "ab", "ü", "", "abc"] * 99
    tokenizer = "own " + " ".join(word.encode().hex() for word in ("ab", "ü", "abc"))
    ids = {"": 259, "ab": 256, "ü": 257, "abc": 258, "c": ord("c")}
    tokens = np.array([ids[word] for word in text], np.uint16)
    for split in ("val", "train"):
        np.save(next(shards.glob(f"*{split}*")), tokens)
    write_meta(shards, tokenizer, 260)
    log = train("--max_steps 2 --val_every 1 --val_tokens 600 --batch_size 5")
    n = 600 // 16 * 16
    size = len("".join(text[1 : n + 1]).encode())
    expected = {step: nats * n / math.log(2) / size for step, nats in log["val"].items()}
    assert log["bpb"] == pytest.approx(expected, abs=1e-4) and len(expected) == 3


def test_evaluations_and_saves_have_a_period_and_come_after_the_last_update(
    shards, capsys, monkeypatch
):
    """An evaluation validates, scores HellaSwag and prints samples. 0 is never."""
    score = lambda model, examples, *_: Namespace(acc_norm=3, acc=2, n=4)  # noqa: E731
    fake = Namespace(fetch=str, load=lambda *_: "examples", score=score)
    monkeypatch.setitem(sys.modules, "hellaswag", fake)
    log = train("--max_steps 7 --val_every 3 --save_every 2 --hellaswag on --num_samples 1")
    assert list(log["val"]) == list(log["bpb"]) == [0, 3, 6, 7]
    assert log["hella"] == dict.fromkeys((0, 3, 6, 7), 0.75)
    assert steps() == [6, 7], "the two newest of four"
    out = capsys.readouterr().out
    assert out.endswith('--sample --init_from "log" --seed 1\n') and "\nnext: python " in out
    done = re.findall(r"(saved .*_\d+)\.pt|(sample) 0|(HellaSwag: 0\.7500)", out)
    done = ["".join(words).removeprefix("saved log/model_0000").partition(":")[0] for words in done]
    both = ["HellaSwag", "sample"]
    assert done == ["0", *both, "2", *both, "4", "6", *both, "7", *both]
    for step in (99999, 100000):
        Path(f"log/model_{step}.pt").touch()
    assert steps() == [6, 7, 99999, 100000], "in the order of numbers"
    log = train("--max_steps 3 --save_every 0 --num_samples 1 --hellaswag on", "never")
    assert "val" not in log and os.listdir("never") == ["log.txt"]
    out = capsys.readouterr().out
    assert "sample 0:" not in out and out.endswith("done: the log is never/log.txt\n")


@pytest.mark.parametrize("losses, told", [
    ([5, 3.25, 3.5], "lowest at step 2, 3.2500: a new run with --max_steps 2 has"),
    ([5, 3.5, 3.25], None), ([], None), ([5, 3.25], None), ([5, float("nan"), 3], None),
    ([3.25, 5, 3.5], None),
])  # fmt: skip
def test_the_end_names_a_better_step(losses, told, tmp_path, capsys):
    path = tmp_path / "log.txt"
    path.write_text("".join(f"{2 * i} train 1\n{2 * i} val {x}\n" for i, x in enumerate(losses)))
    train_gpt2.Log(Namespace(max_steps=4), path).finish()
    out = capsys.readouterr().out
    assert f"done: the log is {path}\n" in out and ("lowest" in out) == bool(told)
    assert (told or "") in out


def test_prompts_are_read_and_answered_line_by_line(monkeypatch, capsys):
    """A sample ends with its document. Half a character prints as U+FFFD."""
    written = torch.tensor([[*"é".encode()[:1], 256, *b"Once"]] * 2)
    generate = Mock(side_effect=lambda model, tokens, *_: torch.cat((tokens, written), dim=1))
    monkeypatch.setattr(train_gpt2, "generate", generate)
    prompts, answers = [" one\r\n", "\n", "a<|endoftext|>b"], []

    def lines():
        for line in prompts:
            yield line
            answers.append(capsys.readouterr().out)

    monkeypatch.setattr(sys, "stdin", lines())
    args = Namespace(**DEFAULTS | {"num_samples": 2, "prompt": "-"})
    train_gpt2.print_samples(GPT(SMALL), args, make_process())
    answers[0] = answers[0].partition("\n")[2]  # the line that says what to do
    texts = [prompt.strip("\r\n") + "\ufffd" for prompt in prompts]
    assert answers == [f"sample 0: {text}\nsample 1: {text}\n" for text in texts]
    tokens = [call.args[1][0].tolist() for call in generate.call_args_list]
    assert tokens == [[*b" one"], [256], [97, 256, 98]]


@pytest.mark.parametrize("dtype, most", [("float32", 0), ("bfloat16", 0.03), ("float16", 0.01)])
def test_a_run_computes_in_its_dtype_everywhere(shards, monkeypatch, dtype, most):
    """Losses are near float32's. Only bfloat16 has the range that a residual stream needs."""
    path = write(Path("hella.jsonl"), make_examples(3))
    monkeypatch.setattr(hellaswag, "fetch", lambda: path)
    seen, forward = set(), train_gpt2.Block.forward

    def spy(self, x):
        half = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        seen.add((half, x.dtype))
        return forward(self, x)

    monkeypatch.setattr(train_gpt2.Block, "forward", spy)
    flags = "--max_steps 3 --val_every 3 --hellaswag on --num_samples 1 --dtype"
    plain = train(f"{flags} float32", "plain")
    seen.clear()
    log = train(f"{flags} {dtype}")
    stream = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    assert seen == {(getattr(torch, dtype), stream)} and "hella" in log
    for name in ("train", "val", "bpb"):
        errors = [abs(log[name][step] - plain[name][step]) for step in plain[name]]
        assert 0 < max(errors) < 2 * most or (dtype == "float32" and max(errors) == 0)
    assert (load("log", 3)["scaler"] != {}) == (dtype == "float16")
    assert main(f"--init_from log --sample --num_samples 1 --dtype {dtype} --prompt ''") == 0


def schedule(name, max_steps=1000, warmup_steps=100, final_lr_frac=0.1) -> list[float]:
    given = {"max_steps": max_steps, "warmup_steps": warmup_steps, "max_lr": 6e-4}
    given |= {"schedule": name, "final_lr_frac": final_lr_frac}
    args = Namespace(**DEFAULTS | given)
    return [get_lr(step, args) for step in range(max_steps + 1)]


@pytest.mark.parametrize("name", train_gpt2.SCHEDULES)
def test_a_schedule_warms_up_and_decays(name):
    rates = schedule(name)
    assert [rates[step] for step in (0, 98, 99, 100)] == pytest.approx([6e-6, 5.94e-4, 6e-4, 6e-4])
    peaks = max(rates), schedule(name, warmup_steps=0)[0], schedule(name, 5, warmup_steps=5)[4]
    assert peaks == pytest.approx((6e-4,) * 3)
    last = 1.0 if name == "constant" else 0.0
    assert schedule(name, final_lr_frac=0.0)[1000] == pytest.approx(last * 6e-4)
    middle = {"cosine": {325: (1 + math.cos(math.pi / 4)) / 2, 550: 0.5}, "constant": {999: 1}}
    middle |= {"linear": {325: 0.75, 550: 0.5}, "wsd": {820: 1, 821: 1 - 180**-0.5, 865: 0.5}}
    for step, share in ({1000: last} | middle[name]).items():
        assert rates[step] == pytest.approx(6e-5 + 5.4e-4 * share, rel=1e-6), (name, step)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_parameter_has_one_optimizer(optimizer):
    model = GPT(SMALL)
    model.transformer.h.append(train_gpt2.Block(SMALL))
    model.transformer.h[-1].mlp.c_fc = torch.nn.Linear(32, 96)
    model.transformer.h[-1].table = torch.nn.Embedding(7, 32)
    model.head = torch.nn.Linear(32, 384, bias=False)
    model.gate = torch.nn.Parameter(torch.ones(2))
    model.positions = torch.nn.Parameter(torch.ones(2, 16))
    optimizers = model.configure_optimizers(0.3, 6e-4, optimizer)
    names = {id(p): name for name, p in model.named_parameters()}
    updated = []
    for one in optimizers:
        pairs = [(p, group) for group in one.param_groups for p in group["params"]]
        for p, group in pairs:
            updated.append(names[id(p)])
            layer, _, kind = updated[-1].rpartition(".")
            is_matrix = kind == "weight" and "ln_" not in layer
            in_muon = optimizer == "muon" and is_matrix and ("mlp" in layer or "attn" in layer)
            assert isinstance(one, Muon) == in_muon, updated[-1]
            assert group["weight_decay"] == (0.3 if is_matrix else 0.0), updated[-1]
            betas = (0.9, 0.98 if optimizer == "muon" else 0.95)
            assert in_muon or (group["betas"], group["eps"]) == (betas, 1e-8)
            share = 1 / 2 if in_muon and "c_proj" in layer else 1
            assert group["lr"] == 6e-4 * share, updated[-1]
            assert ("split_sizes" in group) == (in_muon and "c_attn" in layer)
    assert sorted(updated) == sorted(names.values())
    model.requires_grad_(False).transformer.h[1].mlp.c_fc.requires_grad_()
    assert model.configure_optimizers(0.3, 6e-4, optimizer), "no empty list of parameters"


def newton_schulz(matrix):
    """Apply the polynomial to the singular values themselves, in float64: the definition."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


def test_updates_of_muon_are_their_formula():
    torch.manual_seed(0)
    shapes = [(48, 16), (16, 16), (64, 16), (16, 64), (48, 16)]
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    groups = [{"params": params[1:4]}, {"params": params[4:], "lr": 0.25 * 0.5}]
    groups.append({"params": params[:1], "split_sizes": [16, 24, 8]})
    muon = Muon(groups, 0.5, 0.1)
    optimizer = train_gpt2.ZeRO(torch.nn.ParameterList(params), [muon], 0.5, make_process())
    expected = [p.detach().double() for p in params]
    averages = [torch.zeros_like(p) for p in expected]
    for lr in (0.02, 0.03):
        for i, p in enumerate(params):
            p.grad = torch.randn_like(p) * torch.linspace(0.2, 3, len(p))[:, None]
            averages[i] = 0.9 * averages[i] + 0.1 * p.grad.double()
            ahead = 0.9 * averages[i] + 0.1 * p.grad.double()
            parts = ahead.split([16, 24, 8]) if i == 0 else [ahead]
            parts = [0.2 * max(part.shape) ** 0.5 * newton_schulz(part) for part in parts]
            rate = lr if i < 4 else 0.25 * lr
            expected[i] = expected[i] * (1 - rate * 0.1) - rate * torch.cat(parts)
        optimizer.step(lr)
        buffers = [muon.state[p]["momentum_buffer"] for p in params]
        torch.testing.assert_close(params, expected, atol=1e-5, rtol=0, check_dtype=False)
        torch.testing.assert_close(buffers, averages, atol=1e-6, rtol=0, check_dtype=False)


@pytest.mark.parametrize("max_lr, moved", [(0.4, [0.2, 0.05]), (0.0, [0.0, 0.0])])
def test_the_rate_of_a_group_is_its_peak(max_lr, moved):
    """A group with a quarter of max_lr has a quarter of each step's rate."""
    params = torch.nn.ParameterList([torch.zeros(3), torch.zeros(3)])
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": max_lr / 4}]
    optimizer = train_gpt2.ZeRO(params, [SGD(groups, max_lr)], max_lr, make_process())
    for p in params:
        p.grad = -torch.ones(3)
    optimizer.step(max_lr / 2)
    assert [p[0].item() for p in params] == pytest.approx(moved)


@pytest.mark.parametrize("capturable", [False, True])
def test_a_resumed_optimizer_finds_its_numbers_where_it_left_them(capturable):
    """PyTorch counts steps on the CPU, if no kernel needs to know them. `meta` stands for a GPU."""
    params = torch.nn.ParameterList([torch.zeros(3, device="meta")])
    adam = torch.optim.Adam(params, foreach=False)
    adam.param_groups[0]["capturable"] = capturable
    optimizer = train_gpt2.ZeRO(params, [adam], 1e-3, make_process())
    state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(3), "n": 7}
    optimizer.load_state_dict({"0": state | {"half": torch.ones(3, dtype=torch.bfloat16)}})
    kept = adam.state[params[0]]
    assert kept["step"].device.type == ("meta" if capturable else "cpu")
    assert kept["exp_avg"].device.type == "meta" and kept["n"] == 7
    assert kept["half"].dtype == torch.bfloat16, "a fork's smaller state resumes bit for bit"


@pytest.mark.parametrize("grad_clip, scale", [(0.25, 1), (0, 1), (3, 1), (0.1, 0.2)])
def test_the_gradient_is_clipped_to_grad_clip(shards, monkeypatch, break_losses, grad_clip, scale):
    """Plain SGD moves by the rate times the clipped norm; the norm in the log is not clipped."""
    monkeypatch.setattr(GPT, "configure_optimizers", lambda model, *_: [SGD(model.parameters(), 1)])
    break_losses(lambda n, losses: losses * scale)
    flags = "--max_steps 1 --max_lr 1 --warmup_steps 0 --batch_size 4"
    log = train(f"{flags} --grad_clip {grad_clip}")
    norm = scale * NORM
    assert log["norm"][0] == pytest.approx(norm, rel=1e-3) and log["lr"][0] == 1
    after = load("log", 1)["model"]
    moved = [
        (p - after[name]).double().square().sum() for name, p in new_model().named_parameters()
    ]
    expected = min(grad_clip or norm, norm)
    assert sum(moved).sqrt().item() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_float16_halves_its_scale_in_an_overflow(shards, break_losses, optimizer):
    """These updates are skipped, and the norm is that of unscaled gradients, of every optimizer."""
    break_losses(lambda n, losses: losses * (1e36 if n in (1, 2) else 1))
    flags = "--max_steps 5 --save_every 1 --keep 0 --dtype float16"
    log = train(f"{flags} --optimizer {optimizer}")
    assert log["norm"][0] == pytest.approx(NORM, rel=0.01) and not math.isfinite(log["norm"][1])
    scales = [load("log", step)["scaler"]["scale"] for step in range(1, 6)]
    assert scales == [65536, 32768, 16384, 16384, 16384]
    assert state("log", 1) == state("log", 3)


def test_an_edit_of_appendix_a_empties_the_cache_of_graphs(monkeypatch):
    """PyTorch's key has neither the text of an operator nor, in 2.11, the dtype. Ours has both."""
    script = train_gpt2.SCRIPT

    def tag(old="", new="", dtype="float32") -> str:
        monkeypatch.setattr(train_gpt2, "SCRIPT", script.replace(old, new))
        args = Namespace(**DEFAULTS | {"zero_init": False})
        train_gpt2.make_model(
            SMALL, train_gpt2.Start(), args, make_process(dtype=dtype, compile=True)
        )
        return torch.compiler.config.cache_key_tag

    kernel = tag("log_sum - x_target", "log_sum - 2 * x_target")
    backward = tag("return dx, dweight", "return 2 * dx, dweight")
    assert len({tag(), tag(dtype="bfloat16"), kernel, backward}) == 4
    assert tag() == tag("# Peak TFLOP", "# The peak TFLOP"), "an edit elsewhere"
