"""Turn documents into shards of tokens for train_gpt2.py: exact, on every core, safe to interrupt.

python fineweb.py                                       # FineWeb-Edu, 10B tokens: edu_fineweb10B/
python fineweb.py --name sample-100BT                   # 100B tokens: edu_fineweb100B/
python fineweb.py --files 'texts/*.jsonl' --out mine    # .jsonl, .txt (.gz, .xz, .zst), .parquet
python fineweb.py --dataset pydocs                      # Python's own documentation, offline
python fineweb.py --part 3/128 --out big                # one of 128 slices of the files
python fineweb.py --merge --out big                     # make the finished slices one dataset
python fineweb.py --verify --out big                    # read every shard again and compare

A shard is a 1-D array of uint16 tokens. Each document in it is its <|endoftext|> token followed by
the tokens of its text. The shards depend only on the documents and the options, not on the number
of workers or on interruptions: a run that is killed and started again continues where it stopped.

The file follows the data. A source reads documents; they are cut into segments at places where the
tokenizer begins a new piece anyway; workers encode the segments; one writer fills the shards of
both splits. meta.json, beside the shards, holds all the state: the finished shards with their
sha256, and where to continue. It lists a finished dataset once its progress.done is true. Files
meta-III-of-NNN.json without a meta.json are parts that are not merged yet.
"""

import argparse
import ast
import codecs
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import re
import shlex
import signal
import sys
import sysconfig
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

import numpy as np
import tiktoken

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
DATASETS = {  # the prefix of the shards' names, and the default folder
    FINEWEB_EDU: ("edufineweb", "edu_fineweb"),
    "HuggingFaceFW/fineweb": ("fineweb", "fineweb"),
    "pydocs": ("pydocs", "pydocs"),
}
META_VERSION = 4  # of meta.json: an unfinished run is continued only by the version that began it
OPTIONS = ("text_key", "shard_size", "val_tokens", "val_share", "max_tokens", "format", "streaming")
TABLE_ROWS = 256  # rows that are read from a table at once: ~1 MB of FineWeb
BLOCK = 2**20  # bytes that are read from a file at once: 1 MiB
SEGMENT_CHARS = 2**17  # characters: longer documents are encoded in segments of about this length
LONGEST_SEGMENT = 2**20  # characters: a text without a place to cut is cut here all the same
PIECE = 2**13  # tokens: longer documents are dealt to train and val in pieces of this length
BATCH_BYTES = 2**20  # of text that a worker gets at once: ~0.06 s of work


class Segment(NamedTuple):
    """A part of a document that is encoded at once."""

    position: list[int]  # the file, the segment's number in it, crc32 of the file's text so far
    begins: bool  # it is the first segment of its document
    place: str  # the file and the document, for messages
    text: bytes  # UTF-8


class Source(NamedTuple):
    """Where documents come from."""

    names: list[str]  # of its files
    # Yields the documents of a file, by its number. One may be larger than the memory, so each is
    # its text in blocks
    read: Callable[[int], Iterator[Iterable[str]]]
    tokens: int = 0  # how many there are, 0 if unknown
    revision: str | None = None  # identifies the content of files that have no date


# --------------------------------------------------------------------------------------------------
# what the three scripts share


class UserError(ValueError):
    """A mistake that the user can put right. The command lines print its message as one line and
    exit with status 2. The message says what was found, what was expected, and what to run."""


def require(condition: bool, message: str) -> None:
    """Raise UserError with the message unless the condition holds."""
    if not condition:
        raise UserError(message)


@contextmanager
def naming(place: str, kind: type[Exception] = UserError) -> Iterator[None]:
    """Turn the error of a library into one that names the place. Libraries raise many kinds, and
    few of them say where."""
    try:
        yield
    except UserError:  # says it already
        raise
    except Exception as error:
        raise kind(f"{place}: {type(error).__name__}: {error}") from error


def protect_output() -> None:
    """Replace characters that the terminal cannot show. If stdin, stdout or stderr is closed, open
    the null device in its place: otherwise a file could get its number, 1 for example, and every
    print would land in that file."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest free number
        pass
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed
            setattr(sys, name, open(os.devnull, "w", errors="replace"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def say(*lines: str) -> None:
    """Print lines without buffering. Output that nobody reads any more, after `| head` or a closed
    terminal, never ends a run: from then on it goes nowhere."""
    try:
        print(*lines, sep="\n", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # 1 is stdout


def refuse_arguments(message: str) -> NoReturn:
    """Raise UserError for what argparse finds wrong. A parser takes this as its `error` method."""
    raise UserError(f"{message}; --help lists the flags")


@contextmanager
def atomic_write(path: str | Path) -> Iterator[BinaryIO]:
    """Open a binary file for writing that appears under its name only once it is whole: a reader
    finds the old file or the new one, never a part. Where writing fails, the old file stays."""
    # Every process has a temporary name of its own, in the same folder, because a file can be
    # renamed atomically only within one file system
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            yield file
            # Without this, a crash of the machine can leave the new name with an empty file
            file.flush()
            os.fsync(file.fileno())
        rename(temporary, str(path))
    finally:
        with suppress(FileNotFoundError):  # it has been renamed
            os.remove(temporary)


def rename(old: str, new: str) -> None:
    """Rename a file, and return once the folder is on the disk too."""
    os.replace(old, new)
    if os.name == "posix":  # Windows cannot open a folder
        folder = os.open(os.path.dirname(os.path.abspath(new)), os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


# --------------------------------------------------------------------------------------------------
# tokenizers


@functools.cache
def get_tokenizer(name: str) -> tiktoken.Encoding:
    """Return the tokenizer: "gpt2", or "bytes" (a token is a byte, <|endoftext|> is 256). Raises
    UserError for any other name, ConnectionError if GPT-2's cannot be downloaded."""
    require(name in ("gpt2", "bytes"), f"unknown tokenizer {name!r}: expected gpt2 or bytes")
    if name == "gpt2":
        hint = "TIKTOKEN_CACHE_DIR may name another machine's cache; without it, fineweb.py has"
        hint += " --tokenizer bytes, and train_gpt2.py trains with --sample_every 0"
        with naming(f"GPT-2's vocabulary cannot be downloaded ({hint})", ConnectionError):
            enc = tiktoken.get_encoding("gpt2")
    else:
        ranks = {bytes([byte]): byte for byte in range(256)}
        pieces = r"(?s).{1,64}"  # bytes never merge, so any pieces will do, and short ones are fast
        special = {"<|endoftext|>": 256}
        enc = tiktoken.Encoding(name, pat_str=pieces, mergeable_ranks=ranks, special_tokens=special)
    # A larger vocabulary would wrap around without an error
    expected = f"expected at most {2**16:,}, which is what a shard's uint16 can tell apart"
    require(enc.n_vocab <= 2**16, f"{name} has {enc.n_vocab:,} tokens: {expected}")
    return enc


