# /// script
# requires-python = ">=3.11"
# dependencies = ["datasets", "numpy", "tiktoken", "tokenizers", "tqdm"]
# ///
"""Turn documents into shards of tokens for train_gpt2.py: exact, on every core, safe to kill.

python fineweb.py                                       # FineWeb-Edu, 10B tokens: edu_fineweb10B/
python fineweb.py --files notes "src/**/*.py" --out mine   # your folders, files, globs
python fineweb.py --files texts --tokenizer 16384 --out mine   # a tokenizer made from the texts
python fineweb.py --dataset pydocs                      # Python's own documentation, offline

A folder stands for all files in it and in folders that it links to, but hidden and binary ones. A
row with a text in a .jsonl, .json, .csv, .tsv or .parquet file is a document. Any other file is
one, in UTF-8, unless lines with nothing but <|endoftext|> divide it, as in TinyStories. It may be
packed (.gz, .xz, .zst). Line ends of .csv and text files become \\n: nothing else is changed.
A shard is a 1-D array of uint16 tokens. A document is its <|endoftext|> token, then those of its
text, and may lie in two shards. A killed run continues with the same command, to the same bytes."""

import argparse
import ast
import csv
import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from threading import Thread, local

import numpy as np
import tiktoken
from tqdm import tqdm

FINEWEB = "HuggingFaceFW/fineweb-edu"
FOLDERS = {(FINEWEB, "sample-10BT"): "edu_fineweb10B", ("pydocs", None): "pydocs"}  # defaults
META_VERSION = 10  # raised whenever a folder of an older version cannot be continued
EOT = "<|endoftext|>"
BATCH_SIZE = 2**18  # characters that a thread encodes at a time, in ~0.02 s
SAMPLE_SIZE = 2**25  # bytes of text to train a tokenizer: Chinese takes 3 GB and a minute
# GPT-2's pattern of a word, but with the marks in it, such as vowels of Hindi, Thai or Arabic.
# A token never reaches beyond a word. DNA and Chinese have no blanks, so a word ends after 64
# characters at the latest
WORD = r"'(?:[sdmt]|ll|ve|re)| ?[\p{L}\p{M}]{1,64}| ?\p{N}{1,64}| ?[^\s\p{L}\p{M}\p{N}]{1,64}"
WORD += r"|\s{1,64}(?!\S)|\s"
ADVICE = "undo this, choose another --out, or delete the folder to start over"


class UserError(ValueError):
    """A mistake that the user can put right: what was found, what was expected, what to run."""


def require(condition: object, message: str) -> None:
    """Raise UserError with the message unless the condition holds."""
    if not condition:
        raise UserError(message)


@contextmanager
def naming(what: str, kind: type = Exception) -> Iterator:
    """Turn an error into a UserError that names `what`: few libraries say which file it was."""
    try:
        yield
    except kind as error:
        name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise UserError(f"{what}: {name}{error}") from error


def write_file(path: str, content: bytes) -> None:
    """Write a file, which appears under its name only once it is whole."""
    temporary = f"{path}.{os.getpid()}.unfinished"  # two processes may make the same file at once
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # or a power failure could leave the name without the content
    os.replace(temporary, path)


def get_tokenizer(tokenizer: str) -> tiktoken.Encoding:
    """Return a new copy of GPT-2's tokenizer, or of that of the bytes and of the tokens after its
    name, in hex. Threads that shared a copy would wait for its regular expression."""
    name, *others = tokenizer.split()
    if name == "gpt2":
        with naming("gpt2's tokens cannot be loaded (without a network: .github/CLUSTERS.md)"):
            gpt2 = tiktoken.get_encoding("gpt2")
        return tiktoken.Encoding(
            name,
            pat_str=gpt2._pat_str,
            mergeable_ranks=gpt2._mergeable_ranks,
            special_tokens=gpt2._special_tokens,
        )
    tokens = [bytes([byte]) for byte in range(256)] + [bytes.fromhex(token) for token in others]
    return tiktoken.Encoding(
        name,
        pat_str=WORD,
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens={EOT: len(tokens)},  # the last one
    )


# ---- sources: which files there are --------------------------------------------------------------


