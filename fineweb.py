"""Turn documents into shards of tokens for train_gpt2.py: exact, on every core, safe to interrupt.

python fineweb.py                                       # FineWeb-Edu, 10B tokens: edu_fineweb10B/
python fineweb.py --name sample-100BT                   # 100B tokens: edu_fineweb100B/
python fineweb.py --files 'texts/*.jsonl' --out mine    # .jsonl, .txt (.gz, .xz, .zst), .parquet
python fineweb.py --dataset pydocs                      # Python's own documentation, offline
python fineweb.py --part 3/128 --out big                # a slice of the files; when all are done:
python fineweb.py --merge --out big                     # make the slices one dataset
python fineweb.py --verify --out big                    # re-read every shard

A shard is a 1-D array of uint16 tokens; each document in it is its <|endoftext|> token followed by
its text's tokens. The shards depend on the documents and the options alone, never on the number of
workers or on interruptions: killed at any moment and started again, it goes on where it was.

From top to bottom: sources read documents; long ones are cut where the tokenizer cannot notice;
workers encode; one writer fills the shards of both splits. meta.json, beside the shards, is all the
state there is: each finished shard with its sha256, and the document at which to go on.
"""

import argparse
import functools
import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager, suppress

import numpy as np
import tiktoken

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
PREFIXES = {FINEWEB_EDU: "edufineweb", "HuggingFaceFW/fineweb": "fineweb", "pydocs": "pydocs"}
OPTIONS = ("text_key", "shard_size", "val_tokens", "val_share", "max_tokens", "format", "streaming")
CHARS_PER_TOKEN = {"gpt2": 4.5, "bytes": 1.0}  # of English, to estimate with
TABLE_ROWS = 256  # rows of a table read at once: ~1 MB of FineWeb
SEGMENT_CHARS = 2**17  # longer documents are encoded in segments of about this many characters
BATCH_CHARS = 2**19  # characters sent to a worker at once: ~0.05 s of its time

# a document on its way: its position in the source, [file, row] or [row], at which a restart can
# find it, and its text in blocks, so that a file larger than memory can be one document
Document = tuple[list[int], Iterable[str]]
# a source: a function from a position to the documents from there on; a name that changes when the
# data does; and about how many characters there are, None where nobody knows
Source = tuple[Callable[[list[int] | None], Iterator[Document]], str, float | None]


# --------------------------------------------------------------------------------------------------
# tokenizers


@functools.cache
def get_tokenizer(name: str) -> tiktoken.Encoding:
    """Return the tokenizer: "gpt2", or "bytes" (a token is a byte, <|endoftext|> is 256).

    Raises ValueError for any other name.
    """
    if name == "gpt2":
        try:
            return tiktoken.get_encoding("gpt2")
        except OSError as error:
            hint = "TIKTOKEN_CACHE_DIR can name a folder that another machine's tiktoken filled"
            raise ConnectionError(f"GPT-2's vocabulary cannot be downloaded: {hint}") from error
    if name != "bytes":
        raise ValueError(f"unknown tokenizer {name!r}: expected gpt2 or bytes")
    return tiktoken.Encoding(
        "bytes",
        pat_str=r"(?s).{1,64}",  # nothing merges, so any pieces will do; short ones are fastest
        mergeable_ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens={"<|endoftext|>": 256},
    )


def encode(segments: list[tuple[bool, str]], tokenizer: str) -> list[np.ndarray]:
    """Encode (begins a document?, text) pairs to uint16 arrays. This is what the workers do."""
    enc, arrays = get_tokenizer(tokenizer), []
    for begins, text in segments:
        # half a surrogate pair, which JSON can hold and UTF-8 cannot, becomes U+FFFD
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        # nothing is special: the characters "<|endoftext|>" in a document are text, not the token
        tokens = enc.encode_to_numpy(text, disallowed_special=())
        arrays.append(np.empty(begins + len(tokens), dtype=np.uint16))
        arrays[-1][:begins] = enc.eot_token
        arrays[-1][begins:] = tokens
    return arrays


# --------------------------------------------------------------------------------------------------
# sources


def open_source(args: argparse.Namespace) -> Source:
    """Open what the command line asks for. Raises ValueError where it is not to be had."""
    if args.files:
        return open_files(args)
    return open_pydocs(args) if args.dataset == "pydocs" else open_hub(args)


def open_pydocs(args: argparse.Namespace) -> Source:
    """Python's language reference and its library's docstrings: 2 MB that every Python carries."""
    from pydoc_data.topics import topics

    if args.parts > 1:
        raise ValueError("--part: pydocs is too small to slice")
    texts = [topics[name] for name in sorted(topics)] + [read_docstrings(p) for p in list_stdlib()]
    texts = [text for text in clean(texts) if len(text) > 200]  # characters: less says nothing

    def read(position: list[int] | None) -> Iterator[Document]:
        for row in range(position[0] if position else 0, len(texts)):
            yield [row], [texts[row]]

    return read, fingerprint(texts), sum(map(len, texts))


