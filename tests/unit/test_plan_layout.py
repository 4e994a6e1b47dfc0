"""Pipeline layouts: Megatron's notation read and checked, and generated layouts legal for every PP."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import FLASH, PRO

from dsv4kit.errors import UserError
from dsv4kit.plan.counted.layout import (
    LayoutRules,
    StageWeights,
    check,
    generate,
    max_pipeline,
    parse,
    weights_for,
    write,
)

PRO_RULES = {pp: LayoutRules(pp, 61, 3, 0) for pp in range(1, 60)}


def layers_of(text, rules):
    return [len(stage.layers) for stage in check(text, rules)]


def refusal(text, rules):
    """The message, or nothing where the layout is legal."""
    try:
        check(text, rules)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("EttL", ("EttL",)),
        ("Et*3|(tt|)*2tL", ("Ettt", "tt", "tt", "tL")),
        ("Ettt|(tt|)*29,m|L", ("Ettt", *["tt"] * 29, "m", "L")),
        ("(Et)*1|(t*4|)*2t*3L", ("Et", "tttt", "tttt", "tttL")),
        ("E|t|*2L", ("E", "t", "", "L")),
    ],
)
def test_notation(text, stages):
    assert parse(text) == stages


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "Et*",
        "Et*0L",
        "Et*-1L",
        "E(tL",
        "Et)L",
        "((t)*2)*2",
        "t*99999999999999999999",
        "(t*9999)*9999",
        "E t L",
    ],
)
def test_what_is_not_notation_is_one_line(text):
    rules = LayoutRules(2, 4, 1, 0)
    with pytest.raises(UserError) as error:
        check(text, rules)
    assert "\n" not in str(error.value)
    assert "layout" in str(error.value)


@given(st.text(alphabet="EtmL|()*,0123456789 x", max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_refused(text):
    assert "\n" not in refusal(text, LayoutRules(4, 10, 3, 0))


def test_virtual_stages_are_refused_not_half_planned():
    with pytest.raises(UserError, match="4 stages for PP=2; one each, virtual stages are neither passed on to verl"):
        check("Et|t|t|tL", LayoutRules(2, 4, 1, 0))


@pytest.mark.parametrize(
    ("text", "rules", "words"),
    [
        ("Et*3|t*3L", LayoutRules(2, 61, 3, 0), "too few layers"),
        ("Et*3|t*60L", LayoutRules(2, 61, 3, 0), "too many layers"),
        ("Ett|t*59L", LayoutRules(2, 61, 3, 0), "hash layers must be in the stage of E"),
        ("Et*30|t*31mL", LayoutRules(2, 61, 3, 0), "MTP is off"),
        ("Et*30|t*31L", LayoutRules(2, 61, 3, 1), "0 of m"),
        ("Et*30|t*30m|tL", LayoutRules(3, 61, 3, 1), "m stands after every t"),
        ("Et*30|t*31m|mL", LayoutRules(3, 61, 3, 2), "all m stand in one stage"),
        ("Et*30|t*31L", LayoutRules(3, 61, 3, 0), "2 stages for PP=3; one each"),
        ("t*30E|t*31L", LayoutRules(2, 61, 3, 0), "E stands first"),
        ("Et*30|Lt*31", LayoutRules(2, 61, 3, 0), "L stands last"),
        ("Et*61||L", LayoutRules(3, 61, 3, 0), "stage 1 is empty"),
    ],
)
def test_a_broken_rule_is_named_with_its_source(text, rules, words):
    with pytest.raises(UserError) as error:
        check(text, rules)
    assert words in str(error.value)
    assert "(Megatron-LM" in str(error.value) or "(dsv4kit)" in str(error.value)


def test_the_layout_megatron_bridge_would_make_for_pp32_is_refused():
    """61 layers over 32 stages evenly: two in stage 0, where three hash layers have to be."""
    with pytest.raises(UserError, match="stage 0 holds 2 layers"):
        check("Ett|(tt|)*28(t|)*2tL", PRO_RULES[32])


@pytest.mark.parametrize(
    ("model", "pp", "expert", "text"),
    [
        (PRO, 32, 8, "Et*3|(tt|)*27(t|)*3tL"),
        (PRO, 16, 16, "Et*3|(t*4|)*14ttL"),
        (FLASH, 4, 8, "Et*11|(t*11|)*2t*10L"),
        (FLASH, 32, 8, "Et*3|(tt|)*9(t|)*21tL"),
        (PRO, 1, 8, "Et*61L"),
    ],
)
def test_generated_layouts_one_would_write_by_hand(model, pp, expert, text):
    assert generate(LayoutRules(pp, model.num_layers, 3, 0), weights_for(model, expert)) == text


@pytest.mark.parametrize("model", [PRO, FLASH], ids=["pro", "flash"])
@pytest.mark.parametrize("mtp", [0, 1])
def test_every_legal_pp_has_a_layout_that_holds_every_layer_once(model, mtp):
    for pp in range(1, max_pipeline(model.num_layers, model.hash_layers) + 1):
        rules = LayoutRules(pp, model.num_layers, model.hash_layers, mtp)
        text = generate(rules, weights_for(model, 8))
        stages = check(text, rules)
        assert len(stages) == pp
        assert [layer for stage in stages for layer in stage.layers] == list(range(model.num_layers))
        assert set(range(model.hash_layers)) <= set(stages[0].layers)
        assert [stage.mtp for stage in stages] == [0] * (pp - 1) + [mtp]


@pytest.mark.parametrize("pp", [0, -1, 60, 1000])
def test_an_impossible_pp_is_refused(pp):
    with pytest.raises(UserError, match="allow PP from 1 to 59"):
        generate(LayoutRules(pp, 61, 3, 0), StageWeights())


@given(
    layers=st.integers(1, 80),
    hash_layers=st.integers(0, 5),
    mtp=st.integers(0, 2),
    pp=st.integers(1, 80),
    weights=st.tuples(*[st.floats(0, 8)] * 3),
)
@settings(max_examples=200, deadline=None)
def test_any_model_gets_a_legal_layout(layers, hash_layers, mtp, pp, weights):
    hash_layers = min(hash_layers, layers)
    rules = LayoutRules(min(pp, max_pipeline(layers, hash_layers)), layers, hash_layers, mtp)
    text = generate(rules, StageWeights(*weights))
    assert sum(layers_of(text, rules)) == layers
    assert min(layers_of(text, rules)) >= 1
    assert write(parse(text)) == text


@given(st.lists(st.sampled_from(["E", "t", "tt", "tttt", "mL", "ttmL"]), min_size=1, max_size=30))
def test_what_is_written_reads_the_same(stages):
    assert parse(write(stages)) == tuple(stages)


@pytest.mark.parametrize("pp", [2, 4, 8, 16, 32])
def test_middle_stages_differ_by_one_layer_at_most(pp):
    counts = layers_of(generate(PRO_RULES[pp], weights_for(PRO, 8)), PRO_RULES[pp])
    assert max(counts[1:-1] or [0]) - min(counts[1:-1] or [0]) <= 1
