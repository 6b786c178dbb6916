"""Terraform itself validates infra/nebius and plans it against stand-ins of the providers, which need no download."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT

pytest.importorskip("grpc", reason="the stand-ins for providers need grpcio, which tensorboard installs")
from tests.infra.stand_in_provider import serve_providers

NEBIUS = ROOT / "infra" / "nebius"
KUBERNETES = NEBIUS / "kubernetes"
TERRAFORM = shutil.which("terraform")

needs_terraform = pytest.mark.skipif(TERRAFORM is None, reason="needs terraform >= 1.11 on the PATH")


class Terraform:
    """Terraform in a folder, with stand-ins for all providers."""

    def __init__(self, folder: Path, data: Path, reattach: str):
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TF_", "AWS_"))}
        self._folder = folder
        self._environment = inherited | {
            "TF_REATTACH_PROVIDERS": reattach,
            "TF_DATA_DIR": str(data),
            "CHECKPOINT_DISABLE": "1",
        }

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        assert TERRAFORM is not None
        return subprocess.run(
            [TERRAFORM, *arguments, "-no-color"],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def check(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def reattach() -> Iterator[str]:
    with serve_providers(sorted((ROOT / "tests" / "infra" / "schemas").glob("*.json"))) as value:
        yield value


@needs_terraform
def test_the_cluster_is_valid_and_planned_as_its_tests_say(tmp_path: Path, reattach: str) -> None:
    terraform = Terraform(KUBERNETES, tmp_path, reattach)
    terraform.check("init", "-backend=false")
    terraform.check("validate")
    planned = terraform.check("test")
    passed = re.search(r"Success! (\d+) passed, 0 failed", planned)
    assert passed, planned
    assert int(passed[1]) >= 20, planned


@needs_terraform
def test_a_misspelt_attribute_is_found(tmp_path: Path, reattach: str) -> None:
    """The stand-in's schema is what ``validate`` checks names and types with."""
    broken = tmp_path / "nebius" / "kubernetes"
    shutil.copytree(KUBERNETES, broken, ignore=shutil.ignore_patterns("tests"))
    main = (broken / "main.tf").read_text()
    assert main.count("infiniband_fabric =") == 1
    (broken / "main.tf").write_text(main.replace("infiniband_fabric =", "fabric ="))
    terraform = Terraform(broken, tmp_path / "data", reattach)
    terraform.check("init", "-backend=false")
    found = terraform.run("validate")
    assert found.returncode == 1
    assert 'An argument named "fabric" is not expected here' in found.stderr
    assert 'The argument "infiniband_fabric" is required' in found.stderr


@needs_terraform
def test_soperator_gives_the_recipe_the_variables_that_it_has(tmp_path: Path) -> None:
    """A recipe with the names of the real one's variables stands in for it: it cannot be fetched."""
    root = tmp_path / "soperator"
    shutil.copytree(NEBIUS / "soperator", root)
    known = json.loads((ROOT / "tests" / "infra" / "soperator_variables.json").read_text(encoding="utf-8"))
    main = (root / "main.tf").read_text()
    source, count = re.subn(r'source += "git::[^"]+\?ref=(\w+)"', 'source = "./recipe"', main)
    assert count == 1
    assert f"?ref={known['commit']}" in main
    (root / "main.tf").write_text(source)
    (root / "recipe").mkdir()
    declared = [f'variable "{name}" {{}}' for name in known["required"]]
    declared += [f'variable "{name}" {{\n  default = null\n}}' for name in known["optional"]]
    shown = ("slurm_nodeset_workers", "filestore_jail_submounts")
    declared += [f'output "{name}" {{\n  value = var.{name}\n}}' for name in shown]
    (root / "recipe" / "main.tf").write_text("\n".join(declared))
    terraform = Terraform(root, tmp_path / "data", "{}")
    terraform.check("init", "-backend=false")
    terraform.check("validate")
    assert "Success! 3 passed, 0 failed" in terraform.check("test")


@needs_terraform
def test_terraform_files_are_formatted(tmp_path: Path) -> None:
    assert Terraform(NEBIUS, tmp_path, "{}").check("fmt", "-check", "-diff", "-recursive") == ""


def test_volumes_name_the_storage_classes_of_the_cluster() -> None:
    text = (KUBERNETES / "storage.tf").read_text(encoding="utf-8")
    classes = dict(re.findall(r'(shared|network) = "([a-z-]+)"', text))
    for name, expected in classes.items():
        volume = yaml.safe_load((ROOT / "sky" / "volumes" / f"{name}.yaml").read_text(encoding="utf-8"))
        assert volume["config"]["storage_class_name"] == expected
    assert f"storageClassName: {classes['network']}" in (ROOT / "sky" / "finetune.yaml").read_text(encoding="utf-8")


def test_every_variable_and_output_is_described() -> None:
    for file in NEBIUS.rglob("*.tf"):
        for kind, name, body in re.findall(
            r'^(variable|output) "(\w+)" \{\n(.*?)^\}', file.read_text(encoding="utf-8"), re.M | re.S
        ):
            assert re.search(r'^  description = ".{10,}"$', body, re.M), f"{file}: {kind} {name}"


def test_example_variables_exist() -> None:
    for example in NEBIUS.rglob("terraform.tfvars.example"):
        text = "".join(file.read_text(encoding="utf-8") for file in example.parent.glob("*.tf"))
        declared = set(re.findall(r'^variable "(\w+)"', text, re.M))
        used = set(re.findall(r"^(?:# )?(\w+) +=", example.read_text(), re.M))
        assert used
        assert used <= declared, used - declared
