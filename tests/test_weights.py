"""Weights cross to Hugging Face's format and back, bit for bit, or are refused in one line."""

import json
import re

import pytest
import torch
from conftest import DATA, FLAGS, run_main, save_model, write_shards
from torch import nn

import train_gpt2
from fineweb import UserError
from train_gpt2 import GPT, GPTConfig, export_hf

transformers = pytest.importorskip("transformers")

BYTES = (257, "bytes", 256)


def randomize(model: nn.Module) -> nn.Module:
    """Make every parameter, biases and LayerNorms too, random."""
    for p in model.parameters():
        p.data += 0.2 * torch.randn_like(p)
    return model


def random_model(*config) -> GPT:
    torch.manual_seed(0)
    model = randomize(GPT(GPTConfig(*config)))
    model.transformer.wte.weight.data[model.config.vocab_size :] = 0
    return model


def write_foreign(folder, n_positions=16, **changes):
    """Write a folder as transformers itself does, with nothing of ours, and return its model."""
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 257, "n_positions": n_positions}
    config = transformers.GPT2Config(
        **(shape | {"bos_token_id": 256, "eos_token_id": 256} | changes)
    )
    theirs = randomize(transformers.GPT2LMHeadModel(config)).eval()
    theirs.save_pretrained(folder)
    return theirs


def load(name) -> GPT:
    return GPT.from_pretrained(str(name)).eval()


def test_hugging_face_to_ours_to_hugging_face_is_bitwise(tmp_path):
    """A matrix transposed once too often, padding left in, a tensor forgotten."""
    theirs = write_foreign(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    tokens = torch.randint(0, 257, (2, 16))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)
    wte = ours.transformer.wte.weight
    assert len(wte) == 384 and (wte[257:] == 0).all()
    export_hf(ours, str(tmp_path / "again"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").state_dict()
    for name, p in theirs.state_dict().items():
        assert torch.equal(p, again[name]), name


def test_pytorch_model_bin_is_read_too(tmp_path):
    """Folders from before safetensors."""
    theirs = write_foreign(tmp_path / "new")
    (tmp_path / "old").mkdir()
    (tmp_path / "old/config.json").write_text((tmp_path / "new/config.json").read_text())
    torch.save(theirs.state_dict(), tmp_path / "old/pytorch_model.bin")
    old, new = load(tmp_path / "old"), load(tmp_path / "new")
    assert old.config == new.config
    for name, p in old.state_dict().items():
        assert torch.equal(p, new.state_dict()[name]), name


def test_an_exported_folder_writes_the_same_greedy_text(tmp_path, capsys, monkeypatch):
    """Logits that agree with a tokenizer that does not, an end of text that does not end."""
    monkeypatch.chdir(tmp_path)
    save_model(random_model(2, 2, 32, 64, *BYTES), tmp_path / "model.pt")
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
    train_gpt2.export_tokenizer(GPTConfig(), str(tmp_path))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), get_tokenizer("gpt2")
    play = (DATA / "tinyshakespeare.txt").read_text()[:50_000]
    for text in (play, " don't  \n\n\tünïcödé 漢字 🎉 1234567 aaaaaaaaaaaaa", "a<|endoftext|>b"):
        ids = theirs(text)["input_ids"]
        assert ids == ours.encode(text, allowed_special="all")
        assert theirs.decode(ids) == text
    assert len(theirs) == 50257 and theirs.eos_token_id == 50256


def test_training_starts_from_a_folder(tmp_path):
    """Weights that can be sampled but not fine-tuned."""
    data = write_shards(tmp_path / "data")
    write_foreign(tmp_path / "hf")
    where = ["--data_dir", data, "--log_dir", tmp_path / "log", "--max_steps", 2]
    flags = [flag for flag in FLAGS if flag not in ("--model", "test")]
    assert run_main(*where, *flags, "--init_from", tmp_path / "hf") == 0
    lines = (tmp_path / "log/log.txt").read_text().splitlines()
    assert len([line for line in lines if " dt " not in line]) == 10


class Rotary(GPT):
    """A fork that has no position embeddings."""

    def __init__(self, config):
        super().__init__(config)
        self.transformer._modules.pop("wpe", None)


class Untied(GPT):
    """A fork whose head is a matrix of its own."""

    def __init__(self, config):
        super().__init__(config)
        self.lm_head.weight = nn.Parameter(torch.randn_like(self.lm_head.weight))


class Wider(GPT):
    """A fork with another width of the MLP, as SwiGLU has it."""

    def __init__(self, config):
        super().__init__(config)
        for block in self.transformer.h:
            block.mlp.c_fc = nn.Linear(config.n_embd, 6 * config.n_embd)


class Relu(GPT):
    """A fork of which only the arithmetic differs: every name and shape is GPT-2's."""

    def __init__(self, config):
        super().__init__(config)
        for block in self.transformer.h:
            block.mlp.register_forward_hook(lambda module, args, output: output.relu())


@pytest.mark.parametrize("fork", [Rotary, Untied, Wider, Relu])
def test_what_is_no_gpt_2_any_more_is_not_exported(fork, tmp_path):
    """A folder that transformers loads without a word, and that computes something else."""
    torch.manual_seed(0)
    model = randomize(fork(GPTConfig(2, 2, 32, 16, *BYTES)))
    with pytest.raises(UserError, match="not a GPT-2"):
        export_hf(model, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_an_untied_head_is_saved_and_loaded(tmp_path, monkeypatch):
    """A fork without tying whose checkpoints lost its head, or loaded with the wrong one."""
    monkeypatch.setattr(train_gpt2, "GPT", Untied)
    model = Untied(GPTConfig(2, 2, 32, 16, *BYTES))
    save_model(model, tmp_path / "model.pt")
    source = train_gpt2.load_source(str(tmp_path / "model.pt"))
    again = Untied(model.config)
    again.load_weights(source["model"])
    for name, p in model.state_dict().items():
        assert torch.equal(p, again.state_dict()[name]), name


def test_a_tied_model_refuses_an_untied_head(tmp_path):
    """A head that is dropped without a word."""
    model = Untied(GPTConfig(2, 2, 32, 16, *BYTES))
    save_model(model, tmp_path / "model.pt")
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        train_gpt2.load_source(str(tmp_path / "model.pt"))


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
        "other logits|another shape",
    ),
    "attention": (
        lambda f: change_config(f, scale_attn_weights=False),
        "other logits|another shape",
    ),
    "vocabulary": (lambda f: change_config(f, vocab_size=300), "300|mismatched"),
    "weights": (drop_a_weight, r"h\.1\.mlp\.c_fc\.bias"),
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_folder_that_is_not_gpt_2_is_refused_in_one_line(case, tmp_path, capfd):
    """Another architecture that loads, and computes nonsense; a tensor made up where one is missing."""
    folder = tmp_path / "folder"
    write_foreign(folder)
    spoil, message = BAD[case]
    spoil(folder)
    capfd.readouterr()
    assert run_main("--sample", "--init_from", folder) == 2
    err = capfd.readouterr().err
    assert re.search(rf"train_gpt2.py: .*{message}", err), err
    assert "Traceback" not in err
