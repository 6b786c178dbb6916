"""Secrets and personal data in rows: found, located and counted; ``redaction`` replaces them.

Credentials are found by the patterns of ``detect-secrets`` for keys of known providers, some more of the same sort, and
values of arguments and settings whose names say that they are secret. Its detectors of high entropy are not used: ids,
hashes and encoded files, which tool calls are full of, look no less random than keys. Nor are those of public
addresses, and of key formats that order numbers have as well. No detector verifies a key over the network.

A finding knows its secret, which is never printed: reports name the kind and the place.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fctune.config.intervals import format_count
from fctune.data.conversation import Conversation, Tool
from fctune.data.sources.defects import Defect
from fctune.data.sources.row_builder import CallPointer, ParsedRow, RowWarning

SECRET_KINDS: dict[str, str] = {
    "authorization": "a token or password of an HTTP Authorization header",
    "aws_access_key": "a key of AWS",
    "azure_storage_key": "a storage key of Azure",
    "basic_auth": "a password in a URL",
    "cloud_token": "a token of Databricks, DigitalOcean or Shopify",
    "command_password": "a password among the arguments of a command, or in a netrc file",
    "cookie": "cookies with a random value, as a session has",
    "discord_token": "a token of a Discord bot",
    "github_token": "a token of GitHub",
    "gitlab_token": "a token of GitLab",
    "google_key": "an API key or OAuth token of Google",
    "hugging_face_token": "a token of Hugging Face",
    "json_web_token": "a JSON Web Token",
    "mailchimp_key": "a key of Mailchimp",
    "model_api_key": "an API key of a provider of models",
    "named_secret": "a value that its name calls a password, key, token or secret",
    "package_token": "a token of npm or PyPI",
    "private_key": "a private key",
    "sendgrid_key": "a key of SendGrid",
    "signed_url": "the signature of a URL that gives access",
    "slack_token": "a token or webhook of Slack",
    "square_secret": "an OAuth secret of Square",
    "stripe_key": "a key of Stripe",
    "telegram_token": "a token of a Telegram bot",
    "twilio_key": "a key of Twilio",
}
"""Kinds of credentials, which ``secrets`` stands for."""

PERSONAL_KINDS: dict[str, str] = {
    "email": "an email address",
    "home_path": "a path of a user's home directory",
    "phone": "a phone number",
}
"""Kinds of personal data, which are found only if they are asked for."""

_JSON = json.JSONEncoder(ensure_ascii=False)
MARK = "redacted"
"""In every placeholder of a secret, by which later scans know it; those of numbers have few different digits."""
MAX_DIGITS = 32
"""Digits of the longest number that may be a password."""

_MIN_NAMED = 8  # characters of a value that its name calls a secret; shorter ones are mostly words
_MIN_TOKEN = 16  # letters and digits in a row of a value that its name calls a token alone, in a text
_MIN_COMMAND = 6  # characters of a password that a command gets
_PASSWORD_WORDS = ("pass", "password", "pwd", "secret", "token")
_MAX_CACHED_TOOLS = 10_000
_SHORT_TEXT = 100
_SHOWN_PIECE = 6  # characters of a secret that no message shows

# Names of passwords; keys and tokens that are numbers are ids.
_PASSWORD_NAME = re.compile("pass|pwd|secret|contrase", re.IGNORECASE)

# Words before "key" and "token" in the names of values that are no secrets.
_NO_SECRETS = "PUBLIC|CACHE|PARTITION|PRIMARY|SORT|IDEMPOTENCY|PAGE|NEXT|CONTINUATION|SYNC|SKIP"

# Behind an escape of JSON or of a URL, a secret may follow a letter.
_START = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|(?<=\\u[0-9A-Fa-f]{4})|(?<=%[0-9A-Fa-f]{2}))"
_ESCAPE = r"(?:\\(?:[nrt]|u[0-9A-Fa-f]{4})|%[0-9A-Fa-f]{2})"
_END = r"(?![A-Za-z0-9])"


@dataclass(frozen=True, slots=True)
class Finding:
    """A secret at a location of a row; its text is left out of its representation."""

    pointer: str
    kind: str
    text: str = field(repr=False)

    def to_warning(self) -> RowWarning:
        """Return the warning about it, which does not hold the secret."""
        kind = "personal_data" if self.kind in PERSONAL_KINDS else "secret"
        return RowWarning(self.pointer, kind, f"{self.kind}: {describe_kind(self.kind)}")


def describe_kind(kind: str) -> str:
    """Return the meaning of a kind."""
    return SECRET_KINDS.get(kind) or PERSONAL_KINDS[kind]


class _Rule(NamedTuple):
    """Patterns of a kind of secret, which is the first group that matched, or all that matched.

    Every match contains one of the ``anchors``, so that most texts need no search; ``lower`` ones are searched for in
    the text in lower case.
    """

    kind: str
    anchors: tuple[str, ...]
    patterns: tuple[re.Pattern[str], ...]
    is_lower: bool = False
    accepts: Callable[[str], bool] = lambda text: True


@functools.cache
def _load_rules() -> tuple[_Rule, ...]:
    """Return the rules for credentials; loads detect-secrets, which takes 0.2 seconds."""
    from detect_secrets.plugins import (
        aws,
        azure_storage_key,
        basic_auth,
        discord,
        github_token,
        gitlab_token,
        jwt,
        keyword,
        mailchimp,
        openai,
        pypi_token,
        sendgrid,
        slack,
        square_oauth,
        stripe,
        telegram_token,
        twilio,
    )

    def take(plugin: Any, more: str = "", ends: bool = False, flags: int = 0) -> tuple[re.Pattern[str], ...]:
        """Return the patterns of a plugin, with a start, and an end or what follows a prefix of fixed length."""
        rest = _END if ends else r"[A-Za-z0-9_-]*"
        return tuple(
            re.compile(f"{_START}{_group(pattern.pattern)}{rest}", pattern.flags) for pattern in plugin.denylist
        ) + ((re.compile(_START + more, flags),) if more else ())

    names = _join_names(keyword.DENYLIST)
    passwords = _join_names(filter(_PASSWORD_NAME.search, keyword.DENYLIST))
    # Quotes may be escaped, as in a result that holds JSON, or JSON within JSON.
    quote = r"(?:\\{0,7}[\"'`])?"
    value = r"([^\s\"'`,;\\<>{}()\[\]]+)"
    number = rf"([0-9]{{{_MIN_NAMED},}}){_END}"
    gets = rf"{quote}\s{{0,3}}(?::=|=>|[:=]|%3[ADad]|\bis\b)\s{{0,3}}{quote}"
    named = rf"(?:{names})(?<!pwd(?==[/~])){gets}{value}"
    # A plain "token" is as often a word of a text, or a count.
    other = "".join(f"(?<!{word}[_-])" for word in _NO_SECRETS.split("|"))
    token = rf"{other}token{quote}\s{{0,3}}(?::=|=>|[:=]|%3[ADad])\s{{0,3}}{quote}([^\s\"'`,;&\\<>{{}}()\[\]]+)"
    space = r"(?:\s|\\{1,7}[nrt]){0,40}"

    def pair(names: str) -> str:
        """Return the pattern of a name and the start of its value, such as those of a header in JSON."""
        name = rf"(?:name|key|header){quote}{space}:{space}{quote}(?:[\w.-]{{0,40}}[_.-])?(?:{names}){quote}"
        return rf"{name}{space},{space}{quote}value{quote}{space}:{space}{quote}"

    variable = rf"(?![A-Z0-9_]*(?:{_NO_SECRETS})_)(?:[A-Z][A-Z0-9]*_)+(?:KEY|PASS|SECRET|TOKEN)\s?=\s?{quote}{value}"
    return (
        _Rule(
            "private_key",
            ("PRIVATE KEY", "PuTTY-User-Key-File"),
            (
                re.compile(
                    r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"
                    r"(?:.{0,20000}?-----END (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|[A-Za-z0-9+/=\s\\:,-]*)",
                    re.DOTALL,
                ),
                re.compile(r"PuTTY-User-Key-File-\d.{0,20000}?Private-MAC: *[0-9a-f]+", re.DOTALL),
            ),
        ),
        _Rule(
            "aws_access_key",
            ("A3T", "ABIA", "ACCA", "AKIA", "ASIA"),
            (re.compile(f"{_START}{_group(aws.AWSKeyDetector.denylist[0].pattern)}{_END}"),),
        ),
        _Rule("aws_access_key", ("aws",), (aws.AWSKeyDetector.denylist[1],), is_lower=True),
        _Rule("azure_storage_key", ("AccountKey=",), take(azure_storage_key.AzureStorageKeyDetector, ends=True)),
        _Rule(
            "basic_auth",
            ("://",),
            (*basic_auth.BasicAuthDetector.denylist, re.compile(r"://:([^:/@\s\"']+)@")),
            accepts=_is_url_password,
        ),
        _Rule(
            "cloud_token",
            ("dapi", "dop_v1_", "shpat_", "hvs.", "lin_api_", "ntn_", "ATATT3"),
            (
                re.compile(rf"{_START}(?:dapi[0-9a-f]{{32}}|dop_v1_[0-9a-f]{{64}}|shpat_[0-9a-fA-F]{{32}}){_END}"),
                re.compile(rf"{_START}(?:lin_api_[A-Za-z0-9]{{40}}|ntn_[A-Za-z0-9]{{40,60}}){_END}"),
                re.compile(rf"{_START}(?:hvs\.[A-Za-z0-9_-]{{24,}}|ATATT3[A-Za-z0-9_=-]{{60,}})"),
            ),
        ),
        _Rule(
            "command_password",
            ("machine ", "mysql", "mariadb", "sshpass", "curl", "redis-cli"),
            (
                re.compile(r"\bmachine\s+\S+\s+login\s+\S+\s+password\s+([^\s\"'\\]+)"),
                re.compile(rf"\b(?:mysql(?:dump|admin)?|mariadb)\b[^\n|;&]*?\s-p{quote}{value}"),
                re.compile(rf"\bsshpass\s+-p\s?{quote}{value}"),
                re.compile(rf"\bredis-cli\b[^\n|;&]*?\s-a\s+{quote}{value}"),
                re.compile(rf"\bcurl\b[^\n|;&]*?\s(?:-u|--user)\s?{quote}[^\s:\"']+:{value}"),
            ),
            is_lower=True,
            accepts=lambda text: len(text) >= _MIN_COMMAND and text.lower() not in _PASSWORD_WORDS,
        ),
        _Rule(
            "cookie",
            ("cookie",),
            (
                re.compile(
                    rf"\bcookie{quote}\s{{0,3}}[:=]\s{{0,3}}{quote}([\w.-]+=[^\s\"'`\\]+(?:; ?[^\s\"'`\\;]+)*)", re.I
                ),
            ),
            is_lower=True,
            accepts=_is_random,
        ),
        _Rule(
            "discord_token",
            ("discord", "bot "),
            (
                *take(discord.DiscordBotTokenDetector, ends=True),
                re.compile(r"discord(?:app)?\.com/api/webhooks/\d+/([A-Za-z0-9_-]{60,})"),
            ),
            is_lower=True,
        ),
        _Rule(
            "github_token",
            ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
            take(github_token.GitHubTokenDetector, r"github_pat_[A-Za-z0-9_]{36,}"),
        ),
        _Rule(
            "gitlab_token",
            (
                "glpat-",
                "gldt-",
                "glft-",
                "glsoat-",
                "glrt-",
                "glcbt-",
                "glimt-",
                "glptt-",
                "glagent-",
                "gloas-",
                "GR13",
            ),
            take(gitlab_token.GitLabTokenDetector),
        ),
        _Rule(
            "google_key",
            ("AIza", "ya29.", "GOCSPX-"),
            (re.compile(rf"{_START}(?:AIza[\w-]{{35}}|ya29\.[\w-]{{20,}}|GOCSPX-[\w-]{{28}})(?![\w-])", re.ASCII),),
        ),
        _Rule("hugging_face_token", ("hf_",), (re.compile(rf"{_START}hf_[A-Za-z0-9]{{30,}}{_END}"),)),
        # The plugin's pattern stops before a token's signature.
        _Rule(
            "json_web_token",
            ("eyJ",),
            (re.compile(_START + r"eyJ[A-Za-z0-9_=-]+\.[A-Za-z0-9_=-]+(?:\.[A-Za-z0-9_+/=-]+)?"),),
            accepts=jwt.JwtTokenDetector.is_formally_valid,
        ),
        _Rule("mailchimp_key", ("-us",), take(mailchimp.MailchimpDetector, ends=True)),
        _Rule(
            "model_api_key",
            ("sk-", "gsk_", "xai-", "pplx-", "r8_", "tvly-", "lsv2_"),
            take(
                openai.OpenAIDetector,
                r"(?:sk-[A-Za-z0-9_-]{20,}|gsk_[A-Za-z0-9]{40,}|xai-[A-Za-z0-9]{40,}|pplx-[A-Za-z0-9]{40,}"
                r"|r8_[A-Za-z0-9]{37}|tvly-[A-Za-z0-9-]{20,}|lsv2_(?:pt|sk)_[0-9a-f]{32}_[0-9a-f]{10})",
            ),
            accepts=_is_random,
        ),
        _Rule("package_token", ("npm_", "pypi-"), take(pypi_token.PypiTokenDetector, r"npm_[A-Za-z0-9]{36}")),
        _Rule("sendgrid_key", ("SG.",), take(sendgrid.SendGridDetector)),
        _Rule(
            "signed_url",
            ("sig=", "signature="),
            (re.compile(r"(?:[?&]|\\u0026|&amp;)(?:sig|signature|x-(?:amz|goog)-signature)=([\w%+/=~-]{24,})", re.I),),
            is_lower=True,
        ),
        _Rule(
            "slack_token",
            ("xox", "xapp-", "hooks.slack.com"),
            take(slack.SlackDetector, r"xapp-\d-[A-Z0-9]+-\d+-[a-f0-9]+"),
            is_lower=True,
        ),
        _Rule("square_secret", ("sq0csp-",), take(square_oauth.SquareOAuthDetector)),
        _Rule(
            "stripe_key",
            ("k_live_", "k_test_", "whsec_"),
            take(stripe.StripeDetector, r"(?:[rs]k_test_[0-9a-zA-Z]{24,}|whsec_[A-Za-z0-9+/]{24,}=*)"),
        ),
        _Rule("telegram_token", (":AA",), take(telegram_token.TelegramBotTokenDetector)),
        _Rule("twilio_key", ("AC", "SK"), take(twilio.TwilioKeyDetector, ends=True), accepts=_is_random),
        _Rule(
            "authorization",
            ("bearer ", "basic ", "authorization"),
            (
                re.compile(r"\b(?:bearer|basic)\s+([A-Za-z0-9._~+/-]{20,}=*)", re.IGNORECASE),
                re.compile(
                    rf"\bauthorization{quote}\s*[:=]\s*{quote}(?:token|api-?key|key)\s+([A-Za-z0-9._~+/-]{{20,}}=*)",
                    re.IGNORECASE,
                ),
            ),
            is_lower=True,
            accepts=_is_random,
        ),
        _Rule(
            "named_secret",
            ("key", "pass", "pwd", "secret", "contrase", "token"),
            (
                re.compile(rf"(?<![A-Za-z]){named}", re.IGNORECASE),
                re.compile(_ESCAPE + named, re.IGNORECASE),
                re.compile(
                    rf"--(?<!\S--)(?:[a-z]+-)*(?:{names}|token)\s+{quote}(?=[^\s\"']*[A-Za-z])([^\s\"'`;|&<>]+)",
                    re.IGNORECASE,
                ),
                re.compile(rf"(?<![A-Za-z]){pair(names)}{value}", re.IGNORECASE),
            ),
            is_lower=True,
            accepts=_is_named_secret,
        ),
        _Rule(
            "named_secret",
            ("pass", "pwd", "secret", "contrase"),
            (
                re.compile(rf"(?:(?<![A-Za-z])|{_ESCAPE})(?:{passwords}){gets}{number}", re.IGNORECASE),
                re.compile(rf"(?<![A-Za-z]){pair(passwords)}{number}", re.IGNORECASE),
            ),
            is_lower=True,
            accepts=_is_number,
        ),
        _Rule(
            "named_secret",
            ("token",),
            (re.compile(rf"(?<![A-Za-z]){token}", re.IGNORECASE), re.compile(_ESCAPE + token, re.IGNORECASE)),
            is_lower=True,
            accepts=lambda text: _is_random(text, _MIN_TOKEN) and _is_named_secret(text),
        ),
        _Rule(
            "named_secret",
            ("_KEY", "_PASS", "_SECRET", "_TOKEN"),
            (
                re.compile(rf"(?<![A-Za-z0-9_]){variable}"),
                re.compile(_ESCAPE + variable),
            ),
            accepts=lambda text: _is_random(text) and _is_named_secret(text),
        ),
    )


def _group(pattern: str) -> str:
    """Return a pattern whose groups capture nothing, so that a match is the secret."""
    return "(?:" + re.sub(r"(?<!\\)\((?!\?)", "(?:", pattern) + ")"


@functools.cache
def _load_name() -> re.Pattern[str]:
    """Return the pattern of names of arguments and settings whose values are secrets."""
    from detect_secrets.plugins import keyword

    names = _join_names(keyword.DENYLIST)
    return re.compile(rf"(?!.*(?:{_NO_SECRETS})[_-]?(?:key|token)$)(?:[\w.-]*[_.-])?(?:{names}|token)", re.IGNORECASE)


def _join_names(names: Iterable[str]) -> str:
    """Return a pattern of the names that detect-secrets knows, and some more; their words may be joined by hyphens."""
    more = (r"(?:access|auth|bearer|refresh|session|id|api|bot)_?token", "(?:secret_?)?access_?key", "secret_?key")
    return "|".join([*names, *more, "passphrase"]).replace("_?", "[_-]?")


_PERSONAL: dict[str, _Rule] = {
    "emails": _Rule(
        "email",
        ("@",),
        (re.compile(r"(?<![\w.+-])[A-Za-z0-9][\w.+-]*@(?:[A-Za-z0-9-]+\.)+[A-Za-z]{2,}(?![\w-])", re.ASCII),),
        accepts=lambda text: not re.search(r"@(?:.*\.)?example\.(?:com|net|org)$", text.lower()),
    ),
    "phones": _Rule(
        "phone",
        ("",),
        (
            re.compile(
                r"(?<![\w.+-])(?:\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{2,4}(?:[ .-]?\d{2,4}){1,4}"
                r"|(?:1[ .-])?(?:\(\d{3}\) ?|\d{3}[.-])\d{3}[.-]\d{4})(?![\w-]|\.\d)",
                re.ASCII,
            ),
        ),
        accepts=lambda text: 8 <= len(re.sub(r"\D", "", text)) <= 15 and not _is_phone_placeholder(text),
    ),
    "paths": _Rule(
        "home_path",
        ("/home/", "/Users/", "Users\\", "users\\"),
        (
            re.compile(
                r"(?:(?<![\w.~/-])|(?<=file://))(?:/home/|/Users/|[A-Za-z]:(?:\\{1,2}|/)[Uu]sers(?:\\{1,2}|/))[\w.-]*\w"
            ),
        ),
        accepts=lambda text: (
            not re.search(r"[\\/](?:user(?:-[0-9a-z]{8})?|username|shared|public|default)$", text.lower())
        ),
    ),
}
_EXAMPLE = re.compile(
    r"redacted|example|your|placeholder|dummy|sample|change.?me|insert|\.\.\.|…|x{4}|\*{3}|<|\{\{", re.I
)


def _is_example(text: str) -> bool:
    """Return True for a placeholder, or a value of a manual."""
    from detect_secrets.filters import heuristic

    return (
        _EXAMPLE.search(text) is not None
        or len(set(text)) < 5
        or heuristic.is_templated_secret(text)
        or heuristic.is_prefixed_with_dollar_sign(text)
        or heuristic.is_sequential_string(text)
    )


def _is_random(text: str, length: int = 12) -> bool:
    """Return True for a text with a long part in which letters and digits are mixed, as names of things have none."""
    return any(
        re.search(r"\d", part) and re.search(r"[A-Za-z]", part)
        for part in re.findall(rf"[A-Za-z0-9]{{{length},}}", text)
    )


def _is_url_password(text: str) -> bool:
    return text.lower() not in _PASSWORD_WORDS and not text.isdigit()


def _is_named_secret(text: str) -> bool:
    """Return True if the value of a name that promises a secret is one: of a secret's length, and not only words."""
    from detect_secrets.filters import heuristic

    return (
        _MIN_NAMED <= len(text) <= 500
        and re.search(r"\d", text) is not None
        and not re.search(r"\s|://", text)
        and not heuristic.is_not_alphanumeric_string(text)
        and not heuristic.is_potential_uuid(text)
        and not re.fullmatch(r"[\w.]+\(.*\)?|[a-z_]+(?:\.[a-z_]+)+|\d{4}-\d\d-\d\d.*", text)
    )


