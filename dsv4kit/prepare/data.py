"""Has data prepared: checks what is asked for, starts the trainer's Python, and puts its files in place, or nothing.

It runs where it is called, not as a job: that is the login node, on many clusters the only one that can reach a hub,
and the rows of a data set take seconds. The Python that does the work is the trainer's (see `work`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dsv4kit.errors import UserError, nearest
from dsv4kit.prepare import forms
from dsv4kit.prepare.named import BY_NAME
from dsv4kit.prepare.reading import SUFFIXES
from dsv4kit.prepare.work import STATISTICS, TEST, TRAIN, Request

PACKAGE = Path(__file__).resolve().parents[1]
# What steers another Python than this one.
_ASTRAY = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONUSERBASE", "PYTHONDONTWRITEBYTECODE")


def check(request: Request) -> None:
    """Refuses what can be seen to be wrong before anything is started."""
    if request.form not in forms.FORMS:
        near = nearest(request.form, forms.FORMS)
        raise UserError(f"FORMAT={request.form!r}: unknown; grpo has `prompt`, sft has `messages`{near}")
    if request.name is not None and request.form == forms.SFT and not BY_NAME[request.name].solutions:
        raise UserError(f"DATA={request.name}: has answers and no worked solutions: nothing to learn by FORMAT=sft")
    if request.copy is not None and request.name is None:
        raise UserError(f"FROM={request.copy}: goes with the name of a data set; a file of your own is DATA=FILE")
    for part in request.columns:
        if part not in forms.PARTS:
            raise UserError(f"COLUMNS {part}: unknown; allowed: {', '.join(forms.PARTS)}{nearest(part, forms.PARTS)}")
    for path in [*request.files.get(TRAIN, []), *request.files.get(TEST, [])]:
        if not os.path.isfile(path):
            raise UserError(f"{path}: {'is a directory' if os.path.isdir(path) else 'no such file'}")
        if Path(path).suffix.lower() not in SUFFIXES:
            raise UserError(f"{path}: its name ends with none of {', '.join(SUFFIXES)}")
    if request.test_rows and TEST in _made(request):
        raise UserError(f"TEST_ROWS={request.test_rows}: there is test data besides")
    if request.rows and TRAIN not in _made(request):
        raise UserError(f"ROWS={request.rows}: {request.name} is for validation and has no training data")
    if request.max_tokens is not None and request.tokenizer is None:
        raise UserError(f"MAX_TOKENS={request.max_tokens}: tokens are counted by TOKENIZER=DIRECTORY")
    for name, path_ in (("TOKENIZER", request.tokenizer), ("CHAT_TEMPLATE_FILE", request.chat_template)):
        if path_ is not None and not os.path.exists(path_):
            raise UserError(f"{name}={path_}: no such {'directory' if name == 'TOKENIZER' else 'file'}")


def named_or_file(data: str) -> str | None:
    """The name of a known data set; None where `data` is a file. Raises UserError for neither."""
    if data in BY_NAME:
        return data
    if os.path.exists(data) or Path(data).suffix.lower() in SUFFIXES:
        return None
    near = nearest(data.lower(), BY_NAME)
    raise UserError(f"DATA={data!r}: neither a known data set nor a file; known: {', '.join(BY_NAME)}{near}")


def prepare(request: Request, out: Path, python: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """Makes `out` with train.parquet, test.parquet and statistics.json, or leaves nothing. Returns the statistics.

    `python` is the command that runs a Python which has pyarrow, datasets and transformers. Raises UserError.
    """
    check(request)
    if out.exists() or out.is_symlink():
        raise UserError(f"OUT={out}: exists already")
    if not out.parent.is_dir():
        raise UserError(f"OUT={out}: there is no directory {out.parent}")
    try:
        staging = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise UserError(f"OUT={out}: {out.parent}: {error.strerror}") from None
    try:
        _work(dataclasses.replace(request, out=str(staging)), python, say)
        found: dict[str, Any] = json.loads((staging / STATISTICS).read_text(encoding="utf-8"))
        staging.chmod(0o755)
        if out.exists():
            raise UserError(f"OUT={out}: exists already; somebody else has just made it")
        staging.rename(out)
        return found
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _work(request: Request, python: Sequence[str], say: Callable[[str], None]) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in _ASTRAY}
    environment |= {
        "PYTHONPATH": str(PACKAGE.parent),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [*python, "-m", "dsv4kit.prepare.work"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env=environment,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it ended before it read; its status and its words say why
                process.stdin.write(json.dumps(dataclasses.asdict(request)))
                process.stdin.close()
            for line in process.stdout:
                say(line.rstrip("\n"))
            status = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        said.seek(0)
        lines = [line for line in said.read().splitlines() if line.strip()]
    if status == UserError.exit_code and lines:
        raise UserError(lines[-1])
    if status != 0:
        why = lines[-1] if lines else f"exit status {status}"
        raise UserError(f"{python[-1]}: could not prepare the data: {why}")


def _made(request: Request) -> set[str]:
    """The files that the sources alone make."""
    return set(BY_NAME[request.name].splits.values()) if request.name else set(request.files)
