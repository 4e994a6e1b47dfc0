"""A record becomes a row in one of the two forms verl reads. Pure functions; a record is a dict of plain values.

GRPO (`utils/dataset/rl_dataset.py`, reward `utils/reward_score/__init__.py`): `prompt` is a list of {role, content},
`reward_model.ground_truth` what the reward compares with, `data_source` which reward. SFT
(`utils/dataset/multiturn_sft_dataset.py`): `messages` is a list of {role, content}. A file of one form fails in the
other's trainer with a KeyError, so what is asked for has to be said (`form`), and is never guessed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dsv4kit.errors import UserError, nearest

GRPO, SFT = "grpo", "sft"
FORMS = (GRPO, SFT)
ROLES = ("system", "user", "assistant", "tool")
# What the columns of a question and its answer are commonly called; the first that is there is taken.
QUESTION = ("question", "problem", "prompt", "instruction")
ANSWER = ("answer", "solution", "response", "ground_truth")
PARTS = ("question", "answer", "prompt", "messages", "data_source", "ground_truth")

Message = dict[str, str]


class Wanted(NamedTuple):
    """What the rows are to be; `columns` names the record's column for a part where it is called otherwise."""

    form: str
    columns: Mapping[str, str]
    data_source: str | None = None
    answer_after: str | None = None
    instruction: str | None = None


class Example(NamedTuple):
    """The messages a row begins with and what should come of them: an answer, or (SFT) nothing besides."""

    messages: list[Message]
    answer: str
    source: str


class Dropped(NamedTuple):
    """A record that makes no row, and why."""

    reason: str


Take = Callable[[Mapping[str, Any], str], "Example | Dropped"]


class Reader:
    """Reads records of one file, all of the shape of its first one."""

    def __init__(self, wanted: Wanted, first: Mapping[str, Any], place: str) -> None:
        """`place`: file and row, for messages. Raises UserError where columns are missing."""
        self.wanted = wanted
        self.used: set[str] = set()
        self._names = list(first)
        self._take: Take = self._grpo(first, place) if wanted.form == GRPO else self._sft(first, place)

    def read(self, record: Mapping[str, Any], place: str) -> Example | Dropped:
        """One record. Raises UserError for a value of another type than the column should have."""
        return self._take(record, place)

    def _grpo(self, first: Mapping[str, Any], place: str) -> Take:
        prompt = self._column("prompt", ["prompt"], first)
        if prompt and isinstance(first[prompt], list):
            self.used |= {prompt, "reward_model", "ability", "extra_info"}
            if "reward_model" not in first and "ground_truth" not in self.wanted.columns:
                raise UserError(f"{place}: `{prompt}` is in verl's form, and `reward_model` is missing{self._have()}")
            return self._prompt_in_form(prompt)
        question, answer = self._column("question", QUESTION, first), self._column("answer", ANSWER, first)
        if question and answer:
            self.used |= {question, answer}
            return self._question(question, answer)
        if "messages" in first:
            raise UserError(
                f"{place}: GRPO needs `prompt`, or a question and an answer; `messages` is SFT's: FORMAT=sft"
            )
        raise UserError(f"{place}: GRPO needs `prompt`, or {self._lacking(question, answer)}{self._have()}")

    def _sft(self, first: Mapping[str, Any], place: str) -> Take:
        messages = self._column("messages", ["messages"], first)
        if messages:
            self.used.add(messages)
            return self._conversation(messages)
        prompt = first.get(self.wanted.columns.get("question", "prompt"))
        if isinstance(prompt, list):
            raise UserError(f"{place}: SFT needs `messages`; `prompt` in verl's form is GRPO's: FORMAT=grpo")
        question, answer = self._column("question", QUESTION, first), self._column("answer", ANSWER, first)
        if question and answer:
            self.used |= {question, answer}
            return self._question(question, answer)
        raise UserError(f"{place}: SFT needs `messages`, or {self._lacking(question, answer)}{self._have()}")

    def _column(self, part: str, usual: Sequence[str], first: Mapping[str, Any]) -> str | None:
        named = self.wanted.columns.get(part)
        if named is not None and named not in first:
            raise UserError(f"COLUMNS {part}={named}: there is no such column{self._have()}{nearest(named, first)}")
        return named or next((name for name in usual if name in first), None)

    def _lacking(self, question: str | None, answer: str | None) -> str:
        lacking = [
            f"{part} ({' or '.join(f'`{name}`' for name in usual)})"
            for part, usual, found in (("a question", QUESTION, question), ("an answer", ANSWER, answer))
            if found is None
        ]
        return " and ".join(lacking)

    def _have(self) -> str:
        return (
            f"; it has {', '.join(map(str, self._names)) or 'no column'}; COLUMNS=question=NAME,answer=NAME says which"
        )

    def _prompt_in_form(self, prompt: str) -> Take:
        def take(record: Mapping[str, Any], place: str) -> Example | Dropped:
            messages = conversation(record.get(prompt), f"{place}: `{prompt}`")
            if "ground_truth" in self.wanted.columns:
                answer = text(record, self.wanted.columns["ground_truth"], place)
            else:
                model = record.get("reward_model")
                if not isinstance(model, dict):
                    raise UserError(f"{place}: `reward_model` is {kind(model)}, not an object with `ground_truth`")
                answer = text(model, "ground_truth", f"{place}: reward_model")
            if reason := empty(messages):
                return Dropped(reason)
            return self._answered(messages, answer, record, place)

        return take

    def _question(self, question: str, answer: str) -> Take:
        def take(record: Mapping[str, Any], place: str) -> Example | Dropped:
            asked, answered = text(record, question, place), text(record, answer, place)
            if not asked.strip():
                return Dropped("the question is empty")
            if self.wanted.form == SFT:
                if not answered.strip():
                    return Dropped("the answer is empty")
                return Example([_message("user", asked), _message("assistant", answered)], "", "")
            content = f"{asked} {self.wanted.instruction}" if self.wanted.instruction else asked
            return self._answered([_message("user", content)], answered, record, place)

        return take

    def _conversation(self, column: str) -> Take:
        def take(record: Mapping[str, Any], place: str) -> Example | Dropped:
            messages = conversation(record.get(column), f"{place}: `{column}`")
            if reason := empty(messages):
                return Dropped(reason)
            if not any(message["role"] == "assistant" for message in messages):
                return Dropped("no message of the assistant to learn")
            return Example(messages, "", "")

        return take

    def _answered(
        self, messages: list[Message], answer: str, record: Mapping[str, Any], place: str
    ) -> Example | Dropped:
        if mark := self.wanted.answer_after:
            _, found, answer = answer.rpartition(mark)
            if not found:
                return Dropped(f"no {mark!r} in the answer")
            answer = answer.replace(",", "")  # 1,000 is 1000 to verl's reward
        if not answer.strip():
            return Dropped("the answer is empty")
        source = self.wanted.data_source
        if source is None:
            column = self.wanted.columns.get("data_source", "data_source")
            self.used.add(column)
            if column not in record:
                raise UserError(
                    f"{place}: no `data_source`, which decides the reward; DATA_SOURCE=NAME says it for all"
                )
            source = text(record, column, place)
            if not source:
                return Dropped("`data_source` is empty")
        return Example(messages, answer.strip(), source)