# --------------------------------------------------------------------------------------------------
# sources: local files, the Hugging Face hub, Python's documentation


def open_files(args: argparse.Namespace) -> Source:
    """Open local files, each once, in the order of their names."""
    found = {}
    for pattern in args.files:
        matches = find_files(pattern)
        require(matches, f"--files {pattern}: there is no such file")
        for path in matches:
            known = re.search(r"\.(parquet|(jsonl|txt)(\.(gz|xz|zst))?)$", path)
            require(known, f"{path}: expected .jsonl, .txt (also .gz, .xz, .zst) or .parquet")
            found.setdefault(os.path.realpath(path), path)  # one file may have many spellings
    paths = sorted(found.values())
    return Source(paths, lambda k: read_file(paths[k], args.text_key))


def find_files(pattern: str) -> list[str]:
    """Return the files that a pattern matches, sorted. What exists by that very name is no pattern,
    whatever brackets are in it."""
    return [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))


def read_file(path: str, text_key: str) -> Iterator[Iterable[str]]:
    """Yield a file's documents: the rows of .parquet, the lines of .jsonl, all of a .txt."""
    if path.endswith(".parquet"):
        with naming(path):
            from pyarrow import parquet

            with parquet.ParquetFile(path) as file:
                yield from read_tables(file.iter_batches(TABLE_ROWS), text_key, path)
    elif re.search(r"\.txt(\.(gz|xz|zst))?$", path):
        yield decode(read_bytes(path), path)
    else:
        # Lines are separated before they are decoded: a megabyte at once would be decoded to two
        # bytes per character wherever a single one of them needs two, which takes twice the time
        for number, line in enumerate(decode(split_lines(read_bytes(path)), path), 1):
            if line and not line.isspace():
                where = f"{path}, line {number}"
                with naming(where):
                    record = json.loads(line)
                yield [get_text(record, text_key, where)]


def read_bytes(path: str) -> Iterator[bytes]:
    """Yield a file's content in blocks, decompressed. Raises UserError if it is damaged."""
    suffix = os.path.splitext(path)[1]
    with naming(path):
        if suffix in (".gz", ".xz", ".zst") and os.path.getsize(path) == 0:
            # The libraries take this for no data, but it is what a failed download leaves
            raise EOFError("it has 0 bytes, and a compressed file has at least a header")
        if suffix == ".zst":
            import pyarrow  # unlike zstandard's, its stream notices a truncated file

            file = pyarrow.input_stream(path, compression="zstd")
        elif suffix == ".gz":
            file = gzip.open(path, "rb")  # noqa: SIM115
        else:
            file = open(path, "rb")  # noqa: SIM115
        with file:
            blocks = iter(lambda: file.read(BLOCK), b"")
            if suffix == ".xz":
                blocks = decompress_xz(blocks)
            yield from blocks


def decompress_xz(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Decompress the streams of an .xz file. lzma.open does not do: it takes a damaged header of a
    later stream for the end of the file, without an error."""
    stream = lzma.LZMADecompressor()
    for block in blocks:
        while block:
            if stream.eof:
                block = block.lstrip(b"\0")  # zeros may stand between streams
                stream = lzma.LZMADecompressor() if block else stream
            else:
                yield stream.decompress(block, BLOCK)  # a block may hold gigabytes of equal lines
                while not (stream.eof or stream.needs_input):
                    yield stream.decompress(b"", BLOCK)
                block = stream.unused_data  # empty before the end of the stream
    if not stream.eof:
        raise EOFError("the compressed file ends early")


def split_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    r"""Yield the lines, each with the \n that ends it. A line may be longer than a block."""
    parts = []
    for block in blocks:
        for part in io.BytesIO(block):  # up to the next \n, or to the end of the block
            parts.append(part)
            if part.endswith(b"\n"):
                line = b"".join(parts)
                parts.clear()  # now: while a line of gigabytes is in use, there is one copy less
                yield line
    yield b"".join(parts)


def decode(blocks: Iterable[bytes], path: str) -> Iterator[str]:
    """Decode blocks of UTF-8. Raises UserError naming the line and the byte that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()  # skips a byte order mark
    line = 1
    size = 0  # bytes up to the end of the block
    for block in itertools.chain(filter(None, blocks), [b""]):  # the empty block is the end
        size += len(block)
        try:
            yield decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            rest = error.object[error.start :]  # the object ends where the block ends
            line += error.object[: error.start].count(b"\n")
            place = f"line {line}, byte {size - len(rest) + 1} of the file"
            raise UserError(f"{path}, {place}: 0x{rest[0]:02x} is not UTF-8") from error
        line += block.count(b"\n")


def read_tables(tables: Iterable, text_key: str, name: str) -> Iterator[Iterable[str]]:
    """Yield the documents, one a row, of Arrow tables that follow each other."""
    row = 0
    for table in tables:
        if text_key in table.schema.names:
            table = table.select([text_key])  # the others need not become Python objects
        for record in table.to_pylist():
            row += 1
            yield [get_text(record, text_key, f"{name}, row {row}")]


def get_text(record: object, text_key: str, where: str) -> str:
    """Return the record's text. Raises UserError saying what is there instead."""
    if isinstance(record, dict) and isinstance(record.get(text_key), str):
        return record[text_key]
    if isinstance(record, dict):
        record = {key: type(value).__name__ for key, value in record.items()}
    expected = f"expected text under the key {text_key!r}, which --text_key chooses"
    raise UserError(f"{where}: {expected}, found {record!r:.300}")


def open_hub(args: argparse.Namespace, revision: str | None) -> Source:
    """Open a dataset of the hub, or a local folder of data files, through the datasets library. A
    revision is the commit with which the run began: it reads that to its end, whatever is uploaded
    in the meantime. Raises ConnectionError if the hub cannot be reached."""
    import datasets

    datasets.config.TORCH_AVAILABLE = False  # otherwise a stream imports torch, which takes seconds
    is_folder = os.path.isdir(args.dataset)
    if is_folder:
        revision = None
    hint = f"{datasets.config.HF_ENDPOINT} cannot be reached (HF_ENDPOINT sets the address). "
    hint += "Offline, --no-streaming reads the copy that an earlier --no-streaming run left in "
    hint += "HF_HOME, and --files 'folder/*.parquet' --out FOLDER reads files that you have"
    try:
        builder = datasets.load_dataset_builder(args.dataset, args.name, revision=revision)
    except ConnectionError as error:
        raise ConnectionError(f"{hint}. {error}") from error
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"--dataset {args.dataset}: {error}") from error
    files = builder.config.data_files or {}  # none for a copy in HF_HOME that is read offline
    if args.streaming and not files:
        raise ConnectionError(hint)
    splits = files or builder.info.splits or []
    require("train" in splits, f"{args.dataset} has no split named train, but {list(splits)}")
    if "validation" in splits:
        say(f"{args.dataset}: validation is taken from train, its split validation is not used")
    # A copy counts as one file
    names = list(files["train"]) if args.streaming else [args.dataset]

    def read(k: int) -> Iterator[Iterable[str]]:
        with naming(names[k], ConnectionError):
            if args.streaming:
                rows = builder.as_streaming_dataset(split="train")
            else:
                builder.download_and_prepare()  # does nothing where the copy is there
                rows = builder.as_dataset(split="train").to_iterable_dataset()
            tables = rows.with_format("arrow").shard(len(names), k).iter(batch_size=TABLE_ROWS)
            yield from read_tables(tables, args.text_key, names[k])

    if not (args.streaming and is_folder):  # whose files are compared one by one
        revision = builder.hash  # the commit, or a hash of the folder's files and dates
    billions = re.fullmatch(r"sample-(\d+)BT", args.name or "")  # of GPT-2's tokens
    return Source(names, read, int(billions[1]) * 10**9 if billions else 0, revision)


