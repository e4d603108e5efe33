"""HellaSwag: the same choices as one row at a time, however rows are cut, sorted and shared."""

import io
import json
import lzma
import os
import random
import re
import shutil
import subprocess
import sys
from itertools import product
from unittest.mock import Mock, patch

import pytest
import tiktoken
import torch
import torch.distributed as dist
from conftest import DATA, ROOT, needs_data
from datasets import Dataset
from torch.nn import functional as F

import hellaswag
import train_gpt2

CONVENTIONS = ("build-nanogpt", "harness")
RANKS = {bytes([i]): i for i in range(256)}
BYTES = tiktoken.Encoding("b", pat_str="(?s:.)", mergeable_ranks=RANKS, special_tokens={})
EGG = {  # in the original file's format, with all that the harness cleans away
    "activity_label": "Food",
    "ctx_a": "[header] How to boil an egg [title] Take a pot. [step] Fill it with  water. ",
    "ctx_b": "the Cook [step]",
    "ctx": "[header] How to boil an egg [title] Take a pot. [step] Fill it with  water. the Cook",
    "endings": ["waits.", "[substeps] sings.", " walks   away [title] for good.", "eats it"],
    "label": 2,
}


def make_examples(n: int) -> list[dict]:
    """Return EGG and examples of random words; texts differ much in length."""
    rng, examples = random.Random(1), [EGG]
    for _ in range(n - 1):
        words = (rng.choices(["a", "dog", "[step]"], k=rng.randint(1, 9)) for _ in range(8))
        label, a, b, ctx, *endings = (" ".join(["it", *some]) for some in words)
        example = {"activity_label": label, "ctx_a": a, "ctx_b": b, "ctx": ctx, "endings": endings}
        examples.append(example | {"label": str(rng.randrange(4))})
    return examples


def write(path, examples):
    path.write_text("\n".join(map(json.dumps, examples)) + "\n\n")
    return path


def logits(x: torch.Tensor) -> torch.Tensor:
    """A causal model: the logits at a position depend on all tokens so far and on the position."""
    tokens, positions = torch.randn(2, 1024, 8, generator=torch.Generator().manual_seed(0))
    seen = tokens[x].cumsum(1) / torch.arange(1, x.shape[1] + 1).view(-1, 1) ** 0.5
    return (seen + tokens[x] + positions[: x.shape[1]]) @ tokens[:256].T / 2


def losses(x, y):
    return hellaswag.token_losses(logits(x), y)


def choose_plainly(example, convention, block_size):
    """Return the choices of acc and acc_norm, one row at a time, the whole of it predicted."""
    data, *_ = hellaswag.render_example(example, BYTES, convention)
    sums, means = [], []
    for rest, characters in zip(data["ending_tokens"], data["characters"], strict=True):
        row = torch.tensor([(data["ctx_tokens"] + rest)[-(block_size + 1) :]])
        each = F.cross_entropy(logits(row[:, :-1])[0], row[0, 1:], reduction="none")[-len(rest) :]
        sums.append(float(each.sum()))
        means.append(sums[-1] / (characters if convention == "harness" else len(each)))
    return sums.index(min(sums)), means.index(min(means))


def test_an_ending_has_characters_and_a_score_its_standard_error():
    """A character of other alphabets counts once. The error is sqrt(p (1 - p) / n)."""
    example = EGG | {"endings": ["漢字", "привет", "é [step]", "c"]}
    data, *_ = hellaswag.render_example(example, BYTES, "harness")
    assert data["characters"] == [2, 6, 2, 1]
    line = "harness       | acc 4/6 = 0.6667 +- 0.1925 | acc_norm 0/6 = 0.0000 +- 0.0000"
    assert str(hellaswag.Score("harness", 6, 4, 0)) == line


def test_choices_are_those_of_one_row_at_a_time(tmp_path):
    examples, found = make_examples(60), []
    for convention, block_size in product(CONVENTIONS, (1024, 60, 9)):
        choices = [choose_plainly(example, convention, block_size) for example in examples]
        agree = sum(acc == norm for acc, norm in choices)
        assert agree < 55 and choices not in found
        found.append(choices)
        for measure, counts in enumerate([(60, 60, agree), (60, agree, 60)]):
            right = [e | {"label": c[measure]} for e, c in zip(examples, choices, strict=True)]
            path = write(tmp_path / f"{measure}.jsonl", right)
            loaded = hellaswag.load(path, BYTES, block_size, convention)
            score = hellaswag.score(losses, loaded, "cpu")
            assert (score.n, score.acc, score.acc_norm) == counts, (convention, block_size)


