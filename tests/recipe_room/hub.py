"""A hub of this machine's own: folders, behind the few addresses that the hub's libraries ask for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

_COMMIT = f"{1:040d}"


@contextmanager
def serving(root: Path) -> Iterator[str]:
    """Serve `models/OWNER/NAME/` and `datasets/OWNER/NAME/` below `root`; the address to set HF_ENDPOINT to."""

    class Hub(_Hub):
        folder = root

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class _Hub(BaseHTTPRequestHandler):
    folder: Path

    def do_GET(self) -> None:
        self._answer(*self._look_up(unquote(urlparse(self.path).path).strip("/").split("/")))

    do_HEAD = do_GET

    def _look_up(self, parts: list[str]) -> tuple[int, bytes, dict[str, str]]:
        if parts[0] == "api":
            return self._about(self.folder.joinpath(*parts[1:4]), "/".join(parts[2:4]), parts[4:])
        at = parts.index("resolve")
        kind = parts[:at] if parts[0] == "datasets" else ["models", *parts[:at]]
        file = self.folder.joinpath(*kind, *parts[at + 2 :])
        if not file.is_file():
            return 404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": _COMMIT}
        return 200, file.read_bytes(), {"ETag": f'"{_digest(file)}"', "X-Repo-Commit": _COMMIT}

    def _about(self, folder: Path, name: str, asked: list[str]) -> tuple[int, bytes, dict[str, str]]:
        if not folder.is_dir():
            return 404, b"", {"X-Error-Code": "RepoNotFound"}
        files = [_entry(file) for file in sorted(folder.iterdir())]
        if asked[:1] == ["tree"]:
            if len(asked) > 2:
                return 404, b"", {"X-Error-Code": "EntryNotFound"}
            return 200, json.dumps(files).encode(), {}
        known = {"id": name, "sha": _COMMIT, "siblings": files, "tags": [], "downloads": 0, "likes": 0}
        return 200, json.dumps(known).encode(), {}

    def _answer(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def _entry(file: Path) -> dict[str, Any]:
    facts = {"type": "file", "size": file.stat().st_size, "oid": _digest(file)}
    return {**facts, "path": file.name, "rfilename": file.name}


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
