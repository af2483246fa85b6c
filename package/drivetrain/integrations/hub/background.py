"""An upload in a program of its own: neither its work nor a stuck connection delays training."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import IO

from drivetrain.integrations.hub.client import known_token, without_token
from drivetrain.integrations.hub.upload import Upload

PACKAGES = Path(__file__).parents[3]
"""The folder that `drivetrain` is imported from."""


class BackgroundUpload:
    """One upload that is in progress.

    Args:
        upload: The upload.
        folder: A folder for its files; removed when the upload has ended.
        token: The token that the user gave, or None. The program gets it in its environment.
        timeout: Seconds after which the upload counts as failed.
    """

    def __init__(self, upload: Upload, folder: Path, token: str | None, timeout: float) -> None:
        self._folder = folder
        self._token = token
        self._timeout = timeout
        self._ends = monotonic() + timeout
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        job = folder / "upload.json"
        job.write_text(json.dumps(upload.to_json()), encoding="utf-8")
        paths = [str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            **({"HF_TOKEN": token} if token is not None else {}),
        }
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "drivetrain.integrations.hub.upload", str(job)],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    def poll(self) -> str | None:
        """Return "" once the upload has succeeded, the reason once it has failed, and None before."""
        if self._process.poll() is None and monotonic() < self._ends:
            return None
        is_late = self._process.poll() is None
        printed = self.end()
        if is_late:
            return f"it took longer than {self._timeout:g} seconds"
        try:
            result = json.loads(printed.splitlines()[-1])
            return str(result.get("error", ""))
        except (ValueError, IndexError, AttributeError):
            last = without_token(" ".join(printed.split()), known_token(self._token))[-500:]
            return f"its program ended with code {self._process.returncode}: {last or 'it printed nothing'}"

    def end(self) -> str:
        """End the program if it still runs, remove its files, and return what it printed."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        with self._output:
            self._output.seek(0)
            printed = self._output.read().decode("utf-8", "replace")
        shutil.rmtree(self._folder, ignore_errors=True)
        return printed
