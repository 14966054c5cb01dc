"""Hugging Face's hub on this machine, as far as `huggingface_hub` asks for models."""

import hashlib
import json
import re
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

URL = re.compile(r"(?:/api/models)?/([^/]+/[^/]+)/(revision|tree|resolve)/([^/]+)(?:/(.+))?")


def commit_id(folder: Path) -> str:
    return hashlib.sha1(str(folder).encode()).hexdigest()


class Hub(ThreadingHTTPServer):
    """Serves the folders of models by name and revision; it is also a proxy to any hub.

    Attributes:
        gated: a model whose files are refused.
        fetched: how often each file was sent, as NAME/FILE.
        num_requests: all requests.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.models: dict[str, dict[str, Path]] = {}
        self.gated = ""
        self.fetched = Counter[str]()
        self.num_requests = 0

    def answer(self, url: str, *, is_head: bool) -> tuple[int, dict[str, str], bytes]:
        self.num_requests += 1
        match = URL.fullmatch(urlsplit(url).path)  # to a proxy, the URL is whole
        name, kind, revision, file = map(unquote, match.groups("")) if match else [""] * 4
        revisions = self.models.get(name, {})
        revisions = {**revisions, **{commit_id(folder): folder for folder in revisions.values()}}
        if revision not in revisions:
            missing = "Revision" if revisions else "Repo"
            return 404, {"X-Error-Code": f"{missing}NotFound"}, b""
        folder = revisions[revision]
        if kind == "resolve" and name == self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        if kind == "resolve":
            content = (folder / file).read_bytes()
            self.fetched[f"{name}/{file}"] += not is_head
            etag = hashlib.sha256(content).hexdigest()
            return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit_id(folder)}, content
        files = [
            {"type": "file", "path": path.name, "rfilename": path.name, "oid": "0" * 40}
            | {"size": path.stat().st_size}
            for path in folder.iterdir()
        ]
        info = {"id": name, "sha": commit_id(folder), "siblings": files}
        return 200, {}, json.dumps(files if kind == "tree" else info).encode()


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        is_head = self.command == "HEAD"
        status, headers, content = self.server.answer(self.path, is_head=is_head)
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(b"" if is_head else content)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass
