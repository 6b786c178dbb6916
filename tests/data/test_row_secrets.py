"""Secrets in rows are found, never shown, and replaced by placeholders that keep rows consistent."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import string
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fctune.apps.report.data_page import write_data_html
from fctune.base.errors import ConfigError, DataError
from fctune.cli import main
from fctune.config.loading import load_config
from fctune.config.schema import RunConfig
from fctune.config.sections.data import AugmentConfig, DataConfig, RedactConfig, SourceConfig
from fctune.data.augment.augmented_file import augment_source
from fctune.data.check import check_sources
from fctune.data.conversion import convert_source
from fctune.data.data_size import find_prepared
from fctune.data.prepared_set import describe_counts, prepare
from fctune.data.redaction import Redactor
from fctune.data.secrets import PERSONAL_KINDS, SECRET_KINDS, SecretScanner
from fctune.data.sources import ParsedRow, RowReader, UnreadRow, parse_source
from fctune.tasks.evaluation.held_out import find_held_out_cases
from fctune.tasks.evaluation.row_cases import make_row_cases
from tests.conftest import REAL_DATA, ROOT, TINY_BASE

ALNUM, HEX, LOWER = string.ascii_letters + string.digits, "0123456789abcdef", string.ascii_lowercase + string.digits
ALL = ["secrets", "emails", "phones", "paths"]


def draw(count: int, alphabet: str = ALNUM, seed: int = 0) -> str:
    return "".join(random.Random(f"{seed} {count} {alphabet}").choices(alphabet, k=count))


def make_jwt(seed: int) -> str:
    parts = [{"alg": "HS256", "typ": "JWT"}, {"sub": draw(10, seed=seed)}]
    written = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    return ".".join([*written, draw(43, seed=seed)])


def make_private_key(seed: int) -> str:
    lines = [draw(64, seed=seed + line) for line in range(6)]
    return "\n".join(["-----BEGIN RSA " + "PRIVATE KEY-----", *lines, "-----END RSA " + "PRIVATE KEY-----"])


# Put together here, so that no scanner of repositories takes them for keys.
MAKERS: dict[str, list[Callable[[int], str]]] = {
    "aws_access_key": [lambda n: "AK" + "IA" + draw(16, string.ascii_uppercase + string.digits, n)],
    "azure_storage_key": [lambda n: "Account" + "Key=" + draw(86, seed=n) + "=="],
    "basic_auth": [lambda n: draw(14, seed=n)],
    "cloud_token": [
        lambda n: "da" + "pi" + draw(32, HEX, n),
        lambda n: "shp" + "at_" + draw(32, HEX, n),
        lambda n: "hv" + "s." + draw(90, seed=n),
        lambda n: "lin" + "_api_" + draw(40, seed=n),
        lambda n: "AT" + "ATT3xFfGF0" + draw(180, seed=n),
    ],
    "discord_token": [lambda n: ".".join(["M" + draw(24, seed=n), draw(6, seed=n), draw(27, seed=n)])],
    "github_token": [lambda n: "gh" + "p_" + draw(36, seed=n), lambda n: "github" + "_pat_" + draw(82, seed=n)],
    "gitlab_token": [lambda n: "gl" + "pat-" + draw(20, seed=n)],
    "google_key": [lambda n: "AI" + "za" + draw(35, seed=n), lambda n: "ya" + "29." + draw(60, seed=n)],
    "hugging_face_token": [lambda n: "h" + "f_" + draw(34, seed=n)],
    "json_web_token": [make_jwt],
    "mailchimp_key": [lambda n: draw(32, HEX, n) + "-us" + "12"],
    "model_api_key": [
        lambda n: "s" + "k-" + draw(20, seed=n) + "T3Blbk" + "FJ" + draw(20, seed=n + 1),
        lambda n: "s" + "k-ant-api03-" + draw(93, seed=n),
        lambda n: "gs" + "k_" + draw(52, seed=n),
        lambda n: "pp" + "lx-" + draw(48, seed=n),
        lambda n: "r" + "8_" + draw(37, seed=n),
        lambda n: "tv" + "ly-" + draw(32, seed=n),
        lambda n: "ls" + "v2_pt_" + draw(32, HEX, n) + "_" + draw(10, HEX, n),
    ],
    "package_token": [
        lambda n: "np" + "m_" + draw(36, seed=n),
        lambda n: "py" + "pi-AgEIcHlwaS5vcmc" + draw(90, seed=n),
    ],
    "private_key": [make_private_key],
    "sendgrid_key": [lambda n: "S" + "G." + draw(22, seed=n) + "." + draw(43, seed=n)],
    "slack_token": [
        lambda n: "xo" + "xb-" + draw(12, string.digits, n) + "-" + draw(24, LOWER, n),
        lambda n: f"https://hooks.sl{'ack'}.com/services/T{draw(8, seed=n)}/B{draw(8, seed=n)}/{draw(24, seed=n)}",
    ],
    "square_secret": [lambda n: "sq0" + "csp-" + draw(43, seed=n)],
    "stripe_key": [lambda n: "s" + "k_live_" + draw(24, seed=n), lambda n: "r" + "k_live_" + draw(99, seed=n)],
    "telegram_token": [lambda n: draw(9, "123456789", n) + ":AA" + draw(33, seed=n)],
    "twilio_key": [lambda n: "S" + "K" + draw(32, HEX, n)],
}
BY_NAME = {
    "named_secret": lambda n: "pW7!" + draw(10, seed=n),
    "authorization": lambda n: draw(40, seed=n),
    "cookie": lambda n: f"sessionid={draw(32, LOWER, n)}",
    "signed_url": lambda n: f"{draw(20, seed=n)}%2B{draw(20, seed=n + 1)}%3D",
    "command_password": lambda n: draw(12, seed=n),
}
COMMANDS = (
    "mysql -h db -u root -p{} shop",
    "sshpass -p '{}' ssh admin@10.0.0.8",
    'curl -s -u "admin:{}" https://api.internal/v1',
    "redis-cli -h cache -a {} ping",
    "machine api.internal login deploy password {}",
)
CASES = [(kind, make) for kind, makers in MAKERS.items() for make in makers]
PERSONAL: dict[str, Callable[[int], str]] = {
    "email": lambda n: f"{draw(8, LOWER, n)}.b@mail{n}.org",
    "phone": lambda n: f"+44 20 {draw(4, '123456789', n)} {draw(4, '123456789', n + 1)}",
    "home_path": lambda n: f"/home/{draw(8, string.ascii_lowercase, n)}",
}


def say(kind: str, secret: str) -> str:
    """Return a secret in a text as people and tools write it."""
    if kind == "basic_auth":
        return f"postgres://admin:{secret}@db.internal/app"
    if kind == "named_secret":
        return f"password: {secret}"
    if kind == "authorization":
        return f"Authorization: Bearer {secret}"
    if kind == "cookie":
        return f"Cookie: {secret}"
    if kind == "signed_url":
        return f"https://store.blob.internal/a?sv=2024-01-01&sp=r&sig={secret}"
    if kind == "command_password":
        return COMMANDS[sum(map(ord, secret)) % len(COMMANDS)].format(secret)
    return f"the discord value {secret}" if kind == "discord_token" else f"use ({secret}), please"


FIELDS = ("system", "user", "assistant", "reasoning", "argument", "nested", "result", "description", "default", "id")


def make_row(texts: dict[str, str], number: int = 0) -> dict[str, Any]:
    """Return a row whose fields end in these texts."""

    def get(field: str) -> str:
        return f"{field} {number} {texts[field]}" if field in texts else f"{field} {number}"

    call_id = texts.get("id", "call_1")
    arguments = {"q": get("argument"), "more": {"list": [get("nested")]}}
    properties = {"q": {"type": "string", "default": get("default")}, "more": {"type": "object"}}
    function = {
        "name": "find",
        "description": get("description"),
        "parameters": {"type": "object", "properties": properties},
    }
    return {
        "messages": [
            {"role": "system", "content": get("system")},
            {"role": "user", "content": get("user")},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": get("reasoning"),
                "tool_calls": [
                    {
                        "id": call_id,
                        "type": "function",
                        "function": {"name": "find", "arguments": json.dumps(arguments)},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": call_id, "content": json.dumps({"found": get("result")})},
            {"role": "assistant", "content": get("assistant")},
        ],
        "tools": [{"type": "function", "function": function}],
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def parse(row: dict[str, Any]) -> ParsedRow:
    parsed = RowReader().read(UnreadRow("rows.jsonl", 1, json.dumps(row).encode()))
    assert isinstance(parsed, ParsedRow), parsed
    return parsed


def pieces(secret: str) -> list[str]:
    """Return the pieces of a secret that no output may hold."""
    text = "".join(secret.split("\n")[1:-1]) if "\n" in secret else secret  # without the lines that say what it is
    random_part = text[-20:-2] if len(text) > 24 else text[-8:]
    return [secret, random_part]


def assert_hidden(secrets: list[str], *outputs: bytes | str) -> None:
    for output in outputs:
        text = output.decode("utf-8", "replace") if isinstance(output, bytes) else output
        for secret in secrets:
            for piece in pieces(secret):
                assert piece not in text


@pytest.mark.parametrize("command", COMMANDS)
def test_passwords_of_commands_are_found_and_their_ports_and_words_are_not(command: str) -> None:
    scanner = SecretScanner()
    assert scanner.find_in_text(command.format("pW7x" + draw(8))) == {"pW7x" + draw(8): "command_password"}
    for word in ("password", "$DB_PASS", "YOUR_PASSWORD", "<password>"):
        assert not scanner.find_in_text(command.format(word)), word


@pytest.mark.parametrize(
    "text",
    [
        "mysql -h db -P3306 -u root -p shop",
        "curl -u admin https://api.internal/v1/items:1234567",
        "A recipe: cookie: flour=200g; sugar=100g",
        "cookie=accept",
        "https://example.org/letters?sig=Yours+truly",
        "the machine that you login to has a password policy",
    ],
)
def test_other_commands_and_words_hold_no_secret(text: str) -> None:
    assert SecretScanner().find_in_text(text) == {}


ALL_CASES = [*CASES, *BY_NAME.items()]


@pytest.mark.parametrize(("kind", "make"), ALL_CASES, ids=[kind for kind, _ in ALL_CASES])
def test_a_secret_is_found_in_every_field_and_replaced_in_all_of_them(kind: str, make: Callable[[int], str]) -> None:
    scanner, redactor = SecretScanner(), Redactor(RedactConfig())
    secret = make(1)
    for field in FIELDS[:-1]:
        found = scanner.locate(parse(make_row({field: say(kind, secret)})))
        assert [finding.kind for finding in found] == [kind], field
        assert secret not in repr(found)
    row = parse(make_row({field: say(kind, secret) for field in FIELDS[:-1]}))
    redacted, redaction = redactor.redact(row)
    assert len(redaction.findings) == len(FIELDS) - 1
    assert_hidden([secret], redacted.conversation.to_json(), json.dumps(redacted.raw["metadata"]))
    # One placeholder everywhere, so that calls still match what the user says; it is not found again.
    messages, tool = redacted.conversation.messages, redacted.conversation.tools[0]
    call = messages[2].calls[0]
    texts = {
        "system": messages[0].content,
        "user": messages[1].content,
        "reasoning": messages[2].reasoning,
        "argument": call.arguments["q"],
        "nested": call.arguments["more"]["list"][0],
        "result": json.loads(str(messages[3].content))["found"],
        "assistant": messages[4].content,
        "description": tool.function["description"],
        "default": tool.parameters["properties"]["q"]["default"],
    }
    assert len({str(text).removeprefix(f"{field} 0 ") for field, text in texts.items()}) == 1
    assert "redacted" in str(texts["user"]).lower()
    assert scanner.locate(redacted) == []
    again, nothing = redactor.redact(redacted)
    assert again is redacted
    assert nothing.findings == []


def test_every_kind_has_a_planted_secret() -> None:
    assert {kind for kind, _ in ALL_CASES} == set(SECRET_KINDS)
    assert set(PERSONAL) == set(PERSONAL_KINDS)


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("aws_access_key", r"AKIA[0-9A-Z]{16}"),
        ("github_token", r"ghp_[A-Za-z0-9]{36}"),
        ("google_key", r"AIza[0-9A-Za-z_-]{35}"),
        ("hugging_face_token", r"hf_[A-Za-z0-9]{34}"),
        ("mailchimp_key", r"[0-9a-z]{32}-us12"),
        ("model_api_key", r"sk-[A-Za-z0-9]{48}"),
        ("sendgrid_key", r"SG\.[\w-]{22}\.[\w-]{43}"),
        ("stripe_key", r"sk_live_[0-9a-zA-Z]{24}"),
        ("telegram_token", r"\d{8,10}:[0-9A-Za-z_-]{35}"),
        ("twilio_key", r"SK[a-z0-9]{32}"),
    ],
)
def test_placeholders_match_the_patterns_of_schemas(kind: str, pattern: str) -> None:
    secret = MAKERS[kind][0](3)
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    jsonschema.validate(secret, schema)
    redacted, _ = Redactor(RedactConfig()).redact(parse(make_row({"user": f"use {secret}"})))
    placeholder = str(redacted.conversation.messages[1].content).removeprefix("user 0 use ")
    assert placeholder != secret
    assert "redacted" in placeholder.lower()
    jsonschema.validate(placeholder, schema)


def test_placeholders_depend_on_the_secret_and_the_seed_alone() -> None:
    def replace_all(seed: int, number: int) -> str:
        redactor = Redactor(RedactConfig(kinds=ALL, seed=seed))
        texts = [say(kind, make(number)) for kind, make in ALL_CASES] + [make(number) for make in PERSONAL.values()]
        return str(redactor.redact(parse(make_row({"user": " ; ".join(texts)})))[0].conversation.messages[1].content)

    assert replace_all(0, 1) == replace_all(0, 1)
    assert replace_all(0, 1) != replace_all(1, 1)
    names = set()
    for number in range(200):
        redacted, _ = Redactor(RedactConfig()).redact(
            parse(make_row({"user": "use " + MAKERS["github_token"][0](number)}))
        )
        names.add(redacted.conversation.messages[1].content)
    assert len(names) == 200


def test_a_secret_found_by_its_name_is_replaced_where_no_name_tells_and_in_json() -> None:
    secret = 'aB3"x\\Q9z!7'
    row = make_row({"user": f"log me in with {secret}", "result": f"logged in with {secret}"})
    row["messages"][2]["tool_calls"][0]["function"]["arguments"] = json.dumps({"user": "ann", "password": secret})
    redacted, redaction = Redactor(RedactConfig()).redact(parse(row))
    messages = redacted.conversation.messages
    placeholder = messages[2].calls[0].arguments["password"]
    assert re.fullmatch(r"Redacted-\d[0-9a-z]{7}", placeholder)
    assert messages[1].content == f"user 0 log me in with {placeholder}"
    assert json.loads(str(messages[3].content)) == {"found": f"result 0 logged in with {placeholder}"}
    assert {finding.pointer for finding in redaction.findings} == {
        "messages[1].content",
        "messages[2].tool_calls[0].function.arguments.password",
        "messages[3].content",
    }


def test_a_private_key_is_the_same_with_escaped_line_breaks() -> None:
    key = make_private_key(5)
    row = make_row({"user": key, "argument": key, "result": key})
    messages = Redactor(RedactConfig()).redact(parse(row))[0].conversation.messages
    code = re.search(r"REDACTED-\w+", str(messages[1].content))
    assert code is not None
    assert code[0] in messages[2].calls[0].arguments["q"]
    result = json.loads(str(messages[3].content))["found"]
    assert result.removeprefix("result 0 ") == str(messages[1].content).removeprefix("user 0 ")


def test_ids_of_calls_keep_referring() -> None:
    secret = MAKERS["github_token"][0](1)
    conversation = Redactor(RedactConfig()).redact(parse(make_row({"id": secret})))[0].conversation
    assert conversation.messages[2].calls[0].id == conversation.messages[3].call_id
    assert_hidden([secret], conversation.to_json())


VALUE = draw(10, seed=5) + "7"
NAMED = [
    f"AWS_SECRET_ACCESS_KEY={draw(40)}",
    f'curl -H "x-api-key: {draw(32)}" https://host',
    f'curl -H "Authorization: token {draw(40)}" https://host',
    f"tool --password {VALUE}",
    f"cli --auth-token '{VALUE}' run",
    f"export DEPLOY_TOKEN={draw(30)}",
    f"passphrase: {VALUE}",
    f"redis://:{VALUE}@host:6379",
    f"https://discord.com/api/webhooks/123456789012345678/{draw(68)}",
    json.dumps(json.dumps({"X-Api-Key": draw(32)})),
    f"https://host/login?next=%2Fa%3Fpassword%3D{VALUE}",
    json.dumps(f"user: me\npassword: {VALUE}"),
    json.dumps(f"A=1\nDEPLOY_TOKEN={draw(30)}"),
    json.dumps({"token": draw(20, HEX)}),
    json.dumps(json.dumps({"user": "ann", "Deploy-Token": draw(20, HEX)})),
    f"GET https://host/hook?token={draw(20, HEX)}&next=2",
    json.dumps({"password": 83921734}),
    json.dumps({"headers": [{"name": "X-Api-Key", "value": draw(20, HEX)}]}),
    json.dumps(json.dumps([{"key": "DB_PASSWORD", "value": VALUE}], indent=2)),
    json.dumps([{"name": "authToken", "value": draw(20, HEX)}]),
    json.dumps(f"Łódź {'gh'}p_{draw(36)}").replace(" ", "\\u2003"),
]


@pytest.mark.parametrize("text", NAMED, ids=range(len(NAMED)))
def test_secrets_of_commands_headers_and_environments_are_found(text: str) -> None:
    known = (VALUE, "83921734", "gh" + "p_" + draw(36), draw(20, HEX), *map(draw, (30, 32, 40, 68)))
    secret = next(value for value in known if value in text)
    assert list(SecretScanner().find_in_text(text)) == [secret]
    redacted, _ = Redactor(RedactConfig()).redact(parse(make_row({"result": text})))
    assert secret not in redacted.conversation.to_json()


def test_values_of_named_pairs_are_found_and_replaced_as_those_of_keys() -> None:
    secret = draw(20, HEX)
    row = make_row({"result": f"sent {secret}"})
    headers = [{"name": "X-Api-Key", "value": secret}, {"Key": "Accept", "Value": "application/json"}]
    row["messages"][2]["tool_calls"][0]["function"]["arguments"] = json.dumps({"headers": headers})
    redacted, redaction = Redactor(RedactConfig()).redact(parse(row))
    assert {finding.pointer for finding in redaction.findings} == {
        "messages[2].tool_calls[0].function.arguments.headers[0].value",
        "messages[3].content",
    }
    assert secret not in redacted.conversation.to_json()
    assert redacted.conversation.messages[2].calls[0].arguments["headers"][1] == headers[1]


def test_a_password_that_is_a_number_becomes_another_number() -> None:
    row = make_row({"user": "my password is 83921734", "result": "logged in with 83921734"})
    function = row["messages"][2]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps({"password": 83921734, "order": 83921735, "again": [83921734], "is_new": True})
    redactor = Redactor(RedactConfig())
    redacted, redaction = redactor.redact(parse(row))
    messages = redacted.conversation.messages
    arguments = messages[2].calls[0].arguments
    placeholder = arguments["password"]
    assert isinstance(placeholder, int)
    assert 10_000_000 <= placeholder <= 99_999_999
    assert placeholder != 83921734
    assert arguments == {"password": placeholder, "order": 83921735, "again": [placeholder], "is_new": True}
    assert messages[1].content == f"user 0 my password is {placeholder}"
    assert messages[2].weight == 0
    assert redacted.raw["metadata"]["redacted"]["calls"] == ["messages[2].tool_calls[0]"]
    place = "messages[2].tool_calls[0].function.arguments"
    assert {finding.pointer for finding in redaction.findings} == {
        "messages[1].content", f"{place}.password", f"{place}.again[0]", "messages[3].content",
    }  # fmt: skip
    assert redactor.redact(redacted)[1].findings == [], "a placeholder is no secret"


@pytest.mark.parametrize(
    "value",
    [
        {"token": "Ġweather"}, {"token": "Ġunbelievable"}, {"token": 1732450000}, {"token": "1732450000"},
        {"token": "a1"}, {"token": "<|endoftext|>", "id": 50256}, {"tokens": ["get", "_weather_2"]},
        {"max_tokens": 40961234}, {"token_count": 40961234}, {"password_length": 12345679}, {"account_key": 83921734},
        {"next_page_token": draw(24)}, {"name": "nextPageToken", "value": draw(24)},
        {"token": str(uuid.UUID(int=7**40))}, {"password": "12345678"}, {"password": True},
        {"name": "password", "value": "required"}, {"name": "Content-Type", "value": "application/vnd.api2+json"},
        {"name": "token", "value": "1732450000"}, {"name": ["key"], "value": VALUE},
        {"name": "key", "value": VALUE},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_tokens_of_texts_counts_and_other_pairs_are_no_secrets(value: dict[str, Any]) -> None:
    row = make_row({"result": json.dumps(value), "user": json.dumps(json.dumps([value], indent=2))})
    row["messages"][2]["tool_calls"][0]["function"]["arguments"] = json.dumps({"q": value})
    assert [(finding.kind, finding.pointer) for finding in SecretScanner().locate(parse(row))] == []
    assert SecretScanner().find_in_text('{"token": "unbelievable2"}, token: get_weather_of_2_cities') == {}


def test_the_path_of_an_augmented_row_holds_placeholders(tmp_path: Path) -> None:
    row = make_row({})
    mark = {"kinds": ["ask"], "digest": "0" * 16, "from": "/home/jane/rows.jsonl:1", "seed": 0}
    row["metadata"] = {"augmented": mark}
    out = tmp_path / "out.jsonl"
    convert_source(str(write_rows(tmp_path / "rows.jsonl", [row])), out, redact=RedactConfig(kinds=["paths"]))
    (written,) = read_rows(out)
    assert re.fullmatch(r"/home/user-\w{8}/rows\.jsonl:1", written["metadata"]["augmented"]["from"])


def test_a_part_of_a_secret_is_one_where_it_stands_alone() -> None:
    token = draw(40)
    texts = {
        "system": f"Authorization: Bearer {token}",
        "user": f"GET /login?password={VALUE}&next=/home",
        "reasoning": f"curl -H 'Authorization: Bearer {token[:25]}' was cut",
        "result": f"password: {VALUE}",
    }
    redacted, redaction = Redactor(RedactConfig()).redact(parse(make_row(texts)))
    written = redacted.conversation.to_json()
    assert VALUE not in written
    assert token[:25] not in written
    assert len(redaction.findings) == 4


HONEST = [
    str(uuid.UUID(int=random.Random(1).getrandbits(128))),
    hashlib.sha256(b"file").hexdigest(),
    hashlib.sha1(b"commit").hexdigest(),
    hashlib.md5(b"etag").hexdigest(),
    "sha256:" + hashlib.sha256(b"image").hexdigest(),
    "order ORD-2026-0001234, AP1234567890 and APPROVED99",
    "call_" + draw(24),
    "toolu_" + draw(24),
    "chatcmpl-" + draw(29),
    "data:image/png;base64," + base64.b64encode(random.Random(2).randbytes(6000)).decode(),
    base64.b64encode(random.Random(3).randbytes(6000)).decode(),
    "https://example.com/a/b?id=123&page=2, 8.8.8.8 and http://user:password@host/",
    "The password must be 8 characters or more, and the secret is to practise. api_key: required. token: optional",
    "password: <your password>, api_key=YOUR_API_KEY_123, secret: ${SECRET_1}, key is 12345678",
    "the task-12345678-abcdefghij-long-name-of-a-risk-1 and disk-usage-of-the-last-30-days-of-2026",
    f"PWD=/home/runner/work1 OLDPWD=/srv/app2 CACHE_KEY={draw(30)} NEXT_PAGE_TOKEN={draw(30)} run --max-token 40961234",
    "next_page_token is 12, a token: 2026-11-24T10:00:00, pwd: /var/lib/app",
    "IBAN DE89370400440532013000, ISBN 978-3-16-148410-0, VIN 1HGCM82633A004352, EAN 4006381333931",
    "AKIA" + "IOSFODNN7EXAMPLE",
]


@pytest.mark.parametrize("text", HONEST, ids=range(len(HONEST)))
def test_ids_hashes_and_files_are_no_secrets(text: str) -> None:
    row = make_row(dict.fromkeys(FIELDS[:-1], text))
    found = SecretScanner().locate(parse(row))
    assert [(finding.kind, finding.pointer) for finding in found] == []


@pytest.mark.parametrize(
    "text", [*HONEST[:10], HONEST[-2], "2026-11-24 10:00:00", "3.14159265358", "192.168.100.200:8080"]
)
def test_ids_and_numbers_are_no_phone_numbers_addresses_or_homes(text: str) -> None:
    found = SecretScanner(["emails", "phones", "paths"]).locate(parse(make_row({"user": text, "result": text})))
    assert [(finding.kind, finding.text) for finding in found] == []


@pytest.mark.parametrize("name", ["page_token", "nextPageToken", "next-token", "sync_token"])
def test_tokens_of_pages_are_no_secrets(name: str) -> None:
    row = make_row({})
    call = row["messages"][2]["tool_calls"][0]["function"]
    for key, count in ((name, 0), ("token", 1)):
        call["arguments"] = json.dumps({key: draw(24)})
        assert len(SecretScanner().locate(parse(row))) == count


def test_the_synthetic_set_has_no_secrets() -> None:
    scanner = SecretScanner()
    for source in ("synthetic:train:300", "synthetic:varied:300", "synthetic:reasoned:100"):
        assert [finding for row in parse_source(source) for finding in scanner.locate(row)] == []  # type: ignore[arg-type]


@pytest.mark.real_data
@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="needs ../shared/data")
@pytest.mark.parametrize("name", ["seal_tools/rows.jsonl", "glaive_demo/glaive_toolcall_en_demo.json"])
def test_public_rows_have_passwords_alone(name: str) -> None:
    scanner = SecretScanner()
    rows = [row for row in parse_source(str(REAL_DATA / name)) if isinstance(row, ParsedRow)]
    found = [finding for row in rows for finding in scanner.locate(row)]
    assert {finding.kind for finding in found} == {"named_secret"}
    assert len({finding.text for finding in found}) <= 6


@pytest.mark.parametrize("kind", PERSONAL)
def test_personal_data_are_replaced_if_asked_for(kind: str) -> None:
    text = PERSONAL[kind](1)
    row = parse(make_row(dict.fromkeys(FIELDS[:-1], f"to {text}")))
    assert SecretScanner().locate(row) == []
    redactor = Redactor(RedactConfig(kinds=ALL))
    redacted, redaction = redactor.redact(row)
    assert {finding.kind for finding in redaction.findings} == {kind}
    assert text not in redacted.conversation.to_json()
    assert redactor.redact(redacted)[1].findings == []


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("call (415) 867-5309 now", r"call \(555\) \d{3}-\d{4} now"),
        ("call +14158675309 now", r"call \+999\d{8} now"),
        (r"C:\Users\Jane Doe", r"C:\\Users\\user-\w{8} Doe"),
        ("file:///Users/jane/a.txt", r"file:///Users/user-\w{8}/a\.txt"),
        ("mail Jane.Doe@Corp.co.uk.", r"mail user-\w{8}@example\.com\."),
        ("https://host.com/home/jane and /home/user/x", r"https://host\.com/home/jane and /home/user/x"),
    ],
)
def test_placeholders_of_personal_data_keep_their_notation(text: str, pattern: str) -> None:
    redacted, _ = Redactor(RedactConfig(kinds=ALL)).redact(parse(make_row({"user": text})))
    content = str(redacted.conversation.messages[1].content).removeprefix("user 0 ")
    assert re.fullmatch(pattern, content), content


@pytest.fixture
def planted(tmp_path: Path) -> tuple[Path, list[str]]:
    """Rows with a secret of every kind, some of which are invalid and quote theirs, and the secrets."""
    rows, secrets = [], []
    for number, (kind, make) in enumerate(ALL_CASES):
        secret = make(number)
        field = FIELDS[number % (len(FIELDS) - 1)]
        rows.append(make_row({field: say(kind, secret)}, number))
        secrets.append(secret)
    rows += [make_row({}, number) for number in range(100, 130)]
    shown = MAKERS["github_token"][0](77)
    wrong = make_row({"argument": shown}, 200)
    wrong["tools"][0]["function"]["parameters"]["properties"]["q"]["enum"] = ["a"]
    invalid = make_row({}, 201)
    invalid["messages"][2]["tool_calls"][0]["function"]["arguments"] = f'"{shown}'
    return write_rows(tmp_path / "rows.jsonl", [*rows, wrong, invalid]), [*secrets, shown]


def test_a_check_counts_secrets_by_kind_and_place_and_shows_none(
    planted: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, secrets = planted
    report_file, page = tmp_path / "report.json", tmp_path / "page.html"
    arguments = ["data", "check", str(path), "--json", str(report_file), "--html", str(page), "--on-invalid", "skip"]
    assert main(arguments) == 0
    output = capsys.readouterr()
    assert_hidden(secrets, output.out, output.err, report_file.read_bytes(), page.read_bytes())
    report = json.loads(report_file.read_text(encoding="utf-8"))
    assert set(report["secrets"]["kinds"]) == set(SECRET_KINDS)
    warnings = {finding["kind"]: finding for finding in report["warning_kinds"]}
    assert warnings["secret"]["count"] == sum(report["secrets"]["kinds"].values()) == len(ALL_CASES) + 1
    assert warnings["secret"]["rows"] == report["secrets"]["rows"] == len(ALL_CASES) + 1
    first = warnings["secret"]["examples"][0]
    assert (first["line"], first["pointer"]) == (1, "messages[0].content")
    assert first["reason"] == "aws_access_key: a key of AWS"
    assert "aws_access_key" in page.read_text(encoding="utf-8")


def test_converted_rows_hold_placeholders_and_calls_that_are_not_supervised(
    planted: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, secrets = planted
    out, report_file = tmp_path / "out.jsonl", tmp_path / "report.json"
    assert main(["data", "convert", str(path), str(out), "--json", str(report_file), "--redact"]) == 0
    output = capsys.readouterr()
    assert_hidden(secrets, out.read_bytes(), report_file.read_bytes(), output.out, output.err)
    report = json.loads(report_file.read_text(encoding="utf-8"))["secrets"]
    rows = read_rows(out)
    marks = [row["metadata"]["redacted"] for row in rows if "metadata" in row]
    assert len(marks) == report["rows"] == len(ALL_CASES) + 1
    totals: dict[str, int] = {}
    for mark in marks:
        for kind, count in mark["kinds"].items():
            totals[kind] = totals.get(kind, 0) + count
    assert totals == report["kinds"]
    num_marked = 0
    for row in rows:
        text = json.dumps(row["messages"][2])
        is_marked = row.get("metadata", {}).get("redacted", {}).get("calls") == ["messages[2].tool_calls[0]"]
        assert is_marked == ("redacted" in json.dumps(row["messages"][2].get("tool_calls")).lower())
        assert ("redacted" in text.lower()) == (row["messages"][2].get("weight") == 0)
        num_marked += is_marked
    assert num_marked
    again = tmp_path / "again.jsonl"
    assert main(["data", "convert", str(out), str(again), "--redact"]) == 0
    assert again.read_bytes() == out.read_bytes()
    kept = tmp_path / "kept.jsonl"
    assert main(["data", "convert", str(path), str(kept), "--redact", "--supervise-redacted"]) == 0
    assert all("weight" not in message for row in read_rows(kept) for message in row["messages"])


def test_rows_are_kept_and_counted_without_the_option(
    planted: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, secrets = planted
    assert main(["data", "convert", str(path), str(tmp_path / "out.jsonl")]) == 0
    output = capsys.readouterr()
    assert f"{len(ALL_CASES) + 1} secrets in {len(ALL_CASES) + 1} rows" in output.out.replace("\n", " ")
    assert_hidden(secrets, output.out, output.err)
    assert secrets[0] in (tmp_path / "out.jsonl").read_text(encoding="utf-8")
    assert main(["data", "convert", str(path), str(tmp_path / "dropped.jsonl"), "--drop", "secret"]) == 0
    assert_hidden(secrets, (tmp_path / "dropped.jsonl").read_bytes())


@pytest.mark.parametrize("given", ["passwords", "secrets,mail"])
def test_unknown_kinds_are_refused(given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["data", "convert", "in.jsonl", str(tmp_path / "out.jsonl"), "--redact", given])
    assert stopped.value.code == 2
    assert "unknown kind" in capsys.readouterr().err


def make_config(path: Path, **changes: Any) -> DataConfig:
    values = {"sources": [SourceConfig(path=str(path))], "validation_share": 0.0, "on_invalid": "skip", "seq_len": 2048}
    return DataConfig(**(values | {"reasoning": "drop"} | changes))


def decode(prepared: Any, only_supervised: bool = False) -> str:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TINY_BASE / "tokenizer.json"))
    tokens = prepared.tokens[prepared.weights[prepared.codes] > 0] if only_supervised else prepared.tokens
    return str(tokenizer.decode(tokens.tolist(), skip_special_tokens=False))


def test_prepared_sets_hold_placeholders_that_are_not_supervised(
    planted: tuple[Path, list[str]], tmp_path: Path
) -> None:
    path, secrets = planted
    root = tmp_path / "sets"
    warned = prepare(make_config(path), TINY_BASE, root)
    assert warned.secrets.kinds.keys() == SECRET_KINDS.keys()
    assert warned.describe()["secrets"] == warned.secrets.to_json() | {"redacted": False}
    assert any(line.startswith("warning: ") and "secrets in" in line for line in describe_counts(warned))
    github = next(secret for secret in secrets if secret.startswith("gh" + "p_"))
    assert github in decode(warned)
    redacted = prepare(make_config(path, secrets="redact"), TINY_BASE, root)
    assert redacted.fingerprint != warned.fingerprint
    assert redacted.describe()["secrets"]["redacted"]
    assert redacted.secrets.kinds == warned.secrets.kinds
    assert redacted.secrets.turns > 0
    assert_hidden(secrets, decode(redacted), (redacted.path / "meta.json").read_bytes())
    assert "redacted" in decode(redacted).lower()
    assert "redacted" not in decode(redacted, only_supervised=True).lower()
    chosen = make_config(path, secrets="redact", redact=RedactConfig(supervise=True))
    assert "redacted" in decode(prepare(chosen, TINY_BASE, root), only_supervised=True).lower()
    ignored = prepare(make_config(path, secrets="ignore"), TINY_BASE, root)
    assert ignored.secrets.kinds == {}
    assert (ignored.tokens == warned.tokens).all()
    with pytest.raises(DataError, match=r"github_token \d.*data\.secrets=redact") as stopped:
        prepare(make_config(path, secrets="fail"), TINY_BASE, root)
    assert_hidden(secrets, str(stopped.value))


def test_a_plan_finds_the_set_of_its_own_redaction(tmp_path: Path) -> None:
    def load(*overrides: str) -> RunConfig:
        common = [f"output_dir={tmp_path}/run", f"model.path={TINY_BASE}", "data.sources.0.path=synthetic:train:60:7"]
        return load_config(ROOT / "configs" / "tiny_full.yaml", [*common, f"data.prepared_dir={tmp_path}", *overrides])

    redacted = load("data.secrets=redact", "data.redact={kinds: [emails]}")
    others = (load("data.secrets=redact"), load())
    prepare(redacted.data, TINY_BASE, tmp_path)
    assert [find_prepared(config, None) is not None for config in (redacted, *others)] == [True, False, False]
    with pytest.raises(ConfigError, match=r"data\.redact: has no effect with data\.secrets=warn"):
        load("data.redact={seed: 3}")


def test_invalid_rows_do_not_quote_their_secrets(tmp_path: Path) -> None:
    secret = MAKERS["github_token"][0](9)
    row = make_row({})
    row["messages"][2]["tool_calls"][0]["function"]["arguments"] = f'"{secret}'
    row["messages"][1]["role"] = secret
    path = write_rows(tmp_path / "rows.jsonl", [make_row({}, 1), row])
    with pytest.raises(DataError) as stopped:
        prepare(make_config(path, on_invalid="fail"), TINY_BASE, tmp_path / "sets")
    assert_hidden([secret], str(stopped.value))
    assert "quotes a secret" in str(stopped.value)


def test_pairs_hold_placeholders(tmp_path: Path) -> None:
    secret = MAKERS["github_token"][0](9)
    pairs = [
        {
            "prompt": [{"role": "user", "content": f"My token is {secret if number % 2 else 'none'}, case {number}."}],
            "chosen": [{"role": "assistant", "content": f"I use {secret}." if number % 3 == 0 else "Thanks."}],
            "rejected": [{"role": "assistant", "content": f"No {number}."}],
        }
        for number in range(12)
    ]
    path = write_rows(tmp_path / "pairs.jsonl", pairs)
    prepared = prepare(make_config(path, pairs=True, secrets="redact", reasoning="keep"), TINY_BASE, tmp_path / "sets")
    assert_hidden([secret], decode(prepared))
    assert prepared.counts.unsupervised == 4  # the answer that holds the placeholder
    assert prepared.counts.conversations == 8
    assert prepared.secrets.rows == 8
    assert len(set(re.findall(r"ghp_REDACTED\w+", decode(prepared)))) == 1


def test_augmented_rows_and_cases_hold_placeholders(planted: tuple[Path, list[str]], tmp_path: Path) -> None:
    path, secrets = planted
    out = tmp_path / "out.jsonl"
    report = augment_source(str(path), out, AugmentConfig(paraphrase=1.0), redact=RedactConfig())
    assert report.secrets.rows == len(ALL_CASES) + 1
    assert_hidden(secrets, out.read_bytes(), json.dumps(report.to_json()), *report.describe("in", "out"))
    marks = [row["metadata"] for row in read_rows(out) if "augmented" in row.get("metadata", {})]
    assert any("redacted" in mark for mark in marks)
    assert check_sources([str(out)]).secrets.kinds == {}
    made = make_row_cases([str(path)], turns="each", redact=RedactConfig())
    assert made.secrets.rows == len(ALL_CASES) + 1
    assert_hidden(secrets, *(json.dumps(case.row) for case in made.cases))
    assert not any("redacted" in json.dumps(case.row["messages"][-1]).lower() for case in made.cases)


def test_augmented_rows_and_what_is_skipped_quote_no_part_of_a_secret(tmp_path: Path) -> None:
    secret = MAKERS["github_token"][0](5)
    key, role, switch = make_row({}, 1), make_row({}, 2), make_row({}, 3)
    key["messages"][1][f"note {secret}"] = "Some words."
    role["messages"][1]["role"] = "x" * 40 + f" {secret}"
    switch["enable_thinking"] = "x" * 40 + f" {secret}"
    folder = tmp_path / "jane.doe@corp.org"
    folder.mkdir()
    path, out = write_rows(folder / "rows.jsonl", [make_row({}, 0), key, role, switch]), tmp_path / "out.jsonl"
    redact = RedactConfig(kinds=["secrets", "emails"])
    report = augment_source(str(path), out, AugmentConfig(paraphrase=1.0), redact=redact)
    assert (report.num_skipped, report.changed) == (3, 1)
    shown = "\n".join(report.describe("in", "out"))
    assert secret[:10] not in shown
    (row,) = read_rows(out)
    assert re.search(r"user-\w{8}@example\.com/rows\.jsonl:1$", row["metadata"]["augmented"]["from"])


def test_tools_of_rows_hold_placeholders_if_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = MAKERS["github_token"][0](5)
    path = write_rows(tmp_path / "rows.jsonl", [make_row({"default": secret}), make_row({}, 1)])
    command = ["data", "tools", str(path), "--out", str(tmp_path / "tools.json"), "--force"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "secrets in the tools: github_token 1; --redact replaces them" in said
    assert_hidden([secret], said)
    assert main([*command, "--redact"]) == 0
    assert "secrets in the tools: github_token 1; replaced by placeholders" in capsys.readouterr().out
    assert_hidden([secret], (tmp_path / "tools.json").read_bytes())
    assert "ghp_REDACTED" in (tmp_path / "tools.json").read_text(encoding="utf-8")


def test_a_row_is_shown_with_the_kinds_of_its_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [make_row({"user": MAKERS["github_token"][0](5)}), make_row({})])
    for number, is_secret in ((1, True), (2, False)):
        assert main(["data", "show", str(path), "--row", str(number)]) == 0
        assert ("secrets in this row: github_token 1" in capsys.readouterr().out) is is_secret


def test_held_out_cases_hold_placeholders(planted: tuple[Path, list[str]], tmp_path: Path) -> None:
    path, secrets = planted
    config = make_config(path, validation_share=0.4, secrets="redact")
    prepared = prepare(config, TINY_BASE, tmp_path / "sets")
    cases = find_held_out_cases(config, prepared)
    assert_hidden(
        secrets, *(case.prompt.to_json() + json.dumps([c.arguments for c in case.expected]) for case in cases)
    )
    assert any("redacted" in case.prompt.to_json().lower() for case in cases)
    kept = find_held_out_cases(
        replace(config, secrets="warn"), prepare(replace(config, secrets="warn"), TINY_BASE, tmp_path)
    )
    assert {case.id for case in kept} == {case.id for case in cases}  # the split is the same


def test_the_page_of_a_check_lists_kinds(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [make_row({"user": PERSONAL["email"](1)}, 1)])
    report = check_sources([str(path)], secrets=ALL)
    assert report.secrets.kinds == {"email": 1}
    assert [finding.kind for finding in report.warning_kinds] == ["personal_data"]
    write_data_html(report, tmp_path / "page.html")
    assert "an email address" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_what_was_looked_for_is_said_if_nothing_is_found(
    tmp_path: Path, tiny_base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = [make_row({}, number) for number in range(20)]
    noted = {"metadata": {"api_key": "sk-proj-" + "a1B2" * 10}, "model": "gpt-4o", "none": None}
    path = str(write_rows(tmp_path / "rows.jsonl", [{**row, **noted} for row in plain[:10]] + plain[10:]))
    out = str(tmp_path / "out.jsonl")
    unread = "columns that are in no row, and not searched: metadata, model"
    assert main(["data", "check", path, "--secrets", "secrets,emails", "--json", str(tmp_path / "check.json")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"0 with secrets or personal data (secrets 0, emails 0); {unread}" in said
    report = json.loads((tmp_path / "check.json").read_text())
    assert report["secrets"] == {"rows": 0, "kinds": {}, "searched": ["secrets", "emails"]}
    assert report["unread_columns"] == {"metadata": 10, "model": 10}
    assert main(["data", "convert", path, out, "--redact", "secrets,phones"]) == 0
    assert "found in the rows' texts: secrets 0, phones 0\n" in capsys.readouterr().out
    assert main(["data", "cases", out, "--out", str(tmp_path / "cases.jsonl")]) == 0
    assert "found in the rows' texts: secrets 0\n" in capsys.readouterr().out
    config = make_config(Path(path), secrets="redact", redact=RedactConfig(kinds=["emails"]))
    lines = describe_counts(prepare(config, tiny_base, tmp_path / "prepared"))
    assert f"found in the rows' texts: emails 0; {unread}" in lines


def test_what_was_not_found_is_named_beside_what_was(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [make_row({"user": PERSONAL["email"](1)}, 1)])
    report = convert_source(str(path), tmp_path / "out.jsonl", redact=RedactConfig(kinds=["secrets", "emails"]))
    assert report.secrets.describe(is_redacted=True) == (
        "1 secret or personal datum in 1 row (email 1, secrets 0) replaced by placeholders"
    )
