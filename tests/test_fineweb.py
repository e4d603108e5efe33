"""fineweb.py: exact shards from any documents, whatever interrupts the work (promise 7)."""

import gzip
import hashlib
import io
import json
import lzma
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from unittest.mock import ANY

import fsspec
import numpy as np
import pyarrow
import pytest
from conftest import ROOT, needs_data
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

os.environ["HF_HUB_OFFLINE"] = "1"

import fineweb

exact = settings(deadline=None, derandomize=True, database=None)
fork = multiprocessing.get_context("fork")


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return path


def write_parquet(path: Path | io.BytesIO, texts: list[str], rows: int | None = None) -> None:
    """Write texts in row groups of so many rows, beside a column of numbers."""
    table = pyarrow.table({"id": [*range(len(texts))], "text": texts})
    parquet.write_table(table, path, row_group_size=rows)


def random_texts(number: int, longest: int, seed: int = 0) -> list[str]:
    """Documents of 0 to `longest` characters in words, the last of the longest length."""
    rng = random.Random(seed)
    words = ["the", "cat", "sat.", "<|endoftext|>", "déjà\nvu", "", "漢字", "12"]
    lengths = [rng.randrange(longest + 1) for _ in range(number - 1)] + [longest]
    return [" ".join(rng.choices(words, k=size // 3 + 1))[:size] for size in lengths]


def build(files, out: Path, *options) -> Path:
    """Run fineweb.py in this process. Later options win."""
    argv = ["--files", files, "--out", out, "--tokenizer", "bytes", "--workers", 1, *options]
    fineweb.main([str(word) for word in argv])
    return out


def begin(chunks: int, run) -> None:
    """Run until some chunks are finished, and end there as a kill would."""
    save_chunk, left = fineweb.save_chunk, iter(range(chunks - 1))

    def save_and_stop(*args):
        save_chunk(*args)
        if next(left, None) is None:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fineweb, "save_chunk", save_and_stop)
        run()


def refuse(capsys, *argv) -> str:
    """Run a command line that must end with status 2 and one line; return the line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        fineweb.main(["--workers", "1", *(str(word) for word in argv)])
    assert exit_info.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("fineweb.py: ") and line.count("\n") == 1, line
    return line


def read_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_meta(folder: Path, name: str = "meta.json") -> dict:
    return json.loads((folder / name).read_text())


def read_split(folder: Path, split: str) -> list[int]:
    """Tokens of a split's shards, one after the other."""
    shards = [np.load(path) for path in sorted(folder.glob(f"{split}*.npy"))]
    assert all(shard.dtype == np.uint16 and shard.ndim == 1 and len(shard) for shard in shards)
    return np.concatenate([np.empty(0, np.uint16), *shards]).tolist()


def to_tokens(texts: list[str]) -> list[int]:
    """What all shards together hold with the bytes tokenizer."""
    return [token for text in texts for token in (256, *text.encode())]


# --------------------------------------------------------------------------------------------------
# promise 7: the shards depend on documents and options alone, not on workers or kills; changed
# inputs or options never mix into one dataset; no file has its final name before it is whole

TEXTS = [*random_texts(60, 900), "a long one " * 2000, *random_texts(60, 900, seed=1)]
OPTIONS = ("--shard_size", 2500, "--val_share", 0.3)


@pytest.fixture
def small_batches(monkeypatch):
    """Make batches so short that every chunk has several and every long document spans some."""
    monkeypatch.setattr(fineweb, "BATCH_SIZE", 1000)


def kill_at(event: int, files, out: Path) -> None:
    """Build in a process that kills itself when it encodes, renames or is within np.save."""
    count, save = iter(range(1, 10**9)), np.save

    def die() -> None:
        if next(count) == event:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying(function):
        return lambda *args: (die(), function(*args), die())[1]

    def save_half_and_die(file, array) -> None:
        file.write(b"half a shard")
        file.flush()
        die()
        file.seek(0)
        save(file, array)

    def child() -> None:
        fineweb.encode, os.replace = dying(fineweb.encode), dying(os.replace)
        np.save = save_half_and_die
        build(files, out, *OPTIONS)

    process = fork.Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def assert_whole(out: Path) -> None:
    """Every file with its final name is whole, and has the content that meta.json lists."""
    for path in out.glob("*.npy"):
        assert len(np.load(path)) > 0
    for path in out.glob("meta*.json"):
        for name, shard in json.loads(path.read_text())["shards"].items():
            sha256 = hashlib.sha256((out / name).read_bytes()).hexdigest()
            assert shard == {"tokens": len(np.load(out / name)), "sha256": sha256}


def test_killed_at_15_random_moments_it_ends_byte_for_byte_the_same(tmp_path, small_batches):
    """After each SIGKILL the same command continues, and with another number of workers. Nothing is
    left of the files that were not whole."""
    files, out = write_jsonl(tmp_path / "docs.jsonl", TEXTS), tmp_path / "killed"
    whole = build(files, tmp_path / "whole", *OPTIONS)
    assert read_meta(whole)["progress"]["chunks"] > 25
    rng, chunks = random.Random(1), [0]
    for _ in range(15):
        kill_at(rng.randrange(3, 40), files, out)
        assert_whole(out)
        if (out / "meta.json").exists():
            chunks.append(read_meta(out)["progress"]["chunks"])
    assert chunks == sorted(chunks) and 5 < chunks[-1] < 26
    assert list(out.glob("*.unfinished"))
    build(files, out, *OPTIONS, "--workers", 2)
    assert read_folder(out) == read_folder(whole)


def test_a_chunk_is_written_while_the_next_is_filled(tmp_path, small_batches, monkeypatch, capsys):
    """Each but the last full one, for which the disk has no space."""
    files, out = write_jsonl(tmp_path / "docs.jsonl", TEXTS[:60]), tmp_path / "out"
    encode, save_chunk, encoded = fineweb.encode, fineweb.save_chunk, []
    last = len(to_tokens(TEXTS[:60])) // 2500 - 1
    deadline = time.monotonic() + 10

    def save(args, meta, tokens, position):
        fineweb.require(position is None or meta["progress"]["chunks"] < last, "No space left")
        while position and len(encoded) <= position[1] + 1:
            fineweb.require(time.monotonic() < deadline, "the next chunk waits for this one")
            time.sleep(0.01)
        save_chunk(args, meta, tokens, position)

    monkeypatch.setattr(fineweb, "encode", lambda *args: encoded.append(args) or encode(*args))
    monkeypatch.setattr(fineweb, "save_chunk", save)
    argv = ["--files", files, "--out", out, "--tokenizer", "bytes", *OPTIONS]
    assert "No space left" in refuse(capsys, *argv)
    assert read_meta(out)["progress"]["chunks"] == last > 5


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "txt"])
def test_it_continues_behind_every_chunk(suffix, tmp_path, small_batches, monkeypatch):
    """Each start makes one chunk, and encodes again only the batch in which the chunk begins."""
    write = partial(write_parquet, rows=3) if suffix == "parquet" else write_jsonl
    for k in range(3):
        write(
            tmp_path / f"{k}.{suffix}", TEXTS[k * 40 : k * 40 + 40]
        )  # a .txt is the .jsonl's text
    files, out = tmp_path / f"*.{suffix}", tmp_path / "parts"
    whole = build(files, tmp_path / "whole", *OPTIONS)
    encode, encoded = fineweb.encode, []
    monkeypatch.setattr(fineweb, "encode", lambda *args: encoded.append(args) or encode(*args))
    starts, done = 0, False
    while not done:
        encoded.clear()
        begin(1, lambda: build(files, out, *OPTIONS))
        starts += 1
        done = read_meta(out)["progress"]["done"]
        assert len(encoded) < 15  # of about 60 batches: those of a chunk, and those in the queue
    assert starts == read_meta(whole)["progress"]["chunks"] > 20
    assert read_folder(out) == read_folder(whole)


