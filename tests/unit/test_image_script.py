"""A Dockerfile as one script: run here as it is run in a container, in a directory that stands for its root."""

import subprocess
from pathlib import Path

import pytest

from dsv4kit.errors import UserError
from dsv4kit.image import script
from dsv4kit.launch.image_job import base_uri

BASE = "ARG BASE\nFROM ${BASE} AS one\n"


def ran(tmp_path: Path, dockerfile: str, **arguments: str) -> subprocess.CompletedProcess[str]:
    """The stages' lines alone: what comes after them writes to /etc."""
    text = script.render(dockerfile.replace("/R/", f"{tmp_path}/root/"), arguments, "x", "t", "s")
    functions = text[text.index("step()") : text.index("# The image's configuration")]
    for name in ("root", "context", "work"):
        (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / "work" / "stages").mkdir(exist_ok=True)
    head = f"set -eu\ncontext={tmp_path}/context work={tmp_path}/work\n"
    return subprocess.run(["bash", "-c", f"{head}{functions}"], capture_output=True, text=True)


def test_stages_that_last_keep_variables_and_files(tmp_path: Path) -> None:
    done = ran(
        tmp_path,
        BASE + 'ENV A=1 B="two $A"\nRUN set -eu; \\\n    echo "$B" > /R/b\nFROM one\nARG C=3\nRUN echo "$A$C" > /R/c\n',
        C="four",
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "root" / "b").read_text() == "two 1\n"
    assert (tmp_path / "root" / "c").read_text() == "1four\n"
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["STEP 1/2", "STEP 2/2"]


def test_a_side_stage_gives_what_is_copied_from_it_and_leaves_nothing_else(tmp_path: Path) -> None:
    done = ran(
        tmp_path,
        BASE
        + "FROM one AS side\nENV ONLY=here\nRUN mkdir -p /R/opt/made; echo $ONLY > /R/opt/made/x; touch /R/opt/made/y\n"
        + 'FROM one AS last\nCOPY --from=side /R/opt/made/x /R/kept/\nRUN echo "[${ONLY:-}]" > /R/only\n',
    )
    assert done.returncode == 0, done.stderr
    root = tmp_path / "root"
    assert (root / "kept" / "x").read_text() == "here\n"
    assert (root / "only").read_text() == "[]\n"
    assert not (root / "opt").exists()


def test_a_directory_is_copied_by_its_content_a_file_to_its_name(tmp_path: Path) -> None:
    (tmp_path / "context" / "d" / "e").mkdir(parents=True)
    (tmp_path / "context" / "d" / "e" / "f").write_text("f")
    (tmp_path / "context" / "g").write_text("g")
    done = ran(tmp_path, BASE + "COPY d /R/x\nCOPY g /R/y/\nCOPY g /R/z\nCOPY g d /R/both/\n")
    assert done.returncode == 0, done.stderr
    root = tmp_path / "root"
    found = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    assert found == ["both/e/f", "both/g", "x/e/f", "y/g", "z"]


def test_a_cache_serves_the_steps_that_ask_for_it_and_is_not_in_the_image(tmp_path: Path) -> None:
    mount = "RUN --mount=type=cache,id=pip,target=/R/.cache/pip,sharing=locked"
    done = ran(tmp_path, f"{BASE}{mount} echo kept > /R/.cache/pip/x\n{mount} cp /R/.cache/pip/x /R/y\n")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "root" / "y").read_text() == "kept\n"
    assert not (tmp_path / "root" / ".cache" / "pip").is_symlink()
    assert (tmp_path / "work" / "cache" / "pip" / "x").exists()


def test_a_step_that_fails_ends_the_build_at_once(tmp_path: Path) -> None:
    done = ran(tmp_path, BASE + "RUN set -eu; \\\n    false; \\\n    true\nRUN touch /R/after\n")
    assert done.returncode != 0
    assert not (tmp_path / "root" / "after").exists()


@pytest.mark.parametrize(
    "line",
    ["USER me", 'SHELL ["bash"]', "ADD x /y", "HEALTHCHECK NONE", "RUN --mount=type=secret,id=x true", "ENV A b"],
)
def test_what_a_script_cannot_do_is_refused_with_its_line(line: str) -> None:
    with pytest.raises(UserError, match="Dockerfile, line 3: "):
        script.render(f"{BASE}{line}\n", {}, "x", "t", "s")


@pytest.mark.parametrize(
    ("image", "uri"),
    [
        ("nvidia/cuda:13.0-devel@sha256:ab", "docker://nvidia/cuda:sha256:ab"),
        ("nvcr.io/nvidia/pytorch:26.04@sha256:ab", "docker://nvcr.io#nvidia/pytorch:sha256:ab"),
        ("debian:bookworm-slim@sha256:ab", "docker://debian:sha256:ab"),
        ("registry:5000/a/b@sha256:ab", "docker://registry:5000#a/b:sha256:ab"),
        ("/shared/base.sqsh@sha256:ab", "/shared/base.sqsh"),
    ],
)
def test_a_base_is_named_as_every_enroot_understands_it(image: str, uri: str) -> None:
    assert base_uri(image) == uri