def list_files(args: argparse.Namespace) -> dict[str, list]:
    """Return the dataset's files in order: {address: [size, what changes with the content]}."""
    if args.dataset == "pydocs":
        return {"pydocs": [1, sys.version.split()[0]]}
    if args.dataset:
        return {address: [1, address] for address in find_on_hub(args.dataset, args.name)}
    paths = {}
    named = set()  # by themselves, and not because they are in a folder
    for name in map(os.path.expanduser, args.files):
        # A name, even with brackets, or a glob
        found = [name] if os.path.exists(name) else glob.glob(name, recursive=True)
        named.update(map(os.path.abspath, found))
        inside = sorted(path for top in found for path in walk(top))
        require(inside, f"--files {name}: found no file (expected files, folders, globs; no URL)")
        paths |= {os.path.realpath(path): os.path.abspath(path) for path in inside}  # no file twice
    out = os.path.realpath(args.out) + os.sep  # holds shards, which are no texts
    files = {}
    for path in sorted(path for real, path in paths.items() if not real.startswith(out)):
        try:
            next(read_file(path, args.text_key), None)
        except UserError as error:
            require(path not in named, str(error))
            print(f"{str(error)[:300]}: it is left out")  # as a picture among notes
            continue
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read(2**16)).hexdigest()
        files[path] = [os.path.getsize(path), digest]
    require(files, f"found no file of text outside --out {args.out} (.arrow files need to_parquet)")
    return files


def walk(top: str) -> list[str]:
    """Return a file, or all files in a folder and its links but for hidden ones."""
    if os.path.isfile(top):
        return [top]
    paths = []
    seen = set()  # folders, because links may lead back
    # print tells of folders that may not be read
    for folder, subfolders, names in os.walk(top, onerror=print, followlinks=True):
        if os.path.realpath(folder) in seen:
            subfolders.clear()  # os.walk goes no deeper here
            continue
        seen.add(os.path.realpath(folder))
        subfolders[:] = sorted(name for name in subfolders if name[0] != ".")
        paths += [os.path.join(folder, name) for name in names if name[0] != "."]
    return [path for path in paths if os.path.isfile(path)]


def find_on_hub(dataset: str, name: str | None) -> list[str]:
    """Return the addresses of the training files of a dataset on the Hugging Face hub."""
    import datasets  # takes seconds, so only here

    url = f"{datasets.config.HF_ENDPOINT}/datasets/{dataset}/tree/main"
    with naming(f"{url} cannot be read (HF_ENDPOINT: mirror, HF_TOKEN: account, --files: a copy)"):
        splits = datasets.load_dataset_builder(dataset, name).config.data_files
    require("train" in splits, f"{dataset} has no split train, but {sorted(splits)}")
    return list(splits["train"])


# ---- sources: the rows of a file -----------------------------------------------------------------
# A reader yields (text, whether it begins a document), and skips rows without a text


def fetch(address: str) -> str:
    """Return the path of a file. One of the hub is downloaded, unless the user's cache has it."""
    if "://" not in address:
        return address
    import datasets

    with naming("the download failed, run the same command again"):
        return datasets.DownloadManager().download(address)


def fetch_ahead(address: str) -> None:
    """Download a file while another one is read."""
    with suppress(Exception):  # read_file fetches it again, and says what is wrong
        fetch(address)


def read_file(address: str, text_key: str) -> Iterator[tuple]:
    """Yield (text, whether it begins a document, share of the file that was read)."""
    if address == "pydocs":
        yield from ((text, True, 1.0) for text in read_pydocs())
        return
    name, packing = os.path.splitext(address.lower())
    ending = os.path.splitext(name)[1] if packing in (".gz", ".xz", ".zst") else packing
    advice = "it is no UTF-8 (iconv -f ENCODING -t UTF-8, see .github/HELP.md)"
    not_utf8 = naming(advice, UnicodeDecodeError)
    with naming(address), not_utf8, open(fetch(address), "rb") as file:
        is_pointer = file.peek(1).startswith(b"version https://git-lfs")
        require(not is_pointer, "it is a pointer of Git LFS: run git lfs pull in its folder")
        size = max(1, os.path.getsize(file.name))
        if ending == ".parquet":
            rows = read_parquet(file, text_key)
        else:
            rows = read_text(file, text_key, ending, packing)
        for text, begins in rows:
            yield text, begins, file.tell() / size


