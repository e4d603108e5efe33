"""HellaSwag: the numbers of the two conventions, however the work is shared, cached and cut."""

import http.server
import json
import lzma
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from conftest import DATA, FLAGS, ROOT, read_log, run_main, save_model, write_shards
from torch.nn import functional as F

import hellaswag
from fineweb import get_tokenizer
from hellaswag import CONVENTIONS, iterate_examples, render_rows, score
from train_gpt2 import GPT, GPTConfig

CPU = torch.device("cpu")
SHARED = DATA / "hellaswag_val.jsonl.xz"
BYTES = (257, "bytes", 256)

# in the original file's format, with all that the harness cleans away
RAW = [
    {
        "activity_label": "Food and Entertaining",
        "ctx_a": "[header] How to boil an egg [title] Take a pot. [step] Fill it with  water. ",
        "ctx_b": "the cook",
        "ctx": "[header] How to boil an egg [title] Take a pot. [step] Fill it with  water. the cook",
        "endings": [
            "waits.",
            "[substeps] sings a song.",
            " walks  away [title] for good.",
            "eats it",
        ],
        "label": 0,
    },
    {
        "activity_label": "Canoeing",
        "ctx_a": "Two people sit in a canoe.",
        "ctx_b": "",
        "ctx": "Two people sit in a canoe.",
        "endings": ["They paddle.", "It sinks at once.", "A dog drives a car.", "They fly."],
        "label": "0",
    },
    {
        "activity_label": "Jump",
        "ctx_a": "A man stands on a beam.",
        "ctx_b": "he",
        "ctx": "A man stands on a beam. he",
        "endings": ["'s off.", "ads jump", "jumps off the beam and lands.", "the"],
        "label": 2,
    },
]
# what the harness's hellaswag task (lm_eval, process_docs and _encode_pair) makes of them
HARNESS = [
    "Food and Entertaining: How to boil an egg. Take a pot. Fill it with water. The cook",
    "Canoeing: Two people sit in a canoe.",
    "Jump: A man stands on a beam. He",
]
HARNESS_ENDINGS = ["waits.", " sings a song.", "walks away. for good.", "eats it"]


def write_examples(path, examples=RAW):
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return path


def make_model(vocabulary=BYTES, block_size=1024) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(2, 2, 32, block_size, *vocabulary))
    for p in model.parameters():  # far from uniform: endings then differ by more than rounding
        p.data += 0.2 * torch.randn_like(p)
    return model


@torch.no_grad()
def score_plainly(model, path, convention) -> tuple[int, int, int]:
    """Score one row at a time, the whole of it through the model: n, acc, acc_norm."""
    tokenizer, n, acc, acc_norm = get_tokenizer(model.config.tokenizer), 0, 0, 0
    for example in iterate_examples(path):
        sums, means = [], []
        for row in render_rows(example, tokenizer, convention):
            tokens = torch.tensor([row.tokens[-(model.config.block_size + 1) :]])
            losses = F.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:], reduction="none")
            losses = losses[-(len(row.tokens) - row.start) :].double()
            sums.append(losses.sum().item())
            means.append(losses.mean() if convention == "build-nanogpt" else sums[-1] / row.length)
        n += 1
        acc += int(np.argmin(sums) == int(example["label"]))
        acc_norm += int(np.argmin(means) == int(example["label"]))
    return n, acc, acc_norm


def counts(result) -> tuple[int, int, int]:
    return result.n, result.acc, result.acc_norm


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Return the first 24 examples of the shared data, decompressed."""
    if not SHARED.exists():
        pytest.skip(f"needs {SHARED.name} of the shared test data")
    path = tmp_path_factory.mktemp("hellaswag") / "val.jsonl"
    with lzma.open(SHARED, "rt") as file:
        path.write_text("".join(line for line, _ in zip(file, range(24), strict=False)))
    return path


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_counts_are_those_of_one_row_at_a_time(shared, convention, monkeypatch):
    """A context shared by rows that differ in it, a mask off by one, padding that counts."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(DATA / "tiktoken_cache"))
    model = make_model((50257, "gpt2", 50256))
    assert counts(score(model, shared, convention, CPU)) == score_plainly(model, shared, convention)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("block_size", [1024, 90, 24, 6])
