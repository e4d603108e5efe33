"""Turn documents into shards of tokens for train_gpt2.py: exact, on every core, safe to interrupt.

python fineweb.py                                       # FineWeb-Edu, 10B tokens, to edu_fineweb10B/
python fineweb.py --name sample-100BT                   # 100B tokens, to edu_fineweb100B/
python fineweb.py --files 'docs/*.jsonl' --out mydocs   # your own: .jsonl .txt (.gz .xz .zst) .parquet
python fineweb.py --dataset pydocs                      # Python's own documentation: small, offline
python fineweb.py --part 3/128 --out fw                 # the third of 128 slices, on any machine; then
python fineweb.py --merge --out fw                      # make the slices one dataset
python fineweb.py --verify --out fw                     # re-read every shard and check its sha256

A shard is a 1-D array of uint16 tokens, and every document in it is its <|endoftext|> token followed
by its text's tokens. The shards depend on the documents and the options alone, never on the number of
workers or on interruptions: killed at any moment and started again with the same command, it goes on.

The pieces: sources read documents, segments cut long ones where the tokenizer cannot notice, workers
encode, and one writer fills shards. meta.json is the only state: each finished shard's sha256, and the
document that the next shard starts in.
"""

import argparse
import functools
import glob
import hashlib
import io
import json
import os
import re
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import numpy as np
import tiktoken

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
SHARD_PREFIX = {FINEWEB_EDU: "edufineweb", "HuggingFaceFW/fineweb": "fineweb", "pydocs": "pydocs"}
TABLE_ROWS = 256  # rows of a .parquet file read at once, ~1 MB of FineWeb
SEGMENT_CHARS = 2**17  # a longer document is encoded in pieces of about this many characters
BATCH_CHARS = 2**19  # characters sent to a worker at once, ~0.05 s of work
CHARS_PER_TOKEN = {"gpt2": 4.5, "bytes": 1.0}  # English, for estimates only

# A document on its way: its position in the source (plain JSON, what a restart needs to find it again)
# and its text in blocks, so that one file larger than memory can be one document.
Document = tuple[list, Iterable[str]]
# A piece of one, ready to encode: the position where a document begins, None where it goes on.
Segment = tuple[list | None, str]


# ---------------------------------------------------------------------------------------------------
# tokenizers


@functools.cache
def get_tokenizer(name: str) -> tiktoken.Encoding:
    """Return the tokenizer: "gpt2", or "bytes" (token = byte, <|endoftext|> = 256).

    Raises ValueError for any other name.
    """
    if name == "gpt2":
        return tiktoken.get_encoding("gpt2")
    if name != "bytes":
        raise ValueError(f"unknown tokenizer {name!r}: expected gpt2 or bytes")
    return tiktoken.Encoding(
        "bytes",
        pat_str=r"(?s).{1,64}",  # nothing merges, so any cut will do; short pieces are the fastest
        mergeable_ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens={"<|endoftext|>": 256},
    )


def encode(batch: list[tuple[bool, str]], tokenizer: str) -> list[np.ndarray]:
    """Encode (does it begin a document?, text) pairs to uint16 arrays. Runs in the workers."""
    enc = get_tokenizer(tokenizer)
    # ordinary: the characters "<|endoftext|>" inside a document are text, not the token
    encoded = (
        ([enc.eot_token] if begins else []) + enc.encode_ordinary(text) for begins, text in batch
    )
    return [np.array(tokens, dtype=np.uint16) for tokens in encoded]


# ---------------------------------------------------------------------------------------------------
# sources: each open_* returns (read, identity, size). read(position) yields the documents from there
# on; identity changes when the data does; size is in characters, about, or None where nobody knows.

Source = tuple[Callable[[list | None], Iterator[Document]], str, float | None]


def open_source(args: argparse.Namespace) -> Source:
    """Open what the command line asks for. Raises ValueError where that is not to be had."""
    if args.files:
        return open_files(args)
    return open_pydocs() if args.dataset == "pydocs" else open_hub(args)


def open_pydocs() -> Source:
    """Python's language reference and the standard library's docstrings, about 2 MB, in name order."""
    from pydoc_data.topics import topics

    texts = [clean(topics[name]) for name in sorted(topics)]
    texts += [text for path in stdlib_modules() if len(text := read_docstrings(path)) > 200]

    def read(position: list | None) -> Iterator[Document]:
        for row in range(position[0] if position else 0, len(texts)):
            yield [row], [texts[row]]

    return read, fingerprint(texts), sum(map(len, texts))