def read_text(file: io.BufferedReader, text_key: str, ending: str, packing: str) -> Iterator[tuple]:
    """Yield the rows of any other file. Its line ends become \\n."""
    if packing == ".zst":
        import pyarrow  # unlike zstandard's, its stream notices a truncated file

        file = pyarrow.CompressedInputStream(file, "zstd")
    content = {".gz": gzip.open, ".xz": lzma.open}.get(packing, io.BufferedReader)(file)
    start = content.peek(1)  # in fact its first 8 KB
    is_utf16 = start.startswith((b"\xff\xfe", b"\xfe\xff"))  # Windows calls it Unicode
    require(not is_utf16, "it is UTF-16 (iconv -f UTF-16 -t UTF-8)")
    is_binary = b"\0" in start or start.startswith((b"%PDF", b"{\\rtf"))
    require(not is_binary, "it is no plain text, but packed, a document, a picture or UTF-16")
    with io.TextIOWrapper(content, "utf-8-sig") as lines:  # -sig skips a byte order mark
        if ending in (".jsonl", ".json", ".ndjson", ".jsonlines"):
            yield from read_jsonl(lines, text_key)
        elif ending in (".csv", ".tsv"):
            yield from read_csv(lines, text_key, ending)
        else:
            yield from read_txt(lines)


def read_parquet(file: io.BufferedIOBase, text_key: str) -> Iterator[tuple]:
    """Yield the rows of a .parquet file."""
    from pyarrow import parquet

    # 4 MB at a time, where pre_buffer would read the column of the whole file
    table = parquet.ParquetFile(file, buffer_size=2**22, pre_buffer=False)
    names = table.schema_arrow.names
    require(text_key in names, f"found columns {names}, expected {text_key}: see --text_key")
    found = f"found {table.schema_arrow.field(text_key).type}, expected a text: see --text_key"
    for rows in table.iter_batches(128, columns=[text_key]):  # ~0.6 MB of FineWeb
        for text in rows.column(0).to_pylist():
            require(isinstance(text, str | None), found)
            if text is not None:
                yield text, True


def read_jsonl(lines: io.TextIOWrapper, text_key: str) -> Iterator[tuple]:
    """Yield the rows of a file with a record on each line, or of an array, read at once."""
    records = lines
    if lines.buffer.peek(1).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        records = map(json.dumps, json.load(lines))
    for number, line in enumerate(records, 1):
        if line.isspace():
            continue
        try:
            text = json.loads(line)[text_key]
            if not isinstance(text, str | None):
                raise TypeError
        except (KeyError, TypeError, ValueError) as error:
            expected = f'expected lines like {{"{text_key}": "..."}} (--text_key)'
            raise UserError(f"line {number}: {expected}, found {line[:50]!r}") from error
        if text is not None:
            if re.search(r"\\u[dD]", line):
                # JSON can spell half of a surrogate pair, which UTF-8 cannot: it becomes U+FFFD
                text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            yield text, True


def read_csv(lines: io.TextIOWrapper, text_key: str, ending: str) -> Iterator[tuple]:
    """Yield the rows of a .csv or .tsv file. The first line names the columns."""
    csv.field_size_limit(2**31 - 1)  # characters of a cell
    rows = csv.reader(lines, strict=True)  # refuses an open quote, which would take all behind it
    if ending == ".tsv":  # where a quote is a character like others
        rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    names = next(rows, [])
    require(
        text_key in names,
        f"found columns {names}, expected {text_key}, and commas between them in .csv: "
        "see --text_key",
    )
    try:
        column = names.index(text_key)
        line = 2  # where the row begins
        for row in filter(None, rows):  # without blank lines
            if len(row) != len(names):
                raise csv.Error(f"found {len(row)} cells, expected {len(names)}")
            if row[column]:
                yield row[column], True
            line = rows.line_num + 1
    except csv.Error as error:
        advice = "a cell with commas stands in quotes, and a quote in it is written twice"
        raise UserError(f"row in line {line}: {error} ({advice})") from error


def read_txt(text: io.TextIOWrapper) -> Iterator[tuple]:
    """Yield the documents of a text file in parts, because it may be larger than the memory."""
    part = ""
    begins = True
    lines = iter(partial(text.readline, BATCH_SIZE), "")  # a longer line comes in parts
    for line in chain(lines, [None]):
        is_mark = line in (EOT, f"{EOT}\n") and part[-1:] in ("", "\n")
        if line is None or is_mark:
            if part.strip() or not begins:
                yield part, begins
            part = ""
            begins = True
        else:
            part += line
        if len(part) > BATCH_SIZE:
            *parts, part = cut(part)
            for first in parts:
                yield first, begins
                begins = False


