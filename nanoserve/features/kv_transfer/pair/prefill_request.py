"""The request with which a decode engine lets the prefill server compute a prompt."""

import http.client
import json
import select

from nanoserve.features.kv_transfer.connector import Prompt
from nanoserve.features.kv_transfer.pair.messages import RefusedError
from nanoserve.features.kv_transfer.pair.options import ConsumerOptions

# Statuses for a prompt that is too long there, and of a busy server. The next one may be answered.
_REFUSALS = (400, 413, 422, 429, 503)
_MOST_SHOWN = 200  # bytes of an answer, in a message


class PrefillError(Exception):
    """The prefill server has answered with an error."""


class PrefillRequest:
    """A request for one token after a prompt, whose blocks are the purpose."""

    def __init__(self, options: ConsumerOptions, prompt: Prompt, timeout: float) -> None:
        """Send the request; raises `OSError` or `http.client.HTTPException`.

        timeout: of connecting and sending, in seconds, and of reading an answer that has begun.
        """
        host, port = options.url.hostname or "", options.url.port
        is_https = options.url.scheme == "https"
        kind = http.client.HTTPSConnection if is_https else http.client.HTTPConnection
        self._connection = kind(host, port, timeout=timeout)
        body = {"prompt": prompt.token_ids, "max_tokens": 1, "temperature": 0}
        salt = salt_of(prompt)
        if salt:
            body["cache_salt"] = salt
        headers = {"Content-Type": "application/json"}
        if options.api_key is not None:
            headers["Authorization"] = f"Bearer {options.api_key}"
        try:
            self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        except BaseException:
            self._connection.close()
            raise

    def fileno(self) -> int:
        return self._connection.sock.fileno()

    def read_answer(self) -> None:
        """Read the answer; raises `PrefillError`, or `RefusedError` for this prompt only."""
        answer = self._connection.getresponse()
        text = answer.read(_MOST_SHOWN).decode(errors="replace")
        if answer.status in _REFUSALS:
            raise RefusedError(f"status {answer.status}: {text}")
        if answer.status != 200:
            raise PrefillError(f"the prefill server answers with status {answer.status}: {text}")

    def is_answered(self, seconds: float) -> bool:
        """Return True if an answer arrives in this time."""
        poll = select.poll()
        poll.register(self, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def close(self) -> None:
        """Close the connection; a prompt that is being computed is aborted."""
        self._connection.close()


def salt_of(prompt: Prompt) -> str | None:
    """Return the salt of a prompt, "" if it has none; None if its K and V depend on more.

    The data type of the KV cache is in the key, too, and in the engines' fingerprint.
    """
    key = dict(zip(prompt.cache_key[::2], prompt.cache_key[1::2], strict=True))
    key.pop("kv_cache_dtype", None)
    salt = key.pop("cache_salt", "")
    return None if key else salt
