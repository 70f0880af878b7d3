"""A model hub on loopback: what huggingface_hub asks for to push a head and to fetch it."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "a" * 34
HEAD = "0" * 40


@dataclass
class Hub:
    """What the hub holds, and how it behaves."""

    url: str = ""
    role: str = "write"
    orgs: tuple[str, ...] = ("org",)
    fail_commits: int = 0
    """So many commits are answered with 503."""
    lose_answers: int = 0
    """So many commits are made and answered with 504."""
    files: dict[str, bytes] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    commits: list[list[str]] = field(default_factory=list)
    created: list[str] = field(default_factory=list)
    uploads: int = 0


def git_oid(content: bytes) -> str:
    """Id of a blob, as git counts it."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self, status: int, body: Any = None, **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        if path == "/api/whoami-v2":
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self._answer(401, {"error": "Invalid credentials"})
            orgs = [{"name": name, "roleInOrg": "write"} for name in hub.orgs]
            auth = {"accessToken": {"role": hub.role}}
            return self._answer(200, {"name": "me", "type": "user", "orgs": orgs, "auth": auth})
        if "/tree/" in path:
            return self._answer(200, [self._entry(name) for name in hub.files])
        if path.startswith("/api/models/"):
            return self._answer(200, {"id": "org/head", "sha": HEAD, "siblings": []})
        name = path.rpartition("/")[2]
        if name not in hub.files:
            return self._answer(404, {"error": "no such file"}, X_Error_Code="EntryNotFound")
        etag = f'"{hashlib.sha256(hub.files[name]).hexdigest()}"'
        self._answer(200, hub.files[name], ETag=etag, X_Repo_Commit=HEAD)

    do_HEAD = do_GET

    def _entry(self, name: str) -> dict[str, Any]:
        content = self.hub.files[name]
        return {"type": "file", "path": name, "size": len(content), "oid": git_oid(content)}

    def do_PUT(self) -> None:
        self.hub.objects[self.path.rpartition("/")[2]] = self._body()
        self.hub.uploads += 1
        self._answer(200, {})

    def do_POST(self) -> None:
        hub, body, path = self.hub, self._body(), self.path.partition("?")[0]
        if path == "/api/repos/create":
            name = json.loads(body)["name"]
            hub.created.append(name)
            return self._answer(200, {"url": f"{hub.url}/org/{name}"})
        if path == "/api/validate-yaml":
            return self._answer(200, {"errors": [], "warnings": []})
        if "/preupload/" in path:
            return self._answer(200, {"files": [self._mode(file) for file in json.loads(body)["files"]]})
        if path.endswith("/info/lfs/objects/batch"):
            return self._answer(200, {"transfer": "basic", "objects": self._wanted(json.loads(body))})
        assert "/commit/" in path, path
        if hub.fail_commits:
            hub.fail_commits -= 1
            return self._answer(503, {"error": "try again"})
        self._commit([json.loads(line) for line in body.splitlines()])
        if hub.lose_answers:
            hub.lose_answers -= 1
            return self._answer(504, {"error": "too slow"})
        address = f"{hub.url}/org/head/commit/{HEAD}"
        return self._answer(200, {"commitUrl": address, "commitOid": HEAD})

    def _mode(self, file: dict[str, Any]) -> dict[str, Any]:
        name, is_lfs = file["path"], file["path"].endswith(".safetensors")
        there = self.hub.files.get(name)
        oid = None
        if there is not None:
            oid = hashlib.sha256(there).hexdigest() if is_lfs else git_oid(there)
        mode = "lfs" if is_lfs else "regular"
        return {"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def _wanted(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        wanted = []
        for entry in batch["objects"]:
            found = {"oid": entry["oid"], "size": entry["size"]}
            if entry["oid"] not in self.hub.objects:
                found["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{entry['oid']}"}}
            wanted.append(found)
        return wanted

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        names = []
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.hub.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.hub.files[value["path"]] = self.hub.objects[value["oid"]]
            else:
                continue
            names.append(value["path"])
        self.hub.commits.append(sorted(names))


@contextmanager
def running_hub(**settings: Any) -> Iterator[Hub]:
    """A hub that runs until the block ends."""
    hub = Hub(**settings)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