def list_stdlib() -> list[str]:
    """List the standard library's source files, without tests, tables and whole applications."""
    import sysconfig

    skip = r"tests?|.*_tests?|(site|dist)-packages|idlelib|lib2to3|turtledemo|encodings|pydoc_data"
    paths = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = [name for name in subfolders if not re.fullmatch(skip, name)]
        paths += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    return sorted(paths)


def read_docstrings(path: str) -> str:
    """Return a module's docstrings, each after its dotted name. Nothing is imported."""
    import ast

    def visit(node: ast.AST, name: str) -> Iterator[str]:
        if text := ast.get_docstring(node):
            yield f"{name}: {text}"
        for child in node.body:
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from visit(child, f"{name}.{child.name}")

    with open(path, "rb") as file:
        return "\n\n".join(visit(ast.parse(file.read()), os.path.basename(path)[: -len(".py")]))


def clean(texts: Iterable[str]) -> Iterator[str]:
    """Straighten quotes, and drop the paragraphs that another text had already.

    The topics quote each other at length: a model must not be validated on what it was trained on.
    """
    seen = set()
    for text in texts:
        text = text.translate(str.maketrans("‘’“”–\t", "''\"\"- "))
        paragraphs = [p.rstrip() for p in re.split(r"\n\s*\n", text.strip("\n"))]
        new = [p for p in paragraphs if len(p) < 60 or p not in seen]  # characters
        seen.update(new)
        yield "\n\n".join(new) + "\n"


def open_files(args: argparse.Namespace) -> Source:
    """Local files, in the order of their names; a part takes every parts-th of them."""
    paths = sorted({path for pattern in args.files for path in glob.glob(pattern, recursive=True)})
    if not paths:
        raise ValueError(f"--files {' '.join(args.files)}: there are no such files")
    for path in paths:
        if not re.search(r"\.(parquet|(jsonl|txt)(\.(gz|xz|zst))?)$", path):
            raise ValueError(f"{path}: expected .jsonl, .txt (also .gz, .xz, .zst) or .parquet")
    sizes = [os.path.getsize(path) for path in paths]
    packed = re.compile(r"(gz|xz|zst|parquet)$")  # English is about 2.7 times longer than its file
    ratios = [2.7 if packed.search(path) else 1.0 for path in paths]
    chars = sum(size * ratio for size, ratio in zip(sizes, ratios, strict=True))

    def read(position: list[int] | None) -> Iterator[Document]:
        for k, first in slice_files(args, position, len(paths)):
            for row, blocks in read_file(paths[k], args.text_key, first):
                yield [k, row], blocks

    check_parts(args, len(paths))
    identity = fingerprint([list(map(os.path.basename, paths)), sizes])
    return read, identity, chars / args.parts


def check_parts(args: argparse.Namespace, files: int) -> None:
    """Raise ValueError where there are fewer files than parts."""
    if args.parts > files:
        raise ValueError(f"--part: {args.parts} parts need as many files, found {files}")


def slice_files(args: argparse.Namespace, position: list[int] | None, files: int) -> Iterator:
    """Yield (file, first row) from a position on: every file, or every parts-th from `part`."""
    first_file, first_row = position or (args.part, 0)
    for k in range(first_file, files, args.parts):
        yield k, first_row if k == first_file else 0


def read_file(path: str, text_key: str, first: int) -> Iterator[tuple[int, Iterable[str]]]:
    """Yield (row, text in blocks) of a file's documents from row `first` on.

    Raises ValueError, naming the file, where it is damaged or holds something else.
    """
    jsonl = read_jsonl if ".jsonl" in os.path.basename(path) else read_txt
    read = read_parquet if path.endswith(".parquet") else jsonl
    yield from name_errors(path, read(path, text_key, first))


def name_errors(path: str, things: Iterable, kind: type[Exception] = ValueError) -> Iterator:
    """Pass on what is read from somewhere, and say from where when that fails."""
    try:
        yield from things
    except Exception as error:  # each format, compression and network has errors of its own
        where = "" if str(error).startswith(path) else f"{path} cannot be read: "
        raise kind(f"{where}{error}") from error


def open_text(path: str) -> io.TextIOBase:
    """Open a UTF-8 file, compressed or not; its line ends stay as they are."""
    how = {"encoding": "utf-8-sig", "newline": "\n"}
    if path.endswith(".zst"):
        import pyarrow  # its stream notices a truncated file, zstandard's does not

        return io.TextIOWrapper(pyarrow.input_stream(path, compression="zstd"), **how)
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(os.path.splitext(path)[1], open)
    return opener(path, "rt", **how)


def read_txt(path: str, _: str, first: int) -> Iterator[tuple[int, Iterable[str]]]:
    """A .txt file is one document, read 2**20 characters at a time."""
    with open_text(path) as file:
        yield 0, name_errors(path, iter(lambda: file.read(2**20), ""))


def read_jsonl(path: str, text_key: str, first: int) -> Iterator[tuple[int, Iterable[str]]]:
    """A .jsonl file has one document a line; lines of white space are skipped."""
    with open_text(path) as file:
        for row, line in enumerate(file):
            if row >= first and not line.isspace():
                where = f"{path}, line {row + 1}"
                yield row, [get_text(parse_json(line, where), text_key, where)]