def test_an_example_too_long_is_cut_from_the_left(shared, convention, block_size, tmp_path):
    """Rows of one example cut to different beginnings; an ending that loses its end, or whose mean
    is divided by tokens that were cut off, so that the longest ending wins."""
    model = make_model(block_size=block_size)
    lines = shared.read_text().splitlines(keepends=True)
    path = write_examples(tmp_path / "some.jsonl")
    path.write_text(path.read_text() + "".join(lines))
    assert counts(score(model, path, convention, CPU)) == score_plainly(model, path, convention)


def test_the_harness_convention_cleans_and_splits_as_the_harness_does():
    """Marks of the WikiHow articles in the text, a lower-case ctx_b, lengths of what was removed."""
    tokenizer = get_tokenizer("bytes")
    for example, context in zip(RAW, HARNESS, strict=True):
        for row, ending in zip(render_rows(example, tokenizer, "harness"), range(4), strict=True):
            assert tokenizer.decode(row.tokens[: row.start]) == context
            if example is RAW[0]:
                assert tokenizer.decode(row.tokens[row.start :]) == " " + HARNESS_ENDINGS[ending]
                assert row.length == len(HARNESS_ENDINGS[ending])
    assert [row.start for row in render_rows(RAW[1], tokenizer, "harness")] == [len(HARNESS[1])] * 4


def test_build_nanogpts_convention_leaves_the_text_alone():
    """Its published numbers are of the raw context, and of tokens, not characters."""
    tokenizer = get_tokenizer("bytes")
    for example in RAW:
        for row, ending in zip(
            render_rows(example, tokenizer, "build-nanogpt"), example["endings"], strict=True
        ):
            assert tokenizer.decode(row.tokens) == f"{example['ctx']} {ending}"
            assert row.length == len(row.tokens) - row.start == len(f" {ending}".encode())


def test_the_names_that_people_import_mean_what_they_did(tmp_path):
    """A notebook written for build-nanogpt that no longer runs."""
    model, path = make_model(), write_examples(tmp_path / "raw.jsonl")
    right = 0
    for example in hellaswag.iterate_examples(path):
        data, tokens, mask, label = hellaswag.render_example(example, get_tokenizer("bytes"))
        assert tokens.shape == mask.shape and len(tokens) == 4 and data["label"] == label
        assert mask.sum(1).tolist() == [len(ending) for ending in data["ending_tokens"]]
        right += hellaswag.get_most_likely_row(tokens, mask, model(tokens)) == label
    assert right == score(model, path, "build-nanogpt", CPU).acc_norm


@pytest.mark.parametrize("n", [7, 24])
def test_two_processes_count_what_one_does(shared, n, tmp_path):
    """A share lost or counted twice where examples do not divide by the processes."""
    path = tmp_path / "some.jsonl"
    path.write_text("".join(shared.read_text().splitlines(keepends=True)[:n]))
    model = make_model()
    save_model(model, tmp_path / "model.pt")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    flags = ["-m", str(tmp_path / "model.pt"), "--device", "cpu", "--data", str(path)]
    out = subprocess.run(
        [*launcher, "hellaswag.py", *flags], cwd=ROOT, capture_output=True, text=True
    )
    expected = [str(score(model, path, convention, CPU)) for convention in CONVENTIONS]
    assert out.stdout.splitlines()[-2:] == expected, out.stderr


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serve what a test puts into the list: (status, announced length, body)."""
    answer = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            status, length, body = answer[0]
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            """Say nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        monkeypatch.setattr(hellaswag, "URL", f"http://127.0.0.1:{httpd.server_port}/val.jsonl")
        monkeypatch.setattr(hellaswag, "FILE", tmp_path / "hellaswag" / "val.jsonl")
        yield answer
        httpd.shutdown()