def begin_or_build(chunks: int | None, files, out: Path) -> dict[str, bytes]:
    """Build some chunks with OPTIONS, or all of them; return the folder."""
    run = lambda: build(files, out, *OPTIONS)  # noqa: E731
    begin(chunks, run) if chunks else run()
    return read_folder(out)


@pytest.mark.parametrize("chunks", [1, None])
@pytest.mark.parametrize("change", ["edit", "touch", "add", "remove", "swap"])
def test_changed_files_are_refused(change, chunks, tmp_path, capsys):
    """Also by a finished folder, and nothing in the folder changes. `swap` is another order."""
    for k in range(3):
        write_jsonl(tmp_path / f"{k}.jsonl", random_texts(30, 300 + k, seed=k))
    files, out, path = tmp_path / "?.jsonl", tmp_path / "out", tmp_path / "1.jsonl"
    before = begin_or_build(chunks, files, out)
    date = path.stat().st_mtime_ns
    if change == "add":
        write_jsonl(tmp_path / "3.jsonl", ["more"])
    elif change == "edit":
        path.write_text(path.read_text() + "\n")
        os.utime(path, ns=(date, date))
    elif change == "touch":
        os.utime(path, ns=(0, date + 1000))
    else:
        path.rename(tmp_path / "x")
    if change == "swap":
        (tmp_path / "2.jsonl").rename(path)
        (tmp_path / "x").rename(tmp_path / "2.jsonl")
    line = refuse(capsys, "--files", files, "--out", out, "--tokenizer", "bytes", *OPTIONS)
    assert {"add": "3.jsonl"}.get(change, "1.jsonl") in line and "delete the folder" in line
    assert read_folder(out) == before