def open_pydocs() -> Source:
    """Open Python's reference and the docstrings of its library, which together are 2 MB."""
    from pydoc_data.topics import topics

    # Leave out tests, tables and whole applications
    skip = r"tests?|.*_tests?|(site|dist)-packages|idlelib|lib2to3|turtledemo|encodings|pydoc_data"
    paths = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = [name for name in subfolders if not re.fullmatch(skip, name)]
        paths += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    texts = [topics[name] for name in sorted(topics)]
    for path in sorted(paths):
        tree = ast.parse(Path(path).read_bytes())  # the module is parsed, and never imported
        module = os.path.basename(path).removesuffix(".py")
        texts.append("\n\n".join(find_docstrings(tree, module)))
    texts = [text for text in clean(texts) if len(text) > 200]  # characters: shorter say nothing
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return Source(["pydocs"], lambda k: ([text] for text in texts), revision=digest)


def find_docstrings(node: ast.AST, name: str) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and functions, each after its dotted name."""
    if text := ast.get_docstring(node):
        yield f"{name}: {text}"
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from find_docstrings(child, f"{name}.{child.name}")


def clean(texts: Iterable[str]) -> Iterator[str]:
    """Make quotes and dashes plain, and drop every paragraph of 60 characters or more that came
    before. The topics quote each other, and a model must not be validated on what it was trained
    on."""
    seen = set()
    for text in texts:
        text = text.translate(str.maketrans("‘’“”–\t", "''\"\"- "))
        new = []
        for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
            paragraph = paragraph.rstrip()
            if len(paragraph) < 60 or paragraph not in seen:  # characters
                new.append(paragraph)
            seen.add(paragraph)
        yield "\n\n".join(new) + "\n"


# --------------------------------------------------------------------------------------------------
# from documents to segments to tokens


def open_source(args: argparse.Namespace, revision: str | None = None) -> Source:
    """Open what the command line asks for, on the hub at the revision if it is given."""
    if args.files:
        source = open_files(args)
    elif args.dataset == "pydocs":
        source = open_pydocs()
    else:
        source = open_hub(args, revision)
    files = len(source.names)
    require(args.parts <= files, f"--part: {args.parts} parts need as many files, found {files}")
    return source


def get_stamp(path: str) -> list:
    """Return what changes when a file is changed: its size in bytes and its date in seconds."""
    return [os.path.getsize(path), os.path.getmtime(path)]


def read_segments(source: Source, args: argparse.Namespace, progress: dict) -> Iterator[Segment]:
    """Yield the segments of this part's files, from the one in work on. Raises UserError if an
    input changed since an earlier run read it."""
    position = progress["position"]
    for k in range(args.part, len(source.names), args.parts):
        name = source.names[k]
        hint = "put the old file back, or start over with --overwrite"
        changed = f"{name} changed since this run read it: {hint}"
        is_read = position and k < position[0]
        if os.path.isfile(name):  # and not on the hub, where the revision identifies it
            stamp = get_stamp(name)
            require(not is_read or progress["read"][name] == stamp, changed)
            progress["read"][name] = stamp  # of the moment before it is read
        if is_read:
            continue
        segments = cut_file(source, k)
        if position and k == position[0]:
            # Only what was read of the file in work has to be the same: a download that broke off
            # may be repaired. So the text is compared by its crc32, and not the file by its date
            segments = itertools.islice(segments, position[1], None)
            segment = next(segments, None)
            require(segment and segment.position == position, changed)
            yield segment
        yield from segments


# Half of a surrogate pair, which JSON can hold and UTF-8 cannot, becomes U+FFFD as in tiktoken
HALF_PAIR = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")


def cut_file(source: Source, k: int) -> Iterator[Segment]:
    """Cut all documents of a file into segments."""
    number = 0
    crc = 0
    for document, blocks in enumerate(source.read(k), 1):
        begins = True
        crc = zlib.crc32(b"\xff", crc)  # marks a document's beginning: no UTF-8 has this byte
        for text in split_text(blocks):
            # These bytes are what goes to a worker too, so that the text is encoded only once
            data = HALF_PAIR.sub("\ufffd".encode(), text.encode("utf-8", "surrogatepass"))
            crc = zlib.crc32(data, crc)
            place = f"{source.names[k]}, document {document}"
            yield Segment([k, number, crc], begins, place, data)
            begins = False
            number += 1


# GPT-2's pattern begins a new piece at the first and at the last white-space character of each run
# of them, and between an ASCII letter and a digit. Cutting a text there does not change its tokens.
# Python's \s matches U+001C to U+001F and GPT-2's does not, so BLANK lists what both match. \S then
# leaves out a few places where a cut would also be right.
BLANK = "[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
CUT = rf"(?:(?<=\S)(?={BLANK})|(?={BLANK}\S)|(?<=[A-Za-z])(?=[0-9])|(?<=[0-9])(?=[A-Za-z]))"
LAST_CUT = re.compile(f"(?s:.+){CUT}")  # .+ takes all it can, so the match ends at the last cut
NEXT_CUT = re.compile(CUT)


def split_text(blocks: Iterable[str], chars: int = SEGMENT_CHARS, most: int = LONGEST_SEGMENT):
    """Cut a document into segments of about `chars` characters that encode to the whole's tokens.
    An empty document is one empty segment. A run of `most` characters without a place to cut, such
    as DNA, is cut all the same; the tokens around that cut are not those of the whole document."""
    # Memory then does not grow with the document, all workers share the work, and a megabyte of
    # blanks does not overflow the tokenizer's stack
    text = ""
    for block in itertools.chain(filter(None, blocks), [""]):  # the empty block is the end
        text += block
        start = 0
        # Before the end, wait for enough text that the cuts do not depend on the blocks
        ahead = most if block else chars
        while len(text) > start + ahead + 2:  # a place to cut is known by the characters beside it
            cut = LAST_CUT.match(text, start, start + chars)
            cut = cut or NEXT_CUT.search(text, start + chars, start + most + 2)
            if cut is None and len(text) <= start + most:
                break  # the whole rest is one segment
            end = cut.end() if cut else start + most
            yield text[start:end]
            start = end
        text = text[start:]
    yield text


def make_batches(segments: Iterable[Segment]) -> Iterator[list[Segment]]:
    """Group segments to equal amounts of work."""
    batch = []
    size = 0
    for segment in segments:
        batch.append(segment)
        size += len(segment.text) + 100  # an empty document is some work too
        if size >= BATCH_BYTES:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def tokenize(batches: Iterable[list[Segment]], tokenizer: str, workers: int) -> Iterator[list]:
    """Encode the batches, in order, in this many processes."""
    if workers == 1:
        yield from (encode(batch, tokenizer) for batch in batches)
        return
    idle = deque(start_workers(workers, tokenizer))  # pipes; a deque is safe to use from threads

    def ask_worker(batch: list[Segment]) -> list:
        pipe = idle.popleft()  # never empty, as there are as many threads as workers
        try:
            pipe.send(batch)
            encoded = pipe.recv()
        except (EOFError, OSError) as error:
            raise ChildProcessError("a worker was killed, perhaps for lack of memory") from error
        idle.append(pipe)
        if isinstance(encoded, Exception):
            raise encoded
        return encoded

    waiting = deque()
    with ThreadPoolExecutor(workers) as threads:  # each waits for one worker
        # The pool takes any number of batches, so the number of those in the memory is bounded here
        for batch in batches:
            waiting.append(threads.submit(ask_worker, batch))
            if len(waiting) > 4 * workers:  # so that no worker waits while a shard is written
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def start_workers(workers: int, tokenizer: str) -> list:
    """Start processes that encode, and return a pipe to each. tiktoken computes outside Python's
    lock, but threads of one process would wait for the lock between two texts."""
    from multiprocessing import get_context, resource_tracker

    spawn = get_context("spawn")  # a fork would copy the locks of the libraries' threads
    pipes = []
    # Ctrl-C is for the parent alone. It waits here until the workers are started, which inherit
    # that it is blocked
    if os.name == "posix":
        resource_tracker.ensure_running()  # the first start would do it, and unblock Ctrl-C
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    for _ in range(workers):
        ours, theirs = spawn.Pipe()
        spawn.Process(target=work, args=(theirs, tokenizer), daemon=True).start()
        theirs.close()  # only the worker has it now: when one end is killed, the other one notices
        pipes.append(ours)
    if os.name == "posix":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return pipes


def work(pipe, tokenizer: str) -> None:
    """Encode the batches that come through a pipe, until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Windows, nothing is inherited
    with suppress(EOFError, OSError):
        while True:
            batch = pipe.recv()
            try:
                encoded = encode(batch, tokenizer)
            except Exception as error:  # the parent raises it
                error.add_note(traceback.format_exc())
                encoded = error
            pipe.send(encoded)