def read_parquet(path: str, text_key: str, first: int) -> Iterator[tuple[int, Iterable[str]]]:
    """A .parquet file has one document a row; row groups before the first are not read."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        columns = [text_key] if text_key in file.schema_arrow.names else None
        row = 0
        for group in range(file.num_row_groups):
            if row + file.metadata.row_group(group).num_rows <= first:
                row += file.metadata.row_group(group).num_rows
                continue
            for table in file.iter_batches(TABLE_ROWS, [group], columns):
                texts = read_table(table, text_key, path, row)
                yield from ((r, [text]) for r, text in enumerate(texts, row) if r >= first)
                row += len(table)


def read_table(table, text_key: str, where: str, row: int) -> Iterator[str]:
    """Yield the texts of an Arrow table that begins at a row of its file."""
    if text_key not in table.schema.names:
        get_text(dict.fromkeys(table.schema.names), text_key, f"{where}, row {row + 1}")
    for text in table[text_key].to_pylist():
        row += 1
        yield get_text({text_key: text}, text_key, f"{where}, row {row}")


def get_text(record: object, text_key: str, where: str) -> str:
    """Return the record's text. Raises ValueError saying what is there instead."""
    if isinstance(record, dict) and isinstance(record.get(text_key), str):
        return record[text_key]
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected an object with keys, found {record!r:.40}")
    if text_key in record:
        raise ValueError(f"{where}: expected text, found {text_key!r}: {record[text_key]!r:.40}")
    raise ValueError(f"{where}: no key {text_key!r} but {', '.join(record)}: choose by --text_key")


def parse_json(text: str, where: str) -> object:
    """Parse JSON. Raises ValueError naming the place."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error


def open_hub(args: argparse.Namespace) -> Source:
    """A dataset of the Hugging Face hub, or a local folder of data files, through datasets."""
    import datasets

    datasets.config.TORCH_AVAILABLE = False  # or a stream imports torch: seconds, for nothing
    try:
        builder = datasets.load_dataset_builder(args.dataset, args.name)
    except ConnectionError as error:
        raise ConnectionError(
            f"{error}. No network? HF_ENDPOINT can name a mirror, HF_HOME a folder with the data in"
            " it; or tokenise files that you have: --files 'folder/*.parquet' --out folder"
        ) from error

    def read(position: list[int] | None) -> Iterator[Document]:
        dataset = stream_hub(builder, args.streaming)
        for k, first in slice_files(args, position, dataset.num_shards):
            row = 0  # of file k
            tables = dataset.shard(dataset.num_shards, k).iter(batch_size=TABLE_ROWS)
            for table in name_errors(args.dataset, tables, ConnectionError):
                if row + len(table) > first:
                    texts = read_table(table, args.text_key, f"{args.dataset}, file {k + 1}", row)
                    yield from (([k, r], [text]) for r, text in enumerate(texts, row) if r >= first)
                row += len(table)

    if "train" not in (builder.config.data_files or {}):
        raise ValueError(f"{args.dataset} has no data files for a split named train")
    files = builder.config.data_files["train"]
    check_parts(args, len(files) if args.streaming else 1)
    identity = fingerprint([list(files), files.origin_metadata])  # names, and commit or times
    return read, identity, measure_hub(args, builder.info.splits)


def stream_hub(builder, streaming: bool):
    """Return an iterable dataset of Arrow tables: from the hub itself, or from a copy of it all."""
    if streaming:
        return builder.as_streaming_dataset(split="train").with_format("arrow")
    builder.download_and_prepare()
    return builder.as_dataset(split="train").to_iterable_dataset().with_format("arrow")


def measure_hub(args: argparse.Namespace, splits: dict | None) -> float | None:
    """Return about how many characters this run will read, None where the dataset does not say."""
    chars = splits["train"].num_bytes if splits and "train" in splits else None
    if billions := re.fullmatch(r"sample-(\d+)BT", args.name or ""):
        chars = int(billions[1]) * 1e9 * CHARS_PER_TOKEN["gpt2"]  # BT: billions of GPT-2's tokens
    return chars and chars / args.parts


def fingerprint(thing: object) -> str:
    """Return a short name of the data that changes when the data does."""
    return hashlib.sha256(repr(thing).encode()).hexdigest()[:16]


# --------------------------------------------------------------------------------------------------
# from documents to tokens

# GPT-2's pattern begins a piece at the first and at the last white-space character of every run,
# whatever is around it. Cut there, and the tokens of the segments are the tokens of the whole.
CUT = r"(?:(?<=\S)(?=[ \t\r\n])|(?=[ \t\r\n]\S))"
NEXT_CUT, LAST_CUT = re.compile(CUT), re.compile(f"(?s:.+){CUT}")


def split_text(blocks: Iterable[str], chars: int = SEGMENT_CHARS) -> Iterator[str]:
    """Cut a document into segments that encode to the same tokens as the whole.

    So no memory grows with a document, all workers share in it, and a megabyte of blanks does not
    overflow the tokenizer's stack. An empty document is one empty segment.
    """
    text, start = "", 0
    for block in blocks:
        fresh = len(text) - start - 2  # there was no cut before here
        text, start = text[start:] + block, 0
        while len(text) > start + chars + 1:  # a cut looks one character ahead
            end = start + chars
            cut = LAST_CUT.match(text, start, end) or NEXT_CUT.search(text, max(end, fresh))
            if cut is None:
                break
            yield text[start : cut.end()]
            start = cut.end()
    yield text[start:]


def make_batches(documents: Iterable[Document]) -> Iterator[list[tuple[list[int] | None, str]]]:
    """Group segments to equal amounts of work: (position, text), None where a document goes on."""
    batch, chars = [], 0
    for position, blocks in documents:
        for text in split_text(blocks):
            batch.append((position, text))
            position = None
            chars += len(text) + 100  # an empty document is some work too
            if chars >= BATCH_CHARS:
                yield batch
                batch, chars = [], 0
    if batch:
        yield batch


def tokenize(batches: Iterable, tokenizer: str, workers: int) -> Iterator[Iterable]:
    """Yield the batches in order with uint16 tokens for texts; few are on their way at any time."""
    pool = start_workers(workers) if workers > 1 else None

    def start(batch: list) -> tuple:
        segments = [(position is not None, text) for position, text in batch]
        work = functools.partial(encode, segments, tokenizer)
        return [position for position, _ in batch], pool.submit(work).result if pool else work

    started, ahead = deque(), 4 * workers if pool else 1  # batches: enough while a shard is synced
    try:
        for batch in batches:
            started.append(start(batch))
            if len(started) == ahead:
                positions, finish = started.popleft()
                yield zip(positions, finish(), strict=True)
        for positions, finish in started:
            yield zip(positions, finish(), strict=True)
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)


def start_workers(workers: int):
    """Return a pool of processes, spawned everywhere: sources have threads, which forks break."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    pool = ProcessPoolExecutor(workers, get_context("spawn"), follow_parent)
    with handling(signal.SIGINT, signal.SIG_IGN):  # inherited: Ctrl-C is the parent's alone
        for _ in range(workers):
            pool.submit(int)  # each starts a process
    return pool