CHANGES = ["shard_size 2600", "val_share 0.2", "val_tokens 1000", "max_tokens 9000"]


@pytest.mark.parametrize("option", [*CHANGES, pytest.param("tokenizer gpt2", marks=needs_data)])
def test_changed_options_are_refused(option, tmp_path, capsys):
    """The line names the option and the value."""
    files, out = write_jsonl(tmp_path / "docs.jsonl", TEXTS), tmp_path / "out"
    before = begin_or_build(2, files, out)
    argv = ["--files", files, "--out", out, "--tokenizer", "bytes", *OPTIONS]
    line = refuse(capsys, *argv, *f"--{option}".split())
    assert all(word in line for word in option.split()) and "delete the folder" in line
    assert read_folder(out) == before


@pytest.mark.parametrize("chunks", [4, None])
def test_a_damaged_shard_is_refused_at_the_next_start(chunks, tmp_path, capsys):
    """One bit, a missing end, a missing file: the line names the shard, and nothing changes."""
    files, out = write_jsonl(tmp_path / "docs.jsonl", TEXTS), tmp_path / "out"
    data = begin_or_build(chunks, files, out)["train_000001.npy"]
    for damaged in (data[:-1] + bytes([data[-1] ^ 1]), data[:-2], None):
        (out / "train_000001.npy").unlink()
        if damaged:
            (out / "train_000001.npy").write_bytes(damaged)
        before = read_folder(out)
        argv = ["--files", files, "--out", out, "--tokenizer", "bytes", *OPTIONS]
        assert "train_000001.npy" in refuse(capsys, *argv)
        assert read_folder(out) == before


def test_folders_of_others_are_refused(tmp_path, capsys):
    """Shards without a meta.json, a meta.json of another version or with its end lost. All stay."""
    files = write_jsonl(tmp_path / "docs.jsonl", TEXTS)
    contents = [("x_train.npy", "shard"), ("meta.json", '{"version": 4}'), ("meta.json", '{"ver')]
    for out, (name, content) in enumerate(contents):
        (tmp_path / f"{out}").mkdir()
        (tmp_path / f"{out}" / name).write_text(content)
        argv = ["--files", files, "--out", tmp_path / f"{out}", "--tokenizer", "bytes"]
        assert "meta.json" in refuse(capsys, *argv)
        assert read_folder(tmp_path / f"{out}") == {name: content.encode()}


def test_parts_in_any_order_hold_every_file_once(tmp_path, capsys):
    """Part I has the files I, I + N, ...; part 1 has all validation; other parts are refused."""
    documents = [random_texts(40, 400, seed=k) for k in range(5)]
    for k, texts in enumerate(documents):
        write_jsonl(tmp_path / f"{k}.jsonl", texts)
    out = tmp_path / "out"
    for part in (3, 1, 2):
        build(tmp_path / "?.jsonl", out, *OPTIONS, "--part", f"{part}/3")
    assert_whole(out)
    assert not (out / "meta.json").exists()
    for part in (1, 2, 3):
        tokens = to_tokens([text for texts in documents[part - 1 :: 3] for text in texts])
        train, val = (read_split(out, f"{split}-00{part}-of-003_") for split in ("train", "val"))
        assert sorted(train + val) == sorted(tokens) and bool(val) == (part == 1)
        assert part == 1 or train == tokens
        meta = read_meta(out, f"meta-00{part}-of-003.json")
        assert meta["progress"]["done"] and meta["tokenizer"] == "bytes"
    argv = ["--files", tmp_path / "?.jsonl", "--out", out, "--tokenizer", "bytes", *OPTIONS]
    assert "parts 3" in refuse(capsys, *argv, "--part", "2/4")
    assert "parts 3" in refuse(capsys, *argv)
    write_jsonl(tmp_path / "5.jsonl", ["one more"])
    assert "5.jsonl" in refuse(capsys, *argv, "--part", "2/3")
    assert "found 6 files" in refuse(capsys, *argv, "--out", tmp_path / "more", "--part", "7/7")