def encode(batch: list[Segment], tokenizer: str) -> list[tuple[list[int], bool, np.ndarray]]:
    """Encode each segment to (position, begins, uint16 tokens). Raises UserError naming the
    document that cannot be encoded."""
    enc = get_tokenizer(tokenizer)
    encoded = []
    for position, begins, place, text in batch:
        with naming(place):
            # No text is special: "<|endoftext|>" within a document is characters, not the token
            tokens = enc.encode_to_numpy(text.decode(), disallowed_special=())
        head = [enc.eot_token] if begins else []
        tokens = np.concatenate([head, tokens], dtype=np.uint16, casting="unsafe")
        encoded.append((position, begins, tokens))
    return encoded


# --------------------------------------------------------------------------------------------------
# from tokens to shards


def make_header(tokens: int, suffix: str) -> bytes:
    """Return a shard's header: numpy's, whose length is the same for any count, or llm.c's."""
    if suffix == "bin":
        header = np.zeros(256, dtype="<i4")
        header[:3] = 20240520, 1, tokens  # magic, version, count
        return header.tobytes()
    buffer = io.BytesIO()
    fields = {"descr": "<u2", "fortran_order": False, "shape": (tokens,)}
    np.lib.format.write_array_header_1_0(buffer, fields)
    return buffer.getvalue()