@needs_data
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_rows_are_the_texts_of_the_convention_as_gpt2_tokens(convention):
    gpt2 = tiktoken.get_encoding("gpt2")
    context, endings = EGG["ctx"], [f" {ending}" for ending in EGG["endings"]]
    if convention == "harness":  # no marks, of which the last leaves a space, and no other capital
        context = "Food: How to boil an egg. Take a pot. Fill it with water. The cook"
        endings = ["  waits.", "   sings.", "  walks  away. for good.", "  eats it"]
    with lzma.open(DATA / "hellaswag_val.jsonl.xz", "rt") as file:
        examples = [EGG, *(json.loads(file.readline()) for _ in range(50))]
    for example in examples:
        data, tokens, mask, _ = hellaswag.render_example(example, convention=convention)
        for i, ending in enumerate(data["ending_tokens"]):
            row = data["ctx_tokens"] + ending
            assert tokens[i] == row == gpt2.encode(gpt2.decode(row))
            assert mask[i] == [0] * len(data["ctx_tokens"]) + [1] * len(ending)
            if example is EGG:
                assert (gpt2.decode(row), gpt2.decode(ending)) == (context + endings[i], endings[i])
                assert data["characters"][i] == len(endings[i]) - 1 - (convention == "harness")


def test_losses_are_float32_and_zero_where_nothing_is_predicted():
    logits = torch.zeros(4, 3, 256, dtype=torch.bfloat16)
    logits[2, :2, 7] = 0.01
    logits[3, 2, 7] = 5
    assert len(F.log_softmax(logits, dim=-1)[:, :2, 7].unique()) == 1, "in bfloat16 this is a tie"
    losses = hellaswag.token_losses(logits, torch.tensor([[7, 7, -1]] * 4))
    assert losses.dtype == torch.float32 and losses.sum(dim=1).argmin() == 2
    assert (losses[:, 2] == 0).all() and (losses[:, :2] > 5).all()


def test_two_processes_score_what_one_process_does(tmp_path, monkeypatch):
    monkeypatch.setitem(hellaswag.BATCH_TOKENS, "cpu", 420)
    monkeypatch.setitem(sys.modules, "transformers", None)  # cannot be imported
    monkeypatch.setattr(sys, "stderr", type("", (io.StringIO,), {"isatty": lambda _: True})())
    path = write(tmp_path / "val.jsonl", make_examples(44))
    examples, model = hellaswag.load(path, BYTES, 1024), Mock(side_effect=losses)
    one = hellaswag.score(model, examples, "cpu")
    n = model.call_count
    assert sys.stderr.getvalue() == ""
    assert hellaswag.score(losses, examples, "cpu", bar=True) == one
    assert re.search(rf"\rbuild-nanogpt: 100%.* {n}/{n} .*batch/s\]\n$", sys.stderr.getvalue())
    assert n % 2 == 1 and one.acc != one.acc_norm
    assert all(x.numel() <= 420 for (x, _), _ in model.call_args_list)
    found = []
    monkeypatch.setattr(dist, "all_reduce", lambda sums: found.append(sums.add_(sum(found))))
    shares = [hellaswag.score(model, examples, "cpu", rank, 2) for rank in (0, 1)]
    assert shares[1] == one and model.call_count == 2 * n


@pytest.mark.parametrize("error", [ConnectionError("offline"), RuntimeError("of datasets")])
def test_a_download_is_kept_only_if_it_is_whole(error, tmp_path, monkeypatch):
    path = tmp_path / "new" / "val.jsonl"
    hub = Dataset.from_list([EGG | {"label": str(EGG["label"])}] * 3)  # labels are texts there
    answers = Mock(side_effect=[error, hub])
    monkeypatch.setattr("datasets.load_dataset", answers)
    monkeypatch.setattr(hellaswag, "FILE", path)
    with pytest.raises(ConnectionError, match=f"^[^\n]*--hellaswag off[^\n]* as {path}$"):
        hellaswag.fetch()
    answers.assert_called_with("Rowan/hellaswag", split="validation")
    assert not path.parent.exists()
    with patch.object(Dataset, "to_json", autospec=True, side_effect=Dataset.to_json) as write:
        assert hellaswag.fetch() == path == hellaswag.fetch()
    [call] = write.call_args_list
    assert call.args[1] != path, "a kill would leave a part of it"
    assert os.listdir(path.parent) == ["val.jsonl"] and answers.call_count == 2
    read = [hellaswag.render_example(x, BYTES) for x in hellaswag.iterate_examples()]
    expected = hellaswag.render_example(EGG, BYTES)
    assert len(read) == 3 and all(str(x) == str(expected) for x in read)


