"""Addresses of servers with OpenAI's API, as users give them."""

from __future__ import annotations

from urllib.parse import urlsplit

from fctune.base.errors import ConfigError


def find_address_problem(url: str, name: str) -> str | None:
    """Return what is wrong with the address of a server; None if nothing is.

    A password is refused because a run's record and results name the address; it is not repeated in the message.

    Args:
        url: The address.
        name: Option or config key that holds it, for the message.
    """
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port or an IPv6 address that is none
        is_address = False
    if "@" in url:
        return f"{name}: the address contains a password, which would be written to the results; use FCTUNE_API_KEY"
    return (
        None
        if is_address
        else f"{name}: {url} is not a server's address; expected http://HOST:PORT or https://HOST/PATH"
    )


def parse_base_url(url: str, name: str) -> str:
    """Return the address that the API's paths are relative to; it ends with ``/v1`` unless another path is given.

    Raises:
        ConfigError: It is not a server's address, or contains a password.
    """
    if (problem := find_address_problem(url, name)) is not None:
        raise ConfigError(f"{problem}.")
    parts = urlsplit(url.rstrip("/"))
    path = parts.path.removesuffix("/chat/completions").removesuffix("/")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"