def stdlib_modules() -> list[str]:
    """List the standard library's source files without tests, tables and whole applications."""
    import sysconfig

    skipped = (
        r"tests?|.*_tests?|(site|dist)-packages|idlelib|lib2to3|turtledemo|encodings|pydoc_data"
    )
    found = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = [name for name in subfolders if not re.fullmatch(skipped, name)]
        found += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def read_docstrings(path: str) -> str:
    """Join a module's docstrings under their dotted names, as ast finds them: nothing is imported."""
    import ast

    def visit(node: ast.AST, name: str) -> Iterator[str]:
        if text := ast.get_docstring(node):
            yield f"{name}\n\n{text}\n"
        for child in node.body:
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from visit(child, f"{name}.{child.name}")

    with open(path, "rb") as file:
        tree = ast.parse(file.read())
    return clean("\n".join(visit(tree, os.path.basename(path).removesuffix(".py"))))


def clean(text: str) -> str:
    """Return text with plain quotes and dashes, no trailing blanks, one empty line at most."""
    text = text.translate(str.maketrans("‘’“”–\t", "''\"\"- "))
    text = re.sub(r" +$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def open_files(args: argparse.Namespace) -> Source:
    """Local .jsonl, .txt and .parquet files, in the order of their names."""
    paths = sorted({path for pattern in args.files for path in glob.glob(pattern, recursive=True)})
    if not paths:
        raise ValueError(f"--files {' '.join(args.files)}: no such files")
    for path in paths:
        if not re.search(r"\.(parquet|(jsonl|txt)(\.(gz|xz|zst))?)$", path):
            raise ValueError(f"{path}: expected .jsonl or .txt (also .gz .xz .zst) or .parquet")
    identity = fingerprint([os.path.basename(path), os.path.getsize(path)] for path in paths)
    # compressed English is about 2.7 times longer than its file
    packed = [2.7 if path.endswith(("gz", "xz", "zst", "parquet")) else 1.0 for path in paths]
    size = sum(ratio * os.path.getsize(path) for ratio, path in zip(packed, paths, strict=True))
    mine = [k for k in range(len(paths)) if k % args.parts == args.part]
    if not mine:
        raise ValueError(f"--part: a part needs a file at least, and there are only {len(paths)}")

    def read(position: list | None) -> Iterator[Document]:
        first_file, first_row = position or (0, 0)
        for k in (k for k in mine if k >= first_file):
            for row, blocks in read_file(
                paths[k], args.text_key, first_row if k == first_file else 0
            ):
                yield [k, row], blocks

    return read, identity, size / args.parts


def read_file(path: str, text_key: str, first: int) -> Iterator[tuple[int, Iterable[str]]]:
    """Yield (row, text blocks) of a file's documents from row `first` on.

    Raises ValueError, naming the file, where it is damaged or holds something else.
    """
    rows = (
        read_parquet if path.endswith(".parquet") else read_jsonl if ".jsonl" in path else read_txt
    )
    try:
        yield from rows(path, text_key, first)
    except Exception as error:  # each format and compression has errors of its own
        where = "" if str(error).startswith(path) else f"{path}: cannot be read: "
        raise ValueError(f"{where}{error}") from error


def open_text(path: str) -> io.TextIOBase:
    """Open a UTF-8 file, compressed or not; line ends stay as they are."""
    how = {"encoding": "utf-8-sig", "newline": "\n"}
    if path.endswith(".zst"):
        import pyarrow  # unlike zstandard's, its stream notices a truncated file

        return io.TextIOWrapper(pyarrow.input_stream(path, compression="zstd"), **how)
    if path.endswith(".gz"):
        import gzip

        return gzip.open(path, "rt", **how)
    if path.endswith(".xz"):
        import lzma

        return lzma.open(path, "rt", **how)
    return open(path, **how)


def read_txt(path: str, _: str, first: int) -> Iterator[tuple[int, Iterable[str]]]:
    """A .txt file is one document, read a block at a time."""
    with open_text(path) as file:
        if first == 0:
            yield 0, iter(lambda: file.read(2**20), "")


def read_jsonl(path: str, text_key: str, first: int) -> Iterator[tuple[int, Iterable[str]]]:
    """A .jsonl file has one JSON object a line; lines of white space are skipped."""
    with open_text(path) as file:
        for row, line in enumerate(file):
            if row >= first and not line.isspace():
                record = parse_json(line, where := f"{path}, line {row + 1}")
                yield row, [check_text(record, text_key, where)]


def read_parquet(path: str, text_key: str, first: int) -> Iterator[tuple[int, Iterable[str]]]:
    """A .parquet file has one document a row; whole row groups before the first are not read."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        columns = [text_key] if text_key in file.schema_arrow.names else None
        row = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if row + rows <= first:
                row += rows
                continue
            for table in file.iter_batches(TABLE_ROWS, [group], columns):
                for row, text in read_table(table, text_key, path, row):
                    if row >= first:
                        yield row, [text]
                row += 1


def read_table(table, text_key: str, where: str, row: int) -> Iterator[tuple[int, str]]:
    """Yield (row, text) of an Arrow table that begins at a row of its source."""
    if text_key not in table.schema.names:
        check_text(dict.fromkeys(table.schema.names), text_key, f"{where}, row {row + 1}")
    for row, text in enumerate(table[text_key].to_pylist(), row):
        yield row, check_text({text_key: text}, text_key, f"{where}, row {row + 1}")


def check_text(record: object, text_key: str, where: str) -> str:
    """Return the record's text. Raises ValueError saying what is there instead."""
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected an object with keys, found {type(record).__name__}")
    if text_key not in record:
        keys = ", ".join(map(repr, sorted(record)))
        raise ValueError(f"{where}: no key {text_key!r}, found {keys}: choose one with --text_key")
    if not isinstance(record[text_key], str):
        raise ValueError(f"{where}: {text_key!r} is {record[text_key]!r:.40}, expected text")
    return record[text_key]


def parse_json(text: str, where: str) -> object:
    """Parse JSON. Raises ValueError naming the place."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error


def open_hub(args: argparse.Namespace) -> Source:
    """A dataset of the Hugging Face hub, or a local folder of data files, through datasets."""
    import datasets

    try:
        builder = datasets.load_dataset_builder(args.dataset, args.name)
    except ConnectionError as error:
        raise ConnectionError(
            f"{error}. No network? HF_ENDPOINT names a mirror, HF_HOME a cache that holds the data;"
            " or tokenise files that you have: --files 'folder/*.parquet' --out folder"
        ) from error
    files = builder.config.data_files or {}
    identity = fingerprint([(name, list(f), f.origin_metadata) for name, f in files.items()])

    def read(position: list | None) -> Iterator[Document]:
        state, row, first = position or (None, 0, 0)  # of the dataset before a table, of that table
        dataset = stream_hub(builder, args)
        dataset.load_state_dict(state or dataset.state_dict())
        state = dataset.state_dict()
        for table in dataset.iter(batch_size=TABLE_ROWS):
            for row, text in read_table(table, args.text_key, args.dataset, start := row):
                if row >= first:
                    yield [state, start, row], [text]
            state, row = dataset.state_dict(), row + 1

    return read, identity, hub_size(args, builder.info.splits)


def stream_hub(builder, args: argparse.Namespace):
    """Return an iterable of Arrow tables: straight from the hub, or from a copy of all of it."""
    if args.streaming:
        dataset = builder.as_streaming_dataset(split="train")
    else:
        builder.download_and_prepare()
        dataset = builder.as_dataset(split="train").to_iterable_dataset()
    if args.parts > dataset.num_shards:
        raise ValueError(
            f"--part: {args.dataset} streams from {dataset.num_shards} files: no more parts"
        )
    if args.parts > 1:
        dataset = dataset.shard(args.parts, args.part)
    return dataset.with_format("arrow")


def hub_size(args: argparse.Namespace, splits: dict | None) -> float | None:
    """Characters of text in this part of a hub dataset, about; None where its card does not say."""
    size = splits["train"].num_bytes if splits and "train" in splits else None
    if billions := re.fullmatch(r"sample-(\d+)BT", args.name or ""):
        size = int(billions[1]) * 1e9 * CHARS_PER_TOKEN["gpt2"]  # BT: billions of GPT-2 tokens
    return size and size / args.parts


def fingerprint(thing: object) -> str:
    """Return a short name for the data, another one when the data changes."""
    return hashlib.sha256(repr(thing).encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------
# from documents to tokens, on every core

# GPT-2's pattern begins a new piece at the first and at the last white-space character of every run,
# whatever comes before or after: cut there, the pieces' tokens are the whole text's tokens.
CUT = r"(?:(?<=\S)(?=[ \t\r\n])|(?=[ \t\r\n]\S))"
NEXT_CUT, LAST_CUT = re.compile(CUT), re.compile(rf"(?s:.+){CUT}")


def split_text(blocks: Iterable[str]) -> Iterator[str]:
    """Cut a document into segments that encode to the same tokens as the whole.

    A long document then keeps every worker busy, no memory grows with it, and a megabyte of blanks
    does not overflow the tokenizer's stack. Yields one empty segment for an empty document.
    """
    text = ""
    for block in blocks:
        text, start = text + block, 0
        while len(text) - start > SEGMENT_CHARS + 1:  # a cut looks one character ahead
            cut = LAST_CUT.match(text, start, start + SEGMENT_CHARS)
            cut = cut or NEXT_CUT.search(text, start + SEGMENT_CHARS)
            if cut is None:
                break
            yield text[start : cut.end()]
            start = cut.end()
        text = text[start:]
    yield text


def make_batches(documents: Iterable[Document]) -> Iterator[list[Segment]]:
    """Group segments into about equal amounts of work."""
    batch, chars = [], 0
    for position, blocks in documents:
        for segment in split_text(blocks):
            batch.append((position, segment))
            position = None  # what follows goes on with the same document
            chars += len(segment) + 100  # an empty document is some work too
            if chars >= BATCH_CHARS:
                yield batch
                batch, chars = [], 0
    if batch:
        yield batch


def tokenize(batches: Iterable[list[Segment]], tokenizer: str, workers: int) -> Iterator[list]:
    """Yield each batch as (position, uint16 tokens) pairs, in order, a few batches ahead at most."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    def strip(batch: list[Segment]) -> list[tuple[bool, str]]:
        return [(position is not None, text) for position, text in batch]

    def join(
        batch: list[Segment], tokens: list[np.ndarray]
    ) -> list[tuple[list | None, np.ndarray]]:
        return [(position, array) for (position, _), array in zip(batch, tokens, strict=True)]

    if workers == 1:  # no second process
        yield from (join(batch, encode(strip(batch), tokenizer)) for batch in batches)
        return
    # spawned everywhere: threads that the sources started make forking unsafe
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=follow_parent)
    waiting = deque()
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(encode, strip(batch), tokenizer)))
            if len(waiting) == 4 * workers:
                batch, future = waiting.popleft()
                yield join(batch, future.result())
        yield from (join(batch, future.result()) for batch, future in waiting)
    finally:
        pool.shutdown(cancel_futures=True)