def require_shard(path: str, tokens: int, suffix: str) -> int:
    """Return a shard's size in bytes. Raises UserError unless the file has as many or more."""
    size = len(make_header(tokens, suffix)) + 2 * tokens  # uint16: 2 bytes a token
    found = os.path.getsize(path) if os.path.exists(path) else 0
    message = f"{path} is missing or cut short ({found:,} bytes of {size:,})"
    require(found >= size or not tokens, f"{message}: put it back, or use fineweb.py --overwrite")
    return size


class ShardWriter:
    """Appends tokens to the open shard of each split, and keeps meta.json in step with the disk.

    meta["progress"] describes the moment when the last shard was finished: the `position` of the
    segment in work and how many of its tokens are `written`; the `split` of the piece in work and
    how many tokens are `left` in it; the `tokens` so far; size and date of the files that are
    `read`; and the `open` shards, whose .tmp files have at least the tokens named there. From it a
    killed run continues as if nothing had happened."""

    def __init__(self, args: argparse.Namespace, meta: dict) -> None:
        self.args = args
        self.meta = meta
        self.progress = meta["progress"]
        self.count = self.progress["tokens"]  # {"val": tokens, "train": tokens}
        # The files of the open shards, by split
        self.files = {s: self.reopen(*shard) for s, shard in self.progress["open"].items()}

    def reopen(self, name: str, tokens: int) -> BinaryIO:
        """Open a shard, under its temporary name, behind the first tokens in it."""
        path = os.path.join(self.args.out, name + ".tmp")
        size = require_shard(path, tokens, self.args.format)
        # What an interrupted run appended after its last meta.json is cut off, and comes again
        file = open(path, "r+b" if tokens else "wb")  # noqa: SIM115
        file.seek(file.truncate(size))  # a new shard begins behind its header, which comes last
        return file

    def begin_piece(self) -> None:
        """Choose the split of the next piece: val while that has no more than its share. A piece is
        a document, or PIECE tokens of a longer one."""
        args = self.args
        total = sum(self.count.values())
        # Shorter at first, so that val has about its share of a corpus of any size
        self.progress["left"] = min(PIECE, max(16, total // 32))
        self.progress["split"] = "train"
        room = args.val_tokens - self.count["val"]
        behind = self.count["val"] <= args.val_share * total and args.val_share > 0
        # All of the validation is in the first part, which can then be read without the others
        if args.part == 0 and behind and room > 0:
            self.progress["split"] = "val"
            self.progress["left"] = min(self.progress["left"], room)

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens of the segment in work, and finish every shard that they fill."""
        while len(tokens):
            if self.progress["left"] == 0:
                self.begin_piece()
            split = self.progress["split"]
            if split not in self.files:
                index = len(self.meta["shards"]) + len(self.files)
                name = f"{self.args.prefix}_{split}_{index:06d}.{self.args.format}"
                self.files[split] = self.reopen(name, 0)
                self.progress["open"][split] = [name, 0]
            shard = self.progress["open"][split]  # [name, tokens]
            # A piece may end within these tokens, and so may the shard
            part = tokens[: min(self.progress["left"], self.args.shard_size - shard[1])]
            tokens = tokens[len(part) :]
            self.files[split].write(part.astype("<u2", copy=False).data)
            shard[1] += len(part)
            self.count[split] += len(part)
            self.progress["written"] += len(part)
            self.progress["left"] -= len(part)
            val_is_full = split == "val" and self.count["val"] == self.args.val_tokens
            if val_is_full or shard[1] == self.args.shard_size:
                self.finish(split)

    def finish(self, split: str) -> None:
        """Make the split's shard final: its bytes on the disk, its line in meta.json, its name."""
        from tqdm import tqdm

        name, tokens = self.progress["open"].pop(split)
        path = os.path.join(self.args.out, name)
        file = self.files.pop(split)
        file.seek(0)
        file.write(make_header(tokens, self.args.format))
        # meta.json counts the tokens of the other split's open shard too
        for unsynced in (file, *self.files.values()):
            unsynced.flush()
            os.fsync(unsynced.fileno())
        file.close()
        self.meta["shards"][name] = {"tokens": tokens, "sha256": hash_file(path + ".tmp")}
        # In this order, no shard has its final name before it is whole and listed. If the process
        # is killed between the two, the next start renames the shard
        save_meta(self.args.meta_path, self.meta)
        rename(path + ".tmp", path)
        with tqdm.external_write_mode():  # the line stands above the progress bar
            say(f"{name}: {tokens:,} tokens, {sum(self.count.values()):,} in all")

    def finish_all(self) -> None:
        """Finish the last shards, and with them the run. Raises UserError without train tokens."""
        if self.args.parts == 1:  # a part may be empty, or all validation
            require_training(self.meta)
        for split in list(self.files):
            self.finish(split)
        self.progress.update(position=None, done=True)
        save_meta(self.args.meta_path, self.meta)

    def close(self) -> None:
        """Close what an error left open."""
        for file in self.files.values():
            with suppress(OSError):  # a full disk, which is being reported already
                file.close()


def require_training(meta: dict) -> None:
    """Raise UserError unless there are tokens to train on."""
    tokens = meta["progress"]["tokens"]
    found = f"{meta['source']}: {tokens['val']:,} tokens in all, none to train on"
    require(tokens["train"], f"{found}: take more documents, or lower --val_tokens")


def fill_shards(writer: ShardWriter, batches: Iterable[list]) -> Iterator[int]:
    """Write encoded batches to both splits; yield the number of tokens so far after each."""
    budget = writer.args.max_tokens
    on_disk = writer.progress["written"]  # tokens of the first segment that an earlier run wrote
    for batch in batches:
        for position, begins, tokens in batch:
            total = sum(writer.count.values())
            if total == budget:
                return
            if position != writer.progress["position"]:
                writer.progress.update(position=position, written=0)
                if begins:
                    writer.progress["left"] = 0  # a document begins a piece
            # Without a budget, which is then None, the slice takes all tokens
            writer.write(tokens[on_disk:][: budget and budget - total])
            on_disk = 0
        yield sum(writer.count.values())


# --------------------------------------------------------------------------------------------------
# the folder


def hash_file(path: str) -> str:
    """Return a file's sha256 in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_meta(path: str, meta: dict) -> None:
    """Write a meta.json, whole or not at all."""
    with atomic_write(path) as file:
        file.write(json.dumps(meta, indent=1).encode())


def load_metas(folder: str) -> tuple[dict[str, dict], set[str]]:
    """Return the meta.json of a folder and those of parts, by path, and the names of all shards in
    the folder. Raises UserError for another program's meta.json."""
    # A shard is listed in a meta.json before it appears in the folder. So the folder is looked at
    # first: what another part finishes in between is then not taken for foreign
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    metas = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "meta*.json"))):
        if not re.fullmatch(r"meta(-\d+-of-\d+)?\.json", os.path.basename(path)):
            continue
        with naming(path):
            meta = json.loads(Path(path).read_text("utf-8"))
            known = {"options", "shards", "progress"} <= set(meta)
            version = meta.get("version", 1) if known else 0
            # An older version's position means something else; its finished shards are good
            older = known and version < META_VERSION and meta["progress"].get("done")
        known = version == META_VERSION or older
        other = f"{path} was not written by this version of fineweb.py"
        require(known, f"{other}: choose another --out, or delete it and its shards")
        metas[path] = meta
    # All that the trainer would read
    return metas, {name for name in names if re.fullmatch(r".*(train|val).*\.(npy|bin)", name)}


