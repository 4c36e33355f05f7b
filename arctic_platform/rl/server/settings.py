"""What a server is told when it starts. Safe by default: it listens on this machine only, or asks for a key."""

import ipaddress
import os
import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator

from arctic_platform.errors import ConfigError
from arctic_platform.rl.config import StrictModel, check_api_key

API_KEY_VARIABLE = "ARCTIC_RL_API_KEY"
MIN_KEY_LEN = 16
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


class ServerSettings(StrictModel):
    """One server.

    Raises:
        ConfigError: a value is out of range, or it would listen beyond this machine without an API key.
    """

    host: str = Field("127.0.0.1", description="Address to listen on; beyond this machine only with an API key.")
    port: int = Field(8790, ge=0, le=65535, description="Port to listen on; 0: any free one.")
    api_key: SecretStr | None = Field(None, exclude=True, description="Every request must bear it, but /health.")
    max_body_bytes: int = Field(2**30, ge=1, description="Largest request body.")
    max_jobs: int = Field(8, ge=1, description="Jobs at the same time; each holds a model.")
    idle_seconds: float | None = Field(
        None, gt=0.0, description="Close a job that nobody called or asked about for so long; none: never."
    )
    body_seconds: float = Field(30.0, gt=0.0, description="Longest silence within a request body.")
    drain_seconds: float = Field(60.0, ge=0.0, description="How long running calls may take when the server stops.")
    log_format: Literal["text", "json"] = Field("text", description="Lines for people, or one JSON object per line.")

    @model_validator(mode="after")
    def _check_key(self) -> Self:
        if self.api_key is None and not self.is_loopback:
            raise ConfigError(
                f"host={self.host!r} can be reached from other machines and needs an API key: set "
                f"{API_KEY_VARIABLE}, or give --api-key-file FILE; without one only 127.0.0.1 is allowed"
            )
        if self.api_key is not None and len(self.api_key.get_secret_value()) < MIN_KEY_LEN:
            raise ConfigError(
                f"the API key is shorter than {MIN_KEY_LEN} characters; make one with: "
                'python -c "import secrets; print(secrets.token_urlsafe(32))"'
            )
        return self

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def read_api_key(file: Path | None) -> SecretStr | None:
    """The key in a file, else in the environment, else none. Raises ConfigError for a file that holds none."""
    if file is None:
        return api_key_of_environment()
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f'API key file "{file}" cannot be read ({reason}); give a file with the key in it') from None
    check_api_key(f'the API key in file "{file}"', key)
    return SecretStr(key)


def api_key_of_environment() -> SecretStr | None:
    """The key in the environment, for servers and clients alike. Raises ConfigError for one that is unusable."""
    given = os.environ.get(API_KEY_VARIABLE, "").strip()
    if not given:
        return None
    check_api_key(API_KEY_VARIABLE, given)
    return SecretStr(given)


def parse_bytes(text: str) -> int:
    """`512M`, `2G` or a number of bytes. Raises ConfigError."""
    found = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ConfigError(f'"{text}" is no size; write bytes, or 512M, or 2G')
    return int(found[1]) * _UNITS[found[2].upper()]
