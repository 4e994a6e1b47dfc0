"""The work itself, in a process of the trainer's Python: `python -m dsv4kit.prepare.work`, the request on stdin.

The request is `Request` as JSON; the files go to its directory `out`, which exists and is empty. Progress goes to
stdout, a mistake to stderr in one line with exit status 2. What has been written by then is the caller's to remove.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dsv4kit.errors import UserError
from dsv4kit.prepare import forms, reading, summary
from dsv4kit.prepare.forms import Dropped, Example, Wanted
from dsv4kit.prepare.named import BY_NAME
from dsv4kit.prepare.reading import SourceRow

STATISTICS = "statistics.json"
TRAIN, TEST = "train", "test"
_BATCH_ROWS = 1000
_PROGRESS_S = 5.0


@dataclass(frozen=True)
class Request:
    """What is wanted. `name`: a named set, with `copy` a local one; else `files`, split -> paths.

    `test_rows` rows become the test file and of the others `rows` (None: all) the training file, chosen by `seed`.
    `max_tokens`: longer rows are dropped; needs `tokenizer`, a directory, as the lengths in tokens do.
    """

    out: str
    form: str
    name: str | None = None
    copy: str | None = None
    files: dict[str, list[str]] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    data_source: str | None = None
    answer_after: str | None = None
    instruction: str | None = None
    seed: int = 1
    rows: int | None = None
    test_rows: int = 0
    keep_duplicates: bool = False
    tokenizer: str | None = None
    chat_template: str | None = None
    max_tokens: int | None = None

    @property
    def wanted(self) -> Wanted:
        """How records are read."""
        if self.name is None:
            return Wanted(self.form, self.columns, self.data_source, self.answer_after, self.instruction)
        known = BY_NAME[self.name]
        return Wanted(
            self.form,
            {**known.columns, **self.columns} if self.form == forms.GRPO or known.solutions else self.columns,
            self.data_source or known.data_source,
            self.answer_after or known.answer_after,
            self.instruction or known.instruction,
        )

    def sources(self) -> dict[str, list[Callable[[], Iterator[SourceRow]]]]:
        """File to be made -> what it is made of; each can be read more than once."""
        if self.name is None:
            return {split: [_of(Path(path)) for path in paths] for split, paths in self.files.items()}
        known = BY_NAME[self.name]
        found: dict[str, list[Callable[[], Iterator[SourceRow]]]] = {}
        for split, becomes in known.splits.items():
            if self.copy is None:
                found[becomes] = [lambda split=split: reading.of_hub(known, split)]  # type: ignore[misc]
            else:
                found[becomes] = [_of(path) for path in reading.files_of_copy(Path(self.copy), known.config, split)]
        return found


def _of(path: Path) -> Callable[[], Iterator[SourceRow]]:
    return lambda: reading.of_file(path)


class Row(NamedTuple):
    """A row that is kept."""

    asked: Example
    key: bytes
    length: int


class Preparation:
    """One request under way."""

    def __init__(self, request: Request, say: Callable[[str], None]) -> None:
        self.request, self.say = request, say
        self.length = length_of(request)
        self.questions: dict[str, set[bytes]] = {TRAIN: set(), TEST: set()}

    def run(self) -> dict[str, Any]:
        """Writes the files; returns the statistics."""
        request, sources = self.request, self.request.sources()
        chosen = self._chosen(sources[TRAIN]) if TRAIN in sources and (request.rows or request.test_rows) else None
        counts: dict[str, dict[str, Any]] = {}
        if chosen is not None and request.test_rows:
            counts[TEST] = self._write(TEST, sources[TRAIN], chosen[TEST])
        for split, readers in sources.items():
            keep = chosen[TRAIN] if chosen is not None and split == TRAIN else None
            counts[split] = self._write(split, readers, keep)
        shared = self.questions[TRAIN] & self.questions[TEST]
        return {
            "form": request.form,
            "unit": "tokens" if request.tokenizer else "characters",
            "seed": request.seed,
            "files": {split: counts[split] for split in (TRAIN, TEST) if split in counts},
            "overlap": len(shared) if len(counts) == 2 else None,
        }

    def _chosen(self, readers: Sequence[Callable[[], Iterator[SourceRow]]]) -> dict[str, set[bytes]]:
        """Keys of the rows that go to each file: those whose key comes first once it is hashed with the seed."""
        keys = {row.key for row in self._rows(readers, summary.Count(), "choosing")}
        seed, test_rows, rows = str(self.request.seed).encode(), self.request.test_rows, self.request.rows
        wanted = test_rows + (rows or 1)
        if wanted > len(keys):
            raise UserError(f"TEST_ROWS={test_rows} and ROWS={rows or 'all'}: there are {len(keys)} different rows")
        count = len(keys) if rows is None else wanted
        ordered = heapq.nsmallest(count, keys, key=lambda key: hashlib.sha256(seed + b" " + key).digest())
        return {TEST: set(ordered[:test_rows]), TRAIN: set(ordered[test_rows:])}

    def _rows(
        self, readers: Sequence[Callable[[], Iterator[SourceRow]]], count: summary.Count, doing: str
    ) -> Iterator[Row]:
        seen: set[bytes] = set()
        spoke = time.monotonic()
        for begin in readers:
            first, records = reading.peeked(begin(), "the data")
            reader = forms.Reader(self.request.wanted, first.values, first.place)
            for record in records:
                count.read += 1
                if time.monotonic() - spoke > _PROGRESS_S:
                    spoke = time.monotonic()
                    self.say(f"{doing}: {count.read} rows read")
                asked = reader.read(record.values, record.place)
                if isinstance(asked, Dropped):
                    count.dropped[asked.reason] += 1
                    continue
                key = forms.key(asked)
                if not self.request.keep_duplicates:
                    if key in seen:
                        count.dropped["the same as an earlier row"] += 1
                        continue
                    seen.add(key)
                length = self.length(asked.messages)
                if self.request.max_tokens is not None and length > self.request.max_tokens:
                    count.dropped[f"longer than {self.request.max_tokens} tokens"] += 1
                    continue
                yield Row(asked, key, length)
            count.ignored |= set(first.values) - reader.used

    def _write(
        self, split: str, readers: Sequence[Callable[[], Iterator[SourceRow]]], keep: set[bytes] | None
    ) -> dict[str, Any]:
        """One file. `keep`: keys of the rows that are meant for it; None for all."""
        import pyarrow
        import pyarrow.parquet

        count = summary.Count()
        path = Path(self.request.out, f"{split}.parquet")
        batch: list[dict[str, Any]] = []
        with pyarrow.parquet.ParquetWriter(path, schema(self.request.form)) as writer:

            def flush() -> None:
                writer.write_table(pyarrow.Table.from_pylist(batch, schema(self.request.form)))
                batch.clear()

            for row in self._rows(readers, count, split):
                if keep is not None and row.key not in keep:
                    count.dropped["not chosen for this file"] += 1
                    continue
                batch.append(self._as_row(row.asked, split, count.kept))
                self.questions[split].add(forms.question_key(row.asked))
                count.kept += 1
                count.lengths.append(row.length)
                if len(batch) == _BATCH_ROWS:
                    flush()
            if batch:
                flush()
        if not count.kept:
            why = "; ".join(f"{number}: {reason}" for reason, number in count.dropped.items())
            raise UserError(f"{split}: of {count.read} rows none is left ({why})")
        return count.as_dict()

    def _as_row(self, asked: Example, split: str, index: int) -> dict[str, Any]:
        return forms.grpo_row(asked, split, index) if self.request.form == forms.GRPO else forms.sft_row(asked)


def schema(form: str) -> Any:
    """The columns and their types."""
    import pyarrow

    text = pyarrow.string()
    messages = pyarrow.list_(pyarrow.struct([("role", text), ("content", text)]))
    if form == forms.SFT:
        return pyarrow.schema([("messages", messages)])
    return pyarrow.schema(
        [
            ("data_source", text),
            ("prompt", messages),
            ("ability", text),
            ("reward_model", pyarrow.struct([("style", text), ("ground_truth", text)])),
            ("extra_info", pyarrow.struct([("split", text), ("index", pyarrow.int64())])),
        ]
    )


def length_of(request: Request) -> Callable[[list[forms.Message]], int]:
    """How long a row's messages are: in tokens as the trainer makes them where there is a tokenizer."""
    if request.tokenizer is None:
        return lambda messages: sum(len(message["content"]) for message in messages)
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(request.tokenizer, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        why = " ".join(str(error).split())[:160]
        raise UserError(f"TOKENIZER={request.tokenizer}: no tokenizer can be loaded from it: {why}") from None
    if request.chat_template is not None:
        tokenizer.chat_template = Path(request.chat_template).read_text(encoding="utf-8")
    if not tokenizer.chat_template:
        raise UserError(
            f"TOKENIZER={request.tokenizer}: has no chat template, so rows have no tokens; CHAT_TEMPLATE_FILE=FILE"
            " brings one (containers/chat-templates)"
        )
    begins_answer = request.form == forms.GRPO

    def tokens(messages: list[forms.Message]) -> int:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=begins_answer, tokenize=False)
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    return tokens


def parsed(content: Mapping[str, Any]) -> Request:
    """The request from JSON."""
    return Request(**content)


def main() -> int:
    """See the module."""
    request = parsed(json.load(sys.stdin))
    try:
        found = Preparation(request, lambda line: print(line, flush=True)).run()
    except UserError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return UserError.exit_code
    asked = dataclasses.asdict(request)
    del asked["out"]
    content = json.dumps({**found, "request": asked}, indent=1, ensure_ascii=False)
    Path(request.out, STATISTICS).write_text(content + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
