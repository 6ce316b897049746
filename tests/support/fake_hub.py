"""As much of the Hugging Face hub as its client needs to download a model, on this machine."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """Branches, tags and commits are keys of `versions`: the folder that each of them holds."""

    versions: dict[str, Path]
    is_gated: bool = False  # everybody sees its list of files, and nobody may read them

    def commit(self, revision: str) -> str:
        """A hash like git's, the same for every name of one folder."""
        return hashlib.sha1(str(self.versions[revision]).encode()).hexdigest()

    def folder(self, revision: str) -> Path | None:
        commits = {self.commit(name): folder for name, folder in self.versions.items()}
        return self.versions.get(revision) or commits.get(revision)


@dataclass
class FakeHub:
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)  # such as "GET /org/name/resolve/main/a.json"
    endpoint: str = ""

    @property
    def fetched(self) -> list[str]:
        """The files that were downloaded, in alphabetical order."""
        paths = (line.removeprefix("GET ") for line in self.requests if line.startswith("GET "))
        return sorted(path.split("/", 5)[5] for path in paths if "/resolve/" in path)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        is_api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models").split("/")[1:]
        repository = self.repositories.get("/".join(parts[:2]))
        if repository is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        kind, revision, *rest = parts[2:] or ["revision", "main"]
        folder = repository.folder(unquote(revision))
        if folder is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        commit = hashlib.sha1(str(folder).encode()).hexdigest()
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        if is_api:
            names = [str(file.relative_to(folder)) for file in files]
            entries = [_entry(name, folder / name) for name in names]
            info = {"id": "/".join(parts[:2]), "sha": commit, "siblings": []}
            return 200, {}, json.dumps(entries if kind == "tree" else info).encode()
        if repository.is_gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        file = folder / "/".join(rest)
        if file not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        etag = _entry("", file)["oid"]
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}, file.read_bytes()


def _entry(name: str, file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    oid = hashlib.sha1(content).hexdigest()
    return {"type": "file", "path": name, "size": len(content), "oid": oid}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            hub.requests.append(f"{self.command} {path}")
            status, headers, body = hub.answer(path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield hub
        server.shutdown()
