"""How an object gets into a store: in one request if it is small, else in parts, a few at a time."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from drivetrain.checkpoint.client import Client, speaks_s3
from drivetrain.checkpoint.retries import Request, as_os_error

_MANY_PARTS = 4000
_DOUBLING = 1000


class Upload(Protocol):
    """An object that is too large for one request. Every method raises `OSError` and nothing else."""

    def send(self, part: bytes) -> None:
        """Send the next bytes."""
        ...

    def finish(self) -> None:
        """Let the object appear, whole."""
        ...

    def abort(self) -> None:
        """Leave nothing of it."""
        ...


class PartUpload:
    """A multi-part upload to Amazon S3, or to what speaks its language; each part is retried by itself.

    https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpuoverview.html

    Args:
        client: The store.
        path: The object.
        lanes: The most parts that are under way at a time.
    """

    def __init__(self, client: Client, path: str, lanes: int) -> None:
        self._client = client
        self._path = path
        self._lanes = lanes
        self._bucket, self._key, _ = client.fs.split_path(client.strip(path))
        self._size = 0
        self._sent: list[dict[str, Any]] = []
        self._under_way: list[Request[Any]] = []
        self._id = self._call("writing", "create_multipart_upload").result()["UploadId"]

    def send(self, part: bytes) -> None:
        """See `Upload.send`; returns while parts are still under way."""
        while len(self._under_way) >= self._lanes:
            self._take_first()
        number = len(self._sent) + len(self._under_way) + 1
        self._size += len(part)
        self._under_way.append(
            self._call("writing", "upload_part", UploadId=self._id, PartNumber=number, body=part)
        )

    def finish(self) -> None:
        """See `Upload.finish`."""
        while self._under_way:
            self._take_first()
        self._complete()

    def abort(self) -> None:
        """See `Upload.abort`."""
        # A part that arrives after the upload was aborted would stay, and cost.
        for request in self._under_way:
            request.settle()
        self._under_way.clear()
        self._call("aborting", "abort_multipart_upload", UploadId=self._id).result()

    def _take_first(self) -> None:
        answer = self._under_way[0].result()
        del self._under_way[0]
        # With the checksum, where the service has made one: it then compares again what it puts together.
        checks = {name: value for name, value in answer.items() if name.startswith("Checksum")}
        checks.pop("ChecksumType", None)
        self._sent.append({"PartNumber": len(self._sent) + 1, "ETag": answer["ETag"], **checks})

    def _complete(self) -> None:
        request = self._call(
            "finishing",
            "complete_multipart_upload",
            UploadId=self._id,
            MultipartUpload={"Parts": self._sent},
        )
        try:
            request.result()
        except FileNotFoundError:
            # No such upload: not any more, if it was completed by a request whose answer was lost.
            if request.tries == 1 or not self._is_there():
                raise

    def _is_there(self) -> bool:
        try:
            return bool(self._client.info(self._path)["size"] == self._size)
        except FileNotFoundError:
            return False

    def _call(self, what: str, method: str, **arguments: Any) -> Request[Any]:
        return self._client.begin(
            what, self._path, "call_s3", method, Bucket=self._bucket, Key=self._key, **arguments
        )


class FileUpload:
    """An upload as fsspec's own transactions make it: a file that is not committed when it is closed.

    What is retried here, and how, is the store's own package's affair.

    Args:
        client: The store.
        path: The object.
        part: The bytes of a part.
    """

    def __init__(self, client: Client, path: str, part: int) -> None:
        self._path = path
        self._file: Any = None
        self._file = self._try(
            lambda: client.fs.open(client.strip(path), "wb", block_size=part, autocommit=False)
        )

    def send(self, part: bytes) -> None:
        """See `Upload.send`."""
        self._try(lambda: self._file.write(part))

    def finish(self) -> None:
        """See `Upload.finish`."""
        self._try(self._file.close)
        self._try(self._file.commit)

    def abort(self) -> None:
        """See `Upload.abort`."""
        self._try(self._file.discard)
        # One that believes itself open would be finished by Python's garbage collector.
        with suppress(AttributeError):
            self._file.closed = True

    def _try(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except MemoryError:
            raise
        except Exception as error:
            raise as_os_error(error, self._path) from error


class ObjectSink:
    """An object that is being written; see `Sink`.

    Args:
        client: The store.
        path: The object.
        part: The bytes of a part, which is what is held in memory at least.
        lanes: The most parts that are under way at a time.
    """

    def __init__(self, client: Client, path: str, part: int, lanes: int) -> None:
        self._client = client
        self._path = path
        self._part = part
        self._lanes = lanes
        self._held = io.BytesIO()
        self._parts = 0
        self._upload: Upload | None = None

    def write(self, data: memoryview) -> int:
        """See `Sink.write`."""
        room = self._part_size() - self._held.tell()
        if room == 0:
            self._send()
            room = self._part_size()
        return self._held.write(data[:room])

    def finish(self) -> None:
        """See `Sink.finish`; or nothing is left."""
        if self._upload is None:
            self._put(self._held.getvalue())
            return
        try:
            self._send()
            self._upload.finish()
        except BaseException:
            with suppress(OSError):  # the first cause is on its way
                self._upload.abort()
            raise

    def abort(self) -> None:
        """See `Sink.abort`; nothing is left."""
        self._held = io.BytesIO()
        if self._upload is not None:
            self._upload.abort()

    def _part_size(self) -> int:
        # A store takes 10,000 parts at most. With them all the same size but for the very large, because some
        # stores want that.
        return self._part << max(0, (self._parts - _MANY_PARTS) // _DOUBLING)

    def _send(self) -> None:
        if self._upload is None:
            self._upload = self._begin()
        part = self._held.getvalue()  # no copy
        self._held = io.BytesIO()
        self._parts += 1
        self._upload.send(part)

    def _put(self, content: bytes) -> None:
        name = self._client.strip(self._path)
        if not speaks_s3(self._client.fs):
            self._client.call("writing", self._path, "pipe_file", name, content)
            return
        bucket, key, _ = self._client.fs.split_path(name)
        self._client.call(
            "writing", self._path, "call_s3", "put_object", Bucket=bucket, Key=key, body=content
        )

    def _begin(self) -> Upload:
        if speaks_s3(self._client.fs):
            return PartUpload(self._client, self._path, self._lanes)
        return FileUpload(self._client, self._path, self._part)