def follow_parent() -> None:
    """Make a worker end when its parent ends, killed or not."""
    from multiprocessing import parent_process

    def watch() -> None:
        parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def handling(signum: int, handler: Callable | signal.Handlers) -> Iterator[None]:
    """Handle a signal otherwise for a while, in the main thread, where Python can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signum, handler)
    try:
        yield
    finally:
        signal.signal(signum, previous)


# --------------------------------------------------------------------------------------------------
# from tokens to shards


def make_header(tokens: int, suffix: str) -> bytes:
    """Return a shard's header: numpy's, 128 bytes for any length, or llm.c's, 1024 bytes."""
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

    meta["progress"] is a snapshot of the moment when the last shard was finished: the `position` of
    the document in work, how many of its tokens were `written`, and its `split`; `documents` and
    `tokens` so far; the next shard's `index`; and the `open` shards, whose .tmp files have at least
    the tokens named there. From it a killed run continues as if it had not been.
    """

    def __init__(self, args: argparse.Namespace, meta: dict) -> None:
        self.args, self.meta, self.progress = args, meta, meta["progress"]
        self.count = self.progress["tokens"]  # {"val": tokens, "train": tokens}
        self.files = {split: self.reopen(*shard) for split, shard in self.progress["open"].items()}

    def path(self, name: str) -> str:
        return os.path.join(self.args.out, name)

    def create(self, split: str) -> None:
        """Begin the split's next shard under a temporary name; its header comes last."""
        name = f"{prefix(self.args)}_{split}_{self.progress['index']:06d}.{self.args.format}"
        self.files[split] = open(self.path(name) + ".tmp", "w+b")  # noqa: SIM115
        self.files[split].write(make_header(0, self.args.format))
        self.progress["open"][split] = [name, 0]
        self.progress["index"] += 1

    def reopen(self, name: str, tokens: int) -> io.BufferedRandom:
        """Open an interrupted run's shard, cut to the length that the snapshot knows."""
        path, size = self.path(name) + ".tmp", shard_bytes(tokens, self.args.format)
        if not os.path.exists(path) or os.path.getsize(path) < size:
            raise ValueError(f"{path} is missing or cut short: begin anew with --overwrite")
        file = open(path, "r+b")  # noqa: SIM115
        file.truncate(size)
        file.seek(size)
        return file

    def room(self, split: str) -> int:
        """Return how many tokens the split's open shard still takes."""
        room = self.args.shard_size - self.progress["open"].get(split, ["", 0])[1]
        return min(room, self.args.val_tokens - self.count["val"]) if split == "val" else room

    def append(self, split: str, tokens: np.ndarray) -> None:
        """Append tokens, for which there is room, to the split's shard."""
        if split not in self.files:
            self.create(split)
        self.files[split].write(tokens.astype("<u2", copy=False).data)
        self.progress["open"][split][1] += len(tokens)
        self.count[split] += len(tokens)

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens of the document in work; a full shard is finished when more is to come."""
        while len(tokens):
            split = self.progress["split"]
            if room := self.room(split):
                self.append(split, tokens[:room])
                self.progress["written"] += len(tokens[:room])
                tokens = tokens[room:]
                continue
            if self.count["val"] == self.args.val_tokens:
                self.progress["split"] = "train"  # in the middle of a document, if need be
            self.finish(split)

    def finish(self, split: str) -> None:
        """Make the split's shard final: its bytes on the disk, its line in meta.json, its name.

        In this order, nothing has a final name before it is whole and listed; what a kill leaves
        between the last two steps, the next start renames.
        """
        name, tokens = self.progress["open"].pop(split)
        file = self.files.pop(split)
        file.seek(0)
        file.write(make_header(tokens, self.args.format))
        for unsynced in (file, *self.files.values()):
            unsynced.flush()
            os.fsync(unsynced.fileno())
        file.close()
        sha256 = hash_file(self.path(name) + ".tmp")
        self.meta["shards"][name] = {"tokens": tokens, "sha256": sha256}
        save_meta(self.args, self.meta)
        rename(self.path(name) + ".tmp", self.path(name))

    def finish_all(self) -> None:
        """Finish the last shards. A corpus that ended within validation gives a tenth of itself."""
        if self.count["train"] == 0 and self.count["val"] > 1 and not self.meta["shards"]:
            kept = max(1, self.count["val"] // 10)
            self.files["val"].seek(shard_bytes(kept, self.args.format))
            rest = np.frombuffer(self.files["val"].read(), dtype="<u2")
            self.files["val"].truncate(shard_bytes(kept, self.args.format))
            self.count["val"] = self.progress["open"]["val"][1] = kept
            self.append("train", rest)
        if self.count["train"] == 0:
            found = f"{self.meta['source']}: {self.count['val']:,} tokens in all, none to train on"
            raise ValueError(f"{found}: take more documents, or lower --val_tokens")
        for split in list(self.files):
            self.finish(split)
        self.progress.update(position=None, done=True)
        save_meta(self.args, self.meta)

    def close(self) -> None:
        """Close what an error left open."""
        for file in self.files.values():
            with suppress(OSError):  # a full disk, which is being reported already
                file.close()


def fill_shards(writer: ShardWriter, batches: Iterable[Iterable]) -> Iterator[int]:
    """Write batches of (position, tokens) to both splits; yield the tokens in all after each batch.

    A document is for validation while that has no more than its share of the tokens so far.
    """
    args, progress, count = writer.args, writer.progress, writer.count
    going_on, on_disk = progress["position"] is not None, progress["written"]
    for batch in batches:
        for position, tokens in batch:
            total = count["val"] + count["train"]
            if total == args.max_tokens:
                break
            if position is not None and not going_on:
                wanted = args.part == 0 and count["val"] < args.val_tokens
                split = "val" if wanted and count["val"] <= args.val_share * total else "train"
                progress.update(position=position, written=0, split=split)
                progress["documents"] += 1
            known, going_on = min(on_disk, len(tokens)), False  # what the last run wrote already
            on_disk -= known
            writer.write(tokens[known : known + (args.max_tokens or sys.maxsize) - total])
        yield count["val"] + count["train"]
        if count["val"] + count["train"] == args.max_tokens:
            return


# --------------------------------------------------------------------------------------------------
# the folder


def prefix(args: argparse.Namespace) -> str:
    """Return the start of the shards' names; a part's are its own."""
    return PREFIXES.get(args.dataset, "docs") + part_name(args)


def part_name(args: argparse.Namespace) -> str:
    """Return what a part adds to names, such as -003-of-128; nothing for a run in one part."""
    return f"-{args.part + 1:03d}-of-{args.parts:03d}" if args.parts > 1 else ""


def meta_path(args: argparse.Namespace) -> str:
    """Return the path of meta.json, or of a part's, such as meta.part-003-of-128.json."""
    return os.path.join(args.out, f"meta{part_name(args).replace('-', '.part-', 1)}.json")


