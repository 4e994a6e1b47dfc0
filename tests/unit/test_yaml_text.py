"""What the kit's YAML files may not hold, though YAML itself takes it."""

from __future__ import annotations

import pytest

from dsv4kit.yaml_text import YamlError, parse


def test_plain_values_come_as_they_are() -> None:
    assert parse("a: {b: [1, 2.5, yes, null], c: text}") == {"a": {"b": [1, 2.5, True, None], "c": "text"}}


def test_a_key_twice_in_one_mapping_is_refused_with_its_line() -> None:
    with pytest.raises(YamlError, match="'a' stands here twice") as caught:
        parse("a: 1\nb: {a: 2}\na: 3\n")
    assert caught.value.line == 3


def test_what_is_merged_in_may_be_overridden() -> None:
    merged = parse("base: &b {x: 1, y: 2}\nmid: &m {<<: *b, x: 3}\ntop: {<<: *m, x: 4}\n")
    assert merged["mid"] == {"x": 3, "y": 2}
    assert merged["top"] == {"x": 4, "y": 2}


def test_the_same_word_as_text_and_as_number_are_two_keys() -> None:
    assert parse("{1: a, '1': b}") == {1: "a", "1": "b"}


def test_an_alias_within_its_own_anchor_is_refused() -> None:
    with pytest.raises(YamlError, match="within its own anchor"):
        parse("a: &a [1, [*a]]")


def test_aliases_of_aliases_that_stand_for_a_thousand_million_values_are_refused_at_once() -> None:
    bomb = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))
    with pytest.raises(YamlError, match="more than 100000 values"):
        parse(bomb)


@pytest.mark.parametrize("text", ["a: [", "a: b: c", "\tx: 1", "!!python/object:os.system {}", "a: 2026-13-45", "\0"])
def test_other_texts_say_what_is_wrong(text: str) -> None:
    with pytest.raises(YamlError):
        parse(text)