def read_pydocs() -> Iterator[str]:
    """Yield Python's reference and the docstrings of its library, which together are 2 MB."""
    from pydoc_data.topics import topics

    skip = r"tests?|.*_tests?|(site|dist)-packages|idlelib|lib2to3|turtledemo|encodings|pydoc_data"
    paths = []
    for folder, subfolders, names in os.walk(os.path.dirname(os.__file__)):
        subfolders[:] = [name for name in subfolders if not re.fullmatch(skip, name)]
        paths += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    texts = [topics[name] for name in sorted(topics)]
    for path in sorted(paths):
        tree = ast.parse(Path(path).read_bytes())  # the module is parsed, and never imported
        texts.append("\n\n".join(find_docstrings(tree, Path(path).stem)))
    # Drop what came before: topics quote each other, and validation needs text of its own
    seen = set()
    for text in texts:
        text = text.translate(str.maketrans("‘’“”–\t", "''\"\"- ")).strip("\n")
        new = []
        for paragraph in map(str.rstrip, re.split(r"\n\s*\n", text)):
            if len(paragraph) < 60 or paragraph not in seen:  # short ones may repeat
                new.append(paragraph)
            seen.add(paragraph)
        text = "\n\n".join(new) + "\n"
        if len(text) > 200:  # shorter ones say nothing
            yield text


