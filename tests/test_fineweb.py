"""What fineweb.py promises: exact shards from any documents, whatever interrupts it."""

import gzip
import json
import lzma
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
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
    read, data, _ = fineweb.open_source(args)
    Path(args.out).mkdir(exist_ok=True)
    meta = fineweb.prepare_folder(args, data)
    those = fineweb.make_batches(read(meta["progress"]["position"]))
    writer = fineweb.ShardWriter(args, meta)
    written = fineweb.fill_shards(writer, fineweb.tokenize(those, args.tokenizer, 1))
    for _ in range(batches):
        next(written)
    writer.close()


def start(*argv: object, **how: object) -> subprocess.Popen:
    """Start fineweb.py as a user does."""
    command = [sys.executable, str(ROOT / "fineweb.py"), *(str(word) for word in argv)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes, **how)


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
@given(st.text(st.characters(exclude_categories=[]), max_size=50))
def test_encoding_is_gpt2s_ordinary_encoding(text: str) -> None:
    """Also of lone surrogates, which JSON may hold, and of the text <|endoftext|>."""
    for whole in (text, text + "<|endoftext|>" + text, text + "\ud800"):
        expected = fineweb.get_tokenizer("gpt2").encode_ordinary(whole)
        (_, begun), (_, goes_on) = fineweb.encode([([0, 0], whole), (None, whole)], "gpt2")
        assert begun.dtype == np.uint16
        assert begun.tolist() == [50256, *expected]
        assert goes_on.tolist() == expected


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
    segments = [(None, text) for text in fineweb.split_text(["word" + " " * 10**6 + "word"])]
    tokens = np.concatenate([part for _, part in fineweb.encode(segments, "gpt2")]).tolist()
    enc = fineweb.get_tokenizer("gpt2")
    assert tokens == enc.encode("word") + enc.encode(" ") * (10**6 - 1) + enc.encode(" word")


# --------------------------------------------------------------------------------------------------
# shards


@settings(exact, max_examples=60)
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