def shard_bytes(tokens: int, suffix: str) -> int:
    """Return the size in bytes of a shard's file."""
    return len(make_header(tokens, suffix)) + 2 * tokens  # uint16: 2 bytes a token


def save_meta(args: argparse.Namespace, meta: dict) -> None:
    """Write the run's meta.json, whole or not at all."""
    path = meta_path(args)
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        json.dump(meta, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    rename(path + ".tmp", path)


def rename(old: str, new: str) -> None:
    """Rename a file for good: the folder is on the disk too when this returns."""
    os.replace(old, new)
    if os.name == "posix":  # Windows does not open folders
        folder = os.open(os.path.dirname(os.path.abspath(new)), os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def hash_file(path: str) -> str:
    """Return a file's sha256 in hexadecimal, reading a megabyte at a time."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def load_metas(folder: str) -> dict[str, dict]:
    """Load the folder's meta.json, and those of its parts, by path."""
    metas = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "meta*.json"))):
        with open(path, encoding="utf-8") as file:
            metas[path] = parse_json(file.read(), path)
        if "options" not in metas[path]:
            raise ValueError(f"{path} was not written by fineweb.py: choose another --out")
    return metas


def list_shards(folder: str) -> set[str]:
    """Return the names of the folder's shards: what the trainer would read."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return {name for name in names if re.search(r"(train|val).*\.(npy|bin)$", name)}


def list_all(metas: dict[str, dict]) -> dict[str, dict]:
    """Return the shards of several meta files together."""
    return {name: shard for meta in metas.values() for name, shard in meta["shards"].items()}


def new_meta(args: argparse.Namespace) -> dict:
    """Return the meta.json of a run that begins."""
    enc = get_tokenizer(args.tokenizer)
    progress = {"position": None, "written": 0, "split": None, "documents": 0, "index": 0}
    progress.update(tokens={"val": 0, "train": 0}, open={}, done=False)
    return {
        "tokenizer": args.tokenizer,
        "vocab_size": enc.n_vocab,
        "eot": enc.eot_token,
        "source": " ".join(args.files or filter(None, [args.dataset, args.name])),
        "options": {name: getattr(args, name) for name in (*OPTIONS, "part", "parts")},
        "data": None,
        "shards": {},
        "progress": progress,
    }


def find_meta(args: argparse.Namespace) -> dict:
    """Return this run's meta.json as an interrupted run left it, or a new one.

    Raises ValueError where the folder holds what is neither this run's nor a sister part's.
    """
    new, metas = new_meta(args), load_metas(args.out)
    found = metas.pop(meta_path(args), None)
    ours = set(list_own(args, found)) if args.overwrite else set((found or new)["shards"])
    for path, other in metas.items():
        check_same_run(path, other, new, "choose another --out", except_for="part")
    if found and not args.overwrite:
        hint = "choose another --out, or begin anew with --overwrite"
        check_same_run(meta_path(args), found, new, hint)
    if unknown := sorted(list_shards(args.out) - ours - set(list_all(metas))):
        found_there = f"{args.out} holds {unknown[0]}, which is not of this run"
        raise ValueError(f"{found_there}: choose another --out")
    return new if args.overwrite or not found else found


def check_same_run(path: str, found: dict, wanted: dict, hint: str, except_for: str = "") -> None:
    """Raise ValueError naming the first difference between two runs that share a folder."""
    found, wanted = found | found["options"], wanted | wanted["options"]
    for key in ("tokenizer", "source", "parts", "part", *OPTIONS):
        if key != except_for and found[key] != wanted[key]:
            raise ValueError(f"{path} has {key} {found[key]}, this run {wanted[key]}: {hint}")


def list_own(args: argparse.Namespace, meta: dict | None) -> list[str]:
    """Return the names of the shards that an earlier run of this part left, half done ones too."""
    names = os.listdir(args.out) if os.path.isdir(args.out) else []
    own = re.compile(rf"{prefix(args)}_(train|val)_\d+\.(npy|bin)(\.tmp)?")
    listed = meta["shards"] if meta else {}
    return [name for name in names if own.fullmatch(name) or name in listed]


def prepare_folder(args: argparse.Namespace, meta: dict, identity: str) -> None:
    """Make the folder ready: nothing of a run that is replaced, or all that a run goes on with."""
    if meta["data"] is None:
        for name in list_own(args, load_metas(args.out).get(meta_path(args))):
            os.remove(os.path.join(args.out, name))
        meta["data"] = identity
        save_meta(args, meta)
    if meta["data"] != identity:
        changed = f"{meta['source']} changed since this run began"
        raise ValueError(f"{changed}: begin anew with --overwrite")
    for name, shard in meta["shards"].items():
        path = os.path.join(args.out, name)
        if os.path.exists(path + ".tmp"):
            rename(path + ".tmp", path)
        size = os.path.getsize(path) if os.path.exists(path) else 0
        if size != shard_bytes(shard["tokens"], args.format):
            raise ValueError(f"{path} is missing or was changed: begin anew with --overwrite")


def lock(args: argparse.Namespace) -> io.TextIOBase:
    """Hold this run until the file is closed. Raises ValueError where another process does."""
    file = open(meta_path(args) + ".lock", "w")  # noqa: SIM115
    if os.name == "posix":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process is at work on {meta_path(args)}") from error
    return file


def verify(args: argparse.Namespace) -> None:
    """Re-read every shard of a folder. Raises ValueError saying all that is wrong."""
    metas = load_metas(args.out)
    if not metas:
        raise ValueError(f"{args.out} has no meta.json to verify it by")
    wrong = [f"{path} is not finished" for path, meta in metas.items() if not is_done(meta)]
    shards = list_all(metas)
    wrong += [f"{name} is in no meta.json" for name in sorted(list_shards(args.out) - set(shards))]
    for name, shard in sorted(shards.items()):
        path = os.path.join(args.out, name)
        if not os.path.exists(path):
            wrong.append(f"{name} is missing")
        elif hash_file(path) != shard["sha256"]:
            wrong.append(f"{name} is damaged (sha256)")
    if wrong:
        raise ValueError(f"{args.out}: " + ", ".join(wrong))
    tokens = sum(shard["tokens"] for shard in shards.values())
    print(f"{args.out}: {len(shards)} shards, {tokens:,} tokens, all as meta.json says")


def is_done(meta: dict) -> bool:
    """Return whether a meta.json is of a finished run."""
    return meta.get("progress", {"done": True})["done"]  # a merged meta.json has no progress


def merge(args: argparse.Namespace) -> None:
    """List all parts' shards in one meta.json. Raises ValueError where a part is not finished."""
    metas = load_metas(args.out)
    merged = metas.pop(os.path.join(args.out, "meta.json"), None)
    if not metas or (merged and "progress" in merged):
        raise ValueError(f"{args.out} has no parts to merge: --part 1/4 makes the first of four")
    first = next(iter(metas.values()))
    for path, meta in metas.items():
        check_same_run(path, meta, first, "not parts of one dataset", except_for="part")
    done = {meta["options"]["part"] for meta in metas.values() if is_done(meta)}
    parts = first["options"]["parts"]
    if missing := [f"{part + 1}/{parts}" for part in range(parts) if part not in done]:
        raise ValueError(f"{args.out}: --part {', '.join(missing)} to be finished first")
    merged = {key: first[key] for key in first if key not in ("progress", "data")}
    merged["shards"] = list_all(metas)
    save_meta(args, merged)
    print(f"{args.out}: {parts} parts, {len(merged['shards'])} shards in one meta.json")


