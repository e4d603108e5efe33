"""What fineweb.py promises: exact shards from any documents, whatever interrupts it."""

import gzip
import io
import itertools
import json
import lzma
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from conftest import make_run
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("GPT2_TEST_DATA", ROOT.parent / "shared/data"))
if (DATA / "tiktoken_cache").exists():
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(DATA / "tiktoken_cache"))
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(ROOT))

import fineweb  # noqa: E402
import train_gpt2  # noqa: E402

needs_gpt2 = pytest.mark.skipif(
    "TIKTOKEN_CACHE_DIR" not in os.environ, reason=f"needs GPT-2's BPE: {DATA}/tiktoken_cache"
)
exact = settings(deadline=None, derandomize=True, database=None)
TEXT = st.text(st.sampled_from("ab1.' \t\n\r\0é\x1c\x85\u2028\u3000漢😀"), max_size=60)


# --------------------------------------------------------------------------------------------------
# helpers


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return path


def random_texts(number: int, longest: int, seed: int = 0) -> list[str]:
    """Documents of 0 to `longest` characters in words, the last of the longest length."""
    rng = random.Random(seed)
    words = ["the", "cat", "sat.", "<|endoftext|>", "déjà\nvu", "", "漢字", "12"]
    lengths = [rng.randrange(longest + 1) for _ in range(number - 1)] + [longest]
    return [" ".join(rng.choices(words, k=size // 3 + 1))[:size] for size in lengths]


def build(files: object, out: Path, *options: object, tokenizer: str = "bytes") -> Path:
    """Run fineweb.py in this process, without workers."""
    argv = ["--files", files, "--out", out, "--tokenizer", tokenizer, "--workers", 1, *options]
    fineweb.main([str(word) for word in argv])
    return out


def build_partly(files: object, out: Path, *options: object, batches: int) -> None:
    """Run it as build does, and drop it after a few batches as SIGKILL would."""
    argv = ["--files", files, "--out", out, "--tokenizer", "bytes", "--workers", 1, *options]
    stop_early([str(word) for word in argv], batches)


def stop_early(argv: list[str], batches: int) -> None:
    args = fineweb.parse_args(argv)
    source = fineweb.open_source(args)
    Path(args.out).mkdir(exist_ok=True)
    meta = fineweb.prepare_folder(args, source)
    segments = fineweb.read_segments(source, args, meta["progress"])
    writer = fineweb.ShardWriter(args, meta)
    with mock.patch.object(fineweb, "BATCH_BYTES", 2**19):
        those = fineweb.make_batches(segments)
        written = fineweb.fill_shards(writer, fineweb.tokenize(those, args.tokenizer, 1))
        for _ in range(batches):
            next(written)
    writer.close()


def start(*argv: object, **how: object) -> subprocess.Popen:
    """Start fineweb.py as a user does."""
    command = [sys.executable, str(ROOT / "fineweb.py"), *(str(word) for word in argv)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes | how)


def refuse(capsys, *argv: object) -> str:
    """Run a command line that must end with status 2 and one line; return the line."""
    with pytest.raises(SystemExit) as exit_info:
        fineweb.main([str(word) for word in argv])
    assert exit_info.value.code == 2
    lines = capsys.readouterr().err.strip().split("\n")
    assert len(lines) == 1, lines
    return lines[0]


def read_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def read_shards(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in read_folder(folder).items() if "meta" not in name}


def read_split(folder: Path, split: str) -> list[int]:
    """Tokens of a split's shards, one after the other."""
    shards = [np.load(path) for path in sorted(folder.glob(f"*_{split}_*.npy"))]
    assert all(shard.dtype == np.uint16 and shard.ndim == 1 for shard in shards)
    return np.concatenate([np.empty(0, np.uint16), *shards]).tolist()


def to_tokens(texts: list[str]) -> list[int]:
    """What the shards must hold with the bytes tokenizer."""
    return [token for text in texts for token in (256, *text.encode())]


def to_segments(blocks: list[str]) -> list[fineweb.Segment]:
    """A document's segments, none of which begins one: what is encoded is its text alone."""
    texts = fineweb.split_text(blocks)
    return [to_segment(text, k, False) for k, text in enumerate(texts)]


def to_segment(text: str, k: int = 0, begins: bool = True) -> fineweb.Segment:
    return fineweb.Segment([0, k, 0], begins, f"docs, document {k}", text.encode())


# --------------------------------------------------------------------------------------------------
# tokens


@exact
@given(st.text())
def test_bytes_tokenizer_gives_the_bytes_of_any_text(text: str) -> None:
    """The quickstart's loss is counted per byte: a token must be one."""
    enc = fineweb.get_tokenizer("bytes")
    assert enc.encode_ordinary(text) == list(text.encode())
    assert enc.decode(enc.encode_ordinary(text)) == text
    assert (enc.n_vocab, enc.eot_token) == (257, 256)


def test_unknown_tokenizer_is_a_value_error() -> None:
    """The trainer turns it into its one line."""
    with pytest.raises(ValueError, match="expected gpt2 or bytes"):
        fineweb.get_tokenizer("gpt3")


@needs_gpt2
@exact
@given(st.lists(st.tuples(st.text(max_size=50), st.booleans(), st.booleans()), min_size=1))
def test_encoding_is_gpt2s_ordinary_encoding(drawn: list[tuple[str, bool, bool]]) -> None:
    """One call encodes a batch: no segment may see its neighbour, nor <|endoftext|> in a text."""
    enc = fineweb.get_tokenizer("gpt2")
    texts = [text + "<|endoftext|>" * literal + text for text, _, literal in drawn]
    batch = [
        to_segment(text, k, begins)
        for k, (text, (_, begins, _)) in enumerate(zip(texts, drawn, strict=True))
    ]
    encoded = fineweb.encode(batch, "gpt2")
    assert [position for position, _, _ in encoded] == [segment.position for segment in batch]
    for text, (_, begins, tokens) in zip(texts, encoded, strict=True):
        assert tokens.dtype == np.uint16
        assert tokens.tolist() == [50256] * begins + enc.encode_ordinary(text)


@pytest.mark.parametrize("tokenizer", ["bytes", pytest.param("gpt2", marks=needs_gpt2)])
def test_half_a_surrogate_pair_becomes_what_tiktoken_makes_of_it(tokenizer, tmp_path: Path) -> None:
    """JSON may hold one, UTF-8 cannot; a whole pair is a character."""
    texts = ["\ud800", "a\udfffb\ud83d", "😀 <|endoftext|>", "한\ud7ff"]
    build(write_jsonl(tmp_path / "docs.jsonl", texts * 9), tmp_path / "out", tokenizer=tokenizer)
    enc = fineweb.get_tokenizer(tokenizer)
    expected = [token for text in texts for token in (enc.eot_token, *enc.encode_ordinary(text))]
    tokens = read_split(tmp_path / "out", "val") + read_split(tmp_path / "out", "train")
    assert sorted(tokens) == sorted(expected * 9)


@needs_gpt2
@settings(exact, max_examples=300)
@given(st.lists(TEXT, max_size=5), st.integers(1, 40))
def test_segments_encode_to_the_tokens_of_the_whole(blocks: list[str], chars: int) -> None:
    """A long document is cut; a cut inside one of GPT-2's pieces would change its tokens."""
    segments = list(fineweb.split_text(blocks, chars))
    assert "".join(segments) == "".join(blocks)
    assert all(segments[1:])
    encode = fineweb.get_tokenizer("gpt2").encode_ordinary
    assert [token for text in segments for token in encode(text)] == encode("".join(blocks))


@needs_gpt2
def test_a_megabyte_of_blanks_does_not_overflow_the_tokenizer() -> None:
    """tiktoken's regular expressions fail on some 10**6 blanks before a word."""
    segments = to_segments(["word" + " " * 10**6 + "word"])
    tokens = np.concatenate([part for *_, part in fineweb.encode(segments, "gpt2")]).tolist()
    enc = fineweb.get_tokenizer("gpt2")
    assert tokens == enc.encode("word") + enc.encode(" ") * (10**6 - 1) + enc.encode(" word")


# --------------------------------------------------------------------------------------------------
# shards


@settings(exact, max_examples=40)
@given(data=st.data())
def test_shards_concatenated_are_the_documents_in_order(data, tmp_path_factory) -> None:
    """Documents of 0 to 5 shards, each after its end-of-text token; nothing lost at any edge."""
    shard_size = data.draw(st.integers(1, 40), "shard_size")
    lengths = st.one_of(st.integers(0, 5 * shard_size), st.sampled_from([0, shard_size - 1]))
    texts = [
        c * n
        for c, n in data.draw(
            st.lists(st.tuples(st.sampled_from("abc"), lengths), min_size=2, max_size=6)
        )
    ]
    expected = to_tokens(texts)
    val_tokens = data.draw(st.integers(0, len(expected) - 1), "val_tokens")
    folder = tmp_path_factory.mktemp("shards")
    options = ["--shard_size", shard_size, "--val_tokens", val_tokens, "--val_share", 1]
    build(write_jsonl(folder / "docs.jsonl", texts), folder / "out", *options)

    assert read_split(folder / "out", "val") == expected[:val_tokens]
    assert read_split(folder / "out", "train") == expected[val_tokens:]
    sizes = [len(np.load(path)) for path in sorted((folder / "out").glob("*_train_*"))]
    assert set(sizes[:-1]) <= {shard_size} and 0 < sizes[-1] <= shard_size


@settings(exact, max_examples=25)
@given(data=st.data())
def test_both_splits_are_in_order_and_together_all_there_is(data, tmp_path_factory) -> None:
    """A token lost or told twice where a document is cut, or a document out of its order."""
    lengths = data.draw(st.lists(st.integers(0, 200), min_size=2, max_size=40), "lengths")
    texts = [chr(48 + k) * n for k, n in enumerate(lengths)]  # each of its own character
    share = data.draw(st.sampled_from([0.0, 0.05, 0.1, 0.5]), "share")
    folder = tmp_path_factory.mktemp("share")
    files = write_jsonl(folder / "docs.jsonl", texts)
    options = ["--val_share", share, "--shard_size", 200, "--val_tokens", 10**6]
    with mock.patch.object(fineweb, "PIECE", data.draw(st.sampled_from([7, 20, 1000]), "piece")):
        build(files, folder / "out", *options)
    val, train = (read_split(folder / "out", split) for split in ("val", "train"))
    tokens = to_tokens(texts)
    assert sorted(val + train) == sorted(tokens) and len(train) > 0
    for split in (val, train):  # some of all tokens, in their order: taken one by one
        rest = iter(tokens)
        assert all(token in rest for token in split)
    assert not (val and share == 0)


@pytest.mark.parametrize("shard_size", [10**8, 10_000])
@pytest.mark.parametrize("length", [99, 5000, 10**6])
def test_validation_has_its_share_of_a_corpus_of_any_size(length, shard_size, tmp_path) -> None:
    """A licence that comes first and is all of the validation; no validation, or ten tokens of it."""
    for total in (1000, 8001, 73_738, 400_000):
        texts = ["x" * min(length, total - start) for start in range(0, total, length + 1)]
        out = tmp_path / f"{total}"
        options = ["--shard_size", shard_size, "--val_tokens", 10**6]
        build(write_jsonl(tmp_path / "docs.jsonl", texts), out, *options)
        val, train = (len(read_split(out, split)) for split in ("val", "train"))
        spare = 0.1 + 0.05 + (min(length, total / 32) / total)
        assert 0.05 < val / (val + train) < spare, (total, val, train)
        if total > 50_000:
            assert 0.08 < val / (val + train) < 0.13, (total, val, train)


@pytest.mark.parametrize("name", ["docs.jsonl", "docs.txt"])
def test_a_corpus_smaller_than_a_shard_gives_both_splits(name: str, tmp_path: Path, capsys) -> None:
    """Where validation comes first and takes all of it, it says what to do instead."""
    text = "to be or not to be " * 50
    path = tmp_path / name
    path.write_text(text if path.suffix == ".txt" else json.dumps({"text": text}))
    build(path, tmp_path / "out")
    tokens = read_split(tmp_path / "out", "val") + read_split(tmp_path / "out", "train")
    assert sorted(tokens) == sorted(to_tokens([text])) and read_split(tmp_path / "out", "val")
    argv = ["--files", path, "--out", tmp_path / "val", "--tokenizer", "bytes", "--val_share", 1]
    assert "951 tokens in all, none to train on" in refuse(capsys, *argv)


def test_max_tokens_ends_exactly_there(tmp_path: Path) -> None:
    """A token budget is a budget, and validation still gets a part of it."""
    texts = random_texts(90, 100)
    files = write_jsonl(tmp_path / "docs.jsonl", texts)
    build(files, tmp_path / "out", "--max_tokens", 1000, "--shard_size", 300, "--val_share", 1)
    tokens = to_tokens(texts)[:1000]
    assert read_split(tmp_path / "out", "val") == tokens[:100]
    assert read_split(tmp_path / "out", "train") == tokens[100:]


def test_bin_shards_are_llm_cs(tmp_path: Path) -> None:
    """256 int32 of header (magic, version, count), then the same tokens."""
    files = write_jsonl(tmp_path / "docs.jsonl", random_texts(50, 200))
    npy = build(files, tmp_path / "npy", "--shard_size", 900)
    binary = build(files, tmp_path / "bin", "--shard_size", 900, "--format", "bin")
    paths = sorted(binary.glob("*.bin"))
    assert [path.stem for path in paths] == [path.stem for path in sorted(npy.glob("*.npy"))]
    for path in paths:
        header, tokens = np.fromfile(path, "<i4", 256), np.fromfile(path, "<u2", offset=1024)
        assert header[:3].tolist() == [20240520, 1, len(tokens)] and not header[3:].any()
        assert np.array_equal(tokens, np.load(npy / f"{path.stem}.npy"))


def test_npy_shards_are_numpys_own_bytes(tmp_path: Path) -> None:
    """A shard made in place must be the file that np.save writes."""
    out = build(write_jsonl(tmp_path / "docs.jsonl", random_texts(20, 99)), tmp_path / "out")
    for path in out.glob("*.npy"):
        np.save(tmp_path / "again.npy", np.load(path))
        assert path.read_bytes() == (tmp_path / "again.npy").read_bytes()


def test_workers_do_not_change_a_byte(tmp_path: Path) -> None:
    """The shards depend on documents and options alone; every file is compared, meta.json too."""
    files = write_jsonl(tmp_path / "docs.jsonl", random_texts(3000, 1500))
    for workers in (1, 2, 4):
        options = ["--tokenizer", "bytes", "--shard_size", 300_000, "--workers", workers]
        process = start("--files", files, "--out", tmp_path / f"out{workers}", *options)
        assert process.wait(60) == 0, process.stderr.read()
    one, two, four = (read_folder(tmp_path / f"out{workers}") for workers in (1, 2, 4))
    assert len(one) > 5
    assert one == two == four


# --------------------------------------------------------------------------------------------------
# sources


def test_every_format_gives_the_same_shards(tmp_path: Path) -> None:
    """.jsonl, .gz, .xz, .zst and .parquet are wrappings: the documents are the same."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = ["", "line\r\nend", "\u2028 \x85 <|endoftext|>", *random_texts(600, 50)]
    plain = write_jsonl(tmp_path / "docs.jsonl", texts)
    (tmp_path / "docs.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "docs.jsonl.xz").write_bytes(lzma.compress(plain.read_bytes()))
    packed = pyarrow.compress(plain.read_bytes()[:5000], "zstd", asbytes=True)
    packed += pyarrow.compress(plain.read_bytes()[5000:], "zstd", asbytes=True)  # two frames
    (tmp_path / "docs.jsonl.zst").write_bytes(packed)
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    parquet.write_table(table, tmp_path / "docs.parquet", row_group_size=70)
    expected = read_shards(build(plain, tmp_path / "plain", "--shard_size", 5000))
    assert len(expected) > 3
    for path in tmp_path.glob("docs.*"):
        out = build(path, tmp_path / path.name.replace(".", "_"), "--shard_size", 5000)
        assert read_shards(out) == expected, path.name


def test_txt_files_are_a_document_each_with_their_line_ends(tmp_path: Path) -> None:
    """A .txt file longer than a block is one document, and nothing in it is translated."""
    texts = ["one\r\ntwo\rthree\n", "é word " * 200_000]  # 1.6 MB: two blocks of 2**20 characters
    for name, text in zip("ab", texts, strict=True):
        (tmp_path / f"{name}.txt").write_text(text, "utf-8", newline="")
    out = build(tmp_path / "*.txt", tmp_path / "out", "--val_share", 1, "--val_tokens", 5)
    assert read_split(out, "val") + read_split(out, "train") == to_tokens(texts)


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory) -> Path:
    """A folder of parquet files with FineWeb-Edu's columns."""
    pytest.importorskip("datasets")
    import pyarrow
    from pyarrow import parquet

    folder = tmp_path_factory.mktemp("hub")
    for k in range(3):
        texts = random_texts(700, 3000, seed=k)
        n = len(texts)
        columns = {"text": texts, "id": [f"<urn:uuid:{k}-{i}>" for i in range(n)]}
        columns |= {"dump": ["CC-MAIN-2024-10"] * n, "url": ["https://example.org"] * n}
        columns |= {"file_path": ["s3://"] * n, "language": ["en"] * n, "language_score": [0.9] * n}
        columns |= {"token_count": [len(text) // 4 for text in texts], "score": [3.1] * n}
        columns |= {"int_score": [3] * n}
        name = folder / "sample" / "10BT" / f"{k:03d}_00000.parquet"
        name.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.table(columns), name, row_group_size=300)
    return folder


def hub_options(folder: Path, out: Path, *options: object) -> list[str]:
    argv = ["--dataset", folder, "--out", out, "--tokenizer", "bytes", "--workers", 1]
    argv += ["--shard_size", 200_000, "--val_share", 1, *options]
    return [str(word) for word in argv]


def test_hub_streamed_copied_and_local_files_agree(hub_folder, tmp_path, monkeypatch) -> None:
    """The FineWeb path, offline: the same shards streamed, from a whole copy, from plain files."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    fineweb.main(hub_options(hub_folder, tmp_path / "streamed"))
    fineweb.main(hub_options(hub_folder, tmp_path / "copied", "--no-streaming"))
    options = ["--shard_size", 200_000, "--val_share", 1]
    build(f"{hub_folder}/**/*.parquet", tmp_path / "files", *options)
    texts = [text for k in range(3) for text in random_texts(700, 3000, seed=k)]
    for name in ("streamed", "copied", "files"):
        assert len(read_split(tmp_path / name, "val")) == 200_000
        both = read_split(tmp_path / name, "val") + read_split(tmp_path / name, "train")
        assert both == to_tokens(texts), name


@pytest.mark.parametrize("batches", [1, 4, 6])
def test_an_interrupted_stream_goes_on_inside_a_file(batches, hub_folder, tmp_path) -> None:
    """The position of a hub stream is datasets' own state: files read before are not read again."""
    fineweb.main(hub_options(hub_folder, tmp_path / "whole"))
    stop_early(hub_options(hub_folder, tmp_path / "parts"), batches)
    stop_early(hub_options(hub_folder, tmp_path / "parts"), 1)
    fineweb.main(hub_options(hub_folder, tmp_path / "parts"))
    assert read_folder(tmp_path / "parts") == read_folder(tmp_path / "whole")


def test_without_a_network_it_says_what_to_do(tmp_path: Path, capsys) -> None:
    """Status 1, one line, and no folder that looks like data."""
    pytest.importorskip("datasets")
    with pytest.raises(SystemExit) as exit_info:
        fineweb.main(["--out", str(tmp_path / "out"), "--tokenizer", "bytes"])
    errors = capsys.readouterr().err
    assert exit_info.value.code == 1 and errors.count("\n") == 1
    assert all(word in errors for word in ("HF_ENDPOINT", "HF_HOME", "--files"))
    assert not (tmp_path / "out").exists()


def test_hub_parts_are_slices_of_the_files(hub_folder, tmp_path, capsys) -> None:
    """Three machines take a file each; a fourth has nothing to take."""
    for k in (1, 2, 3):
        fineweb.main(hub_options(hub_folder, tmp_path / "out", "--part", f"{k}/3"))
    fineweb.main(["--merge", "--out", str(tmp_path / "out")])
    tokens = read_split(tmp_path / "out", "val") + read_split(tmp_path / "out", "train")
    assert tokens == to_tokens([t for k in range(3) for t in random_texts(700, 3000, seed=k)])
    argv = hub_options(hub_folder, tmp_path / "out4", "--part", "4/4")
    assert "4 parts need as many files" in refuse(capsys, *argv)


def test_pydocs_is_prose_in_two_splits_without_overlap(tmp_path: Path) -> None:
    """The quickstart's data: about 2 MB, no long paragraph in both splits."""
    fineweb.main(["--dataset", "pydocs", "--out", str(tmp_path / "out")])
    val, train = (
        bytes(token % 256 for token in read_split(tmp_path / "out", split)).decode()
        for split in ("val", "train")  # <|endoftext|>, 256, becomes a NUL
    )
    assert len(train) > 10**6 and 0.05 < len(val) / len(train) < 0.15
    assert val[0] == "\0" and min(val.count("\0"), train.count("\0")) > 10
    paragraphs = {p for p in val.replace("\0", "\n\n").split("\n\n") if len(p) >= 60}
    assert not paragraphs & set(train.replace("\0", "\n\n").split("\n\n"))
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert [meta[key] for key in ("tokenizer", "vocab_size", "eot")] == ["bytes", 257, 256]
    assert sorted(meta["shards"]) == ["pydocs_train_000001.npy", "pydocs_val_000000.npy"]


def test_importing_does_nothing_and_is_cheap() -> None:
    """The trainer imports it for the tokenizer: no datasets, no process pool, no vocabulary."""
    code = "import sys, fineweb; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"datasets", "pyarrow", "tqdm", "multiprocessing", "zstandard", "torch"}
    assert "tiktoken_ext.openai_public" not in loaded


# --------------------------------------------------------------------------------------------------
# interruptions


KILLS = int(os.environ.get("GPT2_TEST_KILLS", 6))


def test_killed_at_random_moments_it_ends_byte_for_byte_the_same(tmp_path: Path) -> None:
    """SIGKILL gives no chance to clean up: whatever is on the disk must be enough to go on."""
    files = write_jsonl(tmp_path / "docs.jsonl", random_texts(2500, 4000))
    options = ["--tokenizer", "bytes", "--shard_size", 40_000, "--val_share", 0.3]
    whole = build(files, tmp_path / "whole", *options[2:])
    rng, out, kills, finished = random.Random(1), tmp_path / "killed0", 0, 0
    while kills < KILLS:
        workers = rng.choice([1, 1, 2])
        process = start("--files", files, "--out", out, "--workers", workers, *options)
        try:
            status = process.wait(rng.uniform(0.2, 0.6))
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        assert status in (0, -signal.SIGKILL), process.stderr.read()
        kills += status != 0
        if status == 0:  # finished before its moment came: compare, and begin anew
            finished += 1
            assert read_folder(out) == read_folder(whole)
            out = tmp_path / f"killed{finished}"
    process = start("--files", files, "--out", out, *options)
    assert process.wait(60) == 0, process.stderr.read()
    assert len(read_folder(whole)) > 50
    assert read_folder(out) == read_folder(whole)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "txt"])
def test_it_goes_on_from_every_batch_of_every_format(suffix: str, tmp_path: Path) -> None:
    """Dropped again and again, also inside a document that is longer than several shards."""
    texts = [*random_texts(800, 1000), "a long one " * 100_000, *random_texts(800, 1000, seed=1)]
    if suffix == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(
            pyarrow.table({"text": texts}), tmp_path / "docs.parquet", row_group_size=150
        )
    elif suffix == "jsonl":
        write_jsonl(tmp_path / "docs.jsonl", texts)
    else:
        for k in range(3):
            (tmp_path / f"docs{k}.txt").write_text(texts[800] + f"{k}")
    options = ["--shard_size", 150_000, "--val_share", 0.2]
    whole = build(tmp_path / f"docs*.{suffix}", tmp_path / "whole", *options)
    for batches in (1, 2, 1, 3, 2, 1):
        try:
            build_partly(tmp_path / f"docs*.{suffix}", tmp_path / "out", *options, batches=batches)
        except StopIteration:
            break
    build(tmp_path / f"docs*.{suffix}", tmp_path / "out", *options)
    assert read_folder(tmp_path / "out") == read_folder(whole)


def test_a_kill_between_listing_and_renaming_is_repaired(tmp_path: Path) -> None:
    """meta.json may list a shard that still has its temporary name."""
    files = write_jsonl(tmp_path / "docs.jsonl", random_texts(2000, 1000))
    whole = build(files, tmp_path / "whole", "--shard_size", 100_000)
    build_partly(files, tmp_path / "out", "--shard_size", 100_000, batches=2)
    shard = max((tmp_path / "out").glob("*.npy"))
    shard.rename(f"{shard}.tmp")
    build(files, tmp_path / "out", "--shard_size", 100_000)
    assert read_folder(tmp_path / "out") == read_folder(whole)


@contextmanager
def run_with_workers(folder: Path) -> Iterator:
    """Start two workers, which are at work for as long as the block writes to the file: its name is
    a pipe's. Yields the process, the workers' ids and the file."""
    if not Path("/proc/self/task").exists():
        pytest.skip("finds the workers by Linux's /proc")
    os.mkfifo(folder / "docs.jsonl")
    argv = ["--files", folder / "docs.jsonl", "--out", folder / "out", "--tokenizer", "bytes"]
    process = start(*argv, "--workers", 2, start_new_session=True)
    with suppress(BrokenPipeError), open(folder / "docs.jsonl", "wb") as file:
        file.write(GOOD * 100_000)  # 1.7 MB: two batches
        file.flush()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        # The first child is multiprocessing's resource tracker
        yield process, [int(child) for child in children[-2:]], file


def wait_for_the_end(processes: list[int]) -> None:
    """Wait until none of the processes runs. A zombie has ended."""
    end = time.monotonic() + 30  # seconds
    for process in processes:
        with suppress(OSError):  # there is no such process
            while Path(f"/proc/{process}/stat").read_text().rsplit(")")[1].split()[0] != "Z":
                assert time.monotonic() < end, "a worker outlived its parent"
                time.sleep(0.01)


ENDS = {
    "Ctrl-C in a terminal": (signal.SIGINT, os.killpg),
    "Ctrl-C to the parent alone": (signal.SIGINT, os.kill),
    "SIGTERM": (signal.SIGTERM, os.kill),
    "SIGKILL": (signal.SIGKILL, os.kill),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_signal_ends_it_and_its_workers_at_once_and_silently(name: str, tmp_path: Path) -> None:
    """A shell stops its loop only where the signal itself ended the process. A terminal sends
    Ctrl-C to the workers too."""
    signum, kill = ENDS[name]
    with run_with_workers(tmp_path) as (process, workers, _):
        kill(process.pid, signum)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == -signum and not errors, errors
        assert "run the same command to continue" in output
        wait_for_the_end(workers)


# fineweb.py, which gets a Ctrl-C as soon as it has blocked it
INTERRUPTED = """
import os, signal, fineweb
set_mask = signal.pthread_sigmask

def interrupt(how, signals):
    set_mask(how, signals)
    if how == signal.SIG_BLOCK:
        os.kill(os.getpid(), signal.SIGINT)

signal.pthread_sigmask = interrupt
fineweb.main()
"""


@pytest.mark.skipif(os.name != "posix", reason="signals are blocked by POSIX")
def test_ctrl_c_while_the_workers_start_is_not_lost(tmp_path: Path) -> None:
    """Workers must not take it, so the parent keeps it from them; it was dropped for both."""
    files = write_jsonl(tmp_path / "docs.jsonl", random_texts(10, 1000))
    argv = ["--files", files, "--out", tmp_path / "out", "--tokenizer", "bytes", "--workers", 2]
    command = [sys.executable, "-c", INTERRUPTED, *map(str, argv)]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGINT


def test_a_killed_worker_ends_the_run_with_one_line(tmp_path: Path) -> None:
    """The system kills a process when memory is short: waiting for it for ever is no answer."""
    with run_with_workers(tmp_path) as (process, workers, file):
        os.kill(workers[0], signal.SIGKILL)
        wait_for_the_end(workers[:1])
        file.write(GOOD * 200_000)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and errors.count("\n") == 1, errors
    assert "a worker was killed" in errors and "same command" in errors
    wait_for_the_end(workers)


@pytest.mark.skipif(os.name != "posix", reason="limits a file's size by POSIX")
def test_a_full_disk_is_one_line_and_can_be_gone_on_from(tmp_path: Path) -> None:
    """Writing fails in the middle of a shard: status 1, no traceback, nothing lost."""
    import resource

    files = write_jsonl(tmp_path / "docs.jsonl", random_texts(1000, 1000))
    options = [
        "--shard_size",
        200_000,
        "--tokenizer",
        "bytes",
        "--workers",
        1,
        "--val_tokens",
        10_000,
    ]
    size = 300_000  # bytes: the first shard of validation fits, the second of training does not
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))  # noqa: E731
    process = start("--files", files, "--out", tmp_path / "out", *options, preexec_fn=limit)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.count("\n") == 1 and "same command" in errors, errors
    build(files, tmp_path / "out", "--shard_size", 200_000, "--val_tokens", 10_000)
    whole = build(files, tmp_path / "whole", "--shard_size", 200_000, "--val_tokens", 10_000)
    assert read_folder(tmp_path / "out") == read_folder(whole)


def test_two_processes_cannot_write_the_same_run(tmp_path: Path, capsys) -> None:
    """The second would cut the first one's open shard."""
    pytest.importorskip("fcntl")
    files = write_jsonl(tmp_path / "docs.jsonl", ["a", "b"])
    argv = ["--files", str(files), "--out", str(tmp_path)]
    with fineweb.lock(fineweb.parse_args(argv)):
        assert "another process" in refuse(capsys, *argv, "--tokenizer", "bytes")


def test_a_terminal_shows_a_progress_bar(tmp_path: Path) -> None:
    """A night's run without a sign of life; a bar in a log file, or in the middle of the one line."""
    pty = pytest.importorskip("pty")
    termios = pytest.importorskip("termios")
    files = write_jsonl(tmp_path / "a.jsonl", random_texts(900, 3000))
    bad = tmp_path / "b.jsonl"
    bad.write_text(files.read_text() + "[1]")
    for paths, status in ([files], 0), ([files, bad], 2):
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 100))
        argv = ["--files", *paths, "--out", tmp_path / f"out{status}", "--tokenizer", "bytes"]
        process = start(*argv, "--max_tokens", 9_000_000, stderr=theirs)
        output, _ = process.communicate(timeout=60)
        os.close(theirs)
        shown = os.read(ours, 2**16).decode()
        os.close(ours)
        assert process.returncode == status
        assert " tokens/s" in shown and "/9.00M" in shown, shown
        assert "\r" not in output and "tokens/s]" not in output
        lines = shown.strip().split("\r\n")
        assert lines[-1].startswith("fineweb.py: ") if status else len(lines) == 1
    process = start("--files", files, "--out", tmp_path / "quiet", *argv[-2:])
    assert process.communicate(timeout=60)[1] == ""


