"""The image a run goes on in is the one it was submitted with."""

import os
import subprocess
from pathlib import Path

import pytest

from dsv4kit.config.loading import load_settings, load_site
from dsv4kit.config.site import Site
from dsv4kit.errors import UserError
from dsv4kit.launch import image_state
from dsv4kit.launch.render import SegmentScript
from dsv4kit.run.directory import RunDir


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "x.sqsh"
    path.write_bytes(b"hsqs")
    os.utime(path, (1_700_000_000, 1_700_000_000))
    return path


def site_of(image: Path) -> Site:
    return load_site("example-h100-pyxis").in_image(str(image))


def test_a_run_without_images_has_none() -> None:
    assert image_state.now(load_site("sandbox")) is None


def test_another_file_under_the_same_name_is_refused_until_it_is_named(image: Path) -> None:
    site = site_of(image)
    frozen = image_state.now(site)._asdict()  # type: ignore[union-attr]
    assert image_state.kept(frozen, site, named=False) == image_state.ImageState(str(image), 4, 1_700_000_000)
    image.write_bytes(b"hsqs and more")
    with pytest.raises(UserError, match=r"4 bytes then, 13 now.*IMAGE="):
        image_state.kept(frozen, site, named=False)
    assert image_state.kept(frozen, site, named=True).size_bytes == 13  # type: ignore[union-attr]
    assert image_state.kept(None, site, named=False).size_bytes == 13  # type: ignore[union-attr]


def checked(image: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """The script's own check, with a scancel that says what it was told."""
    settings = load_settings("h100", "dsv4-pro", "grpo").settings
    state = image_state.ImageState(str(image), 4, 1_700_000_000)
    script = SegmentScript(settings, site_of(image), RunDir(tmp_path / "r"), 1, image=state).render("true")
    part = script[script.index("# The image as it was") : script.index("# A start that was killed")]
    part = f'job_name=j\nscancel() {{ echo "scancel $*"; }}\n{part}'
    return subprocess.run(["bash", "-euo", "pipefail", "-c", part], capture_output=True, text=True)


def test_a_segment_starts_in_no_other_file(image: Path, tmp_path: Path) -> None:
    assert checked(image, tmp_path).returncode == 0
    image.write_bytes(b"hsqs2")
    done = checked(image, tmp_path)
    assert (done.returncode, done.stdout) == (1, "scancel --me --name=j --state=PENDING\n")
    assert "not the file the run was submitted with (5 " in done.stderr
    image.unlink()
    assert "No such file" in checked(image, tmp_path).stderr
