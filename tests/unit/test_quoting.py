"""Every value survives the language it is quoted for: read back by the real reader, it is what it was."""

import shlex
import subprocess
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from dsv4kit import quoting

HOSTILE = "'\"\\${}|*`,:[]() \n\t=~#@!%&;<>é漢"
texts = st.text(
    alphabet=st.one_of(st.sampled_from(HOSTILE), st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    max_size=16,
)
numbers = st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), st.none())
values = st.one_of(texts, numbers, st.lists(texts, max_size=4), st.dictionaries(st.sampled_from(["k", "l_1"]), texts))


def hydra_reads(text: str) -> object:
    override = OverridesParser.create().parse_override(f"key={text}")
    config = OmegaConf.create({"key": "before"})
    ConfigLoaderImpl._apply_overrides_to_config([override], config)
    return OmegaConf.to_container(config, resolve=True)["key"]


@settings(max_examples=1000, deadline=None)
@given(values)
@example("it's ${HOME} `id` $(id) \"quoted\" \\' | * \n é")
@example("ends with a backslash\\")
@example("\\${not.an.interpolation}")
@example("Et*6|t*6|(tt|)*8m|L")
def test_hydra_reads_back_what_was_quoted(value: object) -> None:
    assert hydra_reads(quoting.hydra(value)) == value


@settings(max_examples=50, deadline=None)
@given(st.lists(texts, max_size=3))
def test_bash_reads_back_what_was_quoted(words: list[str]) -> None:
    script = "printf '%s\\0' " + " ".join(quoting.shell(word) for word in [*words, "end"])
    out = subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout
    assert [part.decode() for part in out.split(b"\0")[:-1]] == [*words, "end"]


def test_sbatch_values_are_quoted_and_percent_signs_doubled() -> None:
    assert quoting.sbatch("/runs/50% done/it's") == '"/runs/50%% done/it\'s"'
    assert quoting.sbatch('a"b\\c') == '"a\\"b\\\\c"'


def test_a_line_break_has_no_sbatch_form() -> None:
    with pytest.raises(ValueError, match="line break"):
        quoting.sbatch("a\nb")


def test_what_hydra_has_no_form_for_is_refused() -> None:
    with pytest.raises(TypeError):
        quoting.hydra(Path("/x"))
    with pytest.raises(TypeError):
        quoting.hydra({"a b": 1})


def test_shell_quoting_is_the_standard_librarys() -> None:
    assert quoting.shell is shlex.quote