def grpo_row(asked: Example, split: str, index: int) -> dict[str, Any]:
    """A row of GRPO's form."""
    return {
        "data_source": asked.source,
        "prompt": asked.messages,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": asked.answer},
        "extra_info": {"split": split, "index": index},
    }


def sft_row(asked: Example) -> dict[str, Any]:
    """A row of SFT's form."""
    return {"messages": asked.messages}


def key(asked: Example) -> bytes:
    """What two rows that are the same share: 16 bytes of a hash over question and answer, but for white space."""
    said = [[m["role"], " ".join(m["content"].split())] for m in asked.messages]
    return hashlib.sha256(json.dumps([said, asked.answer]).encode()).digest()[:16]


def question_key(asked: Example) -> bytes:
    """What two rows with the same question share, whatever the answer; tells the overlap of training and test."""
    said = [[m["role"], " ".join(m["content"].split())] for m in asked.messages if m["role"] != "assistant"]
    return hashlib.sha256(json.dumps(said).encode()).digest()[:16]


def conversation(value: Any, place: str) -> list[Message]:
    """A list of {role, content}. Raises UserError for anything else."""
    if not isinstance(value, list):
        raise UserError(f"{place}: {kind(value)}, not a list of {{role, content}}")
    messages = []
    for number, item in enumerate(value, 1):
        if not isinstance(item, dict) or not {"role", "content"} <= item.keys():
            raise UserError(f"{place}: message {number} is no {{role, content}}")
        role, content = item["role"], item["content"]
        if not isinstance(content, str):
            raise UserError(f"{place}: the content of message {number} is {kind(content)}, not text")
        if role not in ROLES:
            raise UserError(
                f"{place}: role {role!r} of message {number}; allowed: {', '.join(ROLES)}{nearest(str(role), ROLES)}"
            )
        messages.append(_message(role, content))
    return messages


def empty(messages: Sequence[Message]) -> str | None:
    """Why a conversation is none."""
    if not messages:
        return "no message"
    return "a message is empty" if any(not message["content"].strip() for message in messages) else None


def text(record: Mapping[str, Any], column: str, place: str) -> str:
    """A text; a number becomes one, and what is missing or null an empty one, which drops the row with its reason."""
    value = record.get(column)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"{place}: `{column}` is {kind(value)}, not text")
    return value if isinstance(value, str) else str(value)


def kind(value: Any) -> str:
    """What a value is, in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "missing or null"}
    return names.get(type(value), "a number")


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
