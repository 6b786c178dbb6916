"""The wheel, installed where the project's source is not, trains and evaluates in an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow

BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
SMALL = ["data.sources.0.path=synthetic:train:200:1", "max_steps=4", "validation.every=0"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the files that git tracks or would track."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=source, check=True, capture_output=True)
    (built,) = out.glob("fctune-*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment with the wheel and this environment's dependencies, but not its fctune."""
    home = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    python = home / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(list(map(str, install)), check=True, capture_output=True)
    scheme = {"base": str(home), "platbase": str(home)}
    packages = Path(sysconfig.get_path("purelib", vars=scheme))
    # Paths in a .pth file are added without reading the .pth files in them, such as that of an editable install.
    folders = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("".join(f"{folder}\n" for folder in folders))
    return python


def run(python: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    keep = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment = keep | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    words = [str(python.parent / command[0]), *command[1:]]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def test_the_wheel_bundles_what_a_clone_has_and_leaves_torchtunes_recipes_alone(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"fctune"}
    for name in ("recipes", "configs", "eval"):
        for file in (ROOT / name).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                assert f"fctune/bundled/{file.relative_to(ROOT)}" in names
    assert "fctune/assets/tiny_base/model.safetensors" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_a_plain_installation_compiles_nothing(wheel: Path) -> None:
    """Every package that it needs has a wheel; needs the package index."""
    options = ["--quiet", "--dry-run", "--ignore-installed", "--only-binary", ":all:", "-c", ROOT / "constraints.txt"]
    command = list(map(str, [sys.executable, "-m", "pip", "install", *options, wheel]))
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr


def test_the_installed_library_is_the_wheels(python: Path, tmp_path: Path) -> None:
    done = run(python, tmp_path, "python", "-c", "import fctune; print(fctune.__file__)")
    assert Path(done.stdout.strip()).is_relative_to(python.parents[1])


def test_a_config_that_extends_another_works_in_place_and_copied(python: Path, tmp_path: Path) -> None:
    shown = run(python, tmp_path, "fctune", "config", "show", "smollm3_3b_lora").stdout
    assert "hermes_glaive_lora.yaml" in shown
    run(python, tmp_path, "fctune", "config", "cp", "smollm3_3b_lora", ".")
    assert (tmp_path / "bases" / "hermes_glaive_lora.yaml").is_file()
    assert "valid" in run(python, tmp_path, "fctune", "config", "check", "./smollm3_3b_lora.yaml").stdout


def test_an_empty_folder_trains_evaluates_and_runs_a_copied_recipe(python: Path, tmp_path: Path) -> None:
    assert "tiny_lora" in run(python, tmp_path, "fctune", "config", "ls").stdout
    run(python, tmp_path, "fctune", "train", "--config", "lora_tiny", "--nproc", "2", *SMALL)
    assert json.loads((tmp_path / "runs/tiny_lora/exit.json").read_text())["code"] == 0
    for model in ("runs/tiny_lora", "fctune/assets/tiny_base"):
        done = run(python, tmp_path, "fctune", "eval", "--model", model, "--suite", "smoke", "--max-new-tokens", "8")
        assert "tool-call accuracy" in done.stdout
    run(python, tmp_path, "fctune", "config", "cp", "lora_fc_distributed", ".")
    run(python, tmp_path, "fctune", "config", "cp", "lora_tiny", ".")
    tune = ["python", "-m", "torchtune._cli.tune", "run", "--nproc_per_node", "1", "lora_fc_distributed.py"]
    run(python, tmp_path, *tune, "--config", "tiny_lora.yaml", "output_dir=runs/tuned", *SMALL)
    assert json.loads((tmp_path / "runs/tuned/exit.json").read_text())["code"] == 0