@settings(exact, max_examples=40)
@given(data=st.data())
def test_both_splits_are_in_order_and_together_all_there_is(data, tmp_path_factory) -> None:
    """A token lost or told twice where a document is cut, or a document out of its order."""
    lengths = data.draw(st.lists(st.integers(0, 200), min_size=2, max_size=40), "lengths")
    texts = [chr(48 + k) * n for k, n in enumerate(lengths)]  # each of its own character
    share = data.draw(st.sampled_from([0.0, 0.05, 0.1, 0.5]), "share")
    folder = tmp_path_factory.mktemp("share")
    files = write_jsonl(folder / "docs.jsonl", texts)
    options = ["--val_share", share, "--shard_size", 50, "--val_tokens", 10**6]
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
def test_a_corpus_smaller_than_a_shard_gives_both_splits(name: str, tmp_path: Path) -> None:
    """All of it within validation, which comes first: a tenth of it is left for that."""
    text = "to be or not to be " * 50
    path = tmp_path / name
    path.write_text(text if path.suffix == ".txt" else json.dumps({"text": text}))
    build(path, tmp_path / "out", "--val_share", 1)
    expected = to_tokens([text])
    assert read_split(tmp_path / "out", "val") == expected[: len(expected) // 10]
    assert read_split(tmp_path / "out", "train") == expected[len(expected) // 10 :]


def test_max_tokens_ends_exactly_there(tmp_path: Path) -> None:
    """A token budget is a budget, and validation still gets a part of it."""
    texts = random_texts(90, 100)
    files = write_jsonl(tmp_path / "docs.jsonl", texts)
    build(files, tmp_path / "out", "--max_tokens", 1000, "--shard_size", 300, "--val_share", 1)
    tokens = to_tokens(texts)[:1000]
    assert read_split(tmp_path / "out", "val") == tokens[:100]
    assert read_split(tmp_path / "out", "train") == tokens[100:]
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta["progress"]["documents"] == tokens.count(256)


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
    argv += ["--shard_size", 200_000, *options]
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


def test_killed_at_20_random_moments_it_ends_byte_for_byte_the_same(tmp_path: Path) -> None:
    """SIGKILL gives no chance to clean up: whatever is on the disk must be enough to go on."""
    files = write_jsonl(tmp_path / "docs.jsonl", random_texts(2500, 4000))
    options = ["--tokenizer", "bytes", "--shard_size", 40_000, "--val_share", 0.3]
    whole = build(files, tmp_path / "whole", *options[2:])
    rng, out, kills, finished = random.Random(1), tmp_path / "killed0", 0, 0
    while kills < 20:
        workers = rng.choice([1, 1, 2])
        process = start("--files", files, "--out", out, "--workers", workers, *options)
        try:
            status = process.wait(rng.uniform(0.2, 0.5) + 0.3 * (workers - 1))
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


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_with_one_line_and_its_status(signum: int, tmp_path: Path) -> None:
    """128 + signal, and the line says how to go on; so it does."""
    files = write_jsonl(tmp_path / "docs.jsonl", random_texts(1500, 3000))
    options = ["--shard_size", 20_000, "--tokenizer", "bytes"]
    out = tmp_path / "out"
    process = start(
        "--files", files, "--out", out, "--workers", 2, *options, start_new_session=True
    )
    wait_for_shards(out, 5)
    os.killpg(process.pid, signum) if signum == signal.SIGINT else process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signum, errors
    assert errors.strip().count("\n") == 0 and "same command" in errors
    build(files, out, *options[:2])
    whole = build(files, tmp_path / "whole", *options[:2])
    assert read_folder(out) == read_folder(whole)


def wait_for_shards(folder: Path, number: int) -> None:
    end = time.monotonic() + 30  # seconds
    while len(list(folder.glob("*.npy"))) < number:
        assert time.monotonic() < end, "no shards"
        time.sleep(0.01)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    """Orphans would hold memory for ever, on a machine that kills and restarts."""
    files = write_jsonl(tmp_path / "docs.jsonl", random_texts(3000, 3000))
    options = ["--shard_size", 20_000, "--tokenizer", "bytes", "--workers", 2]
    process = start("--files", files, "--out", tmp_path / "out", *options)
    wait_for_shards(tmp_path / "out", 3)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) >= 2
    process.kill()
    process.wait()
    end = time.monotonic() + 10  # seconds
    while any(is_running(child) for child in children):
        assert time.monotonic() < end, "a worker outlived its parent"
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_a_killed_worker_ends_the_run_with_one_line(tmp_path: Path) -> None:
    """The system kills a process when memory is short: waiting for it for ever is no answer."""
    files = write_jsonl(tmp_path / "docs.jsonl", random_texts(3000, 3000))
    options = ["--shard_size", 20_000, "--tokenizer", "bytes", "--workers", 2]
    process = start("--files", files, "--out", tmp_path / "out", *options)
    wait_for_shards(tmp_path / "out", 3)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and errors.count("\n") == 1, errors
    assert "a worker was killed" in errors and "same command" in errors


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except OSError:
        return False


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
    assert "--part 1/2 to be finished" in refuse(capsys, "--merge", "--out", out)
    build(tmp_path / "*.jsonl", out, *options, "1/2")
    fineweb.main(["--verify", "--out", str(out)])
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
    assert output.endswith("tokens teach nothing: more text is needed\n"), errors


@pytest.mark.parametrize("tokenizer, tokens, words", [
    ("gpt2", 10**9, []), ("gpt2", 10**6, ["--epochs", "--model", "--log_dir"]),
    ("bytes", 10**6, ["--quickstart", "--log_dir"]), ("bytes", 10**9, ["--quickstart", "--log_dir"]),
])  # fmt: skip
def test_what_to_run_next_suits_the_amount(tokenizer, tokens, words, tmp_path: Path) -> None:
    """176,000 tokens of one's own, and the whole run was a single step of 524,288."""
    folder = tmp_path / "my text"
    folder.mkdir()
    shards = {"docs_train_000000.npy": {"tokens": tokens}, "docs_val_000001.npy": {"tokens": 10**9}}
    meta = {"tokenizer": tokenizer, "options": {}, "shards": shards}
    (folder / "meta.json").write_text(json.dumps(meta))
    line = fineweb.suggest(f"{folder}/")
    _, _, script, *argv = shlex.split(line)
    args = train_gpt2.parse_args(argv)
    assert script == "train_gpt2.py" and Path(args.data_dir) == folder
    assert args.log_dir == ("log/my text" if words else "log") and not args.overwrite
    assert {flag for flag in argv if flag.startswith("--")} >= set(words)
    args.seq_len = args.seq_len or 1024
    train_gpt2.fill_schedule(args, tokens // args.seq_len)
    assert args.max_steps > 200
    meta["shards"].pop("docs_val_000001.npy")
    (folder / "meta.json").write_text(json.dumps(meta))
    assert fineweb.suggest(str(folder)).endswith("--val_every 0"), "or it ends for lack of val"


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
    assert "other_train_000001.npy is in no meta.json" in line


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
    assert "tokenizer bytes, this run gpt2" in line


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
    "--workers 0": "expected 1 or more",
    "--shard_size -1": "expected 1 or more",
    "--format bin --shard_size 3000000000": "2**31",
    "--files a.jsonl --dataset pydocs": "choose one",
    "--files nothing*.jsonl --out {out}": "no such files",
    "--files {out}/x.csv --out {out}/new": "expected .jsonl",
    "--files {out}/x.jsonl": "--out FOLDER",
    "--dataset {out}/nowhere --out {out}/new": "nowhere",
    "--dataset pydocs --part 1/2 --out {out}/new": "2 parts need as many files",
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
    "key.jsonl": (GOOD + b'{"body": "x", "id": 1}', ["line 2", "body, id", "--text_key"]),
    "null.jsonl": (GOOD + b'{"text": null}', ["line 2", "None"]),
    "list.jsonl": (GOOD + b"[1, 2]", ["line 2", "expected an object"]),
    "json.jsonl": (GOOD * 2 + b'{"text": "cut of', ["line 3", "not JSON"]),
    "latin1.txt": (b"caf\xe9", ["latin1.txt", "utf-8"]),
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
    assert "text, id, dump" in refuse(capsys, *argv)
    files = ["--files", f"{hub_folder}/**/*.parquet", "--out", tmp_path / "files"]
    argv = [*files, "--text_key", "body", "--tokenizer", "bytes", "--workers", 1]
    assert "row 1: no key 'body' but text, id" in refuse(capsys, *argv)
