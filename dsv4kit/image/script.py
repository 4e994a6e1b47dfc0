"""A Dockerfile as one shell script, for machines that have containers and nothing that builds images.

One container is written to from the first stage to the last. A stage from which the last one does not descend works in
the same files: it runs in a shell of its own, what others copy from it is kept aside, and what it made below paths that
were not there before is removed when it ends. Packages it installs over the others' stay, so such a stage may only
install what a later one installs as well (`early` of templates/Dockerfile.j2 does).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dsv4kit.errors import UserError
from dsv4kit.image import squashfs
from dsv4kit.image.dockerfile import Dockerfile, Instruction, Stage, parse
from dsv4kit.image.squashfs import ImageConfig
from dsv4kit.templates import environment

_PAIR = re.compile(r"([A-Za-z_][A-Za-z0-9_.-]*)=(\"(?:[^\"\\]|\\.)*\"|(?:\\.|[^\s\\\"'])*)(?:\s+|\\?$)")
_SHOWN = 70


@dataclass
class _Made:
    """What is gathered on the way: instructions that run, and the configuration of the stages that last."""

    steps: int = 0
    variables: dict[str, None] = field(default_factory=dict)
    labels: list[tuple[str, str]] = field(default_factory=list)
    config: ImageConfig = field(default_factory=lambda: ImageConfig(""))


def render(text: str, arguments: Mapping[str, str], architecture: str, title: str, source: str) -> str:
    """The script. `arguments`: the values of ARGs; `source` names the build in the image's /etc/rc.

    Raises UserError for an instruction that has no counterpart here.
    """
    file = parse(text)
    lasting = _lineage(file)
    made = _Made(config=ImageConfig(architecture))
    lines: list[str] = []
    for stage in file.stages:
        copied = _copied_from(stage, file.stages)
        lines += ["", f"# Stage {stage.name}."]
        body = list(_stage(stage, arguments, made, stage.name in lasting))
        if stage.name in lasting:
            lines += [*body, *_kept(stage.name, copied)]
        else:
            touched = [*dict.fromkeys([*copied, *_destinations(stage)])]
            lines += [f"mapfile -t own < <(missing {shlex.join(touched)})"] if touched else ["own=()"]
            lines += ["(", *body, *_kept(stage.name, copied), ")"]
            lines += ['[ "${#own[@]}" = 0 ] || rm -rf -- "${own[@]}"']
    return (
        environment()
        .get_template("image_build.sh.j2")
        .render(
            title=title,
            architecture=architecture,
            steps=made.steps,
            lines=lines,
            variables=list(made.variables) or ["PATH"],
            labels=made.labels,
            rc=_rc(made.config),
            source=source,
        )
    )


def _lineage(file: Dockerfile) -> set[str]:
    """The last stage and those it is built from."""
    by_name = {stage.name: stage for stage in file.stages}
    found, stage = set[str](), file.stages[-1]
    while True:
        found.add(stage.name)
        if stage.base not in by_name:
            return found
        stage = by_name[stage.base]


def _copied_from(stage: Stage, stages: Sequence[Stage]) -> list[str]:
    """Paths that other stages copy out of it; none that lies below another."""
    paths = [
        path
        for other in stages
        for found in other.instructions
        if found.word == "COPY" and found.flags.get("from") == stage.name
        for path in shlex.split(found.text)[:-1]
    ]
    unique = dict.fromkeys(path.rstrip("/") for path in paths)
    return [path for path in unique if not any(path.startswith(f"{other}/") for other in unique)]


def _destinations(stage: Stage) -> list[str]:
    return [shlex.split(found.text)[-1] for found in stage.instructions if found.word == "COPY"]


def _kept(name: str, copied: Sequence[str]) -> list[str]:
    return [f"keep {name} {shlex.join(copied)}"] if copied else []


def _stage(stage: Stage, arguments: Mapping[str, str], made: _Made, lasts: bool) -> Iterator[str]:
    declared: list[str] = []
    for found in stage.instructions[1:]:
        if found.word == "ARG":
            name, _, default = found.text.strip().partition("=")
            declared.append(name)
            value = shlex.quote(arguments[name]) if name in arguments else _doubled(default, found)
            yield f"export {name}={value}"
        elif found.word == "ENV":
            for name, value in _pairs(found):
                yield f"export {name}={_doubled(value, found)}"
                if lasts:
                    made.variables[name] = None
        elif found.word in ("RUN", "COPY"):
            made.steps += 1
            yield f"step {made.steps} {shlex.quote(_shown(found))}"
            yield from _run(found) if found.word == "RUN" else [_copy(found)]
        else:
            yield from _configure(found, made, lasts)
    if declared and lasts:
        yield f"unset {' '.join(declared)}"


def _configure(found: Instruction, made: _Made, lasts: bool) -> Iterator[str]:
    """What only says how the image is started."""
    change: dict[str, Any] = {}
    if found.word == "WORKDIR":
        yield f"mkdir -p {shlex.quote(found.text.strip())}"
        change = {"working_dir": found.text.strip()}
    elif found.word in ("CMD", "ENTRYPOINT"):
        change = {{"CMD": "command", "ENTRYPOINT": "entrypoint"}[found.word]: tuple(json.loads(found.text))}
    elif found.word == "LABEL":
        if lasts:
            # Here, not at the end: an ARG in it has its value in this stage alone.
            for name, value in _pairs(found):
                made.labels.append((name, f'"${{label_{len(made.labels)}}}"'))
                yield f"label_{len(made.labels) - 1}={_doubled(value, found)}"
    else:
        raise UserError(f"Dockerfile, line {found.line}: {found.word} cannot be done in a script")
    if lasts:
        made.config = replace(made.config, **change)


def _run(found: Instruction) -> Iterator[str]:
    """A shell of its own, as in a build; its lines were joined with backslashes, which it does not need."""
    cached = None
    if mount := found.flags.get("mount"):
        words = dict(word.partition("=")[::2] for word in mount.split(","))
        cached = words.get("target")
        if words.get("type") != "cache" or not cached:
            raise UserError(f"Dockerfile, line {found.line}: --mount={mount} cannot be done in a script")
        yield f"cache {shlex.quote(words.get('id', 'cache'))} {shlex.quote(cached)}"
    first, *rest = found.text.rstrip().splitlines()
    lines = [first.rstrip(), *(line.rstrip().removeprefix("    ") for line in rest)]
    yield "("
    for number, line in enumerate(lines, 1):
        goes_on = number < len(lines) and line and not line.endswith((";", "&&", "||", "{", "|", "(", " in", " do"))
        yield f"  {line} \\" if goes_on else f"  {line}"
    yield ")"
    if cached:
        yield f"rm {shlex.quote(cached)}"


def _copy(found: Instruction) -> str:
    *sources, to = shlex.split(found.text)
    stage = found.flags.get("from")
    root = f'"$work"/stages/{stage}' if stage else '"$context"'
    return f"copy {root} {shlex.quote(to)} {shlex.join(sources)}"


def _pairs(found: Instruction) -> list[tuple[str, str]]:
    """NAME=value of an ENV or LABEL. Raises UserError for another form."""
    text, pairs = " ".join(found.text.split("\n")).strip(), []
    while text:
        match = _PAIR.match(text)
        if not match:
            raise UserError(f"Dockerfile, line {found.line}: {found.word} {text[:40]!r} is not NAME=value")
        pairs.append((match[1], match[2]))
        text = text[match.end() :]
    return pairs


def _doubled(value: str, found: Instruction) -> str:
    """In double quotes: variables in it still count, nothing else does."""
    inner = value[1:-1] if value[:1] == '"' else value
    if "`" in inner or "$(" in inner or (value[:1] != '"' and '"' in inner):
        raise UserError(f"Dockerfile, line {found.line}: {value!r} cannot be put into a script")
    return f'"{inner}"'


def _shown(found: Instruction) -> str:
    text = " ".join(f"{found.word} {found.text}".split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _rc(config: ImageConfig) -> str:
    """/etc/rc without its first line, which the script writes with the labels."""
    return squashfs.rc(config, "").partition("\n")[2]