def _is_number(text: str) -> bool:
    """Return True for a number that is long enough for a password."""
    return text.isascii() and text.isdecimal() and _MIN_NAMED <= len(text) <= MAX_DIGITS


class SecretScanner:
    """Finds secrets in conversations.

    Args:
        kinds: ``secrets``, and ``emails``, ``phones`` and ``paths``.
    """

    def __init__(self, kinds: Sequence[str] = ("secrets",)):
        self.kinds = tuple(kinds)
        self.has_secrets = "secrets" in kinds
        self._rules: tuple[_Rule, ...] = _load_rules() if self.has_secrets else ()
        self._rules += tuple(_PERSONAL[kind] for kind in kinds if kind != "secrets")
        self._named = _Rule("named_secret", (), ())
        self._tools: dict[str, dict[str, str]] = {}

    def find(self, conversation: Conversation) -> dict[str, str]:
        """Return the kind of each secret in a conversation, in the order in which they appear."""
        found: dict[str, str] = {}
        if rules := self._choose(_join(conversation)):
            for _, name, text in _walk_messages(conversation, None, None):
                self._search(text, name, rules, found)
        for tool in conversation.tools:
            found |= self._find_in_tool(tool)
        return found

    def find_in_text(self, text: str) -> dict[str, str]:
        """Return the kind of each secret in a text."""
        found: dict[str, str] = {}
        self.search(text, found)
        return found

    def is_named_secret(self, name: str, text: str) -> bool:
        """Return True if the value of a key has a secret, by itself or by the key's name."""
        found: dict[str, str] = {}
        self._search(text, name, self._rules, found)
        return bool(found)

    def search(self, text: str, found: dict[str, str]) -> None:
        """Add the secrets in a text to those found."""
        self._search(text, "", self._choose(text), found)

    def locate(self, row: ParsedRow | Conversation, found: dict[str, str] | None = None) -> list[Finding]:
        """Return the places of all secrets of a row: each string of it, with each secret that it holds.

        Args:
            row: The row.
            found: What ``find`` returned for it, if it is known.
        """
        if found is None:
            found = self.find(row if isinstance(row, Conversation) else row.conversation)
        if not found:
            return []
        secrets: dict[tuple[str, str], list[str]] = {}  # spellings by kind and secret
        for text, kind in found.items():
            secrets.setdefault((kind, normalise(text, kind)), []).append(text)
        patterns = []
        for (kind, _), texts in secrets.items():
            forms = dict.fromkeys(form for text in texts for form in list_forms(text))
            patterns.append((re.compile("|".join(to_pattern(form, kind) for form in forms)), kind, texts[0]))
        patterns.sort(key=lambda pattern: -len(pattern[2]))  # one may be a part of another
        findings = []
        for pointer, _, text in _walk(row):
            for pattern, kind, secret in patterns:
                left = pattern.sub(" ", text)
                if left != text:
                    findings.append(Finding(pointer, kind, secret))
                    text = left
        return findings

    def hide(self, defect: Defect, row: Any) -> Defect:
        """Return a defect whose reason holds no secret of its row, given as it was read."""
        text = row.decode("utf-8", "replace") if isinstance(row, bytes) else str(row)
        found = self.find_in_text(text)
        if not found or not (shows(defect.reason, found) or shows(defect.pointer, found)):
            return defect
        pointer = "" if shows(defect.pointer, found) else defect.pointer
        return replace(defect, pointer=pointer, reason="not shown, because it quotes a secret of the row")

    def _find_in_tool(self, tool: Tool) -> dict[str, str]:
        text = tool.to_json()
        if (known := self._tools.get(text)) is None:
            known = {}
            if rules := self._choose(text):
                for _, name, string in walk_value(tool.function, "", ""):
                    self._search(string, name, rules, known)
            if len(self._tools) >= _MAX_CACHED_TOOLS:
                self._tools.clear()
            self._tools[text] = known
        return known

    def _choose(self, text: str, rules: Sequence[_Rule] | None = None) -> list[_Rule]:
        """Return the rules that may find something in a text, of all or of those given."""
        lower, chosen = text.lower(), []
        for rule in self._rules if rules is None else rules:
            searched = lower if rule.is_lower else text
            for anchor in rule.anchors:
                if anchor in searched:
                    chosen.append(rule)
                    break
        return chosen

    def _search(self, text: str, name: str, rules: Sequence[_Rule], found: dict[str, str]) -> None:
        spans: list[tuple[int, int]] = []  # of secrets in this text; elsewhere a part of one is a secret of its own
        # Anchors were looked for in all texts together; for a short text, the patterns are as fast.
        for rule in self._choose(text, rules) if len(text) > _SHORT_TEXT else rules:
            for pattern in rule.patterns:
                for match in pattern.finditer(text):
                    secret = match[1] if pattern.groups else match[0]
                    secret = secret.rstrip(".!?") if rule.kind == "named_secret" else secret
                    start = match.start(1 if pattern.groups else 0)
                    end = start + len(secret)
                    is_part = any(first <= start and end <= last for first, last in spans)
                    if not is_part and _is_secret(secret, rule):
                        found.setdefault(secret, rule.kind)
                        spans.append((start, end))
        is_named = (
            name
            and self.has_secrets
            and (_is_named_secret(text) or (_is_number(text) and _PASSWORD_NAME.search(name) is not None))
            and _load_name().fullmatch(name) is not None
        )
        if is_named and (0, len(text)) not in spans and _is_secret(text, self._named):
            found.setdefault(text, self._named.kind)