# --------------------------------------------------------------------------------------------------
# command line


def build(args: argparse.Namespace) -> None:
    """Write the shards that the command line asks for, from where an earlier run stopped."""
    rate, meta = "", find_meta(args)
    if not is_done(meta):
        read, identity, chars = open_source(args)
        expected = announce(args, meta, chars)
        os.makedirs(args.out, exist_ok=True)
        with lock(args):
            meta = find_meta(args)  # again, now that no other process can change it
            prepare_folder(args, meta, identity)
            writer = ShardWriter(args, meta)
            documents = read(meta["progress"]["position"])
            batches = tokenize(make_batches(documents), args.tokenizer, args.workers)
            try:
                rate = show_progress(writer, fill_shards(writer, batches), expected)
                writer.finish_all()
            finally:
                batches.close()
                writer.close()
        os.remove(meta_path(args) + ".lock")
    report(args, meta, rate)


def announce(args: argparse.Namespace, meta: dict, chars: float | None) -> int | None:
    """Say what disk and time the run takes; return its tokens, about, None where nobody knows.

    Raises ValueError where the disk has not the room.
    """
    tokens = [args.max_tokens, chars and int(chars / CHARS_PER_TOKEN[args.tokenizer])]
    expected = min(filter(None, tokens), default=None)
    if expected is None:
        print(f"{meta['source']}: of unknown size; a token takes 2 bytes of disk")
        return None
    rest = max(0, expected - sum(meta["progress"]["tokens"].values()))
    minutes = rest / (2.5e6 * args.workers) / 60  # ~2.5M tokens/s a core of GPT-2's BPE
    how_long = f", {minutes:.0f} minutes if the source keeps up" if minutes > 1 else ""
    copy = "" if args.streaming else " besides the copy in HF_HOME"
    size = f"{rest / 1e6:,.0f}M tokens, {2 * rest / 1e6:,.0f} MB of disk"  # uint16: 2 bytes a token
    print(f"{meta['source']}: about {size}{copy}{how_long}")
    folder = os.path.abspath(args.out)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    if (free := shutil.disk_usage(folder).free) < 2 * rest:  # bytes
        raise ValueError(
            f"{args.out} has {free / 1e9:.2f} GB free, the shards take about {2 * rest / 1e9:.2f}:"
            " make room, choose another --out, or take less with --max_tokens"
        )
    return expected