def follow_parent() -> None:
    """Leave Ctrl-C to the parent, and end with it even when it was killed."""
    import multiprocessing
    import threading

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True).start()


# ---------------------------------------------------------------------------------------------------
# shards


def make_header(tokens: int, suffix: str) -> bytes:
    """Return the header of a shard of so many tokens: numpy's 128 bytes, or llm.c's 1024."""
    if suffix == "bin":
        header = np.zeros(256, dtype="<i4")
        header[:3] = 20240520, 1, tokens  # magic, version, count
        return header.tobytes()
    buffer = io.BytesIO()
    fields = {"descr": "<u2", "fortran_order": False, "shape": (tokens,)}
    np.lib.format.write_array_header_1_0(buffer, fields)
    return buffer.getvalue()


class ShardWriter:
    """Appends tokens to the open shard of each split, and keeps meta.json in step with the disk.

    meta["progress"] says where an unbroken run stood when the last shard was finished: `position` of
    the document then at work, how many of its tokens were `written`, to which `split`; how many
    `tokens` each split had; and how long each `open` shard was, which is on the disk as a .tmp file.
    """

    def __init__(self, args: argparse.Namespace, meta: dict) -> None:
        self.args, self.meta, self.progress = args, meta, meta["progress"]
        self.files = {split: self.reopen(*shard) for split, shard in self.progress["open"].items()}

    def reopen(self, name: str, tokens: int) -> io.BufferedRandom:
        """Open an unfinished shard where the interrupted run last said how long it was."""
        path, size = self.path(name) + ".tmp", len(make_header(0, self.args.format)) + 2 * tokens
        if not os.path.exists(path) or os.path.getsize(path) < size:
            raise ValueError(f"{path} is missing or cut short: begin anew with --overwrite")
        file = open(path, "r+b")
        file.truncate(size)
        file.seek(size)
        return file

    def path(self, name: str) -> str:
        return os.path.join(self.args.out, name)

    def create(self, split: str) -> None:
        """Begin the next shard under a temporary name, its header to be filled in."""
        name = f"{shard_prefix(self.args)}_{split}_{self.progress['index']:06d}.{self.args.format}"
        self.files[split] = open(self.path(name) + ".tmp", "w+b")
        self.files[split].write(make_header(0, self.args.format))
        self.progress["open"][split] = [name, 0]
        self.progress["index"] += 1

    def write(self, split: str, tokens: np.ndarray) -> None:
        if split not in self.files:
            self.create(split)
        self.files[split].write(tokens.astype("<u2", copy=False).data)
        self.progress["open"][split][1] += len(tokens)
        self.progress["tokens"][split] += len(tokens)

    def room(self, split: str) -> int:
        """Tokens that the split's open shard can still take."""
        room = self.args.shard_size - self.progress["open"].get(split, ["", 0])[1]
        if split == "val":
            room = min(room, self.args.val_tokens - self.progress["tokens"]["val"])
        return room

    def finish(self, split: str) -> None:
        """Make the split's open shard final: its header, the disk, meta.json, then its name.

        In this order a shard has its name only once it is whole and listed; a run killed before the
        last step finds the listed shard under its temporary name (see recover).
        """
        name, tokens = self.progress["open"].pop(split)
        file = self.files.pop(split)
        file.seek(0)
        file.write(make_header(tokens, self.args.format))
        for unsynced in (file, *self.files.values()):
            unsynced.flush()
            os.fsync(unsynced.fileno())
        file.close()
        digest = hash_file(self.path(name) + ".tmp")
        self.meta["shards"][name] = {"tokens": tokens, "sha256": digest}
        save_meta(self.args, self.meta)
        rename(self.path(name) + ".tmp", self.path(name))

    def close(self) -> None:
        for file in self.files.values():
            with suppress(OSError):  # the disk is full: that is being reported already
                file.close()