def list_shards(metas: dict[str, dict]) -> dict[str, dict]:
    """Return the shards of all these meta.json, by name."""
    return {name: shard for meta in metas.values() for name, shard in meta["shards"].items()}


def find_meta(args: argparse.Namespace, source: Source | None = None) -> dict:
    """Return this run's meta.json as an earlier run left it, or a new one. Raises UserError if the
    folder holds something that belongs neither to this run nor to another part of the same dataset.
    The data is compared once its source is open."""
    metas, found = load_metas(args.out)
    unlisted = sorted(found - list_shards(metas).keys())
    if args.overwrite:  # whatever it is, it will be deleted
        metas.pop(args.meta_path, None)
    enc = get_tokenizer(args.tokenizer)
    new = {
        "version": META_VERSION,
        "tokenizer": args.tokenizer,
        "vocab_size": enc.n_vocab,  # for the trainer, as is the next line
        "eot": enc.eot_token,
        "source": " ".join(args.files or filter(None, [args.dataset, args.name])),
        # All parts read the commit with which the first of them began
        "revision": next((meta.get("revision") for meta in metas.values()), None),
        "options": {name: getattr(args, name) for name in (*OPTIONS, "parts", "part")},
        "shards": {},  # {name: {"tokens": count, "sha256": hexadecimal}}
        "progress": {"position": None, "written": 0, "split": None, "left": 0}
        | {"tokens": {"val": 0, "train": 0}, "read": {}, "open": {}, "done": False},
    }
    if source:
        data = repr([source.names, source.revision]).encode()
        new |= {"revision": source.revision, "data": hashlib.sha256(data).hexdigest()[:16]}
    # The folder's other parts are compared too: a difference found by --merge would cost a night
    for path, meta in metas.items():
        hint = "choose another --out"
        if path == args.meta_path:
            hint += ", or start over with --overwrite"
        check_same_run(path, meta, new, hint)
    foreign = f"{args.out} holds {''.join(unlisted[:1])}, which is not of this run"
    require(not unlisted, f"{foreign}: delete it, or choose another --out")
    return metas.get(args.meta_path, new)


def check_same_run(path: str, found: dict, wanted: dict, hint: str) -> None:
    """Raise UserError naming the first difference between two runs that share a folder."""
    found = found | found["options"]
    wanted = wanted | wanted["options"]
    for key in ("tokenizer", "source", "parts", *OPTIONS):
        values = f"{path} has {key} {found.get(key)}, and this run has {wanted[key]}"
        require(found.get(key) == wanted[key], f"{values}: {hint}")
    # Before the source is open, which may need the network, there is no data to compare
    same = found.get("data") == wanted.get("data", found.get("data"))
    changed = f"the source, its list of files or its revision, is not that of {path}"
    require(same, f"{changed}: {hint}")


def prepare_folder(args: argparse.Namespace, source: Source) -> dict:
    """Return the run's meta.json, and bring the folder in line with it."""
    meta = find_meta(args, source)
    if args.overwrite:
        shards = load_metas(args.out)[0].get(args.meta_path, {"shards": {}})["shards"]
        paths = [os.path.join(args.out, name) for name in shards]
        # A meta.json that lists all parts is out of date now
        for path in (*paths, args.meta_path, os.path.join(args.out, "meta.json")):
            Path(path).unlink(missing_ok=True)
    opened = [name for name, _ in meta["progress"]["open"].values()]
    for temporary in glob.glob(os.path.join(glob.escape(args.out), f"{args.prefix}_*.tmp")):
        name = os.path.basename(temporary).removesuffix(".tmp")
        if name in meta["shards"]:  # listed, but not renamed yet
            rename(temporary, os.path.join(args.out, name))
        elif name.endswith((".npy", ".bin")) and name not in opened:
            os.remove(temporary)  # left by a start that had not written a meta.json yet
    require_shards(args.out, meta)
    return meta


def require_shards(folder: str, meta: dict) -> None:
    """Raise UserError unless all shards of a meta.json are there, none of them cut short."""
    for name, shard in meta["shards"].items():
        require_shard(os.path.join(folder, name), shard["tokens"], meta["options"]["format"])


@contextmanager
def lock(args: argparse.Namespace) -> Iterator[None]:
    """Lock this run, and remove what a killed process left. Raises UserError if it is locked."""
    with open(f"{args.meta_path}.lock", "w") as file:
        if os.name == "posix":  # Windows has no such lock
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process
            except BlockingIOError as error:
                raise UserError(f"another process is at work on {args.meta_path}") from error
        for leftover in glob.glob(f"{glob.escape(args.meta_path)}.*.tmp"):
            os.remove(leftover)  # a meta.json that was not renamed yet
        yield


