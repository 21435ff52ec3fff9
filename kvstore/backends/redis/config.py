"""Configuration of the Redis backend."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar, Final, Literal
from urllib.parse import unquote, urlsplit

import msgspec

from kvstore.backends.stream import check_tls_files
from kvstore.config import Seconds, SecretStr, TierConfig, check_field
from kvstore.errors import ConfigError

_PREFIX: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}", re.ASCII)
_ADDRESS: Final = re.compile(r"[A-Za-z0-9.-]{1,253}:\d{1,5}(/\d{0,5})?", re.ASCII)
"""Host and port; a user and password would have an '@'."""
_SCHEMES: Final = ("redis", "rediss", "unix")


class RedisConfig(TierConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Blocks as values of a Redis or Valkey server, a cluster, or a pair managed by Sentinel.

    docs/redis.md describes each option; comments below give the reasons for the defaults. A user name and password in
    ``url`` are moved to ``username`` and ``password``.
    """

    aliases: ClassVar[dict[str, str]] = {"user": "username", "endpoint": "url"}

    url: str = "redis://127.0.0.1:6379"
    username: str = ""
    password: SecretStr | None = None
    mode: Literal["auto", "standalone", "cluster"] = "auto"
    sentinels: tuple[str, ...] = ()
    sentinel_master: str = ""
    sentinel_username: str = ""
    sentinel_password: SecretStr | None = None
    insecure: bool = False
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_check_hostname: bool = True
    prefix: str = "kv:"
    # A prompt not repeated within a day is not worth server memory.
    ttl: Seconds = Seconds(86400)
    # With one connection the server would idle while the client verifies. More than four gain nothing with a
    # single-threaded server, and every engine has its own.
    connections: int = 4
    # A server in the same data center responds in milliseconds.
    connect_timeout: Seconds = Seconds(1)
    # Longer than the pauses of a forking or syncing server, shorter than recomputing the blocks.
    timeout: Seconds = Seconds(1)
    read_from: Literal["master", "replica"] = "master"
    # Lookups take one round trip of a few hundred microseconds; a network problem must not cost as much as the cache
    # saves.
    lookup_timeout: Seconds = Seconds("500ms")
    load_timeout: Seconds = Seconds(2)
    store_timeout: Seconds = Seconds(10)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._split_url()
        check_field(_PREFIX.fullmatch(self.prefix) is not None, "prefix", self.prefix, "1 to 64 of A-Z a-z 0-9 _ . : -")
        check_field(not self.ttl or self.ttl >= 1, "ttl", self.ttl, "0 or at least 1 second")
        check_field(1 <= self.connections <= 64, "connections", self.connections, "1 to 64")
        for name in ("connect_timeout", "timeout"):
            check_field(0 < getattr(self, name) <= 300, name, getattr(self, name), "above 0 and at most 5 minutes")
        if bool(self.sentinels) != bool(self.sentinel_master):
            raise ConfigError("'sentinels' and 'sentinel_master' belong together. Give both, or neither.")
        for address in self.sentinels:
            host, _, port = address.rpartition(":")
            is_port = re.fullmatch(r"\d{1,5}", port, re.ASCII) is not None and 0 < int(port) < 65536
            # Refused with '@': a password in the address would appear wherever the configuration is shown.
            shown = "(not shown)" if "@" in address else address
            check_field(bool(host) and is_port and "@" not in address, "sentinels", shown, "a list of 'host:port'")
        if self.sentinels and self.mode == "cluster":
            raise ConfigError("Sentinel does not watch clusters. Leave out 'sentinels' or 'mode'.")
        check_tls_files(self, is_encrypted=self.tls, remedy="Give a 'url' with 'rediss://'")

    @property
    def tls(self) -> bool:
        return self.url.startswith("rediss:")

    def _split_url(self) -> None:
        """Move name and password out of the url, so that messages can show it, and put its scheme in lower case."""
        # Messages never contain the full url or a chained exception, which may hold the password.
        if _ADDRESS.fullmatch(self.url):
            raise ConfigError(
                f"'url' is {self.url!r}, without a scheme. Give 'redis://{self.url}', or 'rediss://{self.url}' for TLS."
            )
        try:
            parts = urlsplit(self.url)
            user, password, _ = parts.username, parts.password, parts.port
        except ValueError:
            raise ConfigError("'url' (not shown) is not a URL. Expected one like 'redis://host:6379/0'.") from None
        check_field(parts.scheme in _SCHEMES, "url", f"{parts.scheme}:…", "redis://, rediss:// or unix://")
        query_ok = re.fullmatch(r"(db=\d{1,5})?", parts.query) is not None
        check_field(query_ok, "url", "…?(not shown)", "no option behind '?' but 'db=…'")
        # Text after the host may be the rest of a password.
        place_ok = bool(not parts.netloc.rpartition("@")[2] and parts.path.strip("/"))
        if parts.scheme != "unix":
            place_ok = re.fullmatch(r"(/\d{0,5})?", parts.path) is not None
        if parts.fragment or not place_ok:
            raise ConfigError(
                "'url' (not shown) can't be used. Expected one like 'redis://host:6379/0' or 'unix:///path'; a '/', "
                "'#', '?' or '@' in a password is written as '%2F', '%23', '%3F' or '%40'."
            )
        if password:
            if self.password is not None:
                raise ConfigError("A password is given in 'url' and as 'password'. Give it once.")
            msgspec.structs.force_setattr(self, "password", SecretStr(unquote(password)))
        if user:
            msgspec.structs.force_setattr(self, "username", unquote(user))
        query = f"?{parts.query}" if parts.query else ""
        bare = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}{query}"
        msgspec.structs.force_setattr(self, "url", bare)