def write_shards(writer: ShardWriter, stream: Iterable[list]) -> Iterator[int]:
    """Fill shards with batches of (position, tokens), yield the tokens in all after each.

    A document goes to validation while validation has no more than its share of the tokens so far;
    when it has all its tokens, the rest goes to training, from the middle of a document if need be.
    """
    args, progress, count = writer.args, writer.progress, writer.progress["tokens"]
    limit = args.max_tokens or float("inf")
    resumed, behind = progress["position"], progress["written"]  # tokens already on the disk
    for batch in stream:
        for position, tokens in batch:
            if position is not None and position != resumed:
                wants_more = count["val"] <= args.val_share * sum(count.values())
                split = "val" if wants_more and count["val"] < args.val_tokens else "train"
                progress |= {"position": position, "written": 0, "split": split}
                progress["documents"] += 1
            skipped = min(behind, len(tokens))
            behind -= skipped
            write_tokens(
                writer, tokens[skipped:][: int(min(limit - sum(count.values()), len(tokens)))]
            )
        yield sum(count.values())
        if sum(count.values()) >= limit:
            return


def write_tokens(writer: ShardWriter, tokens: np.ndarray) -> None:
    """Append tokens of the current document, finishing every shard that is full before the next."""
    progress = writer.progress
    while len(tokens):
        split = progress["split"]
        room = writer.room(split)
        if room == 0:
            if split == "val" and progress["tokens"]["val"] == writer.args.val_tokens:
                progress["split"] = "train"
            if split in writer.files:
                writer.finish(split)
            continue
        writer.write(split, tokens[:room])
        progress["written"] += len(tokens[:room])
        tokens = tokens[room:]


