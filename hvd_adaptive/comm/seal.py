"""Values on the side channel carry a code that only this job's ranks can make: what has none is not believed.

Secret names of keys would not do as much: PyTorch's store lists its keys to everybody who connects.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

_CODE_CHARS = 32


class UnsealedError(RuntimeError):
    """A value on the side channel that no rank of this job put there."""


def new_secret() -> str:
    """Returns a secret for a job, which rank 0 sends to the others over MPI."""
    return secrets.token_hex(32)


class Seal:
    """Makes and checks the codes: HMAC-SHA256 over key and value, 128 bits of it.

    Equal values under one key are equal with their codes, too, so that ``compare_set`` works on them.

    Args:
        secret: from :func:`new_secret`.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def close(self, key: str, value: bytes) -> bytes:
        """Returns the value with its code before it.

        Args:
            key: under which it is stored: it is believed nowhere else.
            value: any bytes.
        """
        return self._code(key, value) + value

    def open(self, key: str, data: bytes) -> bytes:
        """Returns the value of what :meth:`close` returned.

        Raises:
            UnsealedError: if its code is not this job's.
        """
        code, value = data[:_CODE_CHARS], data[_CODE_CHARS:]
        if not hmac.compare_digest(code, self._code(key, value)):
            raise UnsealedError(
                f"the side channel holds a value under {key!r} that no rank of this job has put there: another program can "
                "reach rank 0's port. Nothing of it was used; find out which (`ss -tp`), and see docs/security.md"
            )
        return value

    def _code(self, key: str, value: bytes) -> bytes:
        # The key's length, so that no part of one can count for a part of the other.
        text = f"{len(key)}:{key}:".encode() + value
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()[:_CODE_CHARS].encode()
