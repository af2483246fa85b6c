"""The part of the Hub's HTTP API that uploads and downloads use: `python server.py FOLDER PORT TOKEN`.

It prints its port. While the file `stall` is in the folder, an upload stops half way, and says `stalled`.
"""

import base64
import hashlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

FOLDER, TOKEN = Path(sys.argv[1]), sys.argv[3]
OBJECTS = FOLDER / "objects"
LOCK = threading.Lock()
LARGE = (".safetensors", ".bin", ".pt")
Tree = dict[str, dict[str, Any]]


class RefusedError(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Repository:  # a repository: branches that name commits, commits that hold a tree of files
    def __init__(self, name: str) -> None:
        self.path = FOLDER / "repositories" / f"{name.replace('/', '--')}.json"
        if not self.path.exists():
            raise RefusedError(404, "RepoNotFound", f"there is no {name}")
        self.content = json.loads(self.path.read_text())

    @staticmethod
    def create(name: str, private: bool) -> None:
        path = FOLDER / "repositories" / f"{name.replace('/', '--')}.json"
        if path.exists():
            raise RefusedError(409, "", "You already created this model repo")
        path.parent.mkdir(parents=True, exist_ok=True)
        first = "0" * 40
        write(path, {"private": private, "branches": {"main": first}, "commits": {first: {}}, "messages": []})

    def commit_of(self, revision: str) -> str:
        found = self.content["branches"].get(revision, revision)
        if found not in self.content["commits"]:
            raise RefusedError(404, "RevisionNotFound", f"there is no revision {revision}")
        return str(found)

    def tree(self, revision: str) -> Tree:
        return dict(self.content["commits"][self.commit_of(revision)])

    def commit(self, branch: str, tree: Tree, message: str) -> str:
        self.content["messages"].append(message)
        text = json.dumps([tree, self.content["messages"]])
        commit = hashlib.sha1(text.encode()).hexdigest()
        self.content["commits"][commit] = tree
        self.content["branches"][branch] = commit
        write(self.path, self.content)
        return commit


def write(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value))
    temporary.rename(path)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def log_message(self, *arguments: Any) -> None: ...

    def do_GET(self) -> None:
        method = {"HEAD": self.get, "GET": self.get, "POST": self.post, "PUT": self.put}[self.command]
        url = urlsplit(self.path)
        self.parts = [unquote(each) for each in url.path.split("/")[1:]]
        self.query = parse_qs(url.query)
        sent = self.headers.get("Authorization")
        with LOCK, (FOLDER / "requests.jsonl").open("a") as file:
            file.write(json.dumps([self.command, url.path]) + "\n")
        try:
            if sent != f"Bearer {TOKEN}" and self.parts[0] != "lfs":
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                raise RefusedError(401, "RepoNotFound", f"Invalid credentials: {str(sent).split()[-1]}")
            method()
        except RefusedError as refusal:
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": str(refusal)}
            answer = {"error": str(refusal), "url": f"{self.address}/org/known"}
            self.answer(answer, refusal.status, headers)

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def answer(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, each in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, each)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def get(self) -> None:
        if self.parts[:2] != ["api", "models"]:
            self.resolve()
            return
        repository = Repository("/".join(self.parts[2:4]))
        revision = self.parts[5] if len(self.parts) > 5 else "main"
        if self.parts[4:5] == ["tree"]:
            tree = repository.tree(revision)
            self.answer([{"type": "file", "path": path, **each} for path, each in tree.items()])
            return
        name = "/".join(self.parts[2:4])
        siblings = [{"rfilename": path} for path in repository.tree(revision)]
        self.answer({"id": name, "sha": repository.commit_of(revision), "siblings": siblings})

    def resolve(self) -> None:
        owner, name, _, revision, *path = self.parts
        repository = Repository(f"{owner}/{name}")
        entry = repository.tree(revision).get("/".join(path))
        if entry is None:
            raise RefusedError(404, "EntryNotFound", f"there is no file {'/'.join(path)}")
        headers = {"X-Repo-Commit": repository.commit_of(revision), "ETag": f'"{entry["oid"]}"'}
        if "lfs" in entry:
            headers["X-Linked-ETag"] = f'"{entry["lfs"]["oid"]}"'
            headers["X-Linked-Size"] = str(entry["size"])
        self.answer((OBJECTS / entry["content"]).read_bytes(), headers=headers)

    def post(self) -> None:
        if self.parts[-4:] == ["info", "lfs", "objects", "batch"]:
            self.batch()
            return
        if self.parts == ["api", "repos", "create"]:
            asked = json.loads(self.body())
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            with LOCK:
                Repository.create(name, asked.get("visibility") == "private")
            self.answer({"url": f"{self.address}/{name}"})
            return
        if self.parts == ["api", "validate-yaml"]:
            self.validate(json.loads(self.body())["content"])
            return
        name, action, branch = "/".join(self.parts[2:4]), self.parts[4], self.parts[5]
        data = self.body()
        with LOCK:
            getattr(self, action)(Repository(name), branch, data)

    def validate(self, content: str) -> None:
        head = content.split("---\n")[1] if content.startswith("---\n") else ""
        found = yaml.safe_load(head)
        wrong = [] if isinstance(found, dict) else [{"message": "the front matter is no mapping"}]
        self.answer({"errors": wrong, "warnings": []}, 400 if wrong else 200)

    def branch(self, repository: Repository, branch: str, data: bytes) -> None:
        if branch in repository.content["branches"]:
            raise RefusedError(409, "", "Reference already exists")
        repository.content["branches"][branch] = repository.commit_of("main")
        write(repository.path, repository.content)
        self.answer({})

    def preupload(self, repository: Repository, branch: str, data: bytes) -> None:
        tree = repository.tree(branch)
        listed = []
        for path in (each["path"] for each in json.loads(data)["files"]):
            mode, oid = "lfs" if path.endswith(LARGE) else "regular", tree.get(path, {}).get("content_oid")
            listed.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer({"files": listed})

    def batch(self) -> None:
        objects = []
        for each in json.loads(self.body())["objects"]:
            place = f"{self.address}/lfs/{each['oid']}?X-Amz-Signature=signed"
            actions = {"upload": {"href": place}}
            is_here = (OBJECTS / each["oid"]).exists()
            objects.append({**each, **({} if is_here else {"actions": actions})})
        self.answer({"transfer": "basic", "objects": objects})

    def put(self) -> None:
        left = int(self.headers["Content-Length"])
        data = b""
        while left:
            data += self.rfile.read(min(left, 4096))
            left = int(self.headers["Content-Length"]) - len(data)
            while left and (FOLDER / "stall").exists():
                (FOLDER / "stalled").touch()
                time.sleep(0.02)
        oid = hashlib.sha256(data).hexdigest()
        if oid != self.parts[1]:
            raise RefusedError(400, "", "the content differs from its hash")
        store(oid, data)
        self.answer({})

    def commit(self, repository: Repository, branch: str, data: bytes) -> None:
        tree, message = repository.tree(branch), ""
        for line in data.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "header":
                message = value["summary"]
            elif operation["key"] == "deletedFile":
                del tree[value["path"]]
            elif operation["key"] == "file":
                content = base64.b64decode(value["content"])
                sha = hashlib.sha256(content).hexdigest()
                git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
                store(sha, content)
                tree[value["path"]] = {"oid": git, "size": len(content), "content": sha, "content_oid": git}
            elif operation["key"] == "lfsFile":
                oid = value["oid"]
                if not (OBJECTS / oid).exists():
                    raise RefusedError(400, "", f"the object {oid} was never uploaded")
                lfs = {"oid": oid, "size": value["size"], "pointerSize": 134}
                pointer = hashlib.sha1(f"pointer {oid}".encode()).hexdigest()
                names = {"oid": pointer, "content": oid, "content_oid": oid}
                tree[value["path"]] = {**names, "size": value["size"], "lfs": lfs}
            else:
                raise RefusedError(400, "", f"unknown operation {operation['key']}")
        commit = repository.commit(branch, tree, message)
        address = f"{self.address}/{'/'.join(self.parts[2:4])}/commit/{commit}"
        self.answer({"commitUrl": address, "commitOid": commit, "pullRequestUrl": None})


def store(name: str, data: bytes) -> None:
    temporary = OBJECTS / f"{name}.{threading.get_ident()}"
    temporary.write_bytes(data)
    temporary.rename(OBJECTS / name)


if __name__ == "__main__":
    OBJECTS.mkdir(parents=True, exist_ok=True)
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