@pytest.mark.parametrize("answer, message", [
    ((404, 9, b"not found"), "404"),
    ((200, 500, b"half of it"), "cannot be downloaded"),
    ((200, 10, b"<html>hi\n\n"), "is not HellaSwag"),
])  # fmt: skip
def test_a_download_that_is_not_the_file_is_refused_and_leaves_nothing(server, answer, message):
    """An error page kept for ever, a truncated file scored as fewer examples."""
    server.append(answer)
    with pytest.raises(ConnectionError, match=message) as error:
        hellaswag.fetch()
    assert str(hellaswag.FILE) in str(error.value), "it says where to put the file"
    assert not hellaswag.FILE.exists()


def test_a_download_that_is_the_file_is_kept(server, monkeypatch):
    """A file fetched again for every evaluation."""
    body = b'{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 1}\n'
    monkeypatch.setattr(hellaswag, "SHA256", hellaswag.hashlib.sha256(body).hexdigest())
    server.append((200, len(body), body))
    assert hellaswag.fetch().read_bytes() == body
    server[0] = (404, 0, b"")
    assert hellaswag.fetch() == hellaswag.FILE
    assert [path.name for path in hellaswag.FILE.parent.iterdir()] == ["val.jsonl"]


def run_cli(*argv) -> int:
    with pytest.raises(SystemExit) as exit_info:
        hellaswag.main([str(arg) for arg in argv])
    return exit_info.value.code