def find_docstrings(node: ast.AST, name: str) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and functions, each after its dotted name."""
    if text := ast.get_docstring(node):
        yield f"{name}: {text}"
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from find_docstrings(child, f"{name}.{child.name}")


# ---- a tokenizer of one's own --------------------------------------------------------------------


def choose_tokenizer(args: argparse.Namespace, files: dict[str, list]) -> str:
    """Return what get_tokenizer takes: a name, the tokenizer of other shards, or a new one."""
    if args.tokenizer.isdecimal():
        if args.dataset:  # all files of the hub may be hundreds of GB: the first one must do
            files = dict(islice(files.items(), 1))
        return train_tokenizer(files, args.text_key, int(args.tokenizer))
    if args.tokenizer in ("gpt2", "bytes"):
        return args.tokenizer
    path = Path(args.tokenizer, "meta.json")
    require(path.exists(), f"--tokenizer {args.tokenizer}: expected gpt2, bytes, a size or shards")
    with naming(f"{path} names no tokenizer"):
        tokenizer = json.loads(path.read_bytes())["tokenizer"]
        get_tokenizer(tokenizer)
    return tokenizer


def sample_texts(files: dict[str, list], text_key: str) -> Iterator[str]:
    """Yield all texts or, of more than SAMPLE_SIZE bytes, a sample that is spread over all."""
    total = max(1, sum(size for size, _ in files.values()))
    read = 0  # bytes of whole files
    taken = 0
    for address, (size, _) in files.items():
        for text, _, share in read_file(address, text_key):
            # The sample has no more than its share of what was read
            if taken <= SAMPLE_SIZE * (read + size * share) / total:
                taken += len(text.encode())
                yield from cut(text)
        read += size


def train_tokenizer(files: dict[str, list], text_key: str, size: int) -> str:
    """Return a byte-level BPE tokenizer: its name, then its tokens beyond the bytes, in hex."""
    from tokenizers import Regex, Tokenizer, models, trainers
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    print(f"training a tokenizer of {size} tokens from up to 34 MB of text", flush=True)
    bpe = Tokenizer(models.BPE())
    words = Split(Regex(WORD), "isolated")
    bpe.pre_tokenizer = Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])
    alphabet = sorted(ByteLevel.alphabet())  # of 256 characters, which stand for the bytes
    rest = {"initial_alphabet": alphabet, "min_frequency": 2, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=size - 1, **rest)  # <|endoftext|> is the last one
    bpe.train_from_iterator(sample_texts(files, text_key), trainer)
    # Visible bytes stand for themselves, and characters from U+0100 on for the others, in order
    visible = [ord(c) for c in alphabet if c < "\u0100"]
    invisible = sorted({*range(256)} - {*visible})
    byte_of = dict(zip(alphabet, visible + invisible, strict=True))
    vocabulary = bpe.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)[256:]
    count = len(tokens) + 257
    if count < size:
        print(f"it has only {count}, because no other two tokens follow each other twice in words")
    tokens = " ".join(bytes(byte_of[c] for c in token).hex() for token in tokens)
    digest = hashlib.sha256(tokens.encode()).hexdigest()
    return f"bpe-{count}-{digest[:6]} {tokens}"


# ---- from rows to tokens -------------------------------------------------------------------------


def cut(text: str) -> Iterator[str]:
    """Yield a text in parts of at most BATCH_SIZE characters."""
    # tiktoken's regular expression gives up after a million blanks in a row
    # GPT-2's pattern always splits a text between a visible character and a blank or line end, so
    # the parts have the tokens of the whole. `.*` matches all it can: up to the last such place
    until_break = re.compile(r"(?s:.*\S)(?=[ \r\n])")
    start = 0
    while len(text) - start > BATCH_SIZE:
        end = start + BATCH_SIZE  # DNA or a million blanks have no good place to cut
        if found := until_break.match(text, start, end):
            end = found.end()
        yield text[start:end]
        start = end
    yield text[start:]


def read_batches(args: argparse.Namespace, files: dict, position: list) -> Iterator[tuple]:
    """Yield (position, share of all files read, batch) from a position on. A position says where
    its batch begins: [file, how many rows of it come before]. The last batch is empty."""
    sizes = [max(1, size) for size, _ in files.values()]
    addresses = list(files)
    first, start = position
    total = sum(sizes)
    read = sum(sizes[:first])  # bytes of whole files
    batch = []
    length = 0  # of the batch, in characters
    for k in range(first, len(files)):
        # --max_tokens may be reached before the next file is needed
        if args.dataset and not args.max_tokens and k + 1 < len(files):
            Thread(target=fetch_ahead, args=(addresses[k + 1],), daemon=True).start()
        rows = enumerate(read_file(addresses[k], args.text_key), 1)
        for row, (text, begins, share) in islice(rows, start, None):
            batch.append((text, begins))
            length += len(text) + 1  # so that documents without a character count, too
            if length >= BATCH_SIZE:
                yield position, (read + share * sizes[k]) / total, batch
                position = [k, row]
                batch = []
                length = 0
        start = 0
        read += sizes[k]
    yield position, 1.0, batch
    yield [len(files), 0], 1.0, []  # behind all files, for the last chunk to end with


def encode(enc: tiktoken.Encoding, batch: list[tuple]) -> np.ndarray:
    """Return the tokens of a batch."""
    together = "".join([EOT * begins + text for text, begins in batch])
    has_quotes = together.count(EOT) > sum(begins for _, begins in batch)
    if len(together) <= 2 * BATCH_SIZE and not has_quotes:
        # In one call, because a thread waits for Python's lock at the end of each
        return enc.encode_to_numpy(together, allowed_special="all").astype("<u2")
    tokens = [[]]  # a batch may be empty
    for text, begins in batch:
        if begins:
            tokens.append([enc.eot_token])
        # If a text quotes <|endoftext|>, it is encoded like other characters, not as the token
        tokens += [enc.encode_to_numpy(part, disallowed_special=()) for part in cut(text)]
    return np.concatenate(tokens, dtype="<u2", casting="unsafe")


def tokenize(batches: Iterator[tuple], tokenizer: str, workers: int) -> Iterator[tuple]:
    """Yield (position, share, tokens) of all batches, in order, encoded by this many threads."""
    own = local()  # each thread sees its own attributes

    def encode_in_thread(batch: list[tuple]) -> np.ndarray:
        if not hasattr(own, "enc"):
            own.enc = get_tokenizer(tokenizer)
        return encode(own.enc, batch)

    with ThreadPoolExecutor(workers) as pool:  # tiktoken encodes without Python's lock
        waiting = deque()
        for position, share, batch in batches:
            waiting.append((position, share, pool.submit(encode_in_thread, batch)))
            if len(waiting) > 4 * workers:  # tokens must not fill the memory
                *place, tokens = waiting.popleft()
                yield *place, tokens.result()
        for *place, tokens in waiting:
            yield *place, tokens.result()


# ---- from tokens to shards -----------------------------------------------------------------------
# A chunk is about --shard_size tokens, and ends where a batch ends. It becomes a shard of each
# split. Then meta.json says how many chunks are finished, and where the last batch of the newest
# one begins. After a kill, the same command reads on from there. Shards that are not in meta.json
# yet are written a second time, with the same bytes. What was read must be as it was, under
# whatever names: whole files, and the last batch. What was not read may change, so that a broken
# row can be mended.


def write_shards(args: argparse.Namespace, meta: dict) -> None:
    """Fill chunk after chunk from the position in meta.json on."""
    if not meta["shards"]:  # the folder is tried before hours of work
        os.makedirs(os.path.realpath(args.out), exist_ok=True)  # also where a link leads nowhere
        write_file(f"{args.out}/meta.json", json.dumps(meta, indent=1).encode())
    batches = read_batches(args, meta["files"], meta["progress"]["position"])
    batches = tokenize(batches, meta["tokenizer"], args.workers)
    if meta["shards"]:
        _, _, tokens = next(batches)
        found = hashlib.sha256(tokens).hexdigest()
        changed = f"a file of {args.out} has changed where it was being read: {ADVICE}"
        require(found == meta["progress"]["last_batch"], changed)
    total = count_tokens(meta)  # so far
    budget = args.max_tokens or sys.maxsize
    chunk = []
    bar = tqdm(initial=total, unit=" tokens", unit_scale=True, disable=None)  # on a terminal only
    with bar, ThreadPoolExecutor(1) as writer:  # of a chunk, while the next one is filled
        saved = writer.submit(int)  # at first nothing, and int() returns
        for position, share, tokens in batches:
            chunk.append(tokens[: budget - total])
            total += len(chunk[-1])
            bar.total = min(budget, round(total / share))  # about, if it is not the budget
            bar.update(total - bar.n)
            if total == budget:
                break
            if sum(map(len, chunk)) >= args.shard_size:
                saved.result()  # waits for the chunk before, and raises what went wrong there
                saved = writer.submit(save_chunk, args, meta, chunk, position)
                chunk = []
        saved.result()
    save_chunk(args, meta, chunk, position, done=True)  # may be short or empty


def save_chunk(args, meta: dict, chunk: list[np.ndarray], position: list, done=False) -> None:
    """Write a shard of each split, then meta.json with the position of the chunk's last batch."""
    chunks = meta["progress"]["chunks"]
    tokens = np.concatenate(chunk)
    is_val = choose_validation(args, meta, len(tokens))
    for split, chosen in (("val", is_val), ("train", ~is_val)):
        if chosen.any():
            name = f"{split}_{chunks:06d}.npy"
            shard = io.BytesIO()
            np.save(shard, tokens[chosen])
            write_file(f"{args.out}/{name}", shard.getvalue())
            sha256 = hashlib.sha256(shard.getvalue()).hexdigest()
            meta["shards"][name] = {"tokens": int(chosen.sum()), "sha256": sha256}
    meta["progress"] = {
        "chunks": chunks + 1,
        "position": position,
        "last_batch": hashlib.sha256(chunk[-1]).hexdigest(),
        "done": done,
    }
    write_file(f"{args.out}/meta.json", json.dumps(meta, indent=1).encode())