def test_a_part_may_start_while_another_writes_its_first_shard(tmp_path, monkeypatch):
    """Here this happens while it lists the files, for which it asks the hub for seconds."""
    files, list_files, argv = tmp_path / "?.jsonl", fineweb.list_files, [tmp_path / "out", "--part"]
    [write_jsonl(tmp_path / f"{k}.jsonl", TEXTS) for k in range(2)]
    others = [lambda: build(files, *argv, "2/2")]
    list_slowly = lambda *args: ([others.pop()() for _ in others], list_files(*args))[1]  # noqa: E731
    monkeypatch.setattr(fineweb, "list_files", list_slowly)
    build(files, *argv, "1/2")
    assert len(read_split(argv[0], "")) == 2 * len(to_tokens(TEXTS))


@pytest.fixture
def hub(monkeypatch):
    """A dataset of three files, kept in memory, at a commit that the test can change."""
    state = {"commit": "aaa"}
    find = lambda commit: [f"memory://docs@{commit}/{k}.parquet" for k in range(3)]  # noqa: E731
    for commit in ("aaa", "bbb"):
        for k, address in enumerate(find(commit)):
            with fsspec.open(address, "wb") as file:
                write_parquet(file, [commit + text for text in random_texts(30, 300, seed=k)])
    monkeypatch.setattr(fineweb, "find_on_hub", lambda dataset, name: find(state["commit"]))
    return state


HUB = ["--dataset", "me/docs", "--tokenizer", "bytes", "--workers", "1"]
HUB += [*map(str, OPTIONS), "--out"]


def test_a_run_and_its_parts_read_the_commit_with_which_the_first_began(hub, tmp_path, capsys):
    """A later commit is ignored. Parts copied together from folders of two commits are refused."""
    whole, out, a, b = (tmp_path / name for name in ("whole", "out", "a", "b"))
    fineweb.main([*HUB, str(whole)])
    texts = ["aaa" + text for k in range(3) for text in random_texts(30, 300, seed=k)]
    assert sorted(read_split(whole, "val") + read_split(whole, "train")) == sorted(to_tokens(texts))
    begin(1, lambda: fineweb.main([*HUB, str(out)]))
    fineweb.main([*HUB, str(a), "--part", "1/2"])
    hub["commit"] = "bbb"
    fineweb.main([*HUB, str(out)])
    assert read_folder(out) == read_folder(whole)
    fineweb.main([*HUB, str(a), "--part", "2/2"])
    assert "@aaa" in str(read_meta(a, "meta-002-of-002.json")["files"])
    fineweb.main([*HUB, str(b), "--part", "2/2"])
    for path in b.iterdir():
        path.replace(a / path.name)
    assert "docs@aaa" in refuse(capsys, *HUB, a, "--part", "1/2")


class Hub(BaseHTTPRequestHandler):
    """What fineweb.py asks of the Hugging Face hub. A subclass has files, {name: content}."""

    reads = 0

    def do_GET(self):
        path, _, name = self.path.partition("?")[0].rpartition("/")
        content, span = self.files.get(name, b""), self.headers["Range"]
        if "/tree" in path:
            sizes = [(name, len(content)) for name, content in self.files.items()]
            listing = [{"type": "file", "oid": "e", "path": n, "size": size} for n, size in sizes]
            content = json.dumps(listing).encode()
        elif "/resolve/" not in path:
            content = b'{"id": "me/docs", "sha": "%s", "siblings": [], "tags": []}' % (b"a" * 40)
        elif span:
            type(self).reads += 1
            first, last = map(int, span.removeprefix("bytes=").split("-"))
            content = content[first : last + 1]
        self.send_response(200 if content else 404)
        headers = {"X-Repo-Commit": "a" * 40, "X-Error-Code": "EntryNotFound"}  # if it is an error
        for header in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(*header)
        self.end_headers()
        if span and self.reads in (7, 15):
            content = content[:-1]  # and then the connection ends
        elif span and self.reads == 25:
            self.kill()
        self.wfile.write(content * (self.command == "GET"))

    do_HEAD = do_GET