def verify(args: argparse.Namespace) -> None:
    """Read every shard of a folder again. Raises UserError saying all that is wrong."""
    metas, found = load_metas(args.out)
    require(metas, f"{args.out} has no meta.json to compare its shards with")
    shards = list_shards(metas)
    wrong = [f"{path} is not finished" for path in metas if not metas[path]["progress"]["done"]]
    if args.meta_path not in metas:
        wrong.append("the parts are no dataset until --merge has found and listed all of them")
    else:  # the shards of a part that is not merged would be read, too
        shards = metas[args.meta_path]["shards"]
    wrong += [f"{name} is not in meta.json" for name in sorted(found - shards.keys())]
    # All shards are read, also after the first damaged one: they are replaced together
    for name in sorted(shards):
        path = os.path.join(args.out, name)
        if not os.path.exists(path):
            wrong.append(f"{name} is missing")
        elif hash_file(path) != shards[name]["sha256"]:
            wrong.append(f"{name} is damaged (sha256)")
    repair = "To replace a shard, run its command again with another --out and copy it from there"
    require(not wrong, f"{args.out}: {', '.join(wrong)}. {repair}: it is the same byte for byte")
    tokens = sum(shard["tokens"] for shard in shards.values())
    say(f"{args.out}: {len(shards)} shards, {tokens:,} tokens, all as meta.json says")


def merge(args: argparse.Namespace) -> dict:
    """List all parts' shards in one meta.json, and return it. Raises UserError if they are not one
    dataset."""
    metas, found = load_metas(args.out)
    metas.pop(args.meta_path, None)  # an earlier merge's, or that of a run without parts
    require(metas, f"{args.out} has no parts to merge: --part 1/4 makes the first of four")
    shards = list_shards(metas)
    unlisted = sorted(found - shards.keys())
    require(not unlisted, f"{args.out} holds {''.join(unlisted[:1])}, which is of no part")
    first = next(iter(metas.values()))
    for path, meta in metas.items():
        check_same_run(path, meta, first, "make the parts again from the same data")
    # Each part was compared with the first, so all agree on how many there are
    done = {meta["options"]["part"] for meta in metas.values() if meta["progress"]["done"]}
    parts = first["options"]["parts"]
    missing = [f"--part {part + 1}/{parts}" for part in range(parts) if part not in done]
    require(not missing, f"{args.out}: finish {', '.join(missing)} first")
    for meta in metas.values():
        require_shards(args.out, meta)
    every = [meta["progress"]["tokens"] for meta in metas.values()]
    tokens = {split: sum(part[split] for part in every) for split in ("val", "train")}
    merged = first | {"shards": shards, "progress": {"done": True, "tokens": tokens}}
    require_training(merged)
    save_meta(args.meta_path, merged)
    say(f"{args.out}: {len(metas)} parts, {len(shards)} shards in one meta.json")
    return merged


# --------------------------------------------------------------------------------------------------
# command line


def build(args: argparse.Namespace) -> dict:
    """Write the shards that the command line asks for, from where an earlier run stopped, and
    return their meta.json."""
    if args.files and not os.path.exists(args.meta_path):
        open_files(args)  # a wrong name is said before the tokenizer is fetched
    meta = find_meta(args)
    rate = ""
    # A finished run opens nothing and needs no network. An unfinished one is pinned to its commit
    if not meta["progress"]["done"]:
        hint = "if interrupted, run the same command to continue"
        say(f"making shards of {meta['source']}; {hint}")
        source = open_source(args, meta["revision"])
        with naming(f"--out {args.out}"):
            os.makedirs(args.out, exist_ok=True)
        with lock(args):
            meta = prepare_folder(args, source)  # read again: no other process can change it now
            require(not meta["progress"]["done"], f"another process just wrote {args.meta_path}")
            rate = write_shards(args, meta, source)
    else:
        require_shards(args.out, meta)
        if args.files and any(map(find_files, args.files)):
            find_meta(args, open_files(args))  # refuses another list of files
        read = meta["progress"].get("read") or {}  # an older meta.json has none
        for name, stamp in read.items():
            is_same = not os.path.exists(name) or stamp == get_stamp(name)
            found = f"{name} has another size or date than when it was read"
            require(is_same, f"{found}: start over with --overwrite")
    # A finished folder holds its shards and meta.json, and nothing else. It may be read-only
    with suppress(OSError):
        os.remove(f"{args.meta_path}.lock")
    count = meta["progress"]["tokens"]
    say(f"{count['train']:,} tokens to train and {count['val']:,} to validate{rate}")
    return meta


def write_shards(args: argparse.Namespace, meta: dict, source: Source) -> str:
    """Run all stages behind a progress bar, which only a terminal shows; return the speed."""
    from tqdm import tqdm

    # The total is known where the user has set it, and of FineWeb's samples
    total = args.max_tokens or source.tokens // args.parts or None
    done = sum(meta["progress"]["tokens"].values())
    batches = make_batches(read_segments(source, args, meta["progress"]))
    clock = []  # (seconds, tokens so far), after every batch
    bar = tqdm(total=total, initial=done, unit=" tokens", unit_scale=True, disable=None)
    with bar, closing(ShardWriter(args, meta)) as writer:
        for done in fill_shards(writer, tokenize(batches, args.tokenizer, args.workers)):
            clock.append((time.perf_counter(), done))
            bar.update(done - bar.n)
        writer.finish_all()
    if len(clock) < 10 * args.workers:
        return ""  # too short to tell
    # Starting the workers does not count
    seconds, tokens = np.subtract(clock[-1], clock[0])
    return f", {tokens / seconds / 1e6:.2f}M tokens/s on {args.workers} workers"