def _is_secret(text: str, rule: _Rule) -> bool:
    """Return True for a match of a rule that is no example."""
    return rule.accepts(text) and (rule.kind in PERSONAL_KINDS or not _is_example(text))


def shows(text: str, found: dict[str, str]) -> bool:
    """Return True if a text holds a secret, or six characters of one in a row."""
    return any(
        secret[start : start + _SHOWN_PIECE] in text
        for secret in found
        for start in range(max(1, len(secret) - _SHOWN_PIECE + 1))
    )


def warn(findings: Sequence[Finding], others: Iterable[RowWarning]) -> list[RowWarning]:
    """Return the other warnings about a row and those about its secrets, none of which quotes a secret."""
    found = {finding.text: finding.kind for finding in findings}
    kept = list(others)
    if findings:
        hidden = "not shown, because it quotes a secret of the row"
        kept = [warning._replace(reason=hidden) if shows(warning.reason, found) else warning for warning in kept]
        kept += [finding.to_warning() for finding in findings]
        kept = [w._replace(pointer="") if shows(w.pointer, found) else w for w in kept]
    return kept


@dataclass(slots=True)
class SecretCounts:
    """Places with secrets by kind, the rows that have them, and the turns that became context because of them.

    ``searched`` are the texts that were looked for, such as ``emails``.
    """

    rows: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    turns: int = 0
    searched: list[str] = field(default_factory=list)

    def count(self, findings: Sequence[Finding], num_turns: int = 0) -> None:
        """Count the findings of a row, and its turns that are context because of them."""
        self.rows += bool(findings)
        self.turns += num_turns
        for finding in findings:
            self.kinds[finding.kind] = self.kinds.get(finding.kind, 0) + 1

    def add(self, other: SecretCounts) -> None:
        """Add the counts of other rows in place."""
        self.rows += other.rows
        self.turns += other.turns
        self.searched = self.searched or list(other.searched)
        for kind, count in other.kinds.items():
            self.kinds[kind] = self.kinds.get(kind, 0) + count

    def describe(self, is_redacted: bool) -> str:
        """Return the counts in words, such as ``2 secrets in 1 row (github_token 2, emails 0)``."""
        kinds = list_counts(self.kinds, self.searched)
        if not self.kinds:
            return f"found in the rows' texts: {kinds}"
        is_personal = any(kind in PERSONAL_KINDS for kind in self.kinds)
        noun = format_count(
            sum(self.kinds.values()),
            "secret or personal datum" if is_personal else "secret",
            "secrets and personal data" if is_personal else "",
        )
        text = f"{noun} in {format_count(self.rows, 'row')} ({kinds})"
        if is_redacted:
            text += " replaced by placeholders"
        return text + (f"; {format_count(self.turns, 'turn')} with placeholders not supervised" if self.turns else "")

    def describe_with_option(self, is_redacted: bool) -> str:
        """Return ``describe`` for commands that have ``--redact``, which is named where nothing was replaced."""
        return self.describe(is_redacted) + ("" if is_redacted or not self.kinds else "; --redact replaces them")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SecretCounts:
        """Return the counts that ``to_json`` wrote."""
        kinds, searched = dict(values.get("kinds", {})), list(values.get("searched", ()))
        return cls(values.get("rows", 0), kinds, values.get("turns", 0), searched)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        kinds = dict(sorted(self.kinds.items()))
        return {"rows": self.rows, "turns": self.turns, "kinds": kinds, "searched": self.searched}


