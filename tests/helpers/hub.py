"""A small server that speaks the endpoints of the Hugging Face Hub that pushing and loading use."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_secret"


class Hub(ThreadingHTTPServer):
    """Repositories in memory: the files of each commit by name."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.repos = {}

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_port}"


def sha(repo, number):
    return hashlib.sha1(f"{repo}{number}".encode()).hexdigest()


class Answers(BaseHTTPRequestHandler):
    def log_message(self, *words):
        pass

    def reply(self, status, content=b"{}", **headers):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_POST(self):  # noqa: N802
        body = self.rfile.read(int(self.headers["Content-Length"]))
        repos = self.server.repos
        if self.path == "/api/validate-yaml":
            self.reply(200)
        elif self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.reply(401, {"error": "Invalid username or password."})
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            known = name in repos
            repos.setdefault(name, [{".gitattributes": b""}])
            answer = {"url": f"{self.server.endpoint}/{name}"}
            self.reply(409 if known else 200, answer | ({"error": "already created"} if known else {}))
        elif "/preupload/" in self.path:
            files = [file["path"] for file in json.loads(body)["files"]]
            self.reply(200, {"files": [{"path": x, "uploadMode": "regular", "shouldIgnore": False} for x in files]})
        else:
            name = re.match("/api/models/(.*)/commit/main", self.path)[1]
            files = dict(repos[name][-1])
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del files[line["value"]["path"]]
            repos[name].append(files)
            oid = sha(name, len(repos[name]) - 1)
            answer = {"commitUrl": f"{self.server.endpoint}/{name}/commit/{oid}", "commitOid": oid, "success": True}
            self.reply(200, answer)

    def do_GET(self):  # noqa: N802
        path, repos = self.path.partition("?")[0].removeprefix("/api/models"), self.server.repos
        found = re.match(r"/([^/]+/[^/]+)(?:/(revision|tree|resolve)/([^/]+)/?(.*))?$", path)
        name, kind, revision, file = found.groups()
        commits = {sha(name, number): files for number, files in enumerate(repos.get(name, []))}
        newest = list(commits)[-1] if commits else ""
        oid = newest if revision in (None, "main") else revision
        if oid not in commits:
            missing = "RevisionNotFound" if name in repos else "RepoNotFound"
            self.reply(404, {"error": missing}, X_Error_Code=missing)
        elif kind == "tree":
            files = commits[oid].items()
            self.reply(200, [{"type": "file", "path": x, "size": len(y), "oid": sha(x, len(y))} for x, y in files])
        elif kind == "resolve":
            content = commits[oid][file]
            self.reply(200, content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=oid)
        else:
            self.reply(200, {"id": name, "sha": oid, "siblings": [{"rfilename": x} for x in commits[oid]]})

    do_HEAD = do_GET  # noqa: N815


@contextmanager
def running_hub():
    hub = Hub()
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