def finish_shards(writer: ShardWriter) -> None:
    """Finish the last shards. A corpus that ended within validation gives a tenth of it instead."""
    count, progress = writer.progress["tokens"], writer.progress
    if count["train"] == 0 and "val" in writer.files and not writer.meta["shards"]:
        file, header = writer.files["val"], len(make_header(0, writer.args.format))
        kept = max(1, count["val"] // 10)
        file.seek(header + 2 * kept)
        rest = np.frombuffer(file.read(), dtype="<u2")
        file.seek(header + 2 * kept)
        file.truncate()
        count["val"] = progress["open"]["val"][1] = kept
        writer.write("train", rest)
    for split in list(writer.files):
        writer.finish(split)
    progress["done"] = True
    save_meta(writer.args, writer.meta)


def shard_prefix(args: argparse.Namespace) -> str:
    """Return the start of this run's file names; parts have names of their own."""
    prefix = SHARD_PREFIX.get(args.dataset, "docs")
    return f"{prefix}{part_name(args)}"


def part_name(args: argparse.Namespace) -> str:
    return f"-{args.part + 1:03d}-of-{args.parts:03d}" if args.parts > 1 else ""


# ---------------------------------------------------------------------------------------------------
# the folder and its meta.json


def meta_path(args: argparse.Namespace) -> str:
    suffix = part_name(args).replace("-", ".part-", 1)  # meta.part-003-of-128.json
    return os.path.join(args.out, f"meta{suffix}.json")


def save_meta(args: argparse.Namespace, meta: dict) -> None:
    """Write meta.json whole or not at all."""
    path = meta_path(args)
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        json.dump(meta, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    rename(path + ".tmp", path)


def rename(old: str, new: str) -> None:
    """Rename a file so that it survives a power cut."""
    os.replace(old, new)
    if os.name == "posix":  # Windows cannot open folders
        folder = os.open(os.path.dirname(os.path.abspath(new)), os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def hash_file(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def load_metas(folder: str) -> dict[str, dict]:
    """Load a folder's meta files by their paths: meta.json, and those of parts."""
    metas = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "meta*.json"))):
        with open(path, encoding="utf-8") as file:
            metas[path] = parse_json(file.read(), path)
    return metas


def list_shards(folder: str) -> set[str]:
    """Names of a folder's shards, as the trainer sees them."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return {name for name in names if re.search(r"(train|val).*\.(npy|bin)$", name)}


def new_meta(args: argparse.Namespace) -> dict:
    """Return the meta.json of a run that begins."""
    enc = get_tokenizer(args.tokenizer)
    source = " ".join(args.files or [args.dataset, args.name or ""]).strip()
    meta = {"tokenizer": args.tokenizer, "vocab_size": enc.n_vocab, "eot": enc.eot_token}
    options = (
        "text_key shard_size val_tokens val_share max_tokens format streaming part parts".split()
    )
    progress = {"position": None, "written": 0, "split": None, "documents": 0, "index": 0}
    progress |= {"tokens": {"val": 0, "train": 0}, "open": {}, "done": False}
    meta |= {"source": source, "options": {name: getattr(args, name) for name in options}}
    return meta | {"data": None, "shards": {}, "progress": progress}


def find_meta(args: argparse.Namespace) -> dict:
    """Return this run's meta.json, new or as an interrupted run left it.

    Raises ValueError where the folder holds anything that is not this run's or a sister part's.
    """
    new, metas = new_meta(args), load_metas(args.out)
    own = metas.pop(meta_path(args), None)
    own = None if args.overwrite else own
    for path, other in (metas | ({meta_path(args): own} if own else {})).items():
        compare_runs(path, other, new, same_part=path == meta_path(args))
    listed = set().union(*(meta["shards"] for meta in [own, *metas.values()] if meta))
    if args.overwrite:
        listed |= {
            name for name in list_shards(args.out) if name.startswith(shard_prefix(args) + "_")
        }
    if foreign := sorted(list_shards(args.out) - listed):
        raise ValueError(
            f"{args.out} holds {foreign[0]}, which no meta.json there lists: choose another --out"
        )
    return own or new


def compare_runs(path: str, found: dict, wanted: dict, same_part: bool) -> None:
    """Raise ValueError, naming the first difference, unless two runs' shards can share a folder."""
    found, wanted = found | found.get("options", {}), wanted | wanted["options"]
    for key in ("tokenizer", "source", "parts", *wanted["options"]):
        if found.get(key) != wanted[key] and (key != "part" or same_part):
            raise ValueError(
                f"{path} was made with {key} {found.get(key)}, this run has {wanted[key]}: choose"
                " another --out" + (", or begin anew with --overwrite" if same_part else "")
            )


def prepare_folder(args: argparse.Namespace, meta: dict, identity: str) -> None:
    """Make the folder ready to go on in: nothing half renamed, nothing of a run that is replaced."""
    os.makedirs(args.out, exist_ok=True)
    if meta["data"] is None:
        for path in glob.glob(os.path.join(glob.escape(args.out), shard_prefix(args) + "_*")):
            os.remove(path)
        save_meta(args, meta | {"data": identity})
        meta["data"] = identity
    if meta["data"] != identity:
        raise ValueError(f"{args.out}: the documents changed since this run began: use --overwrite")
    for name, shard in meta["shards"].items():
        path = os.path.join(args.out, name)
        if os.path.exists(path + ".tmp") and not os.path.exists(path):
            rename(path + ".tmp", path)
        size = len(make_header(0, args.format)) + 2 * shard["tokens"]
        if not os.path.exists(path) or os.path.getsize(path) != size:
            raise ValueError(f"{path} is missing or has changed: begin anew with --overwrite")


def verify(folder: str) -> None:
    """Re-read every shard of a folder. Raises ValueError listing what is wrong."""
    metas = load_metas(folder)
    if not metas:
        raise ValueError(f"{folder} holds no meta.json: there is nothing to verify against")
    problems = [f"{path}: not finished" for path, meta in metas.items() if not is_done(meta)]
    shards = {name: shard for meta in metas.values() for name, shard in meta["shards"].items()}
    problems += [f"{name}: in no meta.json" for name in sorted(list_shards(folder) - set(shards))]
    for name, shard in sorted(shards.items()):
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            problems.append(f"{name}: missing")
        elif hash_file(path) != shard["sha256"]:
            problems.append(f"{name}: its sha256 is not the one in meta.json")
    if problems:
        raise ValueError(f"{folder} is damaged: " + "; ".join(problems))
    print(
        f"{folder}: {len(shards)} shards, {count_tokens(shards):,} tokens, every sha256 as listed"
    )


def is_done(meta: dict) -> bool:
    return meta.get("progress", {"done": True})["done"]


def count_tokens(shards: dict) -> int:
    return sum(shard["tokens"] for shard in shards.values())


def merge(folder: str) -> None:
    """List the shards of all parts in one meta.json. Raises ValueError where a part is missing."""
    metas = load_metas(folder)
    metas.pop(os.path.join(folder, "meta.json"), None)
    parts = {meta["options"]["part"]: meta for meta in metas.values()}
    expected = next(iter(parts.values()))["options"]["parts"] if parts else 1
    missing = [k + 1 for k in range(expected) if k not in parts or not is_done(parts[k])]
    if missing or not parts:
        raise ValueError(f"{folder}: parts {missing} of {expected} are missing or not finished")
    first = parts[0]
    for path, meta in metas.items():
        compare_runs(path, meta, first, same_part=False)
    merged = {key: first[key] for key in ("tokenizer", "vocab_size", "eot", "source", "options")}
    merged["shards"] = {
        name: shard for k in sorted(parts) for name, shard in parts[k]["shards"].items()
    }
    save_meta(argparse.Namespace(out=folder, parts=1), merged)
    print(f"{folder}: {len(parts)} parts, {len(merged['shards'])} shards in meta.json")


# ---------------------------------------------------------------------------------------------------
# command line


def build(args: argparse.Namespace) -> None:
    """Write the shards that args ask for, going on where an earlier run stopped."""
    meta = find_meta(args)
    rate = ""
    if not is_done(meta):
        read, identity, size = open_source(args)
        expected = estimate_tokens(args, size)
        check_disk(args, meta, expected)
        prepare_folder(args, meta, identity)
        documents = read(meta["progress"]["position"])
        stream = tokenize(make_batches(documents), args.tokenizer, args.workers)
        writer = ShardWriter(args, meta)
        try:
            rate = watch(writer, write_shards(writer, stream), expected)
            finish_shards(writer)
        finally:
            stream.close()
            writer.close()
    report(args, meta, rate)


def estimate_tokens(args: argparse.Namespace, size: float | None) -> int | None:
    """Tokens that this run will write, about; None where nobody knows."""
    tokens = int(size / CHARS_PER_TOKEN[args.tokenizer]) if size else None
    return min(filter(None, (tokens, args.max_tokens)), default=None)


def check_disk(args: argparse.Namespace, meta: dict, expected: int | None) -> None:
    """Say how much disk and time the run takes. Raises ValueError where the disk has not the room."""
    if expected is None:
        print(f"{meta['source']}: of unknown size, 2 bytes of disk a token")
        return
    need = 2 * max(
        0, expected - sum(meta["progress"]["tokens"].values())
    )  # uint16: 2 bytes a token
    minutes = need / 2 / (2.5e6 * args.workers) / 60  # one core: ~2.5M tokens/s of GPT-2's BPE
    print(
        f"{meta['source']}: about {expected:,} tokens, {need / 1e9:.2f} GB of disk, {minutes:.0f} min on"
        f" {args.workers} workers where the download keeps up"
    )
    folder = os.path.abspath(args.out)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    if (free := shutil.disk_usage(folder).free) < need:
        raise ValueError(
            f"{args.out} needs about {need / 1e9:.2f} GB and its disk has {free / 1e9:.2f} GB free:"
            " make room, choose another --out, or take less with --max_tokens"
        )


def watch(writer: ShardWriter, totals: Iterable[int], expected: int | None) -> str:
    """Run the writer to its end behind progress bars; return its steady rate in words."""
    from tqdm import tqdm

    bar = functools.partial(tqdm, unit="tok", unit_scale=True, disable=None)  # none in a log file
    done = sum(writer.progress["tokens"].values())
    with (
        bar(total=expected, initial=done, desc="all") as whole,
        bar(total=writer.args.shard_size) as one,
    ):
        clock = []  # (seconds, tokens) after each batch
        for total in totals:
            clock.append((time.perf_counter(), total))
            whole.update(total - whole.n)
            name, one.n = writer.progress["open"].get(writer.progress["split"], ["", 0])
            one.set_description(name)
    if len(clock) <= 2 * writer.args.workers:
        return ""
    # start-up is over when every worker has delivered a batch
    (start, first), (end, last) = clock[writer.args.workers], clock[-1]
    return f"{(last - first) / (end - start) / 1e6:.2f}M tokens/s on {writer.args.workers} workers"


def report(args: argparse.Namespace, meta: dict, rate: str) -> None:
    """Print what there is and what to run next."""
    for split, tokens in meta["progress"]["tokens"].items():
        names = [name for name in meta["shards"] if f"_{split}_" in name]
        print(f"{split:5} {tokens:,} tokens in {len(names)} shards")
    print(
        f"{meta['progress']['documents']:,} documents"
        + (f", {rate}, start-up excluded" if rate else "")
    )
    if args.parts > 1:
        print(f"when all parts are done: python fineweb.py --merge --out {args.out}")
    print(f"next: python train_gpt2.py --data_dir {args.out}")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line and settle what depends on other options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--dataset", help=f"name or folder for datasets (default {FINEWEB_EDU}), or pydocs")
    add(
        "--name",
        help="its configuration (default of FineWeb: sample-10BT), such as CC-MAIN-2024-10",
    )
    add("--files", nargs="+", metavar="GLOB", help="local files instead: .jsonl .txt .parquet")
    add("--text_key", default="text", help="the key that holds the text (default %(default)s)")
    add("--tokenizer", choices=["gpt2", "bytes"], help="default gpt2; bytes for pydocs")
    add("--out", help="folder of the shards (default edu_fineweb10B, pydocs)")
    add("--shard_size", type=int, default=10**8, help="tokens a shard (default 100M)")
    add("--val_tokens", type=int, help="validation tokens at most (default one shard)")
    add(
        "--val_share",
        type=float,
        help="of each run of documents (default 0.1; hub: 1, they come first)",
    )
    add("--max_tokens", type=int, help="stop after so many tokens")
    add("--format", choices=["npy", "bin"], default="npy", help="bin: as llm.c reads them")
    add("--part", default="1/1", metavar="I/N", help="take the I-th of N slices of the files")
    add("--workers", type=int, help="processes that tokenise (default: all cores)")
    add(
        "--streaming",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="or copy it all first",
    )
    add("--overwrite", action="store_true", help="delete this run's shards and begin anew")
    add("--merge", action="store_true", help="make the parts in --out one dataset")
    add("--verify", action="store_true", help="re-read the shards in --out")
    args = parser.parse_args(argv)
    settle(args)
    return args


def settle(args: argparse.Namespace) -> None:
    """Fill in the defaults that depend on the source. Raises ValueError for what cannot be."""
    if args.files and args.dataset:
        raise ValueError("--files and --dataset are two sources: choose one")
    part = re.fullmatch(r"(\d+)/(\d+)", args.part)
    if not part or not 1 <= int(part[1]) <= int(part[2]):
        raise ValueError(f"--part {args.part}: expected I/N with I from 1 to N, such as 3/128")
    args.part, args.parts = int(part[1]) - 1, int(part[2])
    args.dataset = args.dataset or ("files" if args.files else FINEWEB_EDU)
    fineweb, pydocs = args.dataset.startswith("HuggingFaceFW/fineweb"), args.dataset == "pydocs"
    args.name = args.name or ("sample-10BT" if fineweb else None)
    args.out = args.out or default_out(args)
    args.tokenizer = args.tokenizer or ("bytes" if pydocs else "gpt2")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    args.workers = args.workers or (1 if pydocs else cores)
    if args.val_share is None:
        args.val_share = 0.1 if args.files or pydocs else 1.0
    if args.val_tokens is None:
        args.val_tokens = min(args.shard_size, (args.max_tokens or args.shard_size * 10) // 10)
    if args.part > 0:
        args.val_tokens = 0  # the first part has the validation data
    for name in ("shard_size", "workers", "max_tokens"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name} {value}: expected 1 or more")


def default_out(args: argparse.Namespace) -> str:
    """Name the folder after the data, as build-nanogpt does."""
    if args.dataset == "pydocs":
        return "pydocs"
    if not args.dataset.startswith("HuggingFaceFW/fineweb"):
        raise ValueError("name the folder of the shards: --out FOLDER")
    edu = "edu_" if args.dataset == FINEWEB_EDU else ""
    size = re.sub("^sample-(.*)T$", r"\1", args.name)  # 10B, or the dump's name
    return f"{edu}fineweb{size}"


def main(argv: list[str] | None = None) -> None:
    """Run the command line: exit status 2 for bad arguments or data, 1 when the work failed."""
    interrupted = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        args = parse_args(argv)
        if args.verify or args.merge:
            (verify if args.verify else merge)(args.out)
        else:
            build(args)
    except (ValueError, FileNotFoundError) as error:
        exit_with(2, f"fineweb.py: {error}")
    except OSError as error:
        exit_with(
            1, f"fineweb.py: {error}. The finished shards stay: run the same command to go on"
        )
    except KeyboardInterrupt as stop:
        exit_with(
            130, "fineweb.py: interrupted. The finished shards stay: run the same command to go on"
        )


def exit_with(status: int, line: str) -> None:
    print(line, file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
