"""infra/nebius/.envrc refuses incomplete or contradictory credentials, and sets what Terraform reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

ENVRC = ROOT / "infra" / "nebius" / ".envrc"

# Answers of the nebius command line, by its first three arguments; a file that is missing is a refusal.
NEBIUS = '#!/bin/bash\ncat "$(dirname "$0")/$1-$2-$3" 2> /dev/null\n'
# Only what .envrc asks jq for.
JQ = """#!/usr/bin/env python3
import json, sys
query, found = sys.argv[2], json.load(sys.stdin)
if "region" in query:
    print(found["status"].get("region", ""))
elif "items" in query:
    print("\\n".join(one["metadata"]["id"] for one in found["items"]))
else:
    print(found["status"][query.rpartition(".")[2]])
"""
COMPLETE = {
    "NEBIUS_PROJECT_ID": "project-e00a",
    "NEBIUS_TENANT_ID": "tenant-e00a",
    "NEBIUS_REGION": "eu-north1",
    "NEBIUS_STATE_BUCKET": "state",
    "NEBIUS_STATE_KEY": "accesskey-e00a",
}


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """A folder with a stand-in for the nebius command line, logged in to an account with one subnet."""
    answers = {
        "iam-get-access-token-": "token-value",
        "iam-project-get": json.dumps({"status": {"region": "eu-north1"}}),
        "vpc-subnet-list": json.dumps({"items": [{"metadata": {"id": "vpcsubnet-e00a"}}]}),
        "iam-v2-access-key": json.dumps({"status": {"aws_access_key_id": "key-id", "secret": "key-secret"}}),
    }
    for name, answer in answers.items():
        (tmp_path / name).write_text(answer)
    for name, script in {"nebius": NEBIUS, "jq": JQ, "terraform": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def load(account: Path, **variables: str) -> tuple[int, str, dict[str, str]]:
    """Source .envrc; return its status, its messages, and the environment after it."""
    path = f"{account}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", f'. "{ENVRC}"; code=$?; echo ----; env; exit $code'],
        env={"PATH": path, "HOME": str(account)} | variables,
        capture_output=True,
        text=True,
        timeout=30,
    )
    said, _, environment = done.stdout.partition("----\n")
    pairs = dict(line.split("=", 1) for line in environment.splitlines() if "=" in line)
    return done.returncode, said + done.stderr, pairs


def test_a_complete_account_is_exported_and_no_secret_is_printed(account: Path) -> None:
    code, said, environment = load(account, **COMPLETE)
    assert code == 0, said
    assert environment["TF_VAR_subnet_id"] == "vpcsubnet-e00a"
    assert environment["TF_VAR_region"] == "eu-north1"
    assert environment["NEBIUS_IAM_TOKEN"] == "token-value"
    assert environment["AWS_SECRET_ACCESS_KEY"] == "key-secret"
    assert environment["AWS_ENDPOINT_URL_S3"] == "https://storage.eu-north1.nebius.cloud"
    assert environment["TF_CLI_ARGS_init"] == "-backend-config=bucket=state -backend-config=region=eu-north1"
    assert "token-value" not in said
    assert "key-secret" not in said


def test_all_missing_variables_are_named_at_once(account: Path) -> None:
    code, said, _ = load(account, NEBIUS_REGION="eu-north1")
    assert code == 1
    assert "set NEBIUS_PROJECT_ID NEBIUS_TENANT_ID NEBIUS_STATE_BUCKET;" in said


def test_a_region_that_is_not_the_projects_is_refused(account: Path) -> None:
    code, said, environment = load(account, **COMPLETE | {"NEBIUS_REGION": "eu-west1"})
    assert code == 1
    assert "project project-e00a is in eu-north1, not in NEBIUS_REGION=eu-west1" in said
    assert "TF_VAR_region" not in environment


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("iam-get-access-token-", "not logged in; run: nebius profile create"),
        ("iam-project-get", "NEBIUS_PROJECT_ID=project-e00a cannot be read"),
        ("terraform", "terraform is not installed"),
    ],
)
def test_what_is_missing_is_named(account: Path, missing: str, message: str) -> None:
    (account / missing).unlink()
    (account / "env").symlink_to("/usr/bin/env")
    code, said, _ = load_without_terraform(account) if missing == "terraform" else load(account, **COMPLETE)
    assert code == 1
    assert message in said


def load_without_terraform(account: Path) -> tuple[int, str, dict[str, str]]:
    """Source .envrc with a PATH on which terraform is not installed."""
    for tool in ("bash", "dirname", "wc", "cat", "python3"):
        (account / tool).symlink_to(f"/usr/bin/{tool}")
    done = subprocess.run(
        ["/bin/bash", "-c", f'. "{ENVRC}"'],
        env={"PATH": str(account)} | COMPLETE,
        capture_output=True,
        text=True,
        timeout=30,
    )
    return done.returncode, done.stderr, {}


def test_several_subnets_need_a_choice(account: Path) -> None:
    two = {"items": [{"metadata": {"id": "vpcsubnet-e00a"}}, {"metadata": {"id": "vpcsubnet-e00b"}}]}
    (account / "vpc-subnet-list").write_text(json.dumps(two))
    code, said, _ = load(account, **COMPLETE)
    assert code == 1, said
    assert "has 2 subnets; name one: export TF_VAR_subnet_id=" in said
    code, said, environment = load(account, **COMPLETE, TF_VAR_subnet_id="vpcsubnet-e00b")
    assert code == 0, said
    assert environment["TF_VAR_subnet_id"] == "vpcsubnet-e00b"


def test_a_service_account_needs_its_key(account: Path) -> None:
    code, said, _ = load(account, **COMPLETE, NB_SA_ID="serviceaccount-e00a")
    assert code == 1, said
    assert "NB_AUTHKEY_PUBLIC_ID and a readable NB_AUTHKEY_PRIVATE_PATH" in said
    (account / "private.pem").write_text("key")
    key = {"NB_AUTHKEY_PUBLIC_ID": "publickey-e00a", "NB_AUTHKEY_PRIVATE_PATH": str(account / "private.pem")}
    code, said, environment = load(account, **COMPLETE, NB_SA_ID="serviceaccount-e00a", **key)
    assert code == 0, said
    assert environment["TF_VAR_use_service_account"] == "true"
    assert "NEBIUS_IAM_TOKEN" not in environment


def test_shellcheck_finds_nothing() -> None:
    tool = shutil.which("shellcheck", path=f"{ROOT / '.venv-sky' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    if tool is None:
        pytest.skip("shellcheck is not installed: make sky")
    done = subprocess.run([tool, "--shell", "bash", str(ENVRC)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