# --------------------------------------------------------------------------------------------------
# folders


def test_parts_merge_to_one_dataset(tmp_path: Path, capsys) -> None:
    """Parts share a folder without a collision, in any order; verify works before and after."""
    texts = [random_texts(30, 200, seed=k) for k in range(5)]
    for k in range(5):
        write_jsonl(tmp_path / f"docs{k}.jsonl", texts[k])
    options = ["--shard_size", 1000, "--val_tokens", 700, "--val_share", 1, "--part"]
    out = tmp_path / "out"
    build(tmp_path / "*.jsonl", out, *options, "2/2")
    assert "finish --part 1/2 first" in refuse(capsys, "--merge", "--out", out)
    build(tmp_path / "*.jsonl", out, *options, "1/2")
    assert "--merge" in refuse(capsys, "--verify", "--out", out)
    fineweb.main(["--merge", "--out", str(out)])
    fineweb.main(["--verify", "--out", str(out)])
    fineweb.main(["--merge", "--out", str(out)])  # again: nothing changes
    expected = to_tokens([text for k in (0, 2, 4, 1, 3) for text in texts[k]])
    assert read_split(out, "val") + read_split(out, "train") == expected
    meta = json.loads((out / "meta.json").read_text())
    assert sorted(meta["shards"]) == sorted(path.name for path in out.glob("*.npy"))
    assert "part 1/3" not in refuse(capsys, *part_argv(tmp_path, out, "1/3"))


