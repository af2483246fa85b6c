"""Checkpoints in an S3 bucket: a server in memory, and in front of it one that fails as it is told to."""

import http.client
import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import fsspec.asyn
import fsspec.config
import pytest
from tests.campaigns.checkpoints import run_campaign
from tests.support import s3_server
from tests.support.faults import read_bytes
from tests.support.storage import check_checkpoint_io, check_file_system

from drivetrain.checkpoint import DirectoryCheckpointIO
from drivetrain.checkpoint.storage.files import write_file
from drivetrain.checkpoint.storage.remote import RemoteFileSystem
from drivetrain.checkpoint.storage.retries import Retry
from drivetrain.checkpoint.storage.schemes import file_system

pytestmark = pytest.mark.landing  # the server and its client are large; test_remote.py has what is not S3's

# The thread that all of fsspec's asynchronous file systems share, and one to which it gives what would block
# it. They live as long as the process: started here, they are no test's leak.
fsspec.asyn.get_loop().set_default_executor(HELPER := ThreadPoolExecutor(1))
HELPER.submit(int).result()

BUCKET = "s3://bucket"
PART = 5 << 20  # the smallest that S3 takes


def send(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request(method, path, body)
        return connection.getresponse().read()
    finally:
        connection.close()


class Service:
    def __init__(self, front, port):
        self.front = front
        self.port = port
        self.options = {"endpoint_url": f"http://127.0.0.1:{front}", "key": "key", "secret": "secret"}
        self.files = self.connected()
        # For the server's "hang", which takes longer. Others do not count on how fast the server is.
        self.hasty = self.connected(config_kwargs={"read_timeout": 1})

    def connected(self, block=1 << 20, **options):  # it gives up soon
        retry = Retry(tries=4, pause=0.01, patience=600)
        return RemoteFileSystem("s3", {**self.options, **options}, retry=retry, part=PART, block=block)

    def fail(self, *kinds, method="GET", pattern=".", skip=0, many=1):
        rule = {"method": method, "pattern": pattern, "skip": skip, "many": many}
        self.requests({"kind": kind, **rule} for kind in kinds)

    def requests(self, rules=()):  # those since the last call; from now on the rules are these
        return json.loads(send(self.front, "PUT", "/faults", json.dumps(list(rules))))

    def unfinished_uploads(self):
        return send(self.port, "GET", "/bucket?uploads").count(b"<UploadId>")


@pytest.fixture(scope="module")
def running():
    program, pipe = [sys.executable, s3_server.__file__], subprocess.PIPE
    with subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True) as process:
        service = Service(*map(int, process.stdout.readline().split()))
        send(service.port, "PUT", "/bucket")
        before = dict(fsspec.config.conf)
        fsspec.config.conf["s3"] = {**service.options, "endpoint_url": f"http://127.0.0.1:{service.port}"}
        yield service
        fsspec.config.conf.clear()
        fsspec.config.conf.update(before)
        process.stdin.close()


@pytest.fixture
def service(running):
    running.requests()
    yield running
    running.requests()


@pytest.fixture
def place(request):
    return f"{BUCKET}/{request.node.name}"


CONTENT = random.Random(0).randbytes(1 << 16) * 176 + b"end"  # 11 MiB: two parts and a little
OBJECT = f"{BUCKET}/object"


def write(files, path):
    chunks = [CONTENT[start : start + (1 << 20)] for start in range(0, len(CONTENT), 1 << 20)]
    return write_file(path, chunks, files)


def test_every_operation_is_what_checkpoints_need(service, place):
    files = file_system(place)
    check_file_system(files, f"{place}/files")
    check_checkpoint_io(DirectoryCheckpointIO(), f"{place}/checkpoints", files.join)
    # An empty folder that a console has made is an object of its own name, and is not in itself.
    for number, name in enumerate(("folder/", "object"), 1):
        send(service.port, "PUT", f"/{place.removeprefix('s3://')}/made/{name}", b"")
        assert len(files.entries(f"{place}/made")) == number  # a listing is never kept
    assert files.entries(f"{place}/made/folder") == {}


@pytest.mark.nightly
def test_no_fault_at_any_operation_loses_what_was_saved(service, place):
    score = run_campaign(3, 1, place, ("objects",), files=file_system(place))
    assert not score.failures, str(score)


def test_a_failure_that_passes_does_no_harm(service):
    state = random.getstate()
    for kind, method, pattern, many in (
        ("SlowDown", "PUT", "partNumber=2", 1),
        ("refused", "PUT", "partNumber=3", 2),
        ("lost answer", "PUT", "partNumber=2", 1),
        ("hang", "PUT", "partNumber=2", 1),
        ("InternalError", "POST", "uploads", 1),
        ("refused", "POST", "uploadId=", 2),
        ("lost answer", "POST", "uploadId=", 1),
        ("lost answer, NoSuchUpload", "POST", "uploadId=", 1),  # it is not there any more, as it is done
    ):
        files = service.hasty if kind == "hang" else service.files
        service.fail(*kind.split(", "), method=method, pattern=pattern, many=many)
        assert write(files, OBJECT) == len(CONTENT)
        assert read_bytes(files, OBJECT) == CONTENT
        assert service.unfinished_uploads() == 0
        files.delete(OBJECT)
    write(service.files, OBJECT)
    for kind in ("SlowDown", "refused", "cut short", "fewer bytes", "hang"):
        service.fail(kind, pattern="object", skip=2, many=1 if kind == "hang" else 2)
        assert read_bytes(service.hasty if kind == "hang" else service.files, OBJECT) == CONTENT
        assert [each.split()[0] for each in service.requests()].count("GET") > 12
    service.files.delete(OBJECT)
    assert random.getstate() == state  # a run's random numbers do not depend on the network


def test_an_object_that_could_not_be_written_is_not_there_and_costs_nothing(service):
    for kind, method, pattern in (
        ("AccessDenied", "PUT", "partNumber=2"),
        ("SlowDown", "PUT", "partNumber=1"),
        ("refused", "POST", "uploadId="),
        ("NoSuchUpload", "POST", "uploadId="),
    ):
        service.fail(kind, method=method, pattern=pattern, many=99)
        with pytest.raises(OSError, match="bucket/object"):
            write(service.files, OBJECT)
        assert service.files.kind(OBJECT) is None
        assert service.unfinished_uploads() == 0
