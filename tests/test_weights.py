"""Weights cross to other programs and back, bit for bit, or are refused in one line."""

import json
import re
import struct

import numpy as np
import pytest
import torch
from conftest import DATA, FLAGS, run_main, write_shards

from train_gpt2 import GPT, GPTConfig, export_hf, export_llmc

transformers = pytest.importorskip("transformers")

BYTES = (257, "bytes", 256)


def random_model(*config) -> GPT:
    """Return a model whose every parameter, biases and LayerNorms too, is random."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(*config))
    for p in model.parameters():
        p.data += 0.2 * torch.randn_like(p)
    model.transformer.wte.weight.data[model.config.vocab_size :] = 0
    return model


def load(name) -> GPT:
    return GPT.from_pretrained(str(name))


def assert_same(a: GPT, b: GPT) -> None:
    assert a.config == b.config
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    for name, p in ours.items():
        assert torch.equal(p, theirs[name]), name


def save_checkpoint_of(model: GPT, path) -> None:
    weights = {name: p for name, p in model.state_dict().items() if name != "lm_head.weight"}
    args = {"model": "test", "seq_len": model.config.block_size}
    torch.save({"model": weights, "config": vars(model.config), "args": args}, path)


def test_hugging_face_to_ours_to_hugging_face_is_bitwise(tmp_path):
    """A matrix transposed once too often, padding left in, a tensor forgotten."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=16, vocab_size=257)
    theirs = transformers.GPT2LMHeadModel(config)
    for p in theirs.parameters():
        p.data += 0.2 * torch.randn_like(p)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    tokens = torch.randint(0, 257, (2, 16))
    logits = theirs.eval()(tokens).logits
    torch.testing.assert_close(ours(tokens), logits, atol=1e-4, rtol=1e-4)
    assert (ours.transformer.wte.weight[257:] == 0).all() and len(
        ours.transformer.wte.weight
    ) == 384
    export_hf(ours, str(tmp_path / "again"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").state_dict()
    for name, p in theirs.state_dict().items():
        assert torch.equal(p, again[name]), name


def test_pytorch_model_bin_is_read_too(tmp_path):
    """Folders from before safetensors."""
    export_hf(random_model(2, 2, 32, 16, *BYTES), str(tmp_path / "new"))
    (tmp_path / "old").mkdir()
    (tmp_path / "old/config.json").write_text((tmp_path / "new/config.json").read_text())
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "new")
    torch.save(theirs.state_dict(), tmp_path / "old/pytorch_model.bin")
    assert_same(load(tmp_path / "old"), load(tmp_path / "new"))


def test_an_exported_folder_writes_the_same_greedy_text(tmp_path, capsys, monkeypatch):
    """Logits that agree with a tokenizer that does not, an end of text that does not end."""
    monkeypatch.chdir(tmp_path)
    save_checkpoint_of(random_model(2, 2, 32, 64, *BYTES), tmp_path / "model.pt")
    flags = ["--init_from", "model.pt", "--device", "cpu", "--temperature", 0, "--num_samples", 1]
    flags += ["--max_new_tokens", 20, "--prompt", "héllo <|endoftext|>wörld, "]
    assert run_main("--sample", "--export_hf", "folder", *flags) == 0
    printed = capsys.readouterr().out
    tokenizer = transformers.AutoTokenizer.from_pretrained("folder")
    model = transformers.AutoModelForCausalLM.from_pretrained("folder")
    inputs = tokenizer("héllo <|endoftext|>wörld, ", return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=20, do_sample=False)[
        0, inputs.input_ids.size(1) :
    ]
    text = tokenizer.decode(out, skip_special_tokens=True)
    assert printed.rstrip("\n").endswith(f"wörld, {text}"), (printed, text)
    flags[1] = "folder"
    assert run_main("--sample", *flags) == 0, "our own sampling from the folder"
    assert capsys.readouterr().out in printed


@pytest.mark.skipif(not (DATA / "tiktoken_cache").is_dir(), reason="needs GPT-2's BPE: shared data")
def test_the_exported_tokenizer_is_gpt_2s(tmp_path, monkeypatch):
    """Merges in another order: text that the model was never trained on."""
    from fineweb import get_tokenizer

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(DATA / "tiktoken_cache"))
    export_hf(random_model(1, 1, 8, 8), str(tmp_path))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), get_tokenizer("gpt2")
    play = (DATA / "tinyshakespeare.txt").read_text()[:50_000]
    for text in (play, " don't  \n\n\tünïcödé 漢字 🎉 1234567 aaaaaaaaaaaaa", "a<|endoftext|>b"):
        ids = theirs(text)["input_ids"]
        assert ids == ours.encode(text, allowed_special="all")
        assert theirs.decode(ids) == text
    assert len(theirs) == 50257 and theirs.eos_token_id == 50256