def part_argv(folder: Path, out: Path, part: str) -> list[object]:
    options = ["--shard_size", 1000, "--val_tokens", 700, "--val_share", 1, "--part", part]
    return ["--files", folder / "*.jsonl", "--out", out, "--tokenizer", "bytes", *options]


def test_what_to_run_next_is_for_the_command_line_alone(tmp_path: Path, capsys) -> None:
    """The quickstart calls main in the middle of its own output; a book is no run of 10B tokens."""
    files = write_jsonl(tmp_path / "docs.jsonl", ["one", "two"])
    build(files, tmp_path / "out")
    assert "next:" not in capsys.readouterr().out
    process = start("--files", files, "--out", tmp_path / "out", "--tokenizer", "bytes")
    output, errors = process.communicate(timeout=60)
    assert output.endswith("tokens are too few to train on: more text is needed\n"), errors


@pytest.mark.parametrize("tokenizer, tokens, words", [
    ("gpt2", 10**9, []), ("gpt2", 10**6, ["--epochs", "--model", "--log_dir"]),
    ("bytes", 10**6, ["--quickstart", "--log_dir"]), ("bytes", 10**9, ["--quickstart", "--log_dir"]),
])  # fmt: skip
def test_what_to_run_next_suits_the_amount(tokenizer, tokens, words, tmp_path: Path) -> None:
    """176,000 tokens of one's own, and the whole run was a single step of 524,288."""
    out = f"{tmp_path}/my text/"
    settings = fineweb.parse_args(["--files", "x.txt", "--out", out])
    meta = {"tokenizer": tokenizer, "progress": {"tokens": {"train": tokens, "val": 10**9}}}
    line = fineweb.suggest(settings, meta)
    _, _, script, *argv = shlex.split(line)
    args = train_gpt2.parse_args(argv)
    assert script == "train_gpt2.py" and args.data_dir == out
    assert args.log_dir == ("log/my text" if words else "log") and not args.overwrite
    assert {flag for flag in argv if flag.startswith("--")} >= set(words)
    Path(out).mkdir()
    path = Path(out) / "docs_train_000000.npy"  # zeros that take no place on the disk
    np.lib.format.open_memmap(path, "w+", np.uint16, (tokens,))
    names = {"tokenizer": tokenizer, "vocab_size": 257, "eot": 256}
    (Path(out) / "meta.json").write_text(json.dumps(names))
    settled, _, _ = train_gpt2.settle_args(args, {}, make_run())
    assert settled.max_steps > 200
    meta["progress"]["tokens"]["val"] = 0
    assert fineweb.suggest(settings, meta).endswith("--val_every 0"), "or it ends for lack of val"


