"""Chat templates: read here, when the run is submitted, and passed to verl by value (it knows no `@file`)."""

from __future__ import annotations

from pathlib import Path

from dsv4kit.config.paths import ROOT
from dsv4kit.errors import UserError, nearest

SHIPPED = ROOT / "containers" / "chat-templates"


def read(name: str | None) -> str | None:
    """The text of a template: a file of the user's, or by its name one that is shipped; None for none."""
    if not name:
        return None
    shipped = sorted(path.stem for path in SHIPPED.glob("*.jinja"))
    path = SHIPPED / f"{name}.jinja" if name in shipped else Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        known = f"shipped: {', '.join(shipped)}{nearest(name, shipped)}"
        raise UserError(f"CHAT_TEMPLATE_FILE={name!r}: {error.strerror}; a file, or one that is {known}") from None
    except UnicodeDecodeError:
        raise UserError(f"CHAT_TEMPLATE_FILE={name!r}: not text in UTF-8") from None
    _check(name, text)
    return text


def _check(name: str, text: str) -> None:
    import jinja2

    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except jinja2.TemplateSyntaxError as error:
        # transformers adds a tag of its own, which marks the answers.
        if "generation" not in str(error.message):
            raise UserError(f"CHAT_TEMPLATE_FILE={name!r}: line {error.lineno}: {error.message}") from None
    if "messages" not in text:
        raise UserError(f"CHAT_TEMPLATE_FILE={name!r}: no template of a conversation: it never looks at `messages`")