def show_progress(writer: ShardWriter, totals: Iterable[int], expected: int | None) -> str:
    """Run the writer behind two progress bars, and return its steady rate in words."""
    from tqdm import tqdm

    # disable=None: bars on a terminal only; a log file gets a line a shard
    bar = functools.partial(tqdm, unit="tok", unit_scale=True, disable=None)
    clock, shards, workers = [], writer.meta["shards"], writer.args.workers
    so_far, listed = sum(writer.count.values()), len(shards)
    with (
        bar(total=expected, initial=so_far, desc="all") as whole,
        bar(total=writer.args.shard_size, leave=False) as one,
    ):
        for total in totals:
            clock.append((time.perf_counter(), total))
            whole.update(total - whole.n)
            for name in list(shards)[listed:]:
                tqdm.write(f"{name}: {shards[name]['tokens']:,} tokens, {total:,} in all")
                one.reset()
            listed = len(shards)
            name, tokens = writer.progress["open"].get(writer.progress["split"], ["", 0])
            one.set_description(name, refresh=False)
            one.update(tokens - one.n)
    if len(clock) < 10 * workers:
        return ""  # too short to tell
    (start, first), (end, last) = clock[workers], clock[-1]  # by then every worker has started
    rate = (last - first) / (end - start)
    return f", {rate / 1e6:.2f}M tokens/s on {workers} workers once started"