def test_llm_c_and_back_is_bitwise_and_bfloat16_rounds(tmp_path):
    """Layers interleaved with kinds, or a header that llm.c does not know."""
    model = random_model(3, 2, 32, 16, *BYTES)
    export_llmc(model, str(tmp_path / "model.bin"), "float32")
    assert_same(model, load(tmp_path / "model.bin"))
    data = (tmp_path / "model.bin").read_bytes()
    assert struct.unpack("<8i", data[:32]) == (20240326, 3, 16, 257, 3, 2, 32, 384)
    numbers = np.frombuffer(data, np.float32, offset=1024)
    assert len(numbers) == sum(p.numel() for p in model.parameters())
    # llm.c's order: wte, wpe, then a kind of parameter for all layers before the next kind
    second = model.transformer.h[1].ln_1.weight.detach().numpy()
    start = 384 * 32 + 16 * 32 + 32
    assert np.array_equal(numbers[start : start + 32], second)
    export_llmc(model, str(tmp_path / "half.bin"), "bfloat16")
    half = load(tmp_path / "half.bin").state_dict()
    assert struct.unpack("<2i", (tmp_path / "half.bin").read_bytes()[:8])[1] == 5
    for name, p in model.state_dict().items():
        assert torch.equal(half[name], p.bfloat16().float()), name


def test_training_starts_from_a_folder_and_from_llm_c(tmp_path):
    """Weights that can be sampled but not fine-tuned."""
    data = write_shards(tmp_path / "data")
    export_hf(random_model(2, 2, 32, 16, *BYTES), str(tmp_path / "hf"))
    export_llmc(load(tmp_path / "hf"), str(tmp_path / "model.bin"), "float32")
    logs = []
    for i, source in enumerate((tmp_path / "hf", tmp_path / "model.bin")):
        where = ["--data_dir", data, "--log_dir", tmp_path / f"log{i}", "--max_steps", 2]
        assert run_main(*where, *FLAGS, "--init_from", source) == 0
        lines = (tmp_path / f"log{i}/log.txt").read_text().splitlines()
        logs.append([line for line in lines if " dt " not in line])
    assert logs[0] == logs[1] and len(logs[0]) == 8


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop_a_weight(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.bias"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


BAD = {
    "architecture": (lambda f: change_config(f, model_type="gpt_neox"), "gpt_neox.*expected gpt2"),
    "activation": (
        lambda f: change_config(f, activation_function="relu"),
        "relu, expected gelu_new",
    ),
    "vocabulary": (lambda f: change_config(f, vocab_size=300), "300|mismatched"),
    "weights": (drop_a_weight, r"h\.1\.mlp\.c_fc\.bias"),
    "no config": (lambda f: (f / "config.json").unlink(), "folder"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_folder_that_is_not_gpt_2_is_refused_in_one_line(case, tmp_path, capfd):
    """Another architecture that loads, and computes nonsense; a tensor made up where one is missing."""
    folder = tmp_path / "folder"
    export_hf(random_model(2, 2, 32, 16, *BYTES), str(folder))
    spoil, message = BAD[case]
    spoil(folder)
    capfd.readouterr()
    assert run_main("--sample", "--init_from", folder) == 2
    err = capfd.readouterr().err
    assert re.search(rf"train_gpt2.py: .*{message}", err), err
    assert "Traceback" not in err


@pytest.mark.parametrize("spoil, message", [
    (lambda data: data[:-100], "cannot be read"),
    (lambda data: b"\0" * 8 + data[8:], "magic 0, version 0, expected 20240326"),
    (lambda data: data[:4] + struct.pack("<i", 2) + data[8:], "version 2"),
    (lambda data: data[:500], "cannot be read"),
])  # fmt: skip
def test_a_damaged_llm_c_file_is_refused_in_one_line(spoil, message, tmp_path, capsys):
    """A download that broke off, taken for a model."""
    path = tmp_path / "model.bin"
    export_llmc(random_model(1, 2, 32, 16, *BYTES), str(path), "float32")
    path.write_bytes(spoil(path.read_bytes()))
    assert run_main("--sample", "--init_from", path) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err, err
