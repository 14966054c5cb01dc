"""Hugging Face's hub on this machine, as far as `huggingface_hub` asks for models."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

URL = re.compile(r"(?:/api/models)?/([^/]+/[^/]+)/(revision|tree|resolve)/([^/]+)(?:/(.+))?")


class Hub:
    """The folders of models by name and revision; counts what is asked of it.

    Attributes:
        gated: names of models whose files are refused.
        fetched: how often each file was sent, as NAME/FILE.
        num_requests: all requests.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.folders: dict[tuple[str, str], Path] = {}
        self.gated: set[str] = set()
        self.fetched = Counter[str]()
        self.num_requests = 0

    def add(self, name: str, folder: Path, revision: str = "main") -> str:
        """Serve a folder as a revision of a model, and return its commit."""
        commit = hashlib.sha1(f"{name} {revision}".encode()).hexdigest()
        self.folders |= {(name, revision): folder, (name, commit): folder}
        return commit

    def answer(self, url: str, *, is_head: bool) -> tuple[int, dict[str, str], bytes]:
        """Return the status, the headers and the content for a request."""
        self.num_requests += 1
        match = URL.fullmatch(urlsplit(url).path)  # to a proxy, the URL is whole
        name, kind, revision, file = map(unquote, match.groups("")) if match else [""] * 4
        if name not in {name for name, _ in self.folders}:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if (name, revision) not in self.folders:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        folder = self.folders[name, revision]
        same = [
            key for (other, key), path in self.folders.items() if (other, path) == (name, folder)
        ]
        commit = max(same, key=len)
        if kind == "resolve":
            if name in self.gated:
                return 403, {"X-Error-Code": "GatedRepo"}, b""
            content = (folder / file).read_bytes()
            self.fetched[f"{name}/{file}"] += not is_head
            etag = hashlib.sha256(content).hexdigest()
            return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, content
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        tree = [
            {"type": "file", "path": path, "size": size, "oid": hashlib.sha1().hexdigest()}
            for path, size in sizes.items()
        ]
        siblings = [{"rfilename": path, "size": size} for path, size in sizes.items()]
        info = {"id": name, "sha": commit, "siblings": siblings}
        return 200, {}, json.dumps(tree if kind == "tree" else info).encode()


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Serve an empty hub in a thread; it is also a proxy to any hub."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, content = hub.answer(self.path, is_head=self.command == "HEAD")
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, ThreadPoolExecutor(1) as pool:
        hub = Hub(f"http://127.0.0.1:{server.server_port}")
        pool.submit(server.serve_forever, 0.05)
        try:
            yield hub
        finally:
            server.shutdown()