def report(args: argparse.Namespace, meta: dict, rate: str) -> None:
    """Print what there is now, and what to run next."""
    for split, tokens in meta["progress"]["tokens"].items():
        shards = [name for name in meta["shards"] if f"_{split}_" in name]
        print(f"{split:5} {tokens:,} tokens in {len(shards)} shards")
    print(f"{meta['progress']['documents']:,} documents{rate}")
    if args.parts > 1:
        print(f"when all parts are done: python fineweb.py --merge --out {args.out}")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line, and settle the defaults that depend on other options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--dataset", help=f"hub name or folder (default {FINEWEB_EDU}), or pydocs")
    add("--name", help="a configuration of it (default for FineWeb sample-10BT)")
    add("--files", nargs="+", metavar="GLOB", help="local .jsonl, .txt or .parquet files instead")
    add("--text_key", default="text", help="key of the text in a record (default %(default)s)")
    add("--tokenizer", choices=["gpt2", "bytes"], help="(default gpt2, for pydocs bytes)")
    add("--out", help="folder of the shards (default edu_fineweb10B and the like, or pydocs)")
    add("--shard_size", type=int, default=10**8, help="tokens a shard (default %(default)s)")
    add("--val_tokens", type=int, help="validation tokens at most (default a shard's)")
    add("--val_share", type=float, help="of the tokens (default 0.1; hub: 1, they come first)")
    add("--max_tokens", type=int, help="end after so many tokens")
    add("--format", choices=["npy", "bin"], default="npy", help="bin is llm.c's")
    add("--part", default="1/1", metavar="I/N", help="the I-th of N slices of the data's files")
    add("--workers", type=int, help="processes that tokenise (default: every core)")
    streaming = "tokenise during the download (default), or copy it all first"
    add("--streaming", action=argparse.BooleanOptionalAction, default=True, help=streaming)
    add("--overwrite", action="store_true", help="delete this run's shards and begin anew")
    add("--merge", action="store_true", help="list the shards of all parts in one meta.json")
    add("--verify", action="store_true", help="re-read all shards and compare their sha256")
    args = parser.parse_args(argv)
    check_args(args)
    settle_args(args)
    return args


def check_args(args: argparse.Namespace) -> None:
    """Raise ValueError for options that cannot be."""
    if args.files and (args.dataset or args.name):
        raise ValueError("--files and --dataset are two sources: choose one")
    for name in ("shard_size", "max_tokens", "workers"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name} {value}: expected 1 or more")
    if args.format == "bin" and args.shard_size >= 2**31:
        raise ValueError(f"--shard_size {args.shard_size}: .bin counts to 2**31 - 1 tokens at most")
    if (args.val_tokens or 0) < 0 or not 0 <= (args.val_share or 0) <= 1:
        raise ValueError("expected --val_tokens 0 or more, --val_share from 0 to 1")
    part = re.fullmatch(r"(\d+)/(\d+)", args.part)
    if not part or not 1 <= int(part[1]) <= int(part[2]):
        raise ValueError(f"--part {args.part}: expected I/N with I from 1 to N, such as 3/128")


def settle_args(args: argparse.Namespace) -> None:
    """Fill in the defaults that depend on the source and the machine."""
    args.part, args.parts = (int(number) for number in args.part.split("/"))
    args.part -= 1  # counted from 0 inside
    args.dataset = None if args.files else args.dataset or FINEWEB_EDU
    fineweb = re.fullmatch(r"HuggingFaceFW/fineweb(-edu)?", args.dataset or "")
    if fineweb:
        args.name = args.name or "sample-10BT"
        size = re.sub(r"^sample-(\w+)T$", r"\1", args.name)  # 10B; a dump keeps its name
        args.out = args.out or f"{'edu_' if fineweb[1] else ''}fineweb{size}"
    pydocs = args.dataset == "pydocs"
    args.out = args.out or ("pydocs" if pydocs else None)
    if args.out is None:
        raise ValueError("--out FOLDER is needed: where do the shards go?")
    args.tokenizer = args.tokenizer or ("bytes" if pydocs else "gpt2")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    args.workers = args.workers or (1 if pydocs else cores)  # starting a second takes longer
    if args.val_share is None:
        args.val_share = 0.1 if args.files or pydocs else 1.0
    if args.val_tokens is None:
        args.val_tokens = min(args.shard_size, (args.max_tokens or sys.maxsize) // 10)


def main(argv: list[str] | None = None) -> None:
    """Run the command line. Exits with 2 for bad arguments or data, 1 when the work failed."""
    go_on = "What is finished stays: run the same command to go on."
    try:
        with handling(signal.SIGTERM, raise_interrupt):
            args = parse_args(argv)
            (verify if args.verify else merge if args.merge else build)(args)
            if argv is None and not args.verify:  # not from within the quickstart
                print(f"next: python train_gpt2.py --data_dir {args.out}")
    except (ValueError, FileNotFoundError) as error:
        exit_with(2, str(error))
    except (OSError, BrokenExecutor) as error:
        exit_with(1, f"{error}. {go_on}")
    except KeyboardInterrupt as stop:
        exit_with(128 + (stop.args or (signal.SIGINT,))[0], f"interrupted. {go_on}")


def raise_interrupt(signum: int, frame: object) -> None:
    """Make a signal end the run as Ctrl-C does."""
    raise KeyboardInterrupt(signum)


def exit_with(status: int, line: str) -> None:
    """Print one line and end the process."""
    print(f"fineweb.py: {line}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
