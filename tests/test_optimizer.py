"""--optimizer muon: who updates what, the step against its definition, and that runs go on."""

import pytest
import torch
from conftest import FLAGS, run_main, run_script
from test_training import assert_close, assert_same_weights, train, weights

from train_gpt2 import GPT, GPTConfig, Muon, orthogonalize

MUON = ("--optimizer", "muon", "--max_steps", 9, "--save_every", 3, "--batch_size", 4)
SLOW = ("--max_lr", 0.02)  # the model's rate of 1e-2, times ten, would make rounding grow


@pytest.mark.parametrize("optimizer, matrices", [("adamw", 0), ("muon", 48)])
def test_every_parameter_is_updated_by_one_optimizer(optimizer, matrices):
    """A parameter that never moves, or moves twice; an embedding made orthogonal."""
    with torch.device("meta"):
        model = GPT(GPTConfig())
        optimizers = model.configure_optimizers(0.1, 6e-4, optimizer)
    groups = [group for o in optimizers for group in o.param_groups]
    updated = [id(p) for group in groups for p in group["params"]]
    assert sorted(updated) == sorted(id(p) for p in model.parameters())
    by_muon = [p for o in optimizers[1:] for group in o.param_groups for p in group["params"]]
    assert len(by_muon) == matrices
    assert {id(p) for p in by_muon} <= {id(p) for p in model.transformer.h.parameters()}
    assert all(p.dim() == 2 for p in by_muon)
    # by this mark of PyTorch's, train knows that it need not wait for the GPU
    assert all(optimizer._step_supports_amp_scaling for optimizer in optimizers)


def iterate(matrix):
    """Newton-Schulz's polynomial on each singular value, in float64, without a matrix product of
    the iteration: the definition."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 16, 64), (2, 64, 16)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_orthogonalize_is_its_definition(shape, dtype, tolerance):
    """A wrong coefficient, a norm over the whole stack, a transposed result."""
    torch.manual_seed(0)
    stack = torch.randn(shape)
    found = orthogonalize(stack.to(dtype))
    assert found.dtype == dtype and found.shape == shape
    expected = torch.stack([iterate(matrix) for matrix in stack])
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)
    values = torch.linalg.svdvals(found.double())
    assert values.min() > 0.5 and values.max() < 1.3, "near 1, whatever they were"


def test_two_steps_are_their_definition():
    """Momentum without Nesterov's term, a decay that follows the update, q, k and v in one."""
    torch.manual_seed(0)
    qkv = [torch.nn.Parameter(torch.randn(48, 16)) for _ in range(2)]
    wide = [torch.nn.Parameter(torch.randn(16, 64)), torch.nn.Parameter(torch.randn(64, 16))]
    groups = [{"params": wide, "stacked": 1}, {"params": qkv, "stacked": 3}]
    muon = Muon(groups, lr=0.02, weight_decay=0.1)
    params = [*wide, *qkv]
    expected = [p.detach().double() for p in params]
    averages = [torch.zeros_like(p) for p in expected]
    for _ in range(2):
        for i, p in enumerate(params):
            p.grad = torch.randn_like(p)
            g = p.grad.double()
            averages[i] = 0.95 * averages[i] + 0.05 * g
            g = 0.95 * averages[i] + 0.05 * g
            parts = g.chunk(3) if i >= 2 else [g]
            scale = 0.2 * max(parts[0].shape) ** 0.5
            update = scale * torch.cat([iterate(part) for part in parts])
            expected[i] = expected[i] * (1 - 0.02 * 0.1) - 0.02 * update
        muon.step()
    for p, q in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach().double(), q, atol=1e-5, rtol=0)


def test_a_resumed_run_of_muon_is_the_unbroken_one_bit_for_bit(tmp_path, shards):
    """Momentum that a checkpoint leaves out, or gives to another parameter."""
    unbroken = train(tmp_path / "a", shards, *MUON)
    train(tmp_path / "b", shards, *MUON)
    for step in (6, 9):
        (tmp_path / f"b/model_{step:05d}.pt").unlink()
    assert train(tmp_path / "b", shards, "--resume") == unbroken, "the flags are the checkpoint's"
    assert_same_weights(weights(tmp_path / "a", 9), weights(tmp_path / "b", 9))


def test_two_processes_of_muon_give_the_run_of_one(tmp_path, shards):
    """A share of the matrices that nobody computes, or that goes to another parameter."""
    one = train(tmp_path / "one", shards, *MUON, *SLOW)
    where = ["--data_dir", shards, "--log_dir", tmp_path / "two", *FLAGS]
    status, _, err = run_script([*where, *MUON, *SLOW], processes=2)
    assert status == 0, err
    assert_close(one, train(tmp_path / "two", shards, "--resume"))
    a, b = weights(tmp_path / "one", 9), weights(tmp_path / "two", 9)
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-4, rtol=0)