@pytest.mark.slow
def test_over_http_it_survives_lost_connections_and_continues_after_a_kill(tmp_path):
    """To the shards of the same files on the disk. A row group is one request of a worker."""
    for k in range(3):
        write_parquet(tmp_path / f"{k}.parquet", random_texts(200, 500, seed=k), rows=20)
    files = {path.name: path.read_bytes() for path in sorted(tmp_path.glob("*.parquet"))}
    hub = type("", (Hub,), {"files": files, "kill": lambda self: process.kill()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), hub)
    Thread(target=server.serve_forever, daemon=True).start()
    env = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "no_proxy": "*"}
    env |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, ROOT / "fineweb.py", "--dataset", "me/docs", "--tokenizer", "bytes"]
    command += [*map(str, OPTIONS), "--workers", "2", "--out", tmp_path / "out"]
    errors = ""
    for status in (-signal.SIGKILL, 0):
        process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        errors += process.communicate(timeout=60)[1]  # it is closed when all processes have ended
        assert process.returncode == status, errors
    server.shutdown()
    assert "peer closed connection" in errors and 32 <= hub.reads < 60
    whole = read_folder(build(tmp_path / "*.parquet", tmp_path / "whole", *OPTIONS))
    assert read_folder(tmp_path / "out") == whole | {"meta.json": ANY}


# -------------------- documents to shards


def test_small_corpus_golden(tmp_path, monkeypatch):
    """The bytes that the first version wrote, and the keys that the trainer reads."""
    out = build(write_jsonl(tmp_path / "docs.jsonl", random_texts(50, 500)), tmp_path / "out")
    _, train, val = (hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(out.iterdir()))
    assert (train[:16], val[:16]) == ("77f5cb94beabd2fd", "5c16acecc14da7cb")
    meta = read_meta(out)
    assert [meta[key] for key in ("tokenizer", "vocab_size", "eot")] == ["bytes", 257, 256]
    assert set(meta["shards"]) == {"train_000000.npy", "val_000000.npy"}
    assert meta["progress"]["done"] is True
    monkeypatch.setattr(fineweb, "write_file", None)
    monkeypatch.setattr(fineweb, "read_file", None)
    build(tmp_path / "docs.jsonl", out)  # returns at once: nothing is read, nothing is written