def list_counts(kinds: Mapping[str, int], searched: Sequence[str]) -> str:
    """Return the kinds with their counts, and what was looked for and not found with 0."""
    groups = {{"email": "emails", "home_path": "paths", "phone": "phones"}.get(kind, "secrets") for kind in kinds}
    found = [f"{kind} {count:,}" for kind, count in sorted(kinds.items())]
    return ", ".join([*found, *(f"{name} 0" for name in searched if name not in groups)])


def _is_phone_placeholder(text: str) -> bool:
    digits = re.sub(r"\D", "", text)
    return digits.startswith("999") if text.startswith("+") else digits.startswith(("555", "1555"))


def normalise(text: str, kind: str) -> str:
    """Return what is equal for all spellings of a secret."""
    if kind == "private_key":  # with line breaks, with escaped ones, and without
        return re.sub(r"\\+[nr]|\s", "", text)
    if kind == "home_path":  # the user's name
        return re.split(r"[\\/]", text)[-1].lower()
    if kind == "phone":
        return re.sub(r"\D", "", text)
    return text.lower() if kind == "email" else text


def list_forms(text: str) -> list[str]:
    """Return how a secret is spelled in texts, in JSON, and in JSON within JSON."""
    forms = [text]
    for encode in (json.dumps, _JSON.encode):
        once = encode(text)[1:-1]
        forms += [once, encode(once)[1:-1]]
    return forms