@pytest.mark.parametrize("old", [True, False])
def test_another_optimizer_is_refused_at_resume(tmp_path, shards, capsys, old):
    """AdamW's moments read as momentum, or a KeyError in a library."""
    train(tmp_path / "log", shards, "--max_steps", 3)
    path = tmp_path / "log/model_00003.pt"
    if old:  # of a version that had no such flag
        checkpoint = torch.load(path)
        del checkpoint["args"]["optimizer"], checkpoint["args"]["zero"]
        torch.save(checkpoint, path)
    flags = ["--data_dir", shards, "--log_dir", tmp_path / "log", *FLAGS, "--resume"]
    assert run_main(*flags, "--max_steps", 6, "--optimizer", "muon") == 2
    err = capsys.readouterr().err
    assert "optimizer is muon, was adamw" in err and err.count("\n") == 1
    assert run_main(*flags, "--max_steps", 6) == 0, "what it was, goes on"
    quickstart = ["--quickstart", "--total_batch_size", 256]  # whose optimizer is muon
    assert run_main(*flags, "--max_steps", 7, *quickstart) == 0, "as long as nobody gives a flag"


@pytest.mark.parametrize(
    "make",
    [
        lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9),
        lambda p, lr: torch.optim.AdamW(p, lr),  # not fused
        lambda p, lr: torch.optim.NAdam(p, lr),
    ],
)
def test_a_fork_with_another_optimizer_trains_and_resumes(
    tmp_path, shards, capsys, monkeypatch, make
):
    """An optimizer that refuses found_inf, and a KeyError where another one's state is resumed."""
    old = GPT.configure_optimizers

    def forked(model, weight_decay, lr, name):
        p = list(model.parameters())
        return [make([{"params": p[:2]}, {"params": p[2:]}], lr)]

    monkeypatch.setattr(GPT, "configure_optimizers", forked)
    flags = ["--max_steps", 6, "--save_every", 3]
    unbroken = train(tmp_path / "log", shards, *flags)
    (tmp_path / "log/model_00006.pt").unlink()
    assert train(tmp_path / "log", shards, *flags, "--resume") == unbroken
    monkeypatch.setattr(GPT, "configure_optimizers", old)
    where = ["--data_dir", shards, "--log_dir", tmp_path / "log", *FLAGS, "--max_steps", 9]
    status = run_main(*where, "--resume")
    is_adamw = isinstance(make([torch.zeros(1, requires_grad=True)], 1.0), torch.optim.AdamW)
    assert status == (0 if is_adamw else 2)
    if not is_adamw:
        assert "does not fit this code's optimizer: KeyError" in capsys.readouterr().err
    one = lambda model, decay, lr, name: [make(model.parameters(), lr)]  # noqa: E731
    monkeypatch.setattr(GPT, "configure_optimizers", one)
    assert run_main(*where, "--resume") == 2
    assert "does not fit this code's optimizer: ValueError" in capsys.readouterr().err


def test_muon_sets_its_own_defaults_and_flags_override_them(tmp_path, shards):
    """One flag that needs ten others, or that overrides what was given."""
    train(tmp_path / "a", shards, *MUON)
    args = torch.load(tmp_path / "a/model_00009.pt")["args"]
    assert (args["schedule"], args["min_lr"], args["max_lr"]) == ("wsd", 0, 10 * 1e-2)
    flags = ("--schedule", "linear", "--weight_decay", 0.05, "--max_lr", 0.01)
    train(tmp_path / "b", shards, *MUON, *flags)
    args = torch.load(tmp_path / "b/model_00009.pt")["args"]
    assert (args["schedule"], args["weight_decay"], args["max_lr"]) == ("linear", 0.05, 0.01)


def test_a_model_trained_with_muon_is_a_gpt_2_everywhere(tmp_path, shards, capsys):
    """A recipe whose model no other program computes alike."""
    transformers = pytest.importorskip("transformers")
    train(tmp_path / "log", shards, *MUON, *SLOW, "--max_steps", 40)  # enough for words
    folder = tmp_path / "folder"
    flags = ["--init_from", tmp_path / "log", "--device", "cpu", "--temperature", 0]
    flags += ["--num_samples", 1, "--max_new_tokens", 12, "--prompt", "the "]
    capsys.readouterr()
    assert run_main("--sample", "--export_hf", folder, *flags) == 0, "the logits are compared"
    printed = capsys.readouterr().out
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer("the ", return_tensors="pt")
    text = tokenizer.decode(model.generate(**inputs, max_new_tokens=12, do_sample=False)[0])
    assert f"sample 0: {text.rstrip()}\n" in printed, (text, printed)
    assert len(text.split()) > 1, "a text of spaces would show nothing"


def test_it_learns_faster_than_adamw(tmp_path, shards):
    """A Muon that is right by every definition and moves uphill."""
    adamw = train(tmp_path / "a", shards, "--max_steps", 40)
    muon = train(tmp_path / "b", shards, "--max_steps", 40, "--optimizer", "muon", *SLOW)
    assert muon["val"][40] < adamw["val"][40] - 0.1