def test_verify_finds_what_is_wrong(tmp_path: Path, capsys) -> None:
    """A flipped bit, a lost file, a file that was never listed."""
    out = build(
        write_jsonl(tmp_path / "docs.jsonl", random_texts(90, 99)),
        tmp_path / "out",
        "--shard_size",
        1000,
    )
    fineweb.main(["--verify", "--out", str(out)])
    flipped, lost = sorted(out.glob("*_train_*"))[:2]
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    lost.unlink()
    (out / "other_train_000001.npy").write_bytes(b"")
    capsys.readouterr()
    line = refuse(capsys, "--verify", "--out", out)
    assert f"{flipped.name} is damaged" in line
    assert f"{lost.name} is missing" in line
    assert "other_train_000001.npy is not in meta.json" in line


def test_nothing_is_overwritten_unasked(tmp_path: Path, capsys) -> None:
    """A finished run is left as it is; other options, documents or shards are refused."""
    files = write_jsonl(tmp_path / "docs.jsonl", random_texts(90, 99))
    out = build(files, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    build(files, out)
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    argv = ["--files", files, "--out", out, "--workers", 1]
    argv += ["--tokenizer", "bytes"]
    assert "shard_size" in refuse(capsys, *argv, "--shard_size", 500)
    assert "format" in refuse(capsys, *argv, "--format", "bin")
    assert "another --out" in refuse(capsys, *argv, "--part", "1/1", "--text_key", "body")
    pydocs = ["--dataset", "pydocs", "--out", out]
    assert "source" in refuse(capsys, *pydocs)
    (out / "meta.json").rename(out / "notes.txt")
    assert "not of this run" in refuse(capsys, *argv)
    (out / "notes.txt").rename(out / "meta.json")
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    build(files, out, "--shard_size", 500, "--overwrite")
    assert read_folder(out) == read_folder(build(files, tmp_path / "new", "--shard_size", 500))


@needs_gpt2
def test_another_tokenizers_folder_is_refused(tmp_path: Path, capsys) -> None:
    """Mixed vocabularies would train on noise."""
    files = write_jsonl(tmp_path / "docs.jsonl", random_texts(20, 99))
    build(files, tmp_path / "out")
    line = refuse(capsys, "--files", files, "--out", tmp_path / "out")
    assert "tokenizer bytes, and this run has gpt2" in line


def test_changed_documents_are_refused_in_the_middle(tmp_path: Path, capsys) -> None:
    """Half a run on the old files and half on the new ones is no dataset."""
    files = write_jsonl(tmp_path / "docs.jsonl", random_texts(2000, 1000))
    build_partly(files, tmp_path / "out", "--shard_size", 100_000, batches=1)
    write_jsonl(files, random_texts(2001, 1000))
    argv = ["--files", files, "--out", tmp_path / "out", "--tokenizer", "bytes"]
    assert "changed since" in refuse(capsys, *argv, "--shard_size", 100_000)


BAD_ARGUMENTS = {
    "--part 4/3": "expected I/N",
    "--part three": "expected I/N",
    "--workers 513": "expected 1 to 512",
    "--workers 0": "expected 1 to 512",
    "--shard_size -1": "expected 1 to 2147483647",
    "--format bin --shard_size 3000000000": "expected 1 to 2147483647",
    "--files a.jsonl --dataset pydocs": "choose one",
    "--files nothing*.jsonl --out {out}": "no such file",
    "--files {out}/x.csv --out {out}/new": "expected .jsonl",
    "--files {out}/x.jsonl": "--out FOLDER",
    "--dataset {out}/nowhere --out {out}/new": "nowhere",
    "--files {out}/x.jsonl --part 1/2 --out {out}/new": "2 parts need as many files",
    "--verify --out {out}": "no meta.json",
    "--merge --out {out}": "no parts",
}


@pytest.mark.parametrize("words", BAD_ARGUMENTS)
def test_bad_arguments_are_one_line_and_status_2(words: str, tmp_path: Path, capsys) -> None:
    """And leave no folder behind."""
    (tmp_path / "x.csv").write_text("a,b")
    (tmp_path / "x.jsonl").write_text("{}")
    argv = words.format(out=tmp_path).split()
    assert BAD_ARGUMENTS[words] in refuse(capsys, *argv, "--tokenizer", "bytes")
    assert not (tmp_path / "new").exists()


GOOD = b'{"text": "good"}\n'
BAD_FILES = {
    "key.jsonl": (
        GOOD + b'{"body": "x", "id": 1}',
        ["line 2", "'body': 'str', 'id'", "--text_key"],
    ),
    "null.jsonl": (GOOD + b'{"text": null}', ["line 2", "NoneType"]),
    "list.jsonl": (GOOD + b"[1, 2]", ["line 2", "[1, 2]"]),
    "json.jsonl": (GOOD * 2 + b'{"text": "cut of', ["line 3", "JSONDecodeError"]),
    "latin1.txt": (b"caf\xe9", ["latin1.txt, line 1, byte 4", "0xe9 is not UTF-8"]),
    "cut.jsonl.gz": (gzip.compress(GOOD * 99)[:-9], ["cut.jsonl.gz"]),
    "cut.jsonl.xz": (lzma.compress(GOOD * 99)[:-9], ["cut.jsonl.xz"]),
    "not.jsonl.zst": (b"not zst", ["not.jsonl.zst"]),
    "not.parquet": (b"not parquet", ["not.parquet"]),
    "empty.jsonl": (b"\n", ["0 tokens"]),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_data_is_one_line_that_names_the_place(name: str, tmp_path: Path, capsys) -> None:
    """Ten hours in, "KeyError: 'text'" does not help."""
    content, words = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    argv = ["--files", tmp_path / name, "--out", tmp_path / "out", "--tokenizer", "bytes"]
    line = refuse(capsys, *argv, "--workers", 1)
    assert all(word in line for word in words), line


def test_a_truncated_zst_is_noticed(tmp_path: Path, capsys) -> None:
    """A stream that just ends would lose the rest of the corpus silently."""
    pyarrow = pytest.importorskip("pyarrow")
    packed = pyarrow.compress(GOOD * 10_000, "zstd", asbytes=True)
    (tmp_path / "cut.jsonl.zst").write_bytes(packed[:-5])
    argv = ["--files", tmp_path / "cut.jsonl.zst", "--out", tmp_path / "out"]
    assert "cut.jsonl.zst" in refuse(capsys, *argv, "--tokenizer", "bytes", "--workers", 1)


def test_a_missing_column_names_those_that_are_there(hub_folder, tmp_path, capsys) -> None:
    """Of a hub dataset and of a plain parquet file."""
    argv = hub_options(hub_folder, tmp_path / "hub", "--text_key", "body")
    assert "'text': 'str', 'id': 'str', 'dump'" in refuse(capsys, *argv)
    files = ["--files", f"{hub_folder}/**/*.parquet", "--out", tmp_path / "files"]
    argv = [*files, "--text_key", "body", "--tokenizer", "bytes", "--workers", 1]
    assert "row 1: expected text under the key 'body'" in refuse(capsys, *argv)


# --------------------------------------------------------------------------------------------------
# the hub: a server on this machine speaks as much of its protocol as the datasets library needs


class Hub(BaseHTTPRequestHandler):
    """Serves server.files of one dataset at server.commit; server.trouble(path) may get in the way."""

    protocol_version = "HTTP/1.1"

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        files, commit = self.server.files, self.server.commit
        path = self.path.split("?")[0]
        if asked := re.search(r"/([0-9a-f]{40})\b", path):  # an older commit stays there
            commit = asked[1]
        tree = re.fullmatch(r"/api/datasets/me/docs/tree/(\w+)(/data)?", path)
        resolve = re.fullmatch(r"/datasets/me/docs/resolve/(\w+)/(.*)", path)
        if path.startswith("/api/datasets/me/docs") and not tree:
            siblings = [{"rfilename": name} for name in files]
            info = {"id": "me/docs", "sha": commit, "tags": [], "siblings": siblings}
            self.reply(200, json.dumps(info).encode(), Content_Type="application/json")
        elif tree:
            entries = [
                {"type": "file", "path": name, "size": len(files[name]), "oid": "0" * 40}
                for name in files
            ]
            entries += [] if tree[2] else [{"type": "directory", "path": "data", "oid": "0" * 40}]
            self.reply(200, json.dumps(entries).encode(), Content_Type="application/json")
        elif resolve and resolve[2] in files:
            headers = {"ETag": f'"{resolve[2]}"', "X_Repo_Commit": commit, "Accept_Ranges": "bytes"}
            if self.command == "GET":
                self.server.trouble(resolve[2])
            body = files[resolve[2]]
            if span := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                part = body[int(span[1]) : int(span[2]) + 1]
                end = int(span[1]) + len(part) - 1
                headers["Content_Range"] = f"bytes {span[1]}-{end}/{len(body)}"
                self.reply(206, part, **headers)
            else:
                self.reply(200, body, **headers)
        else:
            self.reply(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)

    do_HEAD = do_GET

    def log_message(self, *words: object) -> None:
        pass


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, *words: object) -> None:  # clients are killed, and hang up
        pass


def serve_hub(texts: dict[str, list[str]]) -> ThreadingHTTPServer:
    """Serve the texts as .parquet files, by their names, in a thread."""
    import pyarrow
    from pyarrow import parquet

    server = QuietServer(("127.0.0.1", 0), Hub)
    server.files = {}
    for name, lines in texts.items():
        buffer = io.BytesIO()
        table = pyarrow.table({"text": lines})
        parquet.write_table(table, buffer, row_group_size=100, compression="none")
        server.files[f"data/{name}.parquet"] = buffer.getvalue()
    server.commit = "a" * 40
    server.trouble = lambda path: None
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


def start_hub(server: ThreadingHTTPServer, home: Path, *options: object, **changes: str):
    """Start fineweb.py on the server's dataset, with a folder of its own for HF_HOME."""
    env = os.environ | {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    env |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}", "HF_HUB_OFFLINE": "0"}
    argv = ["--dataset", "me/docs", "--tokenizer", "bytes", "--workers", 1, *options]
    return start(*argv, env=env | changes)


TRAIN = {  # 3 files of 2 MB, of which some are written before the last of them is asked for
    f"train-0000{k}-of-00003": [f"{k}, {n}: " + "some words " * 200 for n in range(900)]
    for k in range(3)
}


def test_ctrl_c_and_sigterm_end_it_while_the_network_is_down(tmp_path: Path) -> None:
    """A library waits half an hour for the network in C++, where no signal handler runs."""
    pytest.importorskip("datasets")
    words = "enough words for a file that is not read at once " * 40  # 24 MB
    server = serve_hub({"train-00000-of-00001": [f"{k} {words}" for k in range(12_000)]})
    files, runs = server.files, []
    # The server stops answering, or refuses. What Ctrl-C and SIGTERM do is the system's own default
    for refuses, signum in ((False, signal.SIGINT), (True, signal.SIGTERM)):
        server, reached, forever = serve_hub({}), threading.Event(), threading.Event()
        server.files = files
        requests = itertools.count(1)

        def trouble(
            path, refuses=refuses, server=server, reached=reached, forever=forever, n=requests
        ) -> None:
            if next(n) >= 5:  # the first ones read the file's last bytes, and its beginning
                if refuses:
                    server.socket.close()
                reached.set()
                if refuses:
                    raise ConnectionResetError
                forever.wait()

        server.trouble = trouble
        name = f"{refuses}"
        process = start_hub(server, tmp_path / name, "--out", tmp_path / name / "out")
        runs.append((process, signum, reached, forever))
    for process, _, reached, _ in runs:
        assert reached.wait(60), process.communicate()
    time.sleep(1.5)  # seconds: the library is in the middle of its attempts
    for process, signum, _, _ in runs:
        process.send_signal(signum)
    end = time.monotonic() + 7  # seconds
    for process, signum, _, forever in runs:
        _, errors = process.communicate(timeout=max(0.1, end - time.monotonic()))
        forever.set()
        assert process.returncode == -signum and "Traceback" not in errors, errors


def test_a_run_reads_the_commit_with_which_it_began(tmp_path: Path) -> None:
    """A new commit on the hub, to the README say, ended the loop of a night."""
    pytest.importorskip("datasets")
    server = serve_hub(TRAIN)
    options = ["--shard_size", 300_000, "--out"]
    whole = start_hub(server, tmp_path / "hf0", *options, tmp_path / "whole")
    assert whole.wait(60) == 0, whole.stderr.read()

    def break_connection(path: str) -> None:
        if "00002-of" in path:
            process.kill()
            raise ConnectionResetError

    server.trouble = break_connection
    process = start_hub(server, tmp_path / "hf1", *options, tmp_path / "out")
    assert process.wait(60) == -signal.SIGKILL
    assert len(list((tmp_path / "out").glob("*.npy"))) > 3
    server.trouble = lambda path: None
    server.commit = "b" * 40
    process = start_hub(server, tmp_path / "hf2", *options, tmp_path / "out")
    assert process.wait(60) == 0, process.stderr.read()
    assert read_folder(tmp_path / "out") == read_folder(tmp_path / "whole")
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta["revision"] == "a" * 40


def test_a_copy_in_hf_home_is_read_offline(tmp_path: Path) -> None:
    """What the message without a network advises must work."""
    pytest.importorskip("datasets")
    server = serve_hub(TRAIN)
    options = ["--no-streaming", "--out"]
    online = start_hub(server, tmp_path / "hf", *options, tmp_path / "online")
    assert online.wait(60) == 0, online.stderr.read()
    server.shutdown()
    server.socket.close()
    offline = {"HF_HUB_OFFLINE": "1"}
    copied = start_hub(server, tmp_path / "hf", *options, tmp_path / "offline", **offline)
    streamed = start_hub(server, tmp_path / "hf", "--out", tmp_path / "streamed", **offline)
    assert copied.wait(60) == 0, copied.stderr.read()
    assert read_folder(tmp_path / "online") == read_folder(tmp_path / "offline")
    _, errors = streamed.communicate(timeout=60)
    assert streamed.returncode == 1 and "--no-streaming" in errors.strip().split("\n")[-1]


def test_an_address_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    """A misspelt HF_ENDPOINT and no network at all called for the same advice."""
    pytest.importorskip("datasets")
    address = "http://127.0.0.1:1"
    env = os.environ | {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    process = start("--tokenizer", "bytes", "--out", tmp_path / "out", env=env)
    _, errors = process.communicate(timeout=60)
    line = errors.strip().split("\n")[-1]
    assert process.returncode == 1 and "Traceback" not in errors
    assert f"{address} cannot be reached (HF_ENDPOINT" in line


def test_the_validation_split_of_a_dataset_is_mentioned(tmp_path: Path) -> None:
    """It was left out without a word; and val was nearly all of a dataset just above a shard."""
    pytest.importorskip("datasets")
    server = serve_hub(TRAIN | {"validation-00000-of-00001": ["val"] * 9})
    options = ["--out", tmp_path / "out", "--shard_size", 5_000_000]
    process = start_hub(server, tmp_path / "hf", *options)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "split validation is not used" in output, errors
    val, train = (len(read_split(tmp_path / "out", split)) for split in ("val", "train"))
    assert val + train > 5_500_000 and 0.08 < val / (val + train) < 0.13


# --------------------------------------------------------------------------------------------------
# sources that change, files amiss


def split_files(folder: Path) -> list[Path]:
    """Three files, each of which fills some shards of 50,000 tokens."""
    folder.mkdir(exist_ok=True)
    return [
        write_jsonl(folder / f"docs{k}.jsonl", random_texts(450, 1500, seed=k)) for k in range(3)
    ]


SMALL = ["--shard_size", 50_000]


def test_an_edit_of_the_same_size_is_noticed(tmp_path: Path, capsys) -> None:
    """Shards half of the old text and half of the new one. What was not read yet may change."""
    paths = split_files(tmp_path / "in")
    out = tmp_path / "out"
    build_partly(tmp_path / "in/*", out, *SMALL, batches=1)  # into the second file
    progress = json.loads((out / "meta.json").read_text())["progress"]
    assert progress["position"][0] == 1 and progress["position"][1] > 10
    argv = ["--files", tmp_path / "in/*", "--out", out, "--tokenizer", "bytes", *SMALL]
    for path in paths[:2]:
        content, status = path.read_bytes(), path.stat()
        path.write_bytes(content.replace(b"cat", b"dog", 1))
        assert f"{path} changed" in refuse(capsys, *argv, "--workers", 1)
        path.write_bytes(content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    paths[1].touch()  # the text that was read is the same
    paths[2].write_bytes(paths[2].read_bytes().replace(b"cat", b"dog"))
    build(tmp_path / "in/*", out, *SMALL)
    assert read_folder(out) == read_folder(build(tmp_path / "in/*", tmp_path / "new", *SMALL))


@pytest.mark.parametrize("kind, number", [("jsonl", 400), ("txt", 900)])
def test_a_repaired_file_does_not_cost_the_run(kind, number, tmp_path, capsys, monkeypatch) -> None:
    """A truncated file was replaced, and all that had been read of it is the same as before."""
    monkeypatch.setattr(fineweb, "BATCH_BYTES", 2**15)  # little is read ahead of what is written
    (tmp_path / "in").mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in random_texts(number, 3000, seed=5)]
    packed = gzip.compress("".join(lines).encode(), mtime=0)
    paths = [tmp_path / f"in/{name}.{kind}.gz" for name in "abc"]
    for path in paths:
        path.write_bytes(packed)
    monkeypatch.setattr(fineweb, "BLOCK", 2**15)
    paths[1].write_bytes(packed[: len(packed) * 9 // 10])
    out = tmp_path / "out"
    size = ["--shard_size", 50_000]
    argv = ["--files", tmp_path / "in/*", "--out", out, "--tokenizer", "bytes", *size]
    assert str(paths[1]) in refuse(capsys, *argv, "--workers", 1)
    progress = json.loads((out / "meta.json").read_text())["progress"]
    assert progress["position"][0] == 1 and progress["position"][1] > 0
    paths[1].write_bytes(packed)
    build(tmp_path / "in/*", out, *size)
    assert read_shards(out) == read_shards(build(tmp_path / "in/*", tmp_path / "new", *size))


def test_a_shorter_file_is_noticed(tmp_path: Path, capsys) -> None:
    """A file that ends before the place at which to go on has no such place."""
    paths = split_files(tmp_path / "in")
    build_partly(tmp_path / "in/*", tmp_path / "out", *SMALL, batches=1)
    paths[1].write_text(json.dumps({"text": "short"}))
    argv = ["--files", tmp_path / "in/*", "--out", tmp_path / "out", "--tokenizer", "bytes", *SMALL]
    assert f"{paths[1]} changed" in refuse(capsys, *argv, "--workers", 1)


def test_a_file_that_is_added_or_removed_is_noticed(tmp_path: Path, capsys) -> None:
    """The next start counted other files. That the whole folder moves is no change."""
    split_files(tmp_path / "in")
    os.chdir(tmp_path)
    argv = ["--files", "in/*", "--out", tmp_path / "out", "--tokenizer", "bytes", *SMALL]
    build_partly("in/*", tmp_path / "out", *SMALL, batches=1)
    write_jsonl(tmp_path / "in/added.jsonl", ["text"])
    assert "its list of files" in refuse(capsys, *argv, "--workers", 1)
    (tmp_path / "in/added.jsonl").unlink()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "in").rename(tmp_path / "elsewhere/in")
    os.chdir(tmp_path / "elsewhere")
    build("in/*", tmp_path / "out", *SMALL)
    assert read_folder(tmp_path / "out") == read_folder(build("in/*", tmp_path / "new", *SMALL))


@pytest.mark.parametrize("folders", [1, 2])
def test_parts_of_other_files_are_not_merged(folders: int, tmp_path: Path, capsys) -> None:
    """A file added between two parts: documents twice and others never, and --verify content."""
    for k in range(4):
        write_jsonl(tmp_path / f"docs{k}.jsonl", random_texts(30, 200, seed=k))
    outs = [tmp_path / "out", tmp_path / f"out{folders}"][:folders]
    build(tmp_path / "*.jsonl", outs[0], "--part", "1/2")
    write_jsonl(tmp_path / "added.jsonl", ["text"])
    argv = ["--files", tmp_path / "*.jsonl", "--tokenizer", "bytes", "--workers", 1]
    if folders == 1:  # the second part sees the first
        line = refuse(capsys, *argv, "--part", "2/2", "--out", outs[0])
    else:  # made on another machine, and copied
        build(tmp_path / "*.jsonl", outs[1], "--part", "2/2")
        for path in outs[1].iterdir():
            path.rename(outs[0] / path.name)
        line = refuse(capsys, "--merge", "--out", outs[0])
    assert "its list of files" in line and not (outs[0] / "meta.json").exists()


def test_parts_are_no_dataset_until_they_are_merged(tmp_path: Path, capsys) -> None:
    """Parts 1/3 and 3/3 were approved; so was an unfinished run. progress.done tells the trainer."""
    for k in range(3):
        write_jsonl(tmp_path / f"docs{k}.jsonl", random_texts(30, 200, seed=k))
    out = tmp_path / "out"
    for part in ("1/3", "3/3"):
        build(tmp_path / "*.jsonl", out, "--part", part)
    assert "--merge" in refuse(capsys, "--verify", "--out", out)
    assert "finish --part 2/3 first" in refuse(capsys, "--merge", "--out", out)
    build(tmp_path / "*.jsonl", out, "--part", "2/3")
    assert "--merge" in refuse(capsys, "--verify", "--out", out)
    assert not (out / "meta.json").exists()
    fineweb.main(["--merge", "--out", str(out)])
    assert json.loads((out / "meta.json").read_text())["progress"]["done"] is True
    build(tmp_path / "*.jsonl", out, "--part", "2/3", "--overwrite")
    assert not (out / "meta.json").exists(), "its list of shards is of the part before"
    fineweb.main(["--merge", "--out", str(out)])
    fineweb.main(["--verify", "--out", str(out)])
    split_files(tmp_path / "in")
    build_partly(tmp_path / "in/*", tmp_path / "half", *SMALL, batches=2)
    assert json.loads((tmp_path / "half/meta.json").read_text())["progress"]["done"] is False
    assert "is not finished" in refuse(capsys, "--verify", "--out", tmp_path / "half")


def build_two_parts(folder: Path) -> Path:
    """Build both parts of two files in one folder; return it."""
    for k in range(2):
        write_jsonl(folder / f"docs{k}.jsonl", random_texts(30, 200, seed=k))
    for part in ("1/2", "2/2"):
        build(folder / "docs*.jsonl", folder / "out", "--part", part)
    return folder / "out"


@pytest.mark.parametrize("argv, message", [
    (["--merge", "--part", "1/2"], "leave --part out"),
    (["--verify", "--part", "1/2"], "leave --part out"),
    (["--merge", "--overwrite"], "not allowed with"),
    (["--merge", "--verify"], "not allowed with"),
])  # fmt: skip
def test_what_concerns_all_parts_takes_no_part(argv, message, tmp_path: Path, capsys) -> None:
    """It wrote the part's own meta.json, and --overwrite of that part deleted the other one."""
    before = read_folder(build_two_parts(tmp_path))
    assert message in refuse(capsys, *argv, "--out", tmp_path / "out")
    assert read_folder(tmp_path / "out") == before


def test_a_part_made_again_replaces_what_an_earlier_merge_said(tmp_path: Path) -> None:
    """The new shard was listed with the old one's sha256, and --verify called it damaged."""
    out = build_two_parts(tmp_path)
    fineweb.main(["--merge", "--out", str(out)])
    old = read_folder(out)
    for path in out.glob("*-002-of-002*"):
        path.unlink()
    write_jsonl(tmp_path / "docs1.jsonl", random_texts(20, 200, seed=9))
    build(tmp_path / "docs*.jsonl", out, "--part", "2/2")
    fineweb.main(["--merge", "--out", str(out)])
    fineweb.main(["--verify", "--out", str(out)])
    assert read_folder(out)["meta.json"] != old["meta.json"]


@pytest.mark.parametrize("rest", [None, b"half"])
def test_a_lost_shard_is_not_merged(rest: bytes | None, tmp_path: Path, capsys) -> None:
    """A file forgotten when the parts were copied together: half of the data, and no word."""
    out = build_two_parts(tmp_path)
    lost = next(out.glob("*-002-of-002_train*"))
    lost.unlink()
    if rest:
        lost.write_bytes(rest)
    assert f"{lost} is missing or cut short" in refuse(capsys, "--merge", "--out", out)
    assert not (out / "meta.json").exists()


def test_a_shard_of_no_part_is_not_merged(tmp_path: Path, capsys) -> None:
    """The trainer would read it, too."""
    out = build_two_parts(tmp_path)
    (out / "old_train_000000.npy").write_bytes(b"")
    assert "old_train_000000.npy, which is of no part" in refuse(capsys, "--merge", "--out", out)


def test_a_finished_run_misses_a_lost_shard(tmp_path: Path, capsys) -> None:
    """All tokens were counted as before, and a command to train on them was advised."""
    files = write_jsonl(tmp_path / "docs.jsonl", random_texts(300, 1000))
    out = build(files, tmp_path / "out", "--shard_size", 20_000)
    lost = max(out.glob("*.npy"))
    lost.unlink()
    argv = ["--files", files, "--out", out, "--tokenizer", "bytes", "--shard_size", 20_000]
    assert f"{lost} is missing or cut short" in refuse(capsys, *argv)
    train_gpt2.read_meta(str(out))
    assert (
        f"warning: {out} lacks 1 of the shards in its meta.json, such as {lost.name}"
        in capsys.readouterr().out
    )
    fineweb.main([str(word) for word in (*argv, "--overwrite")])
    fineweb.main(["--verify", "--out", str(out)])


def test_a_part_beside_the_whole_is_noticed(tmp_path: Path, capsys) -> None:
    """Both were started before one of them had a meta.json: --verify called it one dataset."""
    out = build_two_parts(tmp_path)
    build(tmp_path / "docs*.jsonl", tmp_path / "whole")
    for path in (tmp_path / "whole").iterdir():
        path.rename(out / path.name)
    assert "002_train_000000.npy is not in meta.json" in refuse(capsys, "--verify", "--out", out)


def test_a_part_may_be_empty_but_not_all_of_them(tmp_path: Path, capsys) -> None:
    """An empty file made a part that could never be finished, and so no merge was possible."""
    write_jsonl(tmp_path / "docs0.jsonl", random_texts(30, 200))
    write_jsonl(tmp_path / "docs1.jsonl", [])
    argv = [tmp_path / "docs*.jsonl", tmp_path / "out", "--part"]
    build(*argv, "1/2")
    build(*argv, "2/2")
    fineweb.main(["--merge", "--out", str(tmp_path / "out")])
    fineweb.main(["--verify", "--out", str(tmp_path / "out")])
    write_jsonl(tmp_path / "docs0.jsonl", [])
    for part in ("1/2", "2/2"):
        build(tmp_path / "docs*.jsonl", tmp_path / "none", "--part", part)
    assert "none to train on" in refuse(capsys, "--merge", "--out", tmp_path / "none")


def test_a_sisters_fresh_shard_is_not_foreign(tmp_path: Path, monkeypatch) -> None:
    """A part that finishes a shard while another one starts: "delete it", it was told."""
    for k in range(2):
        write_jsonl(tmp_path / f"docs{k}.jsonl", random_texts(30, 200, seed=k))
    list_folder = os.listdir

    def list_late(folder: object) -> list[str]:
        """List the folder as it is after a moment in which the sister part got ready."""
        monkeypatch.setattr(os, "listdir", list_folder)
        build(tmp_path / "*.jsonl", tmp_path / "out", "--part", "2/2")
        return list_folder(folder)

    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "listdir", list_late)
    build(tmp_path / "*.jsonl", tmp_path / "out", "--part", "1/2")
    fineweb.main(["--merge", "--out", str(tmp_path / "out")])


def test_a_shard_lost_between_two_starts_is_noticed(tmp_path: Path, capsys) -> None:
    """It was counted as finished, and the hole was found by --verify alone."""
    split_files(tmp_path / "in")
    out = tmp_path / "out"
    argv = ["--files", tmp_path / "in/*", "--out", out, "--tokenizer", "bytes", *SMALL]
    build_partly(tmp_path / "in/*", out, *SMALL, batches=2)
    lost = sorted(out.glob("*.npy"))[1]
    content = lost.read_bytes()
    for rest in (b"", content[:-1]):
        lost.write_bytes(rest)
        assert f"{lost} is missing or cut short" in refuse(capsys, *argv, "--workers", 1)
    lost.unlink()
    assert f"{lost} is missing or cut short" in refuse(capsys, *argv, "--workers", 1)
    lost.write_bytes(content)
    build(tmp_path / "in/*", out, *SMALL)
    fineweb.main(["--verify", "--out", str(out)])


@pytest.mark.parametrize("change", ["other text", "a new file", "a file less", "no files"])
def test_a_finished_run_sees_that_its_files_changed(tmp_path, monkeypatch, capsys, change) -> None:
    """Text that was edited, the same command again, and a model trained on the old text."""
    monkeypatch.chdir(tmp_path)
    for i in range(3):
        Path(f"{i}.txt").write_text(f"the text number {i}, and more of it. " * 50)
    flags = ["--files", "*.txt", "--tokenizer", "bytes", "--out", "out"]
    fineweb.main(flags)
    fineweb.main(flags)  # nothing to do
    if change == "other text":
        Path("1.txt").write_text("something else")
    elif change == "a new file":
        Path("3.txt").write_text("more")
    else:
        for path in Path().glob("1.txt" if change == "a file less" else "*.txt"):
            path.unlink()
    if change == "no files":  # whoever has the shards need not keep the text
        fineweb.main(flags)
        return
    with pytest.raises(SystemExit) as exit_info:
        fineweb.main(flags)
    assert exit_info.value.code == 2 and "start over with --overwrite" in capsys.readouterr().err
    fineweb.main([*flags, "--overwrite"])


@pytest.mark.parametrize("source", ["b[1].jsonl", "--dataset"])
def test_a_finished_run_sees_an_edit_of_any_local_source(source, tmp_path, monkeypatch, capsys):
    """A name with brackets is no pattern, and a folder's files are files, too."""
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    name = "in/docs.jsonl" if source == "--dataset" else source
    write_jsonl(Path(name), random_texts(50, 200))
    argv = ["--files", source, "--out", "out", "--tokenizer", "bytes", "--workers", "1"]
    if source == "--dataset":
        pytest.importorskip("datasets")
        argv[:2] = ["--dataset", "in"]
    fineweb.main(argv)
    fineweb.main(argv)
    write_jsonl(Path(name), random_texts(51, 200))
    assert "another size or date" in refuse(capsys, *argv)


def test_a_shard_can_be_made_again_as_verify_says(tmp_path: Path, capsys) -> None:
    """It named the damage, and neither what to do nor how."""
    split_files(tmp_path / "in")
    out = build(tmp_path / "in/*", tmp_path / "out", *SMALL)
    lost = sorted(out.glob("*.npy"))[3]
    lost.unlink()
    assert "with another --out" in refuse(capsys, "--verify", "--out", out)
    build(tmp_path / "in/*", tmp_path / "again", *SMALL)
    (tmp_path / "again" / lost.name).rename(lost)
    fineweb.main(["--verify", "--out", str(out)])


def test_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    """A kill in the middle of writing meta.json leaves it under a temporary name."""
    files = write_jsonl(tmp_path / "docs.jsonl", random_texts(90, 99))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/meta.json.1234.tmp").write_text("{")
    whole = build(files, tmp_path / "whole")
    assert read_folder(build(files, tmp_path / "out")) == read_folder(whole)


def test_no_shard_of_an_earlier_start_is_left_behind(tmp_path: Path) -> None:
    """Killed before the first meta.json, and started again with --format bin."""
    files = write_jsonl(tmp_path / "docs.jsonl", random_texts(2000, 1000))
    build_partly(files, tmp_path / "out", batches=1)
    assert len(list((tmp_path / "out").glob("*.npy.tmp"))) == 2
    out = build(files, tmp_path / "out", "--format", "bin")
    assert {path.suffix for path in out.iterdir()} == {".bin", ".json"}


@pytest.mark.skipif(os.name != "posix", reason="closes the streams by a shell")
@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&- <&-", "| head -n 1"])
def test_output_that_nobody_reads_does_not_end_a_run(streams: str, tmp_path: Path) -> None:
    """'NoneType' object has no attribute 'flush', after the first shard of a night."""
    files = write_jsonl(tmp_path / "é.jsonl", random_texts(300, 1000))
    argv = ["--files", files, "--out", tmp_path / "out", "--tokenizer", "bytes", "--workers", 1]
    command = " ".join(shlex.quote(str(word)) for word in [sys.executable, "fineweb.py", *argv])
    script = f"set -o pipefail; {command} --shard_size 20000 {streams}"
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    assert subprocess.run(["bash", "-c", script], cwd=ROOT, env=env, timeout=60).returncode == 0
    fineweb.main(["--verify", "--out", str(tmp_path / "out")])


def test_a_finished_folder_may_be_read_only(tmp_path: Path, monkeypatch) -> None:
    """It ended with the advice to run the same command again."""
    files = write_jsonl(tmp_path / "docs.jsonl", random_texts(90, 99))
    build(files, tmp_path / "out")

    def remove(path: str) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "remove", remove)
    build(files, tmp_path / "out")


def test_out_that_is_a_file_is_a_mistake(tmp_path: Path, capsys) -> None:
    """With status 1, a loop that waits for the network would have gone on for ever."""
    files = write_jsonl(tmp_path / "docs.jsonl", random_texts(90, 99))
    argv = ["--files", files, "--tokenizer", "bytes", "--out"]
    assert f"--out {files}: " in refuse(capsys, *argv, files)


def test_other_json_beside_the_shards_is_nobodys_business(tmp_path: Path) -> None:
    """metadata.json was 'not written by this version of fineweb.py', and to be deleted."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/metadata.json").write_text("{}")
    build(write_jsonl(tmp_path / "docs.jsonl", random_texts(90, 99)), tmp_path / "out")


def test_a_text_about_jsonl_is_a_text(tmp_path: Path) -> None:
    """notes.jsonl.txt was read as lines of JSON."""
    (tmp_path / "notes.jsonl.txt").write_text("no JSON at all. " * 99)
    build(tmp_path / "notes.jsonl.txt", tmp_path / "out")


def test_a_compressed_desert_is_read_in_blocks() -> None:
    """39 kB of .xz can hold 264 MB of equal lines, which were in the memory at once."""
    packed = lzma.compress(b"a line\n" * 3_000_000)
    blocks = list(fineweb.decompress_xz(iter([packed])))
    assert max(map(len, blocks)) <= fineweb.BLOCK and b"".join(blocks) == b"a line\n" * 3_000_000


def test_files_are_what_they_are_called(tmp_path: Path, capsys, monkeypatch) -> None:
    """Brackets in a name, a misspelt second name, and one file by three spellings."""
    monkeypatch.chdir(tmp_path)
    names = ["notes [draft].txt", "br[1].txt", "br1.txt"]
    for name in names:
        Path(name).write_text(f"the text of {name}")
    for name in names:
        out = tmp_path / name.replace(".", "_")
        assert Path(name).read_text() in bytes_of(build(name, out))
    spellings = ["br1.txt", "./br1.txt", tmp_path / "br1.txt", "b?1.txt"]
    argv = ["--tokenizer", "bytes", "--workers", 1, "--out", tmp_path / "one", "--files"]
    fineweb.main([str(word) for word in [*argv, *spellings]])
    assert bytes_of(tmp_path / "one").count("the text") == 1
    argv = ["--tokenizer", "bytes", "--out", tmp_path / "two", "--files"]
    assert "br2.txt: there is no such file" in refuse(capsys, *argv, "br1.txt", "br2.txt")
    assert "x*.txt: there is no such file" in refuse(capsys, *argv, "br1.txt", "x*.txt")


def bytes_of(folder: Path) -> str:
    """Both splits as text."""
    tokens = read_split(folder, "val") + read_split(folder, "train")
    return bytes(token for token in tokens if token < 256).decode()


@pytest.mark.parametrize("suffix", ["gz", "xz", "zst"])
def test_a_compressed_file_without_a_byte_is_refused(suffix: str, tmp_path, capsys) -> None:
    """A download that failed counted as an empty corpus."""
    path = tmp_path / f"docs.jsonl.{suffix}"
    path.write_bytes(b"")
    argv = ["--files", path, "--out", tmp_path / "out", "--tokenizer", "bytes", "--workers", 1]
    line = refuse(capsys, *argv)
    assert str(path) in line and "0 bytes" in line


@pytest.mark.parametrize("suffix, pack", [("gz", gzip.compress), ("xz", lzma.compress)])
def test_a_flipped_bit_loses_nothing_silently(suffix, pack, tmp_path: Path) -> None:
    """In the header of an .xz's second stream it ended the file early, with status 0."""
    texts = [b"the first stream " * 20, b"the second stream " * 20]
    first, second = (pack(text) for text in texts)
    path = tmp_path / f"docs.txt.{suffix}"
    padding = b"\0" * 8  # which both formats allow
    path.write_bytes(first + padding + second)
    assert b"".join(fineweb.read_bytes(str(path))) == b"".join(texts)
    for bit in range(8 * len(second)):
        flipped = bytearray(second)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(first + flipped)
        try:
            text = "".join(text for blocks in fineweb.read_file(str(path), "") for text in blocks)
        except fineweb.UserError as error:
            assert str(path) in str(error)
        else:
            assert text.encode() == b"".join(texts), bit


@pytest.mark.parametrize("name", ["docs.txt", "docs.jsonl", "bom.txt"])
def test_what_is_not_utf8_is_named_by_file_line_and_byte(name: str, tmp_path, capsys) -> None:
    """One bad byte in 45 GB could not be found."""
    good = json.dumps({"text": "é" * 99}, ensure_ascii=False).encode() + b"\n"
    content = b"\xef\xbb\xbf" * (name == "bom.txt") + good * 10_000  # 2.1 MB, three blocks
    path = tmp_path / name
    argv = ["--files", path, "--out", tmp_path / "out", "--tokenizer", "bytes", "--workers", 1]
    for bad in (b'{"text": "caf\xe9"}', b"\xc3"):  # in the middle; a character cut off at the end
        path.write_bytes(content + bad)
        where = len(content) + bad.index(bad.lstrip(b'{"tex: caf')) + 1
        line = refuse(capsys, *argv)
        assert f"{path}, line 10001, byte {where} of the file: 0x" in line, line


# --------------------------------------------------------------------------------------------------
# texts that are hard to cut, workers that fail


HARD = {
    "dna": "ACGT",
    "base64": "aB3/+xY9",
    "no-break spaces": "\u00a0",
    "ideographs": "漢字",
}


@pytest.mark.parametrize("name", HARD)
def test_a_text_without_white_space_is_cut_as_it_is_read(name: str) -> None:
    """All of it was kept, and searched again for every block: 80 MB took 158 s, and 2 GiB."""
    size = 3 * 10**6  # characters
    text = (HARD[name] * (size // len(HARD[name]) + 1))[:size]
    in_hand = 0

    def read(block: int) -> Iterator[str]:
        nonlocal in_hand
        for start in range(0, size, block):
            in_hand += block
            yield text[start : start + block]

    segments = []
    for segment in fineweb.split_text(read(2**20)):
        assert in_hand <= fineweb.LONGEST_SEGMENT + 2**20 + 2, "more is kept than is needed"
        in_hand -= len(segment)
        segments.append(segment)
    assert "".join(segments) == text and max(map(len, segments)) <= fineweb.LONGEST_SEGMENT
    assert list(fineweb.split_text(read(700_000))) == segments, "the blocks must not matter"
    assert list(fineweb.split_text([text])) == segments


def test_a_line_of_many_blocks_is_read_in_linear_time(tmp_path: Path, monkeypatch) -> None:
    """A .jsonl of 200 MB in one line, without white space, took hours."""
    monkeypatch.setattr(fineweb, "BLOCK", 2**10)  # as if the line were 1024 times as long

    def measure(size: int) -> float:
        """Return the seconds for a line of this many characters, the least of three."""
        path = write_jsonl(tmp_path / "docs.jsonl", ["ACGT" * (size // 4)])
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            [blocks] = fineweb.read_file(str(path), "text")
            assert sum(map(len, fineweb.split_text(blocks))) == size
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    assert measure(4 * 2**20) < 10 * measure(2**20), "4 times is linear, 16 is quadratic"


@needs_gpt2
def test_a_million_no_break_spaces_are_tokens(tmp_path: Path) -> None:
    """tiktoken's regular expressions failed on 1.2 million of them in a word's way."""
    text = "word" + "\u00a0" * 1_200_000 + "word"
    files = write_jsonl(tmp_path / "docs.jsonl", [text, "another"])
    build(files, tmp_path / "out", tokenizer="gpt2")
    enc = fineweb.get_tokenizer("gpt2")
    tokens = read_split(tmp_path / "out", "val") + read_split(tmp_path / "out", "train")
    assert sorted(enc.decode(tokens)) == sorted(f"<|endoftext|>{text}<|endoftext|>another")


@needs_gpt2
@settings(exact, max_examples=300)
@given(
    st.text(st.sampled_from("ab1'sé٣ \u00a0\u3000\u1680\x1c\n漢"), max_size=60), st.integers(1, 30)
)
def test_every_place_to_cut_is_one_of_gpt2s(text: str, chars: int) -> None:
    """Between letters and digits and at any white space: the tokens are those of the whole."""
    encode = fineweb.get_tokenizer("gpt2").encode_ordinary
    segments = fineweb.split_text([text], chars)
    assert [token for part in segments for token in encode(part)] == encode(text)


@needs_gpt2
@pytest.mark.parametrize("workers", [1, 2])
def test_a_text_that_cannot_be_encoded_is_named(workers: int) -> None:
    """An exception of a worker was "killed, for lack of memory perhaps", after a traceback."""
    spaces = "word" + "\u00a0" * 1_200_000 + "word"  # too much for a stack, if it is not cut
    batch = [to_segment("good", 1), to_segment(spaces, 2), to_segment("good", 3)]
    with pytest.raises(fineweb.UserError, match=r"^docs, document 2: ValueError: .*regex"):
        list(fineweb.tokenize([batch], "gpt2", workers))


@needs_gpt2
def test_the_command_line_names_the_document_in_one_line(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    """Status 2: a document that is left out or mended lets the run go on."""
    monkeypatch.setattr(fineweb, "split_text", lambda blocks: ["".join(blocks)])  # never cuts
    files = write_jsonl(tmp_path / "docs.jsonl", ["good", "word" + "\u00a0" * 1_200_000 + "word"])
    line = refuse(capsys, "--files", files, "--out", tmp_path / "out")
    assert f"{files}, document 2: ValueError" in line


def test_a_bug_is_a_traceback(tmp_path: Path, monkeypatch) -> None:
    """A ValueError of the code itself was taken for the user's mistake."""

    def fail(*words: object, **options: object) -> None:
        raise ValueError("a bug")

    files = write_jsonl(tmp_path / "docs.jsonl", ["a", "b"])
    monkeypatch.setattr(np, "concatenate", fail)
    with pytest.raises(ValueError, match="a bug"):
        build(files, tmp_path / "out")


def test_a_vocabulary_beyond_uint16_is_refused(monkeypatch) -> None:
    """Its tokens wrapped around without a word."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    enc = fineweb.tiktoken.Encoding(
        "large", pat_str=".", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 2**16}
    )
    monkeypatch.setattr(fineweb.tiktoken, "get_encoding", lambda name: enc)
    fineweb.get_tokenizer.cache_clear()
    with pytest.raises(fineweb.UserError, match="uint16"):
        fineweb.get_tokenizer("gpt2")


# --------------------------------------------------------------------------------------------------
# what messages advise


def test_overwrite_works_where_it_is_advised(tmp_path: Path, capsys) -> None:
    """And is not advised where it cannot help."""
    for k in range(2):
        write_jsonl(tmp_path / f"docs{k}.jsonl", random_texts(30, 200, seed=k))
    files = tmp_path / "*.jsonl"
    argv = ["--files", files, "--tokenizer", "bytes", "--workers", 1, "--out"]
    out = build(files, tmp_path / "out")
    for change in (["--shard_size", 500], ["--format", "bin"], ["--val_share", 0.3]):
        assert "--overwrite" in refuse(capsys, *argv, out, *change)
        build(files, out, *change, "--overwrite")
        new = build(files, tmp_path / f"new{change[0]}", *change)
        assert read_folder(out) == read_folder(new)
    assert "--overwrite" not in refuse(capsys, *argv, out, "--part", "1/2")
    parts = tmp_path / "parts"
    for part in ("1/2", "2/2"):
        build(files, parts, "--part", part)
    fineweb.main(["--merge", "--out", str(parts)])
    assert "--overwrite" not in refuse(capsys, *argv, parts, "--overwrite")
    build_partly(files, tmp_path / "half", "--shard_size", 500, batches=1)
    write_jsonl(tmp_path / "docs0.jsonl", random_texts(31, 200, seed=7))
    options = ["--shard_size", 500]
    assert "--overwrite" in refuse(capsys, *argv, tmp_path / "half", *options)
    build(files, tmp_path / "half", *options, "--overwrite")
    assert read_folder(tmp_path / "half") == read_folder(build(files, tmp_path / "7", *options))


@pytest.mark.parametrize("content", [
    '{"tokenizer": "bytes", "vocab_size": 257, "eot": 256}', "[1]", "{", '{"options": {}}',
    '{"version": 99, "source": "x", "options": {}, "shards": {}, "progress": {"done": true}}',
])  # fmt: skip
def test_a_meta_json_of_another_version_is_one_line(content: str, tmp_path, capsys) -> None:
    """It was a KeyError's traceback."""
    files = write_jsonl(tmp_path / "docs.jsonl", ["a", "b"])
    (tmp_path / "meta.json").write_text(content)
    argv = ["--files", files, "--out", tmp_path, "--tokenizer", "bytes"]
    for options in (argv, ["--verify", "--out", tmp_path], ["--merge", "--out", tmp_path]):
        assert str(tmp_path / "meta.json") in refuse(capsys, *options)


def test_an_older_unfinished_run_is_not_continued(tmp_path: Path, capsys) -> None:
    """Its position means something else. A finished one stays as it is."""
    files = write_jsonl(tmp_path / "docs.jsonl", random_texts(90, 999))
    out = build(files, tmp_path / "out", "--shard_size", 900)
    meta = json.loads((out / "meta.json").read_text())
    del meta["version"], meta["revision"], meta["progress"]["read"]
    (out / "meta.json").write_text(json.dumps(meta))
    argv = ["--files", files, "--out", out, "--tokenizer", "bytes", "--shard_size", 900]
    fineweb.main([str(word) for word in argv])
    fineweb.main(["--verify", "--out", str(out)])
    meta["progress"] |= {"done": False, "position": [0, 30]}
    (out / "meta.json").write_text(json.dumps(meta))
    assert "not written by this version" in refuse(capsys, *argv)


@pytest.mark.parametrize("total", [2300, 2400, 2569, 4000])
def test_next_validates_only_where_there_is_a_window(total: int, tmp_path: Path) -> None:
    """A corpus of 2,223 to 2,569 tokens has 222 to 256 of validation, less than a window."""
    files = write_jsonl(tmp_path / "docs.jsonl", ["x" * (total - 1)])
    argv = ["--files", str(files), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]
    args = fineweb.parse_args(argv)
    meta = fineweb.build(args)
    val = meta["progress"]["tokens"]["val"]
    line = fineweb.suggest(args, meta | {"tokenizer": "gpt2"})  # the same counts
    assert ("--val_every 0" in line) == (val < 257)
