"""Registry of backends and codecs: maps names in configurations to classes.

Names are built in, come from installed packages (entry points), or have the form ``"module:Class"``. A class is
imported at its first use, so an optional package is needed only if a configuration uses it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from kvstore.config import did_you_mean
from kvstore.errors import ConfigError


class Registry:
    """The known names of one kind of class.

    Args:
        kind: Noun for messages, in lower case: ``"backend"``.
        base: ``"module:Class"`` of the base class; a string, because the class is in a higher layer.
        builtin: ``"module:Class"`` by name.
        group: Entry point group in which installed packages add names; a built-in name can't be replaced.
        extras: Extra of this package that a built-in name requires, by name.
        products: Built-in names by the names of products that they serve, for errors.
    """

    def __init__(
        self,
        kind: str,
        *,
        base: str,
        builtin: Mapping[str, str],
        group: str,
        extras: Mapping[str, str] | None = None,
        products: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self._extras = dict(extras or {})
        self._products = dict(products or {})
        self.group = group
        self._base = base
        self._builtin = dict(builtin)

    def names(self) -> list[str]:
        """Return all known names, sorted, without importing the classes."""
        return sorted({*self._builtin, *self._installed()})

    def find(self, name: str) -> type[Any]:
        """Return the class of a name.

        Args:
            name: A known name, or ``"module:Class"``.

        Raises:
            ConfigError: The name is unknown, can't be imported, or is not a class of this kind.
        """
        path = self._builtin.get(name) or self._installed().get(name)
        if path is None and ":" not in name:
            raise ConfigError(self._unknown(name))
        return self._checked(name, self._load(name, path or name))

    def meant(self, name: str, known: Iterable[str]) -> str:
        """Return a suffix for errors about an unknown name, with the name of ``known`` that is probably meant."""
        served = self._products.get(name.lower())
        return f" For {name} give {served!r}." if served else did_you_mean(name, known)

    def _installed(self) -> dict[str, str]:
        # Imported here because it takes a fifth of the time of `import kvstore`, and few processes need it.
        from importlib import metadata

        return {point.name: point.value for point in metadata.entry_points(group=self.group)}

    def _unknown(self, name: str) -> str:
        known = self.names()
        hint = self.meant(name, known)
        return f"Unknown {self.kind} {name!r}.{hint} Known: {', '.join(known)}. For your own class give 'module:Class'."

    def _load(self, name: str, path: str) -> Any:
        module_name, _, attribute = path.partition(":")
        what = f"{self.kind.capitalize()} {name!r}"
        if not module_name or not attribute:
            raise ConfigError(f"{what} is not of the form 'module:Class'. Give both, such as 'my_package:MyCache'.")
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            missing = error.name or module_name
            if module_name == missing or module_name.startswith(missing + "."):
                advice = "Check the spelling, and that its directory is on PYTHONPATH of the engine's process."
            elif name in self._extras:
                advice = f"Install what it needs: pip install 'vllm-kvstore[{self._extras[name]}]'."
            else:
                advice = f"It needs {missing!r}: install the package that has it."
            raise ConfigError(f"{what} can't be imported: there is no module {missing!r}. {advice}") from error
        # Importing runs third-party code, which may raise any exception; the user needs one clear error.
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{what} can't be imported: {module_name} raised {raised}.") from error
        for part in attribute.split("."):
            if not hasattr(found, part):
                hint = did_you_mean(part, dir(found))
                raise ConfigError(f"{what} can't be found: {module_name} has no {attribute!r}.{hint}")
            found = getattr(found, part)
        return found

    def _checked(self, name: str, found: Any) -> type[Any]:
        base = self._load(self._base, self._base)
        what = f"{self.kind.capitalize()} {name!r}"
        wanted = f"{base.__module__}.{base.__qualname__}"
        if not inspect.isclass(found):
            raise ConfigError(f"{what} is a {type(found).__name__}, not a class. Name a subclass of {wanted}.")
        if not issubclass(found, base):
            raise ConfigError(f"{what} is not a {self.kind}. Derive the class from {wanted}.")
        if inspect.isabstract(found):
            missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
            raise ConfigError(f"{what} is incomplete: it lacks {missing}. Write these methods.")
        return found


BACKENDS = Registry(
    "backend",
    base="kvstore.backends.base:Backend",
    builtin={
        "file": "kvstore.backends.disk:DiskBackend",
        "memory": "kvstore.backends.memory:MemoryBackend",
        "mooncake": "kvstore.backends.mooncake:MooncakeBackend",
        "nvme": "kvstore.backends.disk:DiskBackend",
        "peer": "kvstore.backends.peer:PeerBackend",
        "redis": "kvstore.backends.redis:RedisBackend",
        "s3": "kvstore.backends.s3:S3Backend",
    },
    group="kvstore.backends",
    extras={"mooncake": "mooncake", "peer": "peer", "s3": "s3"},
    products={"disk": "file", "dragonfly": "redis", "keydb": "redis", "minio": "s3", "ssd": "file", "valkey": "redis"},
)
"""The backends: adapters to one medium each."""

CODECS = Registry(
    "codec",
    base="kvstore.codec.base:Step",
    builtin={
        "aead": "kvstore.codec.seal:AeadSeal",
        "byteplane": "kvstore.codec.byteplane:BytePlane",
        "mac": "kvstore.codec.seal:MacSeal",
        "zstd": "kvstore.codec.zstd:Zstd",
    },
    group="kvstore.codecs",
    extras={"aead": "aead", "mac": "aead", "zstd": "zstd"},
)
"""The steps of codec chains: codecs and seals."""
