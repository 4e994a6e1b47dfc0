"""Profiles: composed from four files and the user's overrides, every value with its source, every mistake one line."""

from pathlib import Path

import pytest

from dsv4kit.config import loading, time_limit
from dsv4kit.config.cache import cache_dir
from dsv4kit.config.frozen import frozen_settings
from dsv4kit.config.loading import Override, load_settings, load_site, names
from dsv4kit.config.tree import merge
from dsv4kit.config.values import parse_value, split_pair, split_words
from dsv4kit.errors import UserError


def refused(*overrides: Override, hardware: str = "cpu", model: str = "tiny", recipe: str = "grpo") -> str:
    with pytest.raises(UserError) as error:
        load_settings(hardware, model, recipe, overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_every_profile_resolves() -> None:
    for name, combination in loading.combinations().items():
        resolved = load_settings(combination["hardware"], combination["model"], combination["recipe"])
        assert resolved.settings.profile == name


def test_every_site_is_valid() -> None:
    assert "sandbox" in names("sites")
    for name in names("sites"):
        assert load_site(name).name == name


def test_the_default_run_is_12_steps_in_segments_of_4_on_2_nodes() -> None:
    schedule = load_settings("cpu", "tiny", "grpo").settings.schedule
    assert (schedule.steps, schedule.segment_steps, schedule.nodes) == (12, 4, 2)


def test_an_override_wins_and_is_named_as_the_source() -> None:
    resolved = load_settings("cpu", "tiny", "grpo", [Override("schedule.steps", "16", "STEPS=16")])
    assert resolved.settings.schedule.steps == 16
    assert resolved.sources["schedule.steps"] == "STEPS=16"
    assert resolved.sources["schedule.nodes"] == "dsv4kit/config/profiles/grpo-tiny.yaml"


def test_a_verl_key_keeps_its_dots() -> None:
    override = Override("verl.actor_rollout_ref.actor.optim.lr", 0.1, "VERL")
    assert load_settings("cpu", "tiny", "grpo", [override]).settings.verl["actor_rollout_ref.actor.optim.lr"] == 0.1


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (Override("schedule.stepz", 1, "SET schedule.stepz"), "SET schedule.stepz: schedule.stepz: no such key"),
        (Override("schedule.stepz", 1, "SET"), "(did you mean 'steps'?)"),
        (Override("schedule.steps", "0", "STEPS=0"), "STEPS=0: schedule.steps='0': must be at least 1"),
        (Override("schedule.steps", "many", "STEPS=many"), "not a whole number"),
        (Override("schedule.steps", "1.5", "STEPS=1.5"), "not a whole number"),
        (Override("schedule.nodes", "0", "NODES=0"), "NODES=0: schedule.nodes='0'"),
        (
            Override("schedule.time", "soon", "TIME=soon"),
            "TIME=soon: schedule.time='soon': not a time limit",
        ),
        (Override("schedule.time", "1-99999999:00", "TIME"), "not a time limit"),
        (Override("data.seed", 2**32, "SET"), "data.seed=4294967296: must be at most 4294967295"),
        (Override("hardware.cpu_numa_nodes", [], "SET"), "hardware.cpu_numa_nodes=[]: memory has to be somewhere"),
        (Override("nothing", 1, "SET nothing"), "allowed here: checkpoint, data"),
        (Override("checkpoint.contents", ["model", "optimiser"], "SET"), "checkpoint.contents.1='optimiser'"),
    ],
)
def test_a_mistake_names_source_key_value_and_what_is_allowed(override: Override, expected: str) -> None:
    assert expected in refused(override)


def test_unknown_names_list_the_known_ones() -> None:
    assert "HW='cqu': no such name; known: " in refused(hardware="cqu")
    assert "(did you mean 'cpu'?)" in refused(hardware="cqu")
    assert "MODEL='tinny'" in refused(model="tinny")
    assert "RECIPE='../../etc/passwd'" in refused(recipe="../../etc/passwd")