def suggest(args: argparse.Namespace, meta: dict) -> str:
    """Return the next command. train_gpt2.py's defaults are for 10B tokens, not for a book."""
    out = shlex.quote(args.out)
    if args.parts > 1:
        return f"when all parts are done: python fineweb.py --merge --out {out}"
    tokens = meta["progress"]["tokens"]
    if tokens["train"] < 2000:
        return f"{tokens['train']:,} tokens are too few to train on: more text is needed"
    flags = f"--data_dir {out}"
    log_dir = shlex.quote(os.path.join("log", os.path.basename(os.path.abspath(args.out))))
    seq_len = 1024  # tokens of a window; validation needs one more, as each predicts the next
    if meta["tokenizer"] == "bytes":
        flags = f'--quickstart {flags} --log_dir {log_dir} --prompt "The "'
        seq_len = 64
    elif tokens["train"] < 10**8:
        seq_len = 256
        flags += f" --model d6 --seq_len {seq_len} --total_batch_size 16384 --epochs 4"
        flags += f" --log_dir {log_dir}"
    if tokens["val"] <= seq_len:
        flags += " --val_every 0"
    return f"next: python train_gpt2.py {flags}"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line, and settle the defaults that depend on other options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.error = refuse_arguments  # argparse's own would end the program that calls main
    add = parser.add_argument
    add("--dataset", help=f"name on the hub, folder (default {FINEWEB_EDU}), or pydocs")
    add("--name", help="a configuration of it (default for FineWeb: sample-10BT)")
    add("--files", nargs="+", metavar="GLOB", help="local .jsonl, .txt or .parquet files instead")
    add("--text_key", default="text", help="key of the text in a record (default %(default)s)")
    add("--tokenizer", choices=["gpt2", "bytes"], help="(default gpt2, for pydocs bytes)")
    add("--out", help="folder of the shards (default edu_fineweb10B and the like, or pydocs)")
    add("--shard_size", type=int, default=10**8, help="tokens a shard (default %(default)s)")
    add("--val_tokens", type=int, help="validation tokens at most (default a shard's)")
    add("--val_share", type=float, help="of the tokens (default 0.1; FineWeb: 1, they come first)")
    add("--max_tokens", type=int, help="stop after this many tokens, with --part in each part")
    add("--format", choices=["npy", "bin"], default="npy", help="bin is llm.c's")
    add("--part", default="1/1", metavar="I/N", help="the I-th of N slices of the data's files")
    add("--workers", type=int, help="processes that tokenise (default: one for every core)")
    streaming = "tokenise during the download (default), or copy the whole dataset first"
    add("--streaming", action=argparse.BooleanOptionalAction, default=True, help=streaming)
    add = parser.add_mutually_exclusive_group().add_argument
    add("--overwrite", action="store_true", help="delete this run's shards and start over")
    add("--merge", action="store_true", help="list the shards of all parts in one meta.json")
    add("--verify", action="store_true", help="read all shards again and compare their sha256")
    args = parser.parse_args(argv)
    settle_source(args)
    settle_numbers(args)
    return args


def settle_source(args: argparse.Namespace) -> None:
    """Fill in the source and the names of files. Raises UserError for impossible values."""
    both = args.files and (args.dataset or args.name)
    require(not both, "--files and --dataset are two sources: choose one")
    part = re.fullmatch(r"(\d+)/(\d+)", args.part)
    valid = part and 1 <= int(part[1]) <= int(part[2])
    require(valid, f"--part {args.part}: expected I/N with I from 1 to N, such as 3/128")
    args.part = int(part[1]) - 1  # counted from 0 inside
    args.parts = int(part[2])
    whole = args.parts == 1 or not (args.merge or args.verify)
    require(whole, "--merge and --verify are for all parts together: leave --part out")
    if not args.files:
        args.dataset = args.dataset or FINEWEB_EDU
    args.prefix, folder = DATASETS.get(args.dataset, ("docs", None))
    if "fineweb" in args.prefix:
        args.name = args.name or "sample-10BT"
        folder += re.sub(r"^sample-(\w+)T$", r"\1", args.name)  # 10B; a dump keeps its name
    args.out = args.out or folder  # other data has no name to make a folder's name from
    require(args.out, "--out FOLDER is needed: where do the shards go?")
    # Parts share a folder, so the files of each part have names of their own
    suffix = f"-{args.part + 1:03d}-of-{args.parts:03d}" if args.parts > 1 else ""
    args.prefix += suffix
    args.meta_path = os.path.join(args.out, f"meta{suffix}.json")


def settle_numbers(args: argparse.Namespace) -> None:
    """Fill in the tokenizer and the numbers. Raises UserError for impossible values."""
    pydocs = args.dataset == "pydocs"
    args.tokenizer = args.tokenizer or ("bytes" if pydocs else "gpt2")
    if args.workers is None:
        args.workers = os.cpu_count()
        if sys.platform == "linux":  # this process may be allowed fewer cores than there are
            args.workers = len(os.sched_getaffinity(0))
        if pydocs:
            args.workers = 1  # a second process would start for longer than the work takes
    if args.val_share is None:
        # FineWeb is shuffled, so its beginning is as good a sample as any, and it is the shard with
        # which build-nanogpt validates. Other data may begin with one kind of text
        args.val_share = 1.0 if "fineweb" in args.prefix else 0.1
    if args.val_tokens is None:
        args.val_tokens = min(args.shard_size, (args.max_tokens or 10 * args.shard_size) // 10)
    bounds = {
        "shard_size": (1, 2**31 - 1),  # .bin counts its tokens in an int32
        "max_tokens": (1, 10**15),
        "val_tokens": (0, 10**15),
        "val_share": (0, 1),
        "workers": (1, 512),  # each is a process of about 80 MB
    }
    for name, (least, most) in bounds.items():
        value = getattr(args, name)
        inside = value is None or least <= value <= most
        require(inside, f"--{name} {value}: expected {least} to {most}")


def main(argv: list[str] | None = None) -> None:
    """Run the command line; without one, the process's own, and then say what to run next. Exits
    with 2 for bad arguments or data and with 1 when the work failed."""
    if argv is None:
        # Ctrl-C and SIGTERM end the process at once, which harms a run no more than SIGKILL does.
        # Python's own handler waits until the main thread runs Python again, and a library that
        # waits for the network in C++ keeps it from that for up to half an hour
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        protect_output()
    try:
        args = parse_args(argv)
        if args.verify:
            verify(args)
        else:
            meta = merge(args) if args.merge else build(args)
            if argv is None:
                say(suggest(args, meta))
        return
    except UserError as error:
        status = 2
        line = f"fineweb.py: {error}"
    except OSError as error:  # no network, no disk space
        status = 1
        line = f"fineweb.py: {error}. What is finished stays: run the same command to continue."
    # The messages of libraries may have several lines
    with suppress(OSError):  # nobody reads stderr
        print(" ".join(line.split()), file=sys.stderr, flush=True)
    if argv is None:
        os._exit(status)  # without waiting for a library's threads, which wait for the network
    sys.exit(status)


if __name__ == "__main__":
    main()
