"""Replace the certificate of a running server when its files change (`--enable-ssl-refresh`)."""

import logging
import os
import ssl

logger = logging.getLogger(__name__)


class CertificateFiles:
    """The files of a certificate and its key, as they were loaded into a context last.

    context: of the server; connections that are made later get the new certificate.
    """

    def __init__(self, context: ssl.SSLContext, certfile: str, keyfile: str) -> None:
        self._context, self._files = context, (certfile, keyfile)
        self._seen = self._versions()

    def refresh(self) -> bool:
        """Load the files if they have changed; return True if they were loaded.

        A pair that does not fit, for example because only one file has been written yet, is logged
        and left alone until a file changes again.
        """
        versions = self._versions()
        if versions == self._seen:
            return False
        self._seen = versions
        try:
            trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # a failure would spoil the server's
            trial.load_cert_chain(*self._files, password="")
            self._context.load_cert_chain(*self._files, password="")
        except OSError as error:  # an `SSLError` is one, too
            logger.warning("the certificate has changed and cannot be loaded: %s", error)
            return False
        logger.info("the certificate was loaded again")
        return True

    def _versions(self) -> list[tuple[int, int, int] | None]:
        return [_version(file) for file in self._files]


def _version(file: str) -> tuple[int, int, int] | None:
    """Return values that change with the content of a file; None while there is no file."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