@settings(exact, max_examples=40)
@given(data=st.data())
def test_validation_first_and_then_training(data, tmp_path_factory):
    """Of documents that are empty, fill a shard exactly or span three, none at an edge is lost."""
    size = data.draw(st.integers(1, 40), "shard_size")
    lengths = st.one_of(st.integers(0, 5 * size), st.sampled_from([0, size - 1, 3 * size]))
    texts = data.draw(st.lists(lengths.map(lambda n: ("xyz" * n)[:n]), min_size=2, max_size=6))
    expected = to_tokens(texts)
    budget = data.draw(st.integers(1, 2 * len(expected)), "max_tokens")
    expected = expected[:budget]
    val = data.draw(st.integers(0, len(expected) - 1), "val_tokens")
    folder = tmp_path_factory.mktemp("shards")
    options = ["--shard_size", size, "--val_tokens", val, "--val_share", 1, "--max_tokens", budget]
    out = build(write_jsonl(folder / "docs.jsonl", texts), folder / "out", *options)
    assert read_split(out, "val") == expected[:val]
    assert read_split(out, "train") == expected[val:]
    for k in range(len(expected) // size):  # chunk k is val's and train's shard k together
        assert sum(len(np.load(path)) for path in out.glob(f"*_{k:06d}.npy")) == size


def test_validation_is_dealt_by_documents(tmp_path, capsys):
    """A document, or piece of a longer one, goes to val while that has not more than its share."""
    texts = [letter * 15 for letter in "abcdefgh"] + ["i" * 39]
    options = ["--val_share", 0.25, "--val_tokens", 44]
    out = build(write_jsonl(tmp_path / "docs.jsonl", texts), tmp_path / "out", *options)
    argv = ["--files", tmp_path / "docs.jsonl", "--out", tmp_path / "all", "--val_share", "1"]
    assert "no tokens to train on" in refuse(capsys, *argv, "--tokenizer", "bytes")
    # All have 16 tokens. Val has 16 of 16, 32, 48, 64, which is its share: e; 32 of 128: i's first
    # piece, of which 12 tokens are left to val_tokens
    assert read_split(out, "val") == to_tokens(["a" * 15, "e" * 15, "i" * 11])
    assert read_split(out, "train") == to_tokens([x * 15 for x in "bcdfgh"]) + [ord("i")] * 28


# -------------------- texts to tokens


@needs_data
def test_the_tokenizers(monkeypatch):
    """There are two. A token of "bytes" is a byte. uint16 holds no vocabulary beyond 65,536, and
    a vocabulary that cannot be downloaded is a mistake that the user can put right."""
    enc = fineweb.get_tokenizer("gpt2")
    assert enc is fineweb.get_tokenizer("gpt2") and (enc.n_vocab, enc.eot_token) == (50257, 50256)
    enc = fineweb.get_tokenizer("bytes")
    text = "".join(map(chr, range(0xD7FF))) + " 😀\n" * 70
    assert enc.encode_ordinary(text) == list(text.encode())
    assert (enc.n_vocab, enc.eot_token) == (257, 256)
    with pytest.raises(fineweb.UserError, match="expected gpt2 or bytes"):
        fineweb.get_tokenizer("gpt3")
    monkeypatch.setattr(fineweb.tiktoken.Encoding, "n_vocab", 2**16 + 1)
    with pytest.raises(fineweb.UserError, match="65,537"):
        fineweb.get_tokenizer.__wrapped__("bytes")
    monkeypatch.setattr(fineweb.tiktoken, "get_encoding", lambda name: {}[name])
    with pytest.raises(fineweb.UserError, match="TIKTOKEN_CACHE_DIR"):
        fineweb.get_tokenizer.__wrapped__("gpt2")


PIECES = st.text(st.sampled_from("ab1.' \t\n\r\0é\x1c\x85\u2028\u3000漢😀"), max_size=60)


@needs_data
@settings(exact, max_examples=150)
@given(st.lists(PIECES, min_size=1, max_size=6), st.integers(70, 120))
def test_long_texts_encode_to_the_tokens_of_the_whole(parts, size):
    """Texts are cut only where GPT-2's pattern begins a new piece, wherever the limit falls."""
    text = "".join(" word " + part for part in parts)
    enc = fineweb.get_tokenizer("gpt2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fineweb, "BATCH_SIZE", size)
        pieces = list(fineweb.cut(text))
        tokens = fineweb.encode("gpt2", "file", lambda: ["", text, text])
        blocks = [batch() for batch in fineweb.read_txt(io.BytesIO(text.encode()))]
    assert all(0 < len(piece) <= size for piece in pieces) and "".join(pieces) == text
    assert blocks == [["", ""], *([piece] for piece in pieces)]
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == 2 * [enc.eot_token, *enc.encode_ordinary(text)]


@needs_data
def test_a_million_blanks_and_a_quoted_endoftext():
    """Blanks without a place to cut are cut all the same; <|endoftext|> in a text is characters."""
    enc = fineweb.get_tokenizer("gpt2")
    blanks = enc.encode(" ") * (10**6 - 1)
    texts = {"word" + " " * 10**6 + "word": [*enc.encode("word"), *blanks, *enc.encode(" word")]}
    texts |= {text: enc.encode_ordinary(text) for text in ("", "a<|endoftext|>b", "<|endoftext|>")}
    expected = [token for tokens in texts.values() for token in (50256, *tokens)]
    assert fineweb.encode("gpt2", "file", lambda: ["", *texts]).tolist() == expected


def test_two_processes_write_the_same_bytes_and_name_a_bad_line(tmp_path, capsys, monkeypatch):
    """From batches in order; about four a worker are read ahead, and not the whole corpus."""
    files = write_jsonl(tmp_path / "docs.jsonl", random_texts(400, 3000))
    whole = build(files, tmp_path / "whole")
    monkeypatch.setattr(fineweb, "BATCH_SIZE", 10_000)
    assert read_folder(build(files, tmp_path / "two", "--workers", 2)) == read_folder(whole)
    taken = []
    batches = (taken.append(k) or ([0, k], "file", partial(list, [f"{k}"])) for k in range(40))
    for (_, k), tokens in fineweb.tokenize(batches, "bytes", 2):
        assert tokens.tolist() == list(str(k).encode()) and len(taken) <= k + 10
    files.write_text(files.read_text() + '{"text": 5}\n')
    argv = ["--files", files, "--out", tmp_path / "bad", "--tokenizer", "bytes", "--workers", 2]
    assert "docs.jsonl: line 401: TypeError: expected string" in refuse(capsys, *argv)


DIE_SENDING = """
import multiprocessing.connection as c, os
c.Connection._send = lambda self, data: os._exit(os.write(self.fileno(), bytes(data)[:5]))
"""


@pytest.mark.parametrize("death", [partial(os._exit, 9), partial(exec, DIE_SENDING, {})])
def test_a_worker_that_is_killed_ends_the_run(death):
    """With a line that says what to do, also when the worker has sent a part of its tokens."""
    batches = iter([([0, 0], "file", partial(list, ["text"])), ([0, 1], "file", death)])
    with pytest.raises(fineweb.UserError, match="fewer --workers"):
        list(fineweb.tokenize(batches, "bytes", 2))


@pytest.mark.slow
def test_ctrl_c_ends_all_processes(tmp_path):
    """With a status that is not 0. The next start ends the work, and says what to run next."""
    files, out = write_jsonl(tmp_path / "x.jsonl", ["some words " * 2000] * 1500), tmp_path / "out"
    command = [sys.executable, ROOT / "fineweb.py", "--files", files, "--out", out]
    command += ["--tokenizer", "bytes", "--workers", "2", "--shard_size", "1000000"]
    main = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not (out / "meta.json").exists():
        time.sleep(0.01)
    os.killpg(main.pid, signal.SIGINT)  # all of them hear it
    _, err = main.communicate(timeout=60)  # stderr is closed when all processes have ended
    assert main.returncode == -signal.SIGINT and "KeyboardInterrupt" in err
    assert_whole(out)
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and read_meta(out)["progress"]["done"]
    lines = done.stdout.splitlines()
    assert "the same command continues" in lines[0] and lines[-1].startswith("next: python")


# -------------------- sources


def test_every_format_gives_the_same_shards(tmp_path, capsys, monkeypatch):
    """.jsonl, .gz, .xz, .zst and .parquet are wrappings: the documents are the same. A row group is
    a batch unless it is large."""
    texts = ["", "line\r\nend", "\u2028 \x85 <|endoftext|>", *random_texts(600, 50)]
    data = write_jsonl(tmp_path / "docs.jsonl", texts).read_bytes()
    (tmp_path / "docs.jsonl.gz").write_bytes(gzip.compress(data))
    (tmp_path / "docs.jsonl.xz").write_bytes(lzma.compress(data))
    frames = [pyarrow.compress(part, "zstd", asbytes=True) for part in (data[:500], data[500:])]
    (tmp_path / "docs.jsonl.zst").write_bytes(b"".join(frames))
    write_parquet(tmp_path / "docs.parquet", texts, rows=70)
    write_parquet(tmp_path / "docs.big.parquet", texts)
    monkeypatch.setattr(fineweb, "GROUP_SIZE", 8000)  # bytes: the one group of docs.big is larger
    batches = [len(list(fineweb.read_file(str(p), "text"))) for p in tmp_path.glob("*.parquet")]
    assert sorted(batches) == [5, 9]  # of 128 rows, and of 70, which the workers will read
    options = ["--shard_size", 5000, "--val_share", 1, "--val_tokens", 7000]
    for path in tmp_path.glob("docs.*"):
        out = build(path, tmp_path / path.name.replace(".", "_"), *options)
        assert read_split(out, "val") == to_tokens(texts)[:7000], path.name
        assert read_split(out, "train") == to_tokens(texts)[7000:], path.name
    argv = ["--files", tmp_path / "*.parquet", "--out", tmp_path / "x", "--tokenizer", "bytes"]
    assert 'KeyError: \'Field "body"' in refuse(capsys, *argv, "--text_key", "body")
    assert "expected a text, found <class 'int'>" in refuse(capsys, *argv, "--text_key", "id")


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_a_txt_file_is_one_document(suffix, tmp_path):
    """Larger than a batch or empty, its line ends kept, a byte order mark skipped."""
    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix]
    texts = ["one\r\ntwo\rthree\n", "é word\n" * 200_000, ""]
    for name, text in zip("abc", texts, strict=True):
        (tmp_path / f"{name}.txt{suffix}").write_bytes(pack(b"\xef\xbb\xbf" + text.encode()))
    out = build(tmp_path / "*.txt*", tmp_path / "out", "--val_share", 1, "--val_tokens", 5)
    assert read_split(out, "val") + read_split(out, "train") == to_tokens(texts)


def test_files_are_read_in_the_order_of_their_names(tmp_path):
    """Whatever the order in which the command line gives them, and in which globs find them."""
    a, b = (write_jsonl(tmp_path / f"{name}.jsonl", [name] * 9) for name in "ab")
    fineweb.main(["--files", str(b), str(a), "--out", str(tmp_path / "x"), "--tokenizer", "bytes"])
    assert read_folder(tmp_path / "x") == read_folder(build(tmp_path / "*.jsonl", tmp_path / "y"))
    assert read_split(tmp_path / "x", "train")[1] == ord("a")


def test_half_a_surrogate_pair_becomes_a_replacement_character(tmp_path):
    """JSON may hold one, UTF-8 cannot; a whole pair is a character."""
    files = write_jsonl(tmp_path / "docs.jsonl", ["\ud800", "a\udfffb\ud83d", "😀", "한\ud7ff"])
    (tmp_path / "link.jsonl").symlink_to(files)  # one file by two names is read once
    out = build(tmp_path / "*.jsonl", tmp_path / "out", "--val_share", 0)
    assert read_split(out, "train") == to_tokens(["\ufffd", "a\ufffdb\ufffd", "😀", "한\ud7ff"])


BAD = {
    "a.jsonl": (b'{"text": "a"}\n\n{"text": 5}\n', "line 3: TypeError: expected string"),
    "b.jsonl": (b'{"text": "a"}\n{"body": "b"}\n', "line 2: KeyError: 'text'"),
    "d.jsonl": (b'{"text": "a"}\n{"text": "\xff"}\n', "line 2: UnicodeDecodeError"),
    "e.txt": (b"one\n" * 200_000 + b"tw\xffo\nthree\n", "from line 131074 on: UnicodeDecodeError"),
    "f.txt.gz": (gzip.compress(b"text " * 9999)[:-20], "EOFError"),
    "g.jsonl.xz": (lzma.compress(b'{"text": "a"}\n' * 9999)[:-20], "EOFError"),
    "h.parquet": (b"PAR1", "ArrowInvalid"),
    "i.csv": (b"text\n", "expected .jsonl, .txt"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_one_line_that_names_the_place(name, tmp_path, capsys):
    """File, line and what is wrong there; no shard is written."""
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    out = tmp_path / "out"
    line = refuse(capsys, "--files", tmp_path / name, "--out", out, "--tokenizer", "bytes")
    assert name in line and message in line, line
    assert not out.exists()


@pytest.mark.slow
def test_pydocs_is_prose_in_two_splits_without_overlap(tmp_path):
    """The quickstart's data: about 2 MB, no long paragraph in both splits."""
    fineweb.main(["--dataset", "pydocs", "--out", str(tmp_path / "out")])
    tokens = [read_split(tmp_path / "out", split) for split in ("val", "train")]
    val, train = ("".join(chr(token) for token in split).split("\u0100") for split in tokens)
    assert len(tokens[1]) > 10**6 and 0.05 < len(tokens[0]) / len(tokens[1]) < 0.15
    assert min(len(val), len(train)) > 10 and val[0] == ""
    val, train = ({p for p in "\n\n".join(t).split("\n\n") if len(p) >= 60} for t in (val, train))
    assert len(val) > 100 and not val & train


# -------------------- the command line

BAD_OPTIONS = ["--out", "--files nowhere.jsonl", "--dataset pydocs", "--part 0/3", "--part 4/3"]
BAD_OPTIONS += ["--workers 0", "--shard_size 0", "--max_tokens many", "--tokenizer gpt4"]
BAD_OPTIONS += ["--out docs.jsonl"]


@pytest.mark.parametrize("words", [*BAD_OPTIONS, ""])
def test_mistakes_are_one_line_and_status_2(words, tmp_path, capsys, monkeypatch):
    """No folder is left behind. The last one has no network."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "docs.jsonl", TEXTS)
    argv = ["--tokenizer", "bytes", "--out", "out"] + ["--files", "docs.jsonl"] * (words != "")
    line = refuse(capsys, *argv, *words.split())
    assert words or ("HF_ENDPOINT" in line and "--files" in line)
    assert [path.name for path in tmp_path.iterdir()] == ["docs.jsonl"]


def test_what_to_run_next_suits_the_amount():
    """Four epochs of a small corpus, by a model that a GPU trains."""
    small = "--log_dir log/m --model d6 --seq_len 256 --total_batch_size 16384 --max_steps 245"
    flags = {("bytes", 10**6): ' --log_dir log/m --quickstart --prompt "The "'}
    flags |= {("gpt2", 10**6): f" {small}", ("gpt2", 10**9): ""}
    for (tokenizer, train), expected in flags.items():
        args = fineweb.parse_args(["--files", "x", "--out", "d/m", "--tokenizer", tokenizer])
        line = fineweb.suggest(args, {"shards": {"train_000000.npy": {"tokens": train}}})
        assert line.endswith(f": python train_gpt2.py --data_dir d/m{expected}")
        assert ("--tokenizer bytes" in line) == ("d6" in expected), "d6 is too slow for a CPU"
