"""What is printed and stored shows no secret of an address, and cannot control a terminal."""

import json

import pytest
from tests.support.messages import warned

from drivetrain.core.errors import ConfigError, MissingDependencyError, shown, without_secrets
from drivetrain.core.files import NotAFileError
from drivetrain.core.messages import logger
from drivetrain.loggers.files import to_json

WITH = (
    ("postgresql://user:{}@host:5432/db", "postgresql://user:<hidden>@host:5432/db"),
    ("redis://:a@{}:b/c@host/0", "redis://:<hidden>@host/0"),
    ("https://{}@github.com/a/b.git", "https://<hidden>@github.com/a/b.git"),
    ("https://h/x?X-Amz-Credential={0}&X-Goog-Signature={0}", "<hidden>"),
    ("az://c/x?AccountKey={0};sig={0}&se=3", "az://c/x?AccountKey=<hidden>;sig=<hidden>&se=3"),
    ("push --token hf_{0}, Authorization: Bearer {0}", "--token <hidden>, Authorization: Bearer <hidden>"),
)
WITHOUT = "s3://bucket/a sftp://user@host abfs://box@account/a tcp://10.0.0.1:2 a@b.c key=value h?monkey=3"


@pytest.mark.parametrize(("form", "wanted"), WITH)
def test_the_secrets_of_addresses_are_hidden_in_texts_errors_and_files(form: str, wanted: str) -> None:
    text = form.format(secret := "tops3cret")
    errors = ConfigError(text), NotAFileError(text, "is a pipe"), MissingDependencyError("a", "b", text)
    config = to_json({"storage": [text], "command": f"drivetrain search --storage {text}"})
    for each in (without_secrets(text), *map(str, errors), json.dumps(config), without_secrets(f'"{text}"')):
        assert wanted in each
        assert secret not in each


def test_other_addresses_are_shown_whole_and_control_characters_as_text() -> None:
    assert without_secrets(WITHOUT) == WITHOUT
    name = "a\x1b]0;owned\x07\u202eb"
    assert shown(f"{name}\n\té") == "a\\x1b]0;owned\\x07\\u202eb\n\té"
    assert str(ConfigError(name)).isprintable()
    with warned("no run a") as told:
        logger("drivetrain.test").warning("no run %s in ftp://me:mine@host", name)
    assert told[0].isprintable() and "mine" not in told[0]  # noqa: PT018
