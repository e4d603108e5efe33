"""fineweb.py: exact shards from any documents, whatever interrupts the work."""

import gzip
import hashlib
import io
import json
import lzma
import multiprocessing
import os
import random
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, count
from operator import length_hint
from pathlib import Path
from unittest.mock import ANY, DEFAULT, Mock, patch

import numpy as np
import pyarrow
import pytest
import tiktoken
import tokenizers
from conftest import ROOT, contents, main, needs_data
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

import fineweb
import train_gpt2

exact = settings(deadline=None, derandomize=True, database=None)


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return path


def write_parquet(path: Path, texts: list[str], rows: int | None = None) -> Path:
    """Write texts in row groups of so many rows, beside a column of numbers."""
    table = pyarrow.table({"id": [*range(len(texts))], "text": texts})
    parquet.write_table(table, path, row_group_size=rows)
    return path


def random_texts(number: int, longest: int, seed: int = 0) -> list[str]:
    """Return documents of 0 to `longest` characters in words, the last of the longest length."""
    rng = random.Random(seed)
    words = ["the", "cat", "sat.", "<|endoftext|>", "déjà\nvu", "", "漢字", "12"]
    lengths = [rng.randrange(longest + 1) for _ in range(number - 1)] + [longest]
    return [" ".join(rng.choices(words, k=size // 3 + 1))[:size] for size in lengths]


def build(files, out: Path, *options) -> Path:
    """Run fineweb.py in this process: on the files, or on FineWeb for None. Later options win."""
    source = ["--files", files] if files and "--files" not in options else []
    argv = [*source, "--out", out, "--tokenizer", "bytes", "--workers", 1, *options]
    fineweb.main([str(word) for word in argv])
    return out


def command_line(files: Path, out: Path, capsys, *options) -> str:
    """Run fineweb.py's own command line, which says what to run next; return what it prints."""
    argv = ["", "--files", files, "--out", out, "--tokenizer", "bytes", "--workers", 1, *options]
    with patch("sys.argv", [str(word) for word in argv]):
        fineweb.main()
    return capsys.readouterr().out


def refuse(*args) -> str:
    """Build, which must end with status 2 and one line; return the line."""
    err = io.StringIO()
    with redirect_stderr(err), pytest.raises(SystemExit, match=r"^2$"):
        build(*args)
    line = err.getvalue()
    assert line.startswith("fineweb.py: ") and line.count("\n") == 1, line
    return line


def begin(chunks: int, *args) -> None:
    """Build until so many chunks are finished and the disk has no space for the next one."""
    effects = [DEFAULT] * chunks + [OSError("No space left")]
    with patch.object(fineweb, "save_chunk", wraps=fineweb.save_chunk, side_effect=effects):
        assert "No space left" in refuse(*args)


def read_meta(folder: Path) -> dict:
    return json.loads((folder / "meta.json").read_text())


def read_split(folder: Path, split: str) -> list[int]:
    shards = [np.load(path) for path in sorted(folder.glob(f"{split}*.npy"))]
    assert all(shard.dtype == np.uint16 and shard.ndim == 1 and len(shard) for shard in shards)
    return np.concatenate([np.empty(0, np.uint16), *shards]).tolist()


def to_tokens(texts: list[str]) -> list[int]:
    return [token for text in texts for token in (256, *text.encode())]


TEXTS = [*random_texts(60, 900), "a long one " * 2000, *random_texts(60, 900, seed=1)]
OPTIONS = ("--shard_size", 2500, "--val_share", 0.3)
SMALL = 1000  # bytes of a batch: every chunk has several, and the long document spans some


def kill_at(moment: int, files, out: Path) -> None:
    """Build in a process that kills itself before or after it writes, syncs or renames a file."""
    moments = count()

    def die(frame, event, function) -> None:
        name = function.__qualname__ if event in ("c_call", "c_return") else ""
        if name in ("BufferedWriter.write", "fsync", "replace") and next(moments) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def child() -> None:
        threading.setprofile(die)
        sys.setprofile(die)
        build(files, out, *OPTIONS, "--workers", 1 + moment % 3)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def assert_whole(out: Path) -> None:
    """Every file with its final name is whole, and has the content that meta.json lists."""
    assert all(len(np.load(path)) > 0 for path in out.glob("*.npy"))
    for path in out.glob("meta*.json"):
        for name, shard in json.loads(path.read_text())["shards"].items():
            sha256 = hashlib.sha256((out / name).read_bytes()).hexdigest()
            assert shard == {"tokens": len(np.load(out / name)), "sha256": sha256}


@pytest.mark.slow
def test_killed_at_15_random_moments_it_ends_byte_for_byte_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(fineweb, "BATCH_SIZE", SMALL)
    story = [b"a story" + b" and so on" * n + b"\r\n" for n in range(80)]
    (tmp_path / "a.txt").write_bytes(b"<|endoftext|>\r\n".join(story))
    write_jsonl(tmp_path / "b.jsonl", [None, *TEXTS[:99], None, *TEXTS[99:]])
    files, out = tmp_path / "*.*", tmp_path / "killed"
    whole = build(files, tmp_path / "whole", *OPTIONS)
    chunks = read_meta(whole)["progress"]["chunks"]
    assert chunks > 28
    begin(15, files, out, *OPTIONS)
    rng = random.Random(1)
    for _ in range(15):
        kill_at(rng.randrange(24), files, out)
        assert_whole(out)
    assert 15 < read_meta(out)["progress"]["chunks"] < chunks
    build(files, out, *OPTIONS, "--workers", 2)
    assert contents(out) == contents(whole), "no unfinished file of a killed process is left"


def test_it_continues_behind_every_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(fineweb, "BATCH_SIZE", SMALL)
    rows = [row for text in TEXTS[30:90] for row in (None, text)]  # without text, it counts, too
    write_jsonl(tmp_path / "0.jsonl", rows[:40])
    lines = write_jsonl(tmp_path / "1.txt", rows[40:80]).read_text()
    (tmp_path / "1.txt").write_text(f"Lines of JSON:\n{lines}")  # or they would be rows
    write_parquet(tmp_path / "2.parquet", rows[80:], rows=3)
    files, out = tmp_path / "*.*", tmp_path / "parts"
    whole = build(files, tmp_path / "whole", *OPTIONS)
    chunks = read_meta(whole)["progress"]["chunks"]
    assert chunks > 10
    for chunk in range(1, chunks):
        with patch.object(fineweb, "encode", wraps=fineweb.encode) as encode:  # counts its calls
            begin(1, files, f"{out}/", *OPTIONS)  # as a shell completes it
        assert encode.call_count < 15  # of about 50 batches: those of up to three chunks
        assert read_meta(out)["progress"]["chunks"] == chunk
        assert_whole(out)
    build(files, out, *OPTIONS)
    assert contents(out) == contents(whole)


CHANGES = [  # a command between two starts, options of the second start, what its refusal names if
    # two chunks are finished, which have all of 0.jsonl and a part of 1.jsonl, and if all are
    ("touch -t 202001010000 0.jsonl", "", "", ""),
    ("mkdir x; cp ?.jsonl x", "--files x/?.jsonl", "", ""),
    ("true", "--files ./2.jsonl 1.jsonl ./?.jsonl", "", ""),
    ("echo > 2.jsonl", "", "", "2.jsonl (b"),
    ("rm 2.jsonl", "", "", "nothing (b"),
    ("echo > 3.jsonl", "", "", "3.jsonl (b"),
    ("cat 0.jsonl >> 1.jsonl", "", "", "1.jsonl (b"),  # behind what was read
    ("echo >> 0.jsonl", "", "0.jsonl (b", "0.jsonl (b"),
    ("mv 0.jsonl x; mv 2.jsonl 0.jsonl; mv x 2.jsonl", "", "0.jsonl (b", "0.jsonl (b"),
    ("sed -i s/the/THE/ 1.jsonl", "", "1.jsonl has changed where", "1.jsonl (b"),
    ("rm 1.jsonl 2.jsonl", "", "0.jsonl is missing", "nothing (b"),
    ("sed -i '1s/: ./: \"X/' 1.jsonl", "", "1.jsonl has changed where", "1.jsonl (b"),  # in row 1
    ("rm out/train_000001.npy", "", *2 * ["train_000001.npy is missing or"]),
    ("echo | dd of=out/train_000001.npy bs=1 seek=999 conv=notrunc", "", *2 * ["train_000001.npy"]),
    ("rm out/meta.json", "", *2 * ["no meta.json"]),
    (
        "echo '{\"version\": 4}' > out/meta.json",
        "",
        *2 * ["another version of fineweb.py made out"],
    ),
    (
        "echo '{\"version\": 99}' > out/meta.json",
        "",
        *2 * ["another version of fineweb.py made out"],
    ),
    ("echo [1] > out/meta.json", "", *2 * ["meta.json is damaged"]),
    ("echo '{\"version' > out/meta.json", "", *2 * ["meta.json is damaged"]),
    ("true", "--shard_size 2600", *2 * ["shard_size 2500, not 2600"]),
]


def test_what_cannot_be_read_at_the_moment_is_not_damaged(tmp_path, monkeypatch):
    files = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    out = build(files, tmp_path / "out")
    read_bytes = Path.read_bytes
    for name in ("meta.json", "train_000000.npy"):

        def fail(path, name=name) -> bytes:
            if path.name == name:
                raise OSError(5, "Input/output error")
            return read_bytes(path)

        monkeypatch.setattr(Path, "read_bytes", fail)
        line = refuse(files, out)
        assert f"{name} cannot be read: OSError: [Errno 5]" in line and "delete" not in line


def test_a_shard_of_a_killed_run_goes_where_the_texts_that_follow_are_others(tmp_path, monkeypatch):
    """Each shard of a folder is trained on, also one that meta.json does not list."""
    monkeypatch.setattr(fineweb, "BATCH_SIZE", SMALL)
    files, out = write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "out"
    begin(2, files, out, *OPTIONS)
    for split in ("train", "val"):  # as a kill leaves them before it writes meta.json
        shutil.copy(out / f"{split}_000001.npy", out / f"{split}_000002.npy")
    _, number, *_ = read_meta(out)["progress"]["position"]
    write_jsonl(files, TEXTS[:number])
    build(files, out, *OPTIONS)
    names = sorted(path.name for path in out.glob("*.npy"))
    assert names == sorted(read_meta(out)["shards"]) and len(names) == 4


@pytest.mark.parametrize("is_finished", [False, True])
@pytest.mark.parametrize("change", CHANGES, ids=" ".join)
def test_what_was_read_must_be_as_it_was(change, is_finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fineweb, "BATCH_SIZE", SMALL)
    for k in range(3):
        write_jsonl(Path(f"{k}.jsonl"), random_texts(30, 300 + k, seed=k))
    (build if is_finished else partial(begin, 2))("?.jsonl", Path("out"), *OPTIONS)
    subprocess.run(change[0], shell=True, check=True, stderr=subprocess.DEVNULL)
    before = contents("out")
    command = ("?.jsonl", Path("out"), *OPTIONS, *change[1].split())
    if named := change[2 + is_finished]:
        line = refuse(*command)
        assert named in line and re.search("delete the folder|choose another --out|delete it", line)
        assert contents("out") == before
    else:
        build(*command)
        whole = build(command[0], Path("whole"), *command[2:])
        assert read_meta(Path("out"))["shards"] == read_meta(whole)["shards"]


def test_a_run_goes_on_with_the_commit_with_which_it_began(tmp_path, monkeypatch):
    """Where the hub cannot be reached, no run begins, and the line says what to do."""

    def publish(commit: str) -> None:
        texts = [commit, *random_texts(200, 400)]
        sample.config.data_files = {"train": [f"file://{write_parquet(tmp_path / commit, texts)}"]}

    monkeypatch.setattr(fineweb, "BATCH_SIZE", SMALL)
    whole, out, sample = tmp_path / "whole", tmp_path / "out", Mock()
    advice = "/datasets/HuggingFaceFW/fineweb-edu/tree/main .*HF_ENDPOINT.*HF_TOKEN.*--files"
    assert re.search(advice, refuse(None, out)) and not out.exists()
    hub = {(fineweb.FINEWEB, "sample-10BT"): sample}  # by default, it would be all: 1.3T tokens
    monkeypatch.setattr("datasets.load_dataset_builder", lambda *asked: hub[asked])
    sample.config.data_files = {"test": [], "dev": []}
    assert "fineweb-edu has no split train, but ['dev', 'test']" in refuse(None, out)
    publish("a.parquet")
    build(None, whole, *OPTIONS)
    begin(1, None, out, *OPTIONS)
    publish("b.parquet")
    assert contents(build(None, out, *OPTIONS)) == contents(whole)


class Hub(BaseHTTPRequestHandler):
    """Answer what libraries ask the hub, with files {name: content} and events {read: event}."""

    reads = count(1)

    def do_GET(self):
        path, _, name = self.path.partition("?")[0].rpartition("/")
        content, event = self.files.get(name, b""), None
        headers = {"X-Repo-Commit": "a" * 40, "X-Error-Code": "EntryNotFound", "ETag": name}
        if "/tree" in path:
            entry = {"type": "file", "oid": "e"}
            listing = [entry | {"path": n, "size": len(c)} for n, c in self.files.items()]
            content = json.dumps(listing).encode()
        elif "/resolve/" not in path:
            content = b'{"id": "me/docs", "sha": "%s", "siblings": [], "tags": []}' % (b"a" * 40)
        elif content and self.command == "GET":
            event = self.events.get(next(self.reads))
            content = content[int((self.headers["Range"] or "bytes=0-")[6:-1]) :]
        status = 200 if content else 404
        self.send_response(429 if event == "busy" else 206 if self.headers["Range"] else status)
        for key, value in (headers | {"Content-Length": len(content)}).items():
            self.send_header(key, str(value))
        self.end_headers()
        if event == "cut":
            content = content[:-999]  # and then the connection ends
        elif event == "kill":
            self.process.kill()
        self.wfile.write(content * (self.command == "GET"))

    do_HEAD = do_GET


@pytest.mark.slow
def test_over_http_it_survives_lost_connections_and_continues_after_a_kill(tmp_path):
    """The shards are those of the same files on the disk, and no file is downloaded twice."""
    for k in range(3):
        write_parquet(tmp_path / f"{k}.parquet", random_texts(200, 500, seed=k), rows=20)
    Hub.files = {path.name: path.read_bytes() for path in sorted(tmp_path.glob("*.parquet"))}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "no_proxy": "*"}
    env |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import fineweb"
    command = [sys.executable, "-c", f"{code}; fineweb.BATCH_SIZE = {SMALL}; fineweb.main()"]
    options = ["--tokenizer", "bytes", "--shard_size", "2500", "--val_share", "1"]
    options += ["--val_tokens", "2500"]
    command += ["--dataset", "me/docs", *options, "--workers", "2", "--out", tmp_path / "out"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    Hub.events = {1: "cut", 4: "kill", 5: "busy"}  # the third file is read twice
    for status in (-signal.SIGKILL, 0):
        Hub.process = subprocess.Popen(command, env=env, **pipes)
        lines, error = Hub.process.communicate(timeout=60)
        assert Hub.process.returncode == status, error
        assert_whole(tmp_path / "out")
    server.shutdown()
    assert "\nnext, " in lines and next(Hub.reads) == 7
    with patch.object(fineweb, "BATCH_SIZE", SMALL):
        build(tmp_path / "*.parquet", tmp_path / "whole", *options)
    shards = [read_meta(tmp_path / folder)["shards"] for folder in ("out", "whole")]
    assert shards[0] == shards[1] and len(shards[0]) > 30


def test_small_corpus_golden(tmp_path, monkeypatch, disk):
    """Bytes reach the disk before their name, or a power failure could leave a name without content."""
    out = build(write_jsonl(tmp_path / "docs.jsonl", random_texts(50, 500)), tmp_path / "out")
    calls = [name for name, _, _ in disk.mock_calls]
    assert calls == ["fsync", "replace"] * 4  # meta.json, val, train, meta.json
    meta = read_meta(out)
    kept = "dataset name text_key tokenizer shard_size max_tokens val_tokens val_share"
    assert sorted(meta["options"]) == sorted(kept.split()), "all that a second start may not change"
    hashes = {name: shard["sha256"][:16] for name, shard in meta["shards"].items()}
    assert hashes == {"train_000000.npy": "42e79a1155377ae1", "val_000000.npy": "9c83d15a1ff07ec4"}
    assert [meta[key] for key in ("tokenizer", "vocab_size", "eot")] == ["bytes", 257, 256]
    monkeypatch.setattr(fineweb, "write_file", None)
    monkeypatch.setattr(fineweb, "read_batches", None)
    build(tmp_path / "docs.jsonl", out)  # returns at once: nothing is encoded, nothing is written


@settings(exact, max_examples=12)
@given(data=st.data())
def test_validation_first_and_then_training(data, tmp_path_factory):
    size = data.draw(st.integers(1, 40), "shard_size")
    lengths = st.one_of(st.integers(0, 5 * size), st.sampled_from([0, size - 1, 3 * size]))
    texts = data.draw(st.lists(lengths.map(lambda n: ("xyz" * n)[:n]), min_size=2, max_size=6))
    expected = to_tokens(texts)
    budget = data.draw(st.integers(1, 2 * len(expected)), "max_tokens")
    expected = expected[:budget]
    val = data.draw(st.integers(0, len(expected) - 1), "val_tokens")
    folder = tmp_path_factory.mktemp("shards")
    options = ["--shard_size", size, "--val_tokens", val, "--val_share", 1, "--max_tokens", budget]
    with patch.object(fineweb, "BATCH_SIZE", 1):
        out = build(write_jsonl(folder / "docs.jsonl", texts), folder / "out", *options)
    assert read_split(out, "val") == expected[:val]
    assert read_split(out, "train") == expected[val:]
    for k in range(read_meta(out)["progress"]["chunks"] - 1):  # the last one may be shorter
        # chunk k is val's and train's shard k together, and ends with a document
        chunk = sum(len(np.load(path)) for path in out.glob(f"*_{k:06d}.npy"))
        assert size <= chunk <= size + max(map(len, texts))


def test_validation_gets_the_middle_of_every_ten_pieces(tmp_path, capsys):
    files = write_jsonl(tmp_path / "docs.jsonl", [x * 2559 for x in "abcdef"])  # 5 pieces each
    out = build(files, tmp_path / "out", "--val_tokens", 1000)
    assert read_split(out, "val") == [ord(x) for x in "a" * 512 + "c" * 488], "its limit"
    rest = ["a" * 2047, "b" * 2559, "c" * 2071, *(x * 2559 for x in "def")]
    assert read_split(out, "train") == to_tokens(rest)
    for share in (0.3, 0.5, 0.9, 1):
        args = Mock(val_share=share, val_tokens=10**6)
        mask = np.empty(0, bool)
        for size in (3, 2, 0, 7000, 999):  # of chunks
            counts = {"val": int(mask.sum()), "train": int((~mask).sum())}
            shards = {name: {"tokens": number} for name, number in counts.items()}
            meta = {"piece_size": 4, "shards": shards}
            mask = np.append(mask, fineweb.choose_validation(args, meta, size))
        assert len(mask) == 8004 and abs(mask.sum() - 8004 * share) <= 4, "wherever chunks end"
        assert all(len({*piece}) == 1 for piece in mask.reshape(-1, 4).tolist())
    said = command_line(write_jsonl(files, ["x" * 99_000]), tmp_path / "few", capsys)
    assert "too little" in said and "next, " not in said


@pytest.mark.parametrize("size, length", [(2**24 - 1, 512), (2**24, 8192)])
def test_more_text_has_longer_pieces_for_validation(size, length, tmp_path):
    """They hold several windows of 1,024 tokens, and no small text has enough of them."""
    (tmp_path / "a.txt").write_bytes((b"x" * 1023 + b"\n") * (size // 1024) + b"x" * (size % 1024))
    out = build(tmp_path / "a.txt", tmp_path / "out", "--max_tokens", 1000)
    assert read_meta(out)["piece_size"] == length


@needs_data
def test_a_million_blanks_are_cut_somewhere():
    enc = fineweb.get_tokenizer("gpt2")
    parts = [*fineweb.cut("word" + " " * 10**6 + "word")]
    blocks = [fineweb.encode(enc, [(part, part is parts[0])]) for part in parts]
    blanks = enc.encode(" ") * (10**6 - 1)
    expected = [50256, *enc.encode("word"), *blanks, *enc.encode(" word")]
    assert np.concatenate(blocks).tolist() == expected


LANGUAGES = "नमस्ते दुनिया שָׁלוֹם مُحَمَّدٌ สวัสดี über the <|endoftext|> 漢字 's 12"
WORDS = [*LANGUAGES.split(), "ACGT" * 99]


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> tuple:
    """Return documents in many languages, and shards with a tokenizer that they made."""
    folder = tmp_path_factory.mktemp("own")
    texts = [" ".join(random.Random(i).choices(WORDS, k=99)) + "\n" for i in range(99)]
    write_jsonl(folder / "a.jsonl", texts)
    options = ("--tokenizer", 330, "--val_share", 0)
    return folder / "a.jsonl", texts, build(folder / "a.jsonl", folder / "out", *options)


def test_a_tokenizer_is_made_from_the_texts(own, tmp_path):
    _, texts, out = own
    meta = read_meta(out)
    enc = fineweb.get_tokenizer(meta["tokenizer"])
    name, _, rest = meta["tokenizer"].partition(" ")
    assert fineweb.WORD == train_gpt2.WORD, "each script stands alone"
    assert name == f"bpe-330-{hashlib.sha256(rest.encode()).hexdigest()[:6]}"
    assert meta["vocab_size"] == enc.n_vocab == 330 and meta["eot"] == enc.eot_token == 329
    assert len(enc.encode(" नमस्ते")) == len(enc.encode(" दुनिया")) == 1
    documents = [[329, *enc.encode_ordinary(text)] for text in texts]
    assert read_split(out, "train") == [*chain(*documents)]
    train_gpt2.export_tokenizer(train_gpt2.GPTConfig(tokenizer=meta["tokenizer"]), str(tmp_path))
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in texts:
        assert theirs.encode(text).ids == enc.encode(text, allowed_special="all")


def test_a_tokenizer_stays_the_same(own, tmp_path, capsys, monkeypatch):
    files, texts, out = own
    monkeypatch.setattr(fineweb, "BATCH_SIZE", SMALL)
    options = ("--tokenizer", 330, "--shard_size", 2500, "--workers")
    unbroken = build(files, tmp_path / "unbroken", *options, 1)
    printed = capsys.readouterr().out
    assert "too little" not in printed, "tokens have more than 100 KB"
    assert "next, " not in printed, "only the command line asks what is next"
    assert "it has only" not in printed
    with patch.object(fineweb, "train_tokenizer", wraps=fineweb.train_tokenizer) as training:
        for chunks in (0, 2):
            begin(chunks, files, tmp_path / "killed", *options, 2)
        build(files, tmp_path / "killed", *options, 2)
    assert training.call_count == 2, "the second start found no shard, and the third found some"
    assert contents(tmp_path / "killed") == contents(unbroken)
    more = write_jsonl(tmp_path / "more.jsonl", texts[:9])
    build(more, tmp_path / "more", "--tokenizer", out)
    assert read_meta(tmp_path / "more")["tokenizer"] == read_meta(out)["tokenizer"]
    assert "has tokenizer 330, not 500" in refuse(files, unbroken, "--tokenizer", 500)
    small = write_jsonl(tmp_path / "small.jsonl", ["abab"] * 99 + ["qwertz"])
    build(small, tmp_path / "small", "--tokenizer", 65536, "--val_share", 0)
    out = capsys.readouterr().out
    assert "it has only 259, because" in out, "ab, abab"
    assert "of 1.96 bytes each\n" in out, "402 bytes, and 100 tokens between documents"
    assert read_meta(tmp_path / "small")["vocab_size"] == 259


@pytest.mark.slow
def test_two_libraries_divide_words_at_the_same_characters(tmp_path):
    """Of all that Unicode has: an update of tiktoken or tokenizers could part what they know of it.
    From 0x40000 on, it has nothing but a few characters at 0xE0000."""
    leads = [*range(0x80), *range(0xC2, 0xF5)]  # the first bytes of characters
    tokens = [bytes([ord(probe), lead]).hex() for probe in "a1!\t" for lead in leads]
    tokenizer = f"bpe-test {' '.join(tokens)}"  # they merge where both are in one word
    enc = fineweb.get_tokenizer(tokenizer)
    config = train_gpt2.GPTConfig(tokenizer=tokenizer, vocab_size=enc.n_vocab)
    train_gpt2.export_tokenizer(config, str(tmp_path))
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for plane in [*range(0, 0x40000, 0x1000), 0xE0000]:
        characters = [chr(i) for i in range(plane, plane + 0x1000) if not 0xD800 <= i < 0xE000]
        text = "".join(f"a{c}1{c}!{c}\t{c}\n" for c in characters)
        ids = enc.encode_ordinary(text)
        assert theirs.encode(text).ids == ids and enc.decode(ids) == text, hex(plane)


def test_the_sample_comes_from_all_files(tmp_path):
    """But of a dataset of the hub from the first one, as all might be hundreds of GB."""
    for name, rows in (("a", 900), ("b", 90), ("c", 10)):
        write_jsonl(tmp_path / f"{name}.jsonl", [name + "é" * 50] * rows + [None])
    files = {str(path): [path.stat().st_size, ""] for path in sorted(tmp_path.iterdir())}
    counts = {}
    for size in (10**4, 10**6):
        with patch.multiple(fineweb, SAMPLE_SIZE=size, BATCH_SIZE=200):
            texts = [*fineweb.sample_texts(files, "text")]
        counts[size] = [sum(text[0] == name for text in texts) for name in "abc"]
    assert counts == {10**4: ANY, 10**6: [900, 90, 10]}
    assert 85 <= counts[10**4][0] <= 95 and 5 <= counts[10**4][1] <= 13 and counts[10**4][2] >= 1
    args = fineweb.parse_args(["--dataset", "me/docs", "--tokenizer", "330", "--out", "x"])
    with patch.object(fineweb, "train_tokenizer") as training:
        fineweb.choose_tokenizer(args, files)
    training.assert_called_once_with(dict([*files.items()][:1]), "text", 330)


LETTERS = st.text(st.sampled_from("ab1.' \t\n\r\0é\x1c\x85\u2028\u3000漢😀"), max_size=60)
# The mark is characters in a text, but a border between documents at the end of a line
MARKS = [
    "<|endoftext|>",
    "<|endoftext|>\n",
    *(f"{a}\n<|endoftext|>{b}\n" for a in ("", "\r") for b in ("", "\r")),
]
PIECES = st.one_of(LETTERS, st.sampled_from(MARKS))


@needs_data
@settings(exact, max_examples=40)
@given(st.lists(PIECES, min_size=1, max_size=6), st.integers(70, 120))
@example(["x" * 60 + " " * 20], 70)  # the last part is blank
def test_long_texts_encode_to_the_tokens_of_the_whole(parts, size):
    """Texts are cut only where GPT-2's pattern begins a new piece, wherever the limit falls."""
    text = "".join(" word " + part for part in parts)
    enc = fineweb.get_tokenizer("gpt2")
    with patch.object(fineweb, "BATCH_SIZE", size):
        pieces = list(fineweb.cut(text))
        tokens = fineweb.encode(enc, [(text, True), (text, True)])
        together = fineweb.encode(enc, [(part, True) for part in parts])
        content = io.TextIOWrapper(io.BytesIO(text.encode()), "utf-8")
        rows = list(fineweb.read_txt(content))
        blocks = [fineweb.encode(enc, rows[k : k + 3]) for k in range(0, len(rows), 3)]
    assert all(0 < len(piece) <= size for piece in pieces) and "".join(pieces) == text
    in_file = re.sub("\r\n?", "\n", text)  # where text is one row, its line ends stay
    documents = filter(str.strip, re.split(r"(?m)<\|endoftext\|>$\n?", in_file))
    pairs = ((np.concatenate(blocks), documents), (tokens, [text] * 2), (together, parts))
    for found, texts in pairs:
        expected = [(enc.eot_token, *enc.encode_ordinary(text)) for text in texts]
        assert found.dtype == np.uint16 and found.tolist() == [*chain(*expected)]


def test_threads_keep_the_order_and_read_a_little_ahead():
    """While one of them works for long, the other one works on about eight batches, and waits."""

    def slow(enc, text, **rest):
        time.sleep(0.3 * (text == "<|endoftext|>10"))
        return encode(enc, text, **rest)

    encode = tiktoken.Encoding.encode_to_numpy
    unread = iter([([0, k], 0.5, [(f"{k}", True)]) for k in range(40)])
    with patch.object(tiktoken.Encoding, "encode_to_numpy", slow):
        for k, (place, share, tokens) in enumerate(fineweb.tokenize(unread, "bytes", 2)):
            assert (place, share) == ([0, k], 0.5)
            assert tokens.tolist() == [256, *f"{k}".encode()]
            assert length_hint(unread) >= 31 - k


@pytest.mark.parametrize("suffix", [
    "txt", "jsonl", "jsonl.zst", "jsonl.xz", "json.gz", "csv", "csv.gz", "tsv", "parquet",
])  # fmt: skip
def test_a_document_is_whole_wherever_a_block_ends(suffix, tmp_path, monkeypatch):
    """In .txt, texts begin in a line. From any row on, the rest is read."""
    monkeypatch.setattr(fineweb, "BATCH_SIZE", 2**16)
    end = {"txt": "\n", "tsv": "\u2028"}.get(suffix, "\r\n")  # a .tsv has no quotes
    line = f" of \x85, with an é <|endoftext|>,{end}"
    texts = [f"{k}{line * (k % 29)}{end}" for k in range(9000)]
    path = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        write_parquet(path, texts, rows=4500)
    else:
        rows = {"t": "<|endoftext|>\n".join(texts)}
        rows["j"] = [json.dumps({"text": text}) + "\n" for text in texts]
        rows["c"] = ["id,text\n", *(f'{k},"{text}"\n' for k, text in enumerate(texts))]
        if suffix == "tsv":
            rows["t"] = ["id\ttext\n", *(f"{k}\t{text}\n" for k, text in enumerate(texts))]
        content = "".join(rows[suffix[0]]).encode()
        pack = {"gz": gzip.compress, "xz": partial(lzma.compress, preset=0)}
        pack["zst"] = partial(pyarrow.compress, codec="zstd", asbytes=True)
        path.write_bytes(pack.get(suffix.rpartition(".")[2], bytes)(content))
    files = {str(path): [path.stat().st_size, ""]}
    found, shares, places = [], [0.0], [fineweb.Position()]
    args = fineweb.parse_args(["--files", str(path), "--out", "out"])
    for place, share, batch in fineweb.read_batches(args, files, places[0]):
        shares.append(share)
        places.append(place)
        for text, begins in batch:
            found += [""] * begins
            found[-1] += text
    if suffix[:3] in ("txt", "csv"):
        texts = [text.replace("\r\n", "\n") for text in texts]
    assert found == texts and len(places) > 60
    assert shares == sorted(shares) and shares[-1] == 1, "how much of the file was read"
    assert suffix != "parquet" or shares[1] < 0.7, "row groups are read one after the other"
    again = fineweb.read_batches(args, files, places[30])
    assert [place for place, _, _ in again] == places[31:]


def test_files_are_read_once_and_in_the_order_of_their_names(tmp_path, monkeypatch):
    """A file may have two names, and brackets in one. Halves of characters become U+FFFD."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "some/of/mine"
    folder.mkdir(parents=True)
    a, b, link = (folder / name for name in ("a.jsonl", "b[1].txt.gz", "0.jsonl"))
    write_jsonl(a, ["a\udfffb\ud83d", "😀", "한\ud7ff"])
    b.write_bytes(gzip.compress("one\n\ufeffé".encode()))
    link.symlink_to(a)
    (folder / "b1.txt.gz").touch()  # which the pattern b[1].txt.gz means
    x = build(None, tmp_path / "x", "--files", b, link, a, "--val_share", 0)
    (folder / "b1.txt.gz").unlink()
    assert read_split(x, "train") == to_tokens(["a\ufffdb\ufffd", "😀", "한\ud7ff", "one\n\ufeffé"])
    y = build("~/some/**/*.*", tmp_path / "y", "--val_share", 0)
    assert contents(x) == contents(y)


@pytest.mark.slow
def test_pydocs_needs_numpy_tiktoken_and_tqdm_alone(tmp_path, monkeypatch):
    """The texts of another Python would be others, so a run goes on with those of the first one."""
    for package in ("datasets", "pyarrow", "fsspec", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, package, None)  # cannot be imported
    main = runpy.run_path(str(ROOT / "fineweb.py"))["main"]
    out, before = tmp_path / "out", None
    for _ in range(2):
        main(["--dataset", "pydocs", "--tokenizer", "bytes", "--out", str(out)])
        assert before in (None, contents(out))
        before = contents(out)
        monkeypatch.setattr(sys, "version", "3.99.0 of another day")
    val, train = (len(read_split(out, split)) for split in ("val", "train"))
    assert train > 10**6 and 0.05 < val / train < 0.15


def test_a_terminal_shows_tokens_their_rate_and_the_time_left(tmp_path, monkeypatch):
    monkeypatch.setattr(fineweb, "BATCH_SIZE", SMALL)
    monkeypatch.setattr(fineweb, "tqdm", partial(fineweb.tqdm, mininterval=0))
    files = write_jsonl(tmp_path / "a.jsonl", ["a text"] * 3000)
    for end, options in (("21.0k/21.0k", ()), ("5.00k/5.00k", ("--max_tokens", 5000))):
        with redirect_stderr(type("", (io.StringIO,), {"isatty": lambda _: True})()) as terminal:
            build(files, tmp_path / end, *options)
        *_, last = bars = terminal.getvalue().strip().split("\r")
        assert re.match(rf"100%.* {end} \[00:\d\d<00:00, .* tokens/s\]$", last)
        assert all(re.search(r"\d%.*<\d.* tokens/s", bar) for bar in bars[2:])


def test_out_is_tried_before_the_work(tmp_path, monkeypatch):
    """~ is the home, a console that lacks a letter shows another, and shards are no texts."""
    monkeypatch.setenv("HOME", str(tmp_path))
    files = write_jsonl(tmp_path / "a.jsonl", ["text"] * 9)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    build(tmp_path, "~/é")
    sys.stdout.flush()
    assert b"making" in sys.stdout.buffer.getvalue() and b"/?: if" in sys.stdout.buffer.getvalue()
    build(tmp_path, "~/é")
    assert list(read_meta(tmp_path / "é")["files"]) == [str(files)]
    monkeypatch.setattr("tiktoken.get_encoding", Mock(side_effect=OSError("no network")))
    line = refuse(files, tmp_path / "gpt2", "--tokenizer", "gpt2")
    assert re.search(r"gpt2.*CLUSTERS\.md.*no network", line)
    monkeypatch.setattr(fineweb, "tokenize", None)  # would be a traceback
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    assert "No space left" in refuse(files, tmp_path / "full")
    monkeypatch.setattr(fineweb, "find_meta", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit, match=r"^130$"):  # 128 plus SIGINT's number
        build(files, tmp_path / "stopped")


GOOD = b'{"text": "a"}\n'
LONG = b'{"text": "%s"}\n' % (b"a" * 100_000)
WRONG = "--out; --files nowhere.jsonl; --dataset pydocs; "
WRONG += "--files https://example.org/a.jsonl; --files -; --val_tokens -1; "
WRONG += "--val_share 10; --workers 0; --shard_size 0; --max_tokens 0; --max_tokens many; --tokenizer gpt4; "
WRONG += "--tokenizer 257; --tokenizer 65537"
STRANGERS = [("a.jsonl", GOOD, words, words.split()[0]) for words in WRONG.split("; ")]
ARRAY = b'[{"text": "a"}, {"text": "b"}]'
STRANGERS += [  # the name of a file, its content, options, and the documents, or what the line says
    ("a.jsonl", GOOD, "--out a.jsonl", "a.jsonl"),
    ("a.jsonl", GOOD, "--out .", "found no file of text outside --out ."),
    ("a.ndjson", GOOD, "", ["a"]),
    ("a.JSONLINES.gz", gzip.compress(GOOD, mtime=0), "", ["a"]),
    ("a.txt", b"Gutenberg\r\nor\rMac\n", "", ["Gutenberg\nor\nMac\n"]),
    ("a.txt.gz", b"", "--val_share 0", "no tokens"),
    ("a.jsonl", b'{"text": null}\n' + GOOD + b'\n{"text": null}\n{"text": ""}', "", ["a", ""]),
    ("a.jsonl", GOOD * 40_000 + b'\n{"text": 5}\n', "", """row 40002: expected a text as 'text' (--text_key), found {'text': 5}"""),
    ("a.jsonl", LONG * 30 + b"5", "--max_tokens 8", ["a" * 7]),  # the rest is not read
    ("a.jsonl", GOOD + b'{"body": "b"}\n', "", """row 2: expected the key 'text' (--text_key), found ['body']"""),
    ("a.JSON", b"\xef\xbb\xbf\n" + ARRAY, "", ["a", "b"]),
    ("a.txt", b"one\n" * 200_000 + b"tw\xffo\n", "", "it is no UTF-8 (iconv: see .github/HELP.md): UnicodeDecodeError"),
    ("a.TXT", b"A\n<|endoftext|>\nB\n <|endoftext|>\n", "", ["A\n", "B\n "]),
    ("a.md", b"<|endoftext|>\r\n<|endoftext|>\n\nA\r\n<|endoftext|>", "", ["\nA\n"]),
    ("README", b"\xef\xbb\xbf<|endoftext|>\nA <|endoftext|>\n", "", ["A "]),
    ("a.txt", b"One.<|endoftext|>\r\nTwo<|endoftext|>.\n<|endoftext|>\n", "", ["One.", "Two<|endoftext|>.\n"]),
    ("f/g/a.html", b"A", "--files f", ["A"]),
    ("f/.git/a", b"A", "--files f", "--files f: found no file (expected"),
    ("f/.a", b"A", "--files f", "--files f: found no file (expected"),
    ("meta.json", GOOD, "--tokenizer .", "--tokenizer .: expected gpt2, bytes, a size or shards: KeyError"),
    ("meta.json", b'{"text": "a", "tokenizer": "a zz"}', "--tokenizer .", "--tokenizer .: expected gpt2, bytes, a size or shards: Value"),
    ("a.txt.xz", lzma.compress(b"text\0"), "", "it is packed, a document"),
    ("a.csv", b'id,text\n1,"A\n2,B\n', "", "a.csv: row in line 2: unexpected end of data"),
    ("a.csv", b"id,text\n1,%s\n" % (b"long " * 99_999), "", ["long " * 99_999]),
    ("a.tsv", b'id\ttext\n1\t"A\n2\tB\n', "", ['"A', "B"]),
    ("f/d.arrow", b"\0", "--files f", "to_parquet"),
    ("a.jsonl.zst", pyarrow.compress(GOOD * 9999, "zstd", asbytes=True)[:-20], "", "OSError"),
    ("a.csv", b'\xef\xbb\xbfid,text\n1,"A\nB, ""c"""\n2,\n3,NA\n', "", ['A\nB, "c"', "NA"]),
    ("a.TSV.gz", gzip.compress(b"body\ta; b\r\nA, b\t1\r\n", mtime=0), "--text_key body", ["A, b"]),
    ("a.csv", b"id,text\n1,05\n\n2,5\n", "", ["05", "5"]),
    ("a.csv", b'id,text\n1,"A\nA"\n2,B, b\n', "", "a.csv: row in line 4: found 3 cells, expected 2"),
    ("a.csv", b"id;text\n1;A\n", "", """row in line 2: expected the key 'text' (--text_key), found ['id;text']"""),
    ("a.parquet", b"PAR1", "", "ArrowInvalid"),
    ("a.parquet", {"text": ["A", None, "", None]}, "", ["A", ""]),
    ("a.parquet", {"text": pyarrow.array(["A", None], "string_view")}, "", ["A"]),  # of polars
    ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", "", "git lfs pull"),
    ("a.csv", "\ufefftext\nA\n".encode("utf-16-le"), "", "a picture or UTF-16"),  # of PowerShell
    ("a.jsonl", GOOD, "--files a.jsonl --files b", "--files b: found no file"),
    ("a.parquet", {"id": [1], "body": ["A"]}, "", "expected the columns ['text'] (--text_key), found ['id', 'body']"),
    ("a.parquet", {"text": ["A"], "id": [5]}, "--text_key id", """row 1: expected a text as 'id' (--text_key), found {'id': 5}"""),
    ("a.parquet", {"text": pyarrow.array([], "string")}, "--val_share 0", "no tokens"),
    ("a.jsonl", GOOD + b'{"text": "cut', "--tokenizer 300", "a.jsonl: row 2 is no JSON: Unterminated string starting at: line 1 column 10"),
    ("a.Parquet", {"text": pyarrow.array([b"A", b"\xff"]).view("string")}, "", "UnicodeDecode"),
    ("a.jl", GOOD * 2, "", ["a", "a"]),  # of Scrapy
    ("wiki_00", GOOD * 2, "", ["a", "a"]),  # of WikiExtractor
    ("a.jsonl-00000-of-00002", b'\n{ "text" : "a"}\n', "", ["a"]),  # of TensorFlow Datasets
    ("a.gdoc", b'{"url": "x"}', "", """row 1: expected the key 'text' (--text_key), found ['url']"""),
    ("a.ipynb", b'{\n "cells": []\n}', "", """row 1: expected the key 'text' (--text_key), found ['cells']"""),
    ("a.json", b'{\n  "text": "a"\n}\n', "", ["a"]),  # of jq
    ("a.json", b'{\r\n  "text": "a",\r\n}\r\n', "", "JSONDecodeError: Illegal trailing comma" if sys.version_info >= (3, 13) else "JSONDecodeError: Expecting property name"),
    ("a.jsonl", b'["a"]\n["b"]\n', "", "Extra data: line 2 column 1"),
    ("a.json", b'{\n  "text": "a"\n}\n' * 2, "", "expected a record on each line, or all in one array: JSONDecodeError: Extra data: line 4"),
    ("a.jsonl", GOOD + b"5\n", "", """row 2: expected the key 'text' (--text_key), found 5"""),
    ("a.jsonl", GOOD + b'{"text": NaN}\n' + GOOD, "", ["a", "a"]),  # of pandas
    ("a.jsonl", b'{"q": "B", "a": "C"}\n{"q": null, "a": null}\n{"q": null, "a": "D"}\n', r"--text_key Q:{q}\nA:{{{a}}}.", ["Q:B\nA:{C}.", "Q:\nA:{D}."]),
    ("a.csv", b"q,a\nB,C\n,\n,D\n", r"--text_key {q}-{a}", ["B-C", "-D"]),
    ("a.parquet", {"q": ["B", None], "a": ["C", None]}, r"--text-key={q}-{a}", ["B-C"]),
    ("a.parquet", {"q": ["B"], "a": ["C"]}, "--text_key {q}{b}", "expected the columns ['q', 'b'] (--text_key), found ['q', 'a']"),
    ("a.jsonl", GOOD, "--text_key {text", "is written {{ or }}"),
    ("a.csv", b'id, text\n1, "A, b"\nid, text\n2, C\n', "", ["A, b", "C"]),
    ("a.tsv", b"id\ttext\n1\tA\tB\n", "", "row in line 2: found 3 cells, expected 2 (a cell has no tabs"),
    ("a.jsonl", GOOD, "--text_key {{x}}", "{{ or }}: there is no key"),
]  # fmt: skip


@pytest.mark.parametrize("name, content, options, expected", STRANGERS)
def test_what_strangers_bring(name, content, options, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, dict):
        parquet.write_table(pyarrow.table(content), name)
    else:
        Path(name).write_bytes(content)
    if isinstance(expected, str):
        line = refuse(name, "out", *options.split())
        assert expected in line and (options or name in line), line
        assert not list(tmp_path.glob("**/*.npy"))
    else:
        build(name, "out", "--val_share", 0, *options.split())
        assert read_split(tmp_path / "out", "train") == to_tokens(expected)


OWN, HUB, WEB = "--files x", "--dataset me/docs", "--dataset HuggingFaceFW/fineweb-edu"
PROMPT = ' --prompt="A b"'
CPU = f"{PROMPT} --quickstart --max_steps"
D6 = f"{PROMPT} --optimizer muon --model d6 --seq_len 256 --total_batch_size 16384 --max_steps"
TUNE = f"{PROMPT} --init_from gpt2 --total_batch_size 16384 --max_steps"
MUON = " --optimizer muon --max_steps"
SUGGESTIONS = [  # source, tokens in the vocabulary, to train, to validate, flags on a CPU, on a GPU
    (OWN, 257, 10**4, 2000, f"{CPU} 800 --val_every 81 --val_tokens 2000", f"{D6} 3 --val_every 1"),
    (OWN, 257, 300_000, 9**9, f"{CPU} 1171 --val_every 118 --val_tokens 500000", f"{D6} 74 --val_every 8"),
    (OWN, 8192, 10**7, 1025, f"{CPU} 4000 --val_every 401 --val_tokens 1025", f"{D6} 2442 --val_every 245"),
    (OWN, 257, 10**6, 1024, f" --val_tokens 0{CPU} 3906 --val_every 391", f" --val_tokens 0{D6} 245 --val_every 25"),
    (OWN, 8193, 10**6, 2000, None, f"{D6} 245 --val_every 25"),
    (OWN, 50257, 10**6, 2000, None, f"{TUNE} 184 --val_every 19"),
    (HUB, 50257, 10**6, 2000, None, f"{TUNE} 184 --val_every 19"),
    (OWN, 257, 10**8, 2000, None, f"{PROMPT}{MUON} 3813"),
    (OWN, 50257, 2_499_999_999, 2000, None, f"{PROMPT}{MUON} 19069"),
    (HUB, 50257, 10**8, 2000, None, f"{PROMPT}{MUON} 1000"),
    (WEB, 50257, 135 * 10**6, 2000, None, f"{MUON} 2000"),  # as README has them
    (WEB, 50257, 540 * 10**6, 2000, None, f"{MUON} 4000"),
    (WEB, 50257, 25 * 10**8, 2000, None, " --max_lr 1.8e-3"),
    (OWN, 257, 25 * 10**8, 0, None, " --val_tokens 0 --max_lr 1.8e-3"),
]  # fmt: skip


@pytest.mark.parametrize("source, vocab_size, train, val, on_cpu, on_gpu", SUGGESTIONS)
def test_what_to_run_next_suits_the_texts(source, vocab_size, train, val, on_cpu, on_gpu):
    tokenizer = "gpt2" if vocab_size == 50257 else "bpe"
    meta = {"tokenizer": tokenizer, "vocab_size": vocab_size}
    args = fineweb.parse_args([*source.split(), "--out", "a d/m"])
    lines = fineweb.suggest(args, meta, train, val, "A b").splitlines()
    command = 'python train_gpt2.py --data_dir "a d/m" --log_dir "log/m"'
    assert lines[1::2] == [f"{command}{flags}" for flags in (on_cpu, on_gpu) if flags is not None]
    assert all(line[-1] == ":" for line in lines[::2])
    assert ("--tokenizer 2048" in lines[0]) == (on_cpu is None and train < 10**8)


def test_the_full_run_is_that_of_the_pages():
    command = fineweb.suggest(fineweb.parse_args([]), {}, 10**10, 10**8, "A b").splitlines()[1]
    assert command == "python train_gpt2.py --max_lr 1.8e-3"


def test_the_log_dir_has_the_name_of_the_shards():
    args = fineweb.parse_args(["--files", "x", "--out", "."])
    assert f"--data_dir . --log_dir log/{Path.cwd().name} " in fineweb.suggest(
        args, {}, 10**10, 0, ""
    )


def test_a_text_to_measure_a_model_with(tmp_path, capsys, monkeypatch):
    """All of it validates, and the printed command evaluates a model that has its tokens."""
    monkeypatch.chdir(tmp_path)
    files = write_jsonl(tmp_path / "a.jsonl", ["some text"] * 900)
    build(files, tmp_path / "mine")
    assert main("--data_dir", "mine", "--log_dir", "log/mine", "--max_steps", 1) == 0
    capsys.readouterr()
    printed = command_line(
        files, tmp_path / "test", capsys, "--val_share", 1, "--tokenizer", "mine"
    )
    assert "\n0 tokens to train and 9,000 to validate, of 0.90 bytes each\n" in printed
    [command] = re.findall(r"^python train_gpt2.py (.*)", printed, re.M)
    flags = '--init_from "log/mine" --max_steps 0 --val_tokens 9000'
    assert command == f"--data_dir {tmp_path}/test {flags}"
    assert main(*shlex.split(command)) == 0
    assert re.search(r"step +\d/\d \| val loss: [\d.]+ \| bits per byte", capsys.readouterr().out)


@pytest.mark.parametrize("text, prompt", {
    "Donaudampfschifffah m": "Donaudampfschifffah",
    "Beta gamma delta ": "Beta gamma", "Beta " + "x" * 20: "Beta xxxxxxxxxxxxxxx", "你好" * 99: "你好" * 10,
    "Donaudampfschifffahrtsgesellschaft m b H ": "Donaudampfschifffahr", "----- a ": "----- a",
    "\n\n\"Oh!\" he said": "Oh he", r"{%if%} `x` $HOME! \n": "{ if",
}.items())  # fmt: skip
def test_the_prompt_begins_a_document_and_pastes_into_any_shell(text, prompt, tmp_path, capsys):
    files = write_jsonl(tmp_path / "a.jsonl", [text * 19999])
    out = command_line(files, tmp_path / "out", capsys)
    assert f' --prompt="{prompt}" --quickstart ' in out
    assert "'" not in out, "cmd.exe knows no other quotes"


def test_defaults_follow_the_source_and_the_machine(monkeypatch):
    """A job has a worker for each core that it may use, and where it cannot be limited, that there is."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5, 6}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    for argv, *expected in (
        ("", 1.0, 10**8, 4, "gpt2"), ("--max_tokens 150000000", 1.0, 15 * 10**6, 4, "gpt2"),
        ("--files x --out y", 0.1, 10**8, 4, "gpt2"), ("--dataset pydocs", 0.1, 10**8, 4, "2048"),
        ("--max_tokens 9000000000", 1.0, 10**8, 4, "gpt2"),
        ("--files x --out y --val_share 1", 1.0, sys.maxsize, 4, "gpt2"),  # a text to measure with
    ):  # fmt: skip
        args = fineweb.parse_args(argv.split())
        assert [args.val_share, args.val_tokens, args.workers, args.tokenizer] == expected
    monkeypatch.delattr(os, "sched_getaffinity")
    assert fineweb.parse_args(["--files", "x", "--out", "y"]).workers == 64


def test_a_folder_may_hold_what_has_no_text(tmp_path, capsys, recwarn):
    """It is left out, and named at the start. By itself, it is refused. No file is left open."""
    warnings.simplefilter("always")
    folder = tmp_path / "code"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", ["A"] * 99)
    (folder / "b.txt").write_text("B")
    others = {"price.CSV": b"id,price\n1,2\n", "p.png": b"\0", "e.gz": b"\x1f\x8b"}
    others |= {"n.gz": b"no gzip", "n.zst": b"no zstd", "n.parquet": b"PAR1 no parquet PAR1"}
    others |= {"n.rtf": b"{\\rtf1 B}", "s.pdf": b"%PDF B", "w.txt": b"M\xe4rz"}
    for name, content in others.items():
        (folder / name).write_bytes(content)
    out = build(folder, tmp_path / "out", "--val_share", 0)
    assert read_split(out, "train") == to_tokens(["A"] * 99 + ["B"])
    printed = capsys.readouterr().out
    for name in others:
        assert re.search(rf"code/{name}: .*: it is left out\n", printed), name
        assert name in refuse(folder / name, tmp_path / "other")
    assert not [warning for warning in recwarn if warning.category is ResourceWarning]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError()], ids=str)
def test_a_file_is_left_out_for_its_content_alone(error, tmp_path, monkeypatch):
    """The disk or the memory may be better at the next start, and the shards would be others."""
    write_jsonl(tmp_path / "a.jsonl", ["A"] * 99)
    (tmp_path / "b.txt").write_text("B")
    monkeypatch.setattr(fineweb, "read_txt", Mock(side_effect=error))
    assert f"b.txt: {type(error).__name__}:" in refuse(tmp_path, tmp_path / "out")


def test_a_file_that_is_empty_when_it_is_listed_may_grow(tmp_path, monkeypatch):
    (tmp_path / "a.txt").touch()
    get = fineweb.get_tokenizer

    def get_tokenizer(name):
        if not (tmp_path / "a.txt").stat().st_size:  # each thread calls this
            (tmp_path / "a.txt").write_text("A line.\n" * SMALL)
        return get(name)

    monkeypatch.setattr(fineweb, "BATCH_SIZE", SMALL)
    monkeypatch.setattr(fineweb, "get_tokenizer", get_tokenizer)
    out = build(tmp_path / "a.txt", tmp_path / "out", "--val_share", 0)
    assert read_split(out, "train") == to_tokens(["A line.\n" * SMALL])


def test_links_to_folders_are_followed_once(tmp_path):
    """Whether they lead back, twice to the same folder, or nowhere. --out is made where one leads."""
    (tmp_path / "elsewhere/of").mkdir(parents=True)
    (tmp_path / "elsewhere/of/a.txt").write_text("A")
    links = {"c": "../elsewhere", "d": "../elsewhere/of", "up": "..", "lost": "no"}
    (tmp_path / "texts").mkdir()
    for name, target in links.items():
        (tmp_path / "texts" / name).symlink_to(target)
    (tmp_path / "out").symlink_to("disk")
    out = build(tmp_path / "texts", tmp_path / "out", "--val_share", 0)
    assert read_split(out, "train") == to_tokens(["A"]) and (tmp_path / "disk").is_dir()


def test_four_starts_at_once_end_with_the_same_shards(tmp_path):
    files = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with ProcessPoolExecutor(4, multiprocessing.get_context("fork")) as pool:
        starts = [pool.submit(build, files, tmp_path / "out", *OPTIONS) for _ in range(4)]
    outs = {start.result() for start in starts}  # or the error of one
    assert contents(outs.pop()) == contents(build(files, tmp_path / "whole", *OPTIONS))


def test_tokens_that_fit_badly_are_named(tmp_path, capsys, monkeypatch):
    files = write_jsonl(tmp_path / "a.jsonl", ["A"] * 99)
    enc = fineweb.get_tokenizer("bytes")
    monkeypatch.setattr(fineweb, "get_tokenizer", lambda name: enc)
    for size, tokenizer in ((2.9, "gpt2"), (3.0, "gpt2"), (1.0, "bytes")):
        text = "x" * round(2 * size * 99)
        monkeypatch.setattr(enc, "decode", lambda tokens, text=text: text)
        build(files, tmp_path / f"{size} {tokenizer}", "--tokenizer", tokenizer)
        is_named = "fit these texts badly: add --tokenizer 16384" in capsys.readouterr().out
        assert is_named == (size == 2.9)


def test_an_edit_is_seen_wherever_it_is(tmp_path):
    """Also behind the first 64 KB of a file whose size stays the same."""
    files = tmp_path / "a.txt"
    files.write_text("a line of text\n" * 20_000)
    out = build(files, tmp_path / "out")
    files.write_text("a line of text\n" * 19_999 + "a line of TEXT\n")
    assert "a.txt (before: " in refuse(files, out)


def test_a_sample_of_parquet_is_spread_over_its_rows(tmp_path):
    """The texts may take less space than other columns, and come before them."""
    texts = [f"{k} {'x' * 99}" for k in range(1000)]
    table = pyarrow.table({"text": texts, "picture": [os.urandom(2000) for _ in texts]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=1000)
    files = {str(tmp_path / "a.parquet"): [(tmp_path / "a.parquet").stat().st_size, ""]}
    with patch.object(fineweb, "SAMPLE_SIZE", 20_000):
        rows = [int(text.split()[0]) for text in fineweb.sample_texts(files, "text")]
    assert 190 <= len(rows) <= 210 and 480 < np.mean(rows) < 520


def test_no_unfinished_file_stays(tmp_path, monkeypatch, capsys):
    """A full disk leaves none and is named, and what kills left goes with the next success."""
    files, out = write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "out"
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    assert f"{out}/meta.json cannot be written: OSError: [Errno 28] No space" in refuse(files, out)
    assert list(out.iterdir()) == []
    monkeypatch.undo()
    for _ in range(2):
        (out / "train_000000.npy.99999.unfinished").write_text("of a killed process")
        build(files, out)
        assert not list(out.glob("*.unfinished"))
    assert f"{out} is made already\n" in capsys.readouterr().out


def test_another_command_that_finishes_first_may_delete_a_temporary_file(tmp_path, monkeypatch):
    """It is not needed then, because all files have their names already. While both commands write,
    each has a temporary file of its own."""
    path, found = tmp_path / "a.npy", []

    def write_at_once(_):
        found.append(len([*tmp_path.iterdir()]))
        if len(found) == 1:
            monkeypatch.setattr(os, "getpid", lambda: 1)  # the other command
            fineweb.write_file(str(path), b"A")

    monkeypatch.setattr(os, "fsync", write_at_once)
    fineweb.write_file(str(path), b"A")
    assert found == [1, 2] and path.read_bytes() == b"A"
    monkeypatch.setattr(os, "fsync", lambda _: [path.unlink() for path in tmp_path.iterdir()])
    fineweb.write_file(str(path), b"B")
    assert not [*tmp_path.iterdir()]


def test_short_rows_and_marks_inside_texts(tmp_path, capsys, monkeypatch):
    """The prompt is the beginning of one text. Nothing needs a stderr."""
    files = write_jsonl(tmp_path / "a.jsonl", ["", "emma", "oli", "a<|endoftext|>b"] * 20_000)
    monkeypatch.setattr(sys, "stderr", None)
    printed = command_line(files, tmp_path / "out", capsys)
    assert ' --prompt="emma" ' in printed
    assert "\n20,000 <|endoftext|> inside texts end no document: they are read" in printed
    monkeypatch.setattr(fineweb, "BATCH_SIZE", 100)
    empty = str(write_jsonl(tmp_path / "b.jsonl", [""] * 250))
    args = fineweb.parse_args(["--files", empty, "--out", "out"])
    batches = fineweb.read_batches(args, {empty: [1, ""]}, fineweb.Position())
    assert [len(batch) for *_, batch in batches] == [100, 100, 50], "they need little memory"


@pytest.mark.parametrize("words, values", {
    "a b --out o": (["a", "b"], "o", None), "--out o a": (["a"], "o", None),
    "--out o-o --files a-b --max-tokens 5": (["a-b"], "o-o", 5),
    "--files a c --max-tokens=5 --out=--o-o b": (["a", "c", "b"], "--o-o", 5),
}.items())  # fmt: skip
def test_flags_as_people_type_them(words, values):
    args = fineweb.parse_args(words.split())
    assert (args.files, args.out, args.max_tokens) == values


def test_a_home_is_found_behind_an_equals_sign_too(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    args = fineweb.parse_args(["--files=~/a", "--out=~/b", "--tokenizer=~/c"])
    assert (args.files, args.out, args.tokenizer) == (["/home/me/a"], "/home/me/b", "/home/me/c")