EXAMPLE = {"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 1}
HALVES = {"ctx_a": "a", "ctx_b": "b", "endings": ["b", "c", "d", "e"], "label": "1"}
FILES = {  # content of a file: what is printed, the number of examples or the one line
    json.dumps(EXAMPLE) + "\n\n \n": 1,  # blank lines at the end
    json.dumps(EXAMPLE) + "\n" + json.dumps(HALVES): 2,  # ctx_a and ctx_b instead of ctx
    "": "holds no examples",
    "\n": "holds no examples",
    '{"ctx": "a", "end': "line 1: not an example",
    "{}": "line 1: not an example",
    "[1]": "line 1: not an example",
    "\n" + json.dumps(EXAMPLE | {"ctx": 5}): "line 2: expected a text ctx",
    json.dumps(HALVES | {"ctx_a": 5}): "line 1: expected a text ctx",
    json.dumps({"ctx_a": "a", "endings": ["b", "c", "d", "e"], "label": 1}): "KeyError('ctx_b')",
    json.dumps(EXAMPLE | {"endings": "abcd"}): "line 1: expected a text ctx, 4 texts",
    json.dumps(EXAMPLE | {"endings": ["b"]}): "line 1: expected a text ctx, 4 texts",
    json.dumps(EXAMPLE | {"endings": ["", "c", "d", "e"]}): "line 1: expected a text ctx, 4 texts",
    json.dumps(EXAMPLE | {"endings": ["b", "c", "d", 4]}): "line 1: expected a text ctx, 4 texts",
    json.dumps(EXAMPLE | {"label": 4}): "a label from 0 to 3",
    json.dumps(EXAMPLE | {"label": 1.5}): "a label from 0 to 3",
    json.dumps(EXAMPLE | {"label": "x"}): "a label from 0 to 3",
    json.dumps(EXAMPLE | {"ctx_b": "half"}): "KeyError('ctx_a')",
    json.dumps(EXAMPLE | {"endings": ["[step]", "b", "c", "d"]}): "4 texts as endings",
    "[" * 100_000: "RecursionError",
}


@pytest.mark.parametrize("content", FILES, ids=lambda content: content[:60])
def test_a_file_is_scored_or_refused_in_one_line(content, tmp_path, capsys):
    """A JSON error without the place, an example counted as wrong, a division by zero."""
    (tmp_path / "val.jsonl").write_text(content)
    save_model(make_model(), tmp_path / "model.pt")
    expected = FILES[content]
    argv = ("-m", tmp_path / "model.pt", "--device", "cpu", "--data", tmp_path / "val.jsonl")
    status = run_cli(*argv)
    out, err = capsys.readouterr()
    if isinstance(expected, int):
        assert (status, err, out.count(f"/{expected} = ")) == (0, "", 4)
    else:
        assert status == 2 and err.count("\n") == 1 and f"{tmp_path}/val.jsonl" in err, err
        assert expected in err and err.startswith("hellaswag.py: ")


def test_halves_of_a_context_are_put_together(tmp_path):
    """The original file has ctx_a, ctx_b and ctx, and some copies have only the halves."""
    path = write_examples(tmp_path / "halves.jsonl", [HALVES, RAW[1] | {"ctx_b": ""}])
    [first, second] = iterate_examples(path)
    assert first["ctx"] == "a b" and second["ctx"] == RAW[1]["ctx"]


@pytest.mark.parametrize("argv, message", [
    (["-n", "0"], "--examples is 0, expected 1 to 1000000000"),
    (["-n", "x"], "invalid int value: 'x'"),
    (["--data", "nowhere"], "no HellaSwag file nowhere"),
    (["--data", "{packed}"], "val.jsonl.xz, line 1: not an example"),
])  # fmt: skip
def test_bad_arguments_are_one_line(argv, message, tmp_path, capsys):
    """A traceback, or a score of no examples at all."""
    save_model(make_model(), tmp_path / "model.pt")
    packed = tmp_path / "val.jsonl.xz"
    packed.write_bytes(lzma.compress(json.dumps(EXAMPLE).encode()))
    argv = [word.format(packed=packed) for word in argv]
    assert run_cli("-m", tmp_path / "model.pt", "--device", "cpu", *argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err, err


def test_without_data_the_first_of_two_processes_says_so(tmp_path):
    """The second one waited for the first, and ended with a traceback about a closed connection."""
    save_model(make_model(), tmp_path / "model.pt")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    flags = ["-m", str(tmp_path / "model.pt"), "--device", "cpu", "--data", str(tmp_path / "none")]
    done = subprocess.run(
        [*launcher, "hellaswag.py", *flags], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert done.stderr.count("hellaswag.py: there is no HellaSwag file") == 1, done.stderr
    assert "[rank1]" not in done.stderr and "Connection closed" not in done.stderr


def test_training_logs_hella_and_is_not_changed_by_it(tmp_path, monkeypatch, capsys):
    """An evaluation that moves the data cursor or the random numbers; one without a network that ends the run."""
    data = write_shards(tmp_path / "data")
    monkeypatch.setattr(hellaswag, "FILE", write_examples(tmp_path / "raw.jsonl"))
    where = ["--data_dir", data, *FLAGS, "--max_steps", 4]
    assert run_main(*where, "--log_dir", tmp_path / "a", "--hellaswag_every", 2) == 0
    log = read_log(tmp_path / "a")
    assert list(log["hella"]) == [0, 2, 4], "the last update's too"
    assert all(share in (0, 0.3333, 0.6667, 1) for share in log["hella"].values())
    assert run_main(*where, "--log_dir", tmp_path / "b", "--hellaswag_every", 0) == 0
    assert read_log(tmp_path / "b")["train"] == log["train"]
    monkeypatch.setattr(hellaswag, "FILE", tmp_path / "nowhere" / "val.jsonl")
    monkeypatch.setattr(hellaswag, "URL", "http://127.0.0.1:9/val.jsonl")
    capsys.readouterr()
    assert run_main(*where, "--log_dir", tmp_path / "c", "--hellaswag_every", 1) == 0
    out = capsys.readouterr().out
    assert out.count("HellaSwag is skipped") == 1 and str(hellaswag.FILE) in out
    assert read_log(tmp_path / "c")["train"] == log["train"]
