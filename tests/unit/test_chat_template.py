"""Chat templates travel by value: whatever is in the file arrives in verl's configuration, and renders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import pytest
from omegaconf import OmegaConf

from dsv4kit.config.loading import Override, load_settings
from dsv4kit.errors import UserError
from dsv4kit.verl_keys import chat_template, compose, overrides

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "1+1?"}
ANSWER = {"role": "assistant", "content": "It's 2."}
HOSTILE = "{% for m in messages %}{{ m['content'] ~ \"\\n$HOME `id` ${x} \\\\${y} 'q' | * é\" }}{% endfor %}\n"


def render(text: str, messages: list[dict[str, Any]], ask: bool = False) -> str:
    """As transformers does it."""
    made = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    return made.from_string(text).render(messages=messages, add_generation_prompt=ask, bos_token="<b>", eos_token="<e>")


@pytest.fixture
def shipped() -> str:
    text = chat_template.read("deepseek-v4-minimal")
    assert text is not None
    return text


def test_the_shipped_template_needs_bos_and_eos_only(shipped: str) -> None:
    expected = "<b>Be brief.\n\nUser: 1+1?\n\nAssistant: It's 2.<e>"
    assert render(shipped, [SYSTEM, USER, ANSWER]) == expected


def test_messages_render_alone_as_they_do_in_place(shipped: str) -> None:
    """verl tokenizes them one by one, less what the first of two equal ones has more (multiturn_sft_dataset.py)."""
    empty = {"role": "user", "content": ""}
    one, two = render(shipped, [empty]), render(shipped, [empty, empty])
    prefix = one[: -(len(two) - len(one))]
    assert prefix == "<b>"
    talk = [SYSTEM, USER, ANSWER, USER, ANSWER]
    parts = [render(shipped, [message]) for message in talk]
    joined = parts[0] + "".join(part.removeprefix(prefix) for part in parts[1:])
    assert joined == render(shipped, talk)


def test_an_answer_begins_with_what_asks_for_it(shipped: str) -> None:
    """verl takes that many tokens of an answer out of the loss."""
    asks = render(shipped, [USER], ask=True).removeprefix(render(shipped, [USER]))
    assert asks == "Assistant:"
    assert render(shipped, [ANSWER]).removeprefix("<b>").startswith(asks)


def test_content_in_parts(shipped: str) -> None:
    parts = [{"type": "text", "text": "1+"}, {"type": "image"}, {"type": "text", "text": "1?"}]
    assert render(shipped, [{"role": "user", "content": parts}]) == "<b>User: 1+1?\n\n"


@pytest.mark.parametrize("recipe", ["sft", "grpo"])
def test_a_file_of_ones_own_survives_hydra(tmp_path: Path, recipe: str) -> None:
    path = tmp_path / "it's mine.jinja"
    path.write_text(HOSTILE, encoding="utf-8")
    own = Override("model.chat_template_file", str(path), f"CHAT_TEMPLATE_FILE={path}")
    settings = load_settings("h100", "dsv4-flash", recipe, [own]).settings
    pairs = overrides.build(
        settings, run_name="r", model_path="/m", data_dir="/d", run_dir="/r", kit_dir="/k", layout="EtL"
    )
    name = settings.recipe.config_name
    config = compose._compose(name, compose.Tree(name).render(pairs))
    key = "model.custom_chat_template" if recipe == "sft" else "actor_rollout_ref.model.custom_chat_template"
    assert OmegaConf.select(config, key) == HOSTILE
    assert render(HOSTILE, [USER]).startswith("1+1?\n$HOME `id` ${x}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{% for m in messages %}", "line 1: "), ("no template", "never looks at `messages`")],
)
def test_a_broken_template_is_one_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "x.jinja"
    path.write_text(text)
    with pytest.raises(UserError, match=expected) as error:
        chat_template.read(str(path))
    assert "\n" not in str(error.value)


def test_transformers_own_tag_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "x.jinja"
    path.write_text("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}")
    assert chat_template.read(str(path))


def test_a_file_that_is_not_there_names_the_shipped_ones() -> None:
    with pytest.raises(UserError, match=r"CHAT_TEMPLATE_FILE='deepseek-v4-minimum': .*did you mean 'deepseek-v4-min"):
        chat_template.read("deepseek-v4-minimum")