def choose_validation(args: argparse.Namespace, meta: dict, size: int) -> np.ndarray:
    """Return the mask of the validation tokens among the next `size` tokens."""
    # All tokens are cut into pieces. Of the first n pieces, validation gets n * val_share, rounded.
    # So it gets the pieces at which this number rises: with a share of 0.1, the fifth of every ten
    length = meta["piece_size"]
    start = count_tokens(meta)
    pieces = np.arange(start // length, (start + size) // length + 2)
    is_val = np.diff(np.floor(pieces * args.val_share + 0.5)) > 0
    is_val = np.repeat(is_val, length)[start % length :][:size]
    excess = count_tokens(meta, "val") + int(is_val.sum()) - args.val_tokens
    if excess > 0:
        is_val[np.flatnonzero(is_val)[-excess:]] = False
    return is_val


def count_tokens(meta: dict, split: str = "") -> int:
    """Return how many tokens the finished shards of a split, or all of them, have."""
    return sum(shard["tokens"] for name, shard in meta["shards"].items() if split in name)


def find_meta(args: argparse.Namespace) -> dict:
    """Return meta.json as an earlier start of the same run has left it, or a new one."""
    others = ("files", "out", "workers")  # the shards depend on none of them but the files' content
    options = {"version": META_VERSION} | {k: v for k, v in vars(args).items() if k not in others}
    if list(Path(args.out).glob("*.npy")):
        return check_meta(args, options)
    files = list_files(args)
    tokenizer = choose_tokenizer(args, files)
    enc = get_tokenizer(tokenizer)
    total = sum(size for size, _ in files.values())  # bytes, or, on the hub, the number of files
    is_small = total < 2**24 and args.dataset in (None, "pydocs")
    return {
        "tokenizer": tokenizer,  # this and the next two are for the trainer
        "vocab_size": enc.n_vocab,
        "eot": enc.eot_token,
        "options": options,
        # Tokens that go to validation together: longer pieces cut fewer windows of 1,024 in two
        "piece_size": 512 if is_small else 8192,
        "shards": {},  # {name: {"tokens": count, "sha256": hexadecimal}}
        "progress": {"chunks": 0, "position": [0, 0], "done": False},  # see read_batches
        "files": files,
    }


def check_meta(args: argparse.Namespace, options: dict) -> dict:
    """Return the meta.json of a run, after a check that nothing has changed since."""
    path = Path(args.out, "meta.json")
    require(path.exists(), f"{args.out} holds shards, but no meta.json: choose another --out")
    with naming(f"{path} is damaged: delete the folder to start over"):
        meta = json.loads(path.read_bytes())
        old_options = meta.get("options", {})
    for key, new in options.items():
        old = old_options.get(key)
        require(old == new, f"{path} has {key} {old}, not {new}: {ADVICE}")
    if args.files:  # those of a dataset stay as they were at the beginning
        files = list_files(args)
        before = list(meta["files"].items())
        now = list(files.items())
        if not meta["progress"]["done"]:  # files that were not read yet may change
            read = meta["progress"]["position"][0]
            before = before[:read]
            now = now[:read]
        for (was, old), (name, new) in zip_longest(before, now, fillvalue=("nothing", None)):
            require(old == new, f"{name} (before: {was}) is new, missing or changed: {ADVICE}")
        meta["files"] = files
    for name, shard in meta["shards"].items():
        with naming(f"{args.out}/{name} is not as it was: put it back, or delete the folder"):
            sha256 = hashlib.sha256(Path(args.out, name).read_bytes()).hexdigest()
            require(sha256 == shard["sha256"], "its content has changed")
    return meta


# ---- command line --------------------------------------------------------------------------------


def quote(word: str) -> str:
    """Return a word of a command line as bash and Windows' cmd.exe both take it."""
    return word if re.fullmatch(r"[\w:+=,./\\-]+", word) else f'"{word}"'


def suggest(args: argparse.Namespace, meta: dict, prompt: str) -> str:
    """Return the next command for this amount of text: for a CPU, if that is enough, and a GPU."""
    train = count_tokens(meta, "train")
    val = count_tokens(meta, "val")
    log_dir = f"log/{Path(args.out).resolve().name}"
    command = f"python train_gpt2.py --data_dir {quote(args.out)} --log_dir {quote(log_dir)}"
    command += f' --prompt="{prompt}"'
    command += " --val_every 0" * (val == 0)  # --val_share is 0
    if train >= 10**8:
        if train < 2.5e9:  # more is the run that the script makes by default
            # A step has about 27.5 * max_steps tokens, which makes this about four epochs
            command += f" --optimizer muon --max_steps {round((4 * train / 27.5) ** 0.5)}"
        return f"next, on a GPU:\n{command}"
    model, epochs = "--optimizer muon --model d6 --seq_len 256", 4
    if args.tokenizer == "gpt2":
        model, epochs = "--init_from gpt2", 3  # OpenAI's model, which knows English already
    steps = epochs * train // 16384 + 1
    on_gpu = f"{command} {model} --total_batch_size 16384 --max_steps {steps}"
    if val:  # to see when the texts are learnt by heart
        on_gpu += f" --val_every {steps // 10 + 1}"
    if meta["vocab_size"] > 2**13:
        return f"next, on a GPU (a CPU needs --tokenizer 2048, and another --out):\n{on_gpu}"
    # All of the validation text, if that is possible: it is in the order of the files
    on_cpu = f"{command} --quickstart --val_tokens {min(val, 500_000)}"
    return f"next, on a CPU (a small model, in minutes):\n{on_cpu}\nor, on a GPU:\n{on_gpu}"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line, and fill in the defaults that depend on other options."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("fineweb.py", description=__doc__, formatter_class=raw)
    parser.error = partial(require, False)  # raises UserError: one line, not argparse's several
    add = parser.add_argument
    add("--dataset", help=f"name on the Hugging Face hub (default {FINEWEB}), or pydocs")
    add("--name", help="configuration of the dataset (default for FineWeb: sample-10BT)")
    add("--files", nargs="+", action="extend", metavar="PATH", help="files, globs, folders")
    add("--text_key", default="text", help="key or column of the texts (default %(default)s)")
    add("--tokenizer", help="gpt2 (default), bytes, a size to train one, or shards that have one")
    add("--out", help="folder of the shards (default edu_fineweb10B or pydocs)")
    add("--shard_size", type=int, default=10**8, help="tokens of train + val shard (default 100M)")
    add("--max_tokens", type=int, help="stop after this many tokens")
    add("--val_tokens", type=int, help="for validation (default: shard_size or max_tokens / 10)")
    add("--val_share", type=float, help="share for validation, up to val_tokens (0.1; FineWeb: 1)")
    add("--workers", type=int, help="threads (default: 1 per core)")
    args = parser.parse_args(argv)
    require(not (args.files and args.dataset), "--files and --dataset are two sources: choose one")
    args.dataset = args.dataset or (None if args.files else FINEWEB)
    args.name = args.name or {FINEWEB: "sample-10BT"}.get(args.dataset)
    args.out = os.path.expanduser(args.out or FOLDERS.get((args.dataset, args.name), ""))
    args.out = args.out and os.path.normpath(args.out)  # without a slash at the end
    require(args.out, "--out FOLDER is needed: where do the shards go?")
    args.tokenizer = args.tokenizer or {"pydocs": "2048"}.get(args.dataset, "gpt2")
    if args.tokenizer.isdecimal():
        require(257 < int(args.tokenizer) <= 65536, "--tokenizer: expected 258 to 65536 tokens")
    if args.workers is None:
        is_limited = hasattr(os, "sched_getaffinity")  # a job may use some of the cores only
        args.workers = len(os.sched_getaffinity(0)) if is_limited else os.cpu_count()
    if args.val_share is None:
        # FineWeb is shuffled, and build-nanogpt validates on its start. Other data may be sorted
        args.val_share = {FINEWEB: 1.0}.get(args.dataset, 0.1)
    require(0 <= args.val_share <= 1, "--val_share is a number from 0 to 1")
    if args.val_tokens is None:
        args.val_tokens = min(args.shard_size, (args.max_tokens or 10 * args.shard_size) // 10)
    for flag, least in (("shard_size", 1), ("max_tokens", 1), ("workers", 1), ("val_tokens", 0)):
        value = getattr(args, flag)
        require(value is None or value >= least, f"--{flag} {value}: expected {least} or more")
    return args


def main(argv: list[str] | None = None) -> None:
    """Run a command line. Without one, run that of the process, and say what to run next."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a name may hold what a console cannot print
    try:
        args = parse_args(argv)
        meta = find_meta(args)
        if not meta["progress"]["done"]:
            print(f"making {args.out}: if interrupted, the same command continues", flush=True)
            write_shards(args, meta)
        report(args, meta, argv)
    except (UserError, OSError) as error:
        print("fineweb.py:", *str(error).split(), file=sys.stderr)  # all its lines as one
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)  # 128 plus SIGINT's number


def report(args: argparse.Namespace, meta: dict, argv: list[str] | None) -> None:
    """Print what was made and, to a user of the command line, what to run next."""
    train = count_tokens(meta, "train")
    require(train, "no training tokens: more files, or a lower --val_share?")
    sizes = {name: meta["shards"][name]["tokens"] for name in meta["shards"] if "train" in name}
    largest = max(sizes, key=sizes.get)
    tokens = np.load(Path(args.out, largest), mmap_mode="r")[: 10**6]
    text = get_tokenizer(meta["tokenizer"]).decode(tokens.tolist())
    size = len(text.replace(EOT, "").encode()) / len(tokens)
    val = count_tokens(meta, "val")
    print(f"{train:,} tokens to train and {val:,} to validate, of {size:.2f} bytes each")
    if args.tokenizer == "gpt2" and size < 3:  # English has 3.4 to 4.6
        words = sys.argv[1:] if argv is None else argv
        better = [*words, "--out", f"{args.out}_4096", "--tokenizer", "4096"]  # the last ones count
        print("GPT-2's tokens fit these texts badly. This makes tokens of their own:")
        print("python fineweb.py", *map(quote, better))
    if train * size < 10**5:
        print("this is too little to learn from: a model needs 120 KB of text or more")
    elif argv is None:
        # The words that begin a document, without what means something to a shell
        start = text.partition(EOT)[2] or text
        words = re.sub(r"[\"$%!`\\]", " ", start[:200]).split()
        print(suggest(args, meta, " ".join(words[:2])[:20]))


if __name__ == "__main__":
    main()