LINE = json.dumps(EGG)
BAD = {"": "no examples", LINE + '\n{"ctx': "example 2", "{}": "KeyError", "\x80": "Unicode"}
BAD |= {json.dumps(EGG | {"label": ""}): "the test split has no labels: use the validation split"}
BAD |= {f"[{LINE}]": "and no array", "\x1f\x8b\x08": "array, .gz", "PAR1": ".gz or .parquet"}
BAD |= {LINE.replace('"label": 2', '"label": 4'): "0 to 3", LINE.replace('"waits.", ', ""): "4 end"}
BAD |= {json.dumps(EGG | {"ctx": ""}): "a context", LINE.replace("waits.", ""): "4 endings"}


@pytest.mark.parametrize("text", BAD, ids=BAD.get)
def test_a_file_that_is_not_hellaswag_is_one_line(text, tmp_path):
    path = tmp_path / "val.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(hellaswag.UserError, match=f"^{path}.*{re.escape(BAD[text])}[^\n]*$"):
        hellaswag.load(path, BYTES, 1024)


@pytest.fixture
def folders(tmp_path, monkeypatch) -> list[str]:
    """Make models of many kinds with a context of 24 tokens, and return flags that score one."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    write(tmp_path / "val.jsonl", make_examples(9))
    for size in (50257, 50256, 60000):
        config = GPT2Config(vocab_size=size, n_embd=8, n_layer=1, n_head=1, n_positions=24)
        GPT2LMHeadModel(config).save_pretrained(str(size))
    model = GPT2LMHeadModel.from_pretrained("50257", dtype=torch.float32)
    model.resize_token_embeddings(50304)
    model.transformer.wte.weight.data[50257:] = 100 * model.transformer.wte.weight.data[:47]
    model.save_pretrained("padded")
    model.bfloat16().save_pretrained("half")
    config = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    LlamaForCausalLM(LlamaConfig(vocab_size=50257, **config)).save_pretrained("llama")
    shutil.copytree("50257", "bytes")
    train_gpt2.export_tokenizer(train_gpt2.GPTConfig(tokenizer="bytes"), "bytes")
    return ["-d", "cpu", "-m", "50257", "--data", "val.jsonl", "-n", "7"]


@needs_data
def test_the_command_line_scores_a_model_in_its_context(folders, monkeypatch, capsys):
    """Weights are read in float32, and computed in --dtype. Padding does not count."""
    seen, measure = [], hellaswag.token_losses

    def spy(logits, y):
        seen.append((logits.dtype, logits.size(2), torch.is_grad_enabled()))
        assert logits.size(1) <= 24
        return measure(logits, y)

    monkeypatch.setattr(hellaswag, "token_losses", spy)
    said = Mock(wraps=print)
    monkeypatch.setattr(hellaswag, "print", said, raising=False)
    hellaswag.main(folders)
    one = capsys.readouterr().out
    assert all(call.kwargs == {"flush": True} for call in said.mock_calls), "at once"
    assert re.fullmatch(r"build-nanogpt \| acc ./7 .*\nharness .* acc_norm ./7 .*\n", one)
    with monkeypatch.context() as other:
        other.setenv("RANK", "1")
        hellaswag.main(folders)
        assert capsys.readouterr().out == "", "the first process alone prints"
    hellaswag.main([*folders, "-m", "padded"])
    assert capsys.readouterr().out == one
    hellaswag.main([*folders, "-m", "half"])
    assert {*seen} == {(torch.float32, 50257, False)}
    seen.clear()
    hellaswag.main([*folders, "--dtype", "bfloat16"])
    assert {*seen} == {(torch.bfloat16, 50257, False)}
    mistakes = "-m 50256, -m 60000, -m bytes, -m llama, -m ., -n x, -n 0, -d tpu, --data nowhere"
    for mistake in map(str.split, mistakes.split(", ")):
        capsys.readouterr()
        with pytest.raises(SystemExit, match=r"^2$"):
            hellaswag.main([*folders, *mistake])
        err = capsys.readouterr().err
        expected = {".": "python train_gpt2.py --init_from . --max_steps 0"}
        assert err.count("\n") == 1 and expected.get(mistake[1], mistake[1]) in err


def test_ctrl_c_ends_it_without_a_traceback(monkeypatch):
    monkeypatch.setattr(hellaswag, "run", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit, match=r"^130$"):
        hellaswag.main([])


@pytest.mark.slow
@needs_data
def test_two_processes_print_what_one_does(folders, capsys):
    hellaswag.main(folders)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    out = subprocess.check_output([*torchrun, ROOT / "hellaswag.py", *folders], text=True)
    assert out == capsys.readouterr().out