def to_pattern(form: str, kind: str) -> str:
    """Return the pattern of a spelling; a short secret is not replaced within a word."""
    is_part = kind not in (*PERSONAL_KINDS, "basic_auth", "named_secret")
    start = "" if is_part or not form[0].isalnum() else _START
    return start + re.escape(form) + ("" if is_part or not form[-1].isalnum() else _END)


def _join(conversation: Conversation) -> str:
    """Return all texts of a conversation's messages as one, to search for anchors."""
    texts: list[str] = []
    for message in conversation.messages:
        texts += [text for text in (message.content, message.reasoning, message.call_id, message.name) if text]
        for call in message.calls:
            texts += [call.name, call.id or "", _JSON.encode(call.arguments)]
    if conversation.template_args:
        texts.append(_JSON.encode(conversation.template_args))
    return "\n".join(texts)


def _walk(row: ParsedRow | Conversation) -> Iterator[tuple[str, str, str]]:
    """Yield the location, the name and the text of each string of a row, which is a value's if it has a name."""
    if isinstance(row, Conversation):
        yield from _walk_messages(row, None, None)
        tools, tools_pointer, tools_suffix = row.tools, "tools", ".function"
    else:
        yield from _walk_messages(row.conversation, row.message_pointers, row.call_pointers)
        tools, tools_pointer, tools_suffix = row.conversation.tools, row.tools_pointer, row.tools_suffix
    for index, tool in enumerate(tools):
        yield from walk_value(tool.function, f"{tools_pointer}[{index}]{tools_suffix}", "")