def test_a_broken_yaml_file_is_named_with_its_line(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("name: x\nslurm: {grace_s: [}\n")
    with pytest.raises(UserError, match=r"site\.yaml:2: not valid YAML"):
        load_site(str(site))


def test_a_site_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^SITE='.*/none\.yaml': no such file; there are examples in "):
        load_site(str(tmp_path / "none.yaml"))


def test_an_alias_within_its_own_anchor_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("name: mine\nenv: &all {X: {Y: [*all]}}\n")
    with pytest.raises(UserError, match="alias"):
        load_site(str(path))


def test_a_key_that_stands_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("name: mine\nslurm:\n  grace_s: 60\n  grace_s: 600\n")
    with pytest.raises(UserError, match=r"site\.yaml:4: the key 'grace_s' stands here twice"):
        load_site(str(path))


def test_what_a_site_lacks_is_said_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("name: mine\n")
    with pytest.raises(UserError, match=f"^{path}: description: not set"):
        load_site(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hardwar: {}", "x.yaml: hardware=None: not keys and values"),
        ("hardware: {name: x, self: 1}", "x.yaml: hardware.self: no such key"),
        ("hardware: {name: x, device: gpu}", "x.yaml: hardware.device='gpu': none of cuda, cpu"),
        ("defaults: 5", "x.yaml: defaults=5: names of model"),
        ("defaults: {model: [tiny]}", "x.yaml: defaults="),
    ],
)
def test_a_damaged_hardware_file_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "x.yaml").write_text(text)
    monkeypatch.setattr(loading, "HERE", tmp_path)
    read = loading.hardware_defaults if text.startswith("defaults") else loading.hardware_of
    with pytest.raises(UserError) as error:
        read("x")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x: 1", "for=None: names of model and recipe"),
        ("for: 3", "for=3: names of model and recipe"),
        ("for: {model: tiny}", "for={'model': 'tiny'}: names"),
        ("for: {model: [tiny], recipe: grpo}", "for="),
        ("for: {model: tiny, recipe: grpo}", "hardware=None: a table is needed"),
        ("{for: {model: tiny, recipe: grpo}, hardware: [cpu]}", "hardware=['cpu']: a table is needed"),
        ("{for: {model: tiny, recipe: grpo}, hardware: {cpu: 5}}", "hardware={'cpu': 5}: a table is needed"),
        (
            "{for: {model: tiny, recipe: grpo}, hardware: {cqu: {}}}",
            "hardware.cqu: no such hardware; known: cpu (did you mean 'cpu'?)",
        ),
    ],
)
def test_a_damaged_table_of_profiles_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    for kind in ("hardware", "profiles"):
        (tmp_path / kind).mkdir()
    (tmp_path / "hardware" / "cpu.yaml").write_text("")
    (tmp_path / "profiles" / "x.yaml").write_text(text)
    monkeypatch.setattr(loading, "HERE", tmp_path)
    with pytest.raises(UserError) as error:
        loading.combinations()
    assert str(error.value).startswith(f"{tmp_path}/profiles/x.yaml: {message}")


def test_settings_of_an_earlier_kit_are_read_without_those_that_are_gone() -> None:
    now = load_settings("h100", "dsv4-pro", "grpo").settings
    tree = now.model_dump()
    tree["hardware"] |= {"cores_per_node": 96, "scratch_gb": None}
    tree["schedule"]["nodes_multiple_of"] = 1
    assert frozen_settings(tree) == now
    tree["schedule"]["stepz"] = 1
    for damaged in (tree, {}, None, {"hardware": 3}):
        with pytest.raises(ValueError, match=r"not the settings of a run|validation error"):
            frozen_settings(damaged)


@pytest.mark.parametrize("bases", ["5", "[5]", "{a: b}", "tiny"])
def test_bases_that_are_no_names_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bases: str) -> None:
    for kind in ("hardware", "models", "recipes", "profiles"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "x.yaml").write_text(f"bases: {bases}\n")
    (tmp_path / "profiles" / "x.yaml").write_text("{for: {model: x, recipe: x}, hardware: {x: {}}}")
    monkeypatch.setattr(loading, "HERE", tmp_path)
    with pytest.raises(UserError, match=r"x\.yaml: bases=.*: a list of names"):
        load_settings("x", "x", "x")


def test_a_user_without_a_home_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DSV4KIT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(UserError, match="DSV4KIT_CACHE"):
        cache_dir()


def test_merge_remembers_the_last_source_of_each_value() -> None:
    sources: dict[str, str] = {}
    tree = merge({}, {"a": {"b": 1, "c": 2}}, "first", sources)
    tree = merge(tree, {"a": {"c": 3}}, "second", sources)
    assert tree == {"a": {"b": 1, "c": 3}}
    assert sources == {"a.b": "first", "a.c": "second"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("-0.5", -0.5),
        ("1e-6", 1e-6),
        ("True", True),
        ("null", None),
        ("[model,extra]", ["model", "extra"]),
        ("{a: 1}", {"a": 1}),
        ("a: b", "a: b"),
        ("yes", "yes"),
        ("~", "~"),
        ("2026-01-01", "2026-01-01"),
        ('"quoted"', '"quoted"'),
        (" padded ", " padded "),
        ("[not closed", "[not closed"),
        ("$HOME `id` | * é\n", "$HOME `id` | * é\n"),
        ("", ""),
    ],
)
def test_only_what_is_plainly_a_number_list_or_the_like_is_read_as_one(text: str, value: object) -> None:
    assert parse_value(text) == value


def test_a_pair_is_split_at_its_first_equals_sign() -> None:
    assert split_pair("a.b=c=d", "SET") == ("a.b", "c=d")


@pytest.mark.parametrize("text", ["novalue", "=x", "a b=c", "a;b=c", "$(id)=c"])
def test_what_is_no_pair_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="key=value"):
        split_pair(text, "SET")


def test_words_are_split_as_a_shell_would() -> None:
    assert split_words("a=1 'b=2 3' c=\"4 5\"", "SET") == ["a=1", "b=2 3", "c=4 5"]
    with pytest.raises(UserError, match="SET="):
        split_words("a='1", "SET")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("4:00:00", 14400), ("1-12", 129600), ("1-12:30", 131400), ("1-00:00:01", 86401)],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert time_limit.seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0:00", "4h", "-1", "1:2:3:4", "٣", "UNLIMITED"])
def test_other_time_limits_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="time limit"):
        time_limit.seconds(text)