def _walk_messages(
    conversation: Conversation, message_pointers: list[str] | None, call_pointers: list[CallPointer] | None
) -> Iterator[tuple[str, str, str]]:
    located = iter(call_pointers or ())
    for index, message in enumerate(conversation.messages):
        where = message_pointers[index] if message_pointers is not None else f"messages[{index}]"
        for key, text in (("content", message.content), ("reasoning_content", message.reasoning)):
            if text:
                yield f"{where}.{key}", "", text
        for key, text in (("tool_call_id", message.call_id), ("name", message.name)):
            if text:
                yield f"{where}.{key}", "", text
        for number, call in enumerate(message.calls):
            at = next(located, None) or CallPointer(
                f"{where}.tool_calls[{number}]", f"{where}.tool_calls[{number}].function.arguments"
            )
            yield f"{at.call}.name", "", call.name
            if call.id:
                yield f"{at.call}.id", "", call.id
            yield from walk_value(call.arguments, at.arguments, "")
    yield from walk_value(conversation.template_args, "chat_template_kwargs", "")


def walk_value(value: Any, pointer: str, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield the location, the name and the text of each string of a JSON value; keys have no name of their own.

    A number that is long enough for a password is a text as well. The name of a ``value`` is the ``name`` beside it,
    as in lists of headers.
    """
    if isinstance(value, str):
        yield pointer, name, value
    elif isinstance(value, int):
        if 10 ** (_MIN_NAMED - 1) <= value < 10**MAX_DIGITS:
            yield pointer, name, str(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"{pointer}.{key}", "", key
            label = _name_value(value) if key in ("value", "Value") else ""
            yield from walk_value(item, f"{pointer}.{key}", label or key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from walk_value(item, f"{pointer}[{index}]", name)


def _name_value(pair: dict[str, Any]) -> str:
    """Return the name that an object such as a header has for its value, or an empty text."""
    names = (pair.get(key) for key in ("name", "Name", "key", "Key", "header"))
    return next((name for name in names if isinstance(name, str)), "")
