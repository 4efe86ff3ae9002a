from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from knnper.client.settings import LimitSettings, ServiceSettings, read_client
from knnper.errors import ConfigError
from knnper.server.link.setup import client_yaml
from knnper.transport.credentials import Address

WHOLE = """
name: site-a
server: federation.example.org:8443
tls: {ca: ca.crt}
key: keys/site-a.key
state: /var/lib/knnper
data: {name: image_folder, path: pictures}
train: false
service: {port: 9000, tls: {certificate: a.crt, key: a.key}}
"""


def _file(folder: Path, text: str) -> Path:
    path = folder / "client.yaml"
    path.write_text(text)
    return path


def _problems(folder: Path, text: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        read_client(_file(folder, text))
    return {problem.place: problem.message for problem in caught.value.problems}


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    found = read_client(_file(tmp_path, WHOLE))
    assert found.name == "site-a"
    assert found.tls is not None
    assert found.tls.ca == tmp_path / "ca.crt"
    assert found.key == tmp_path / "keys/site-a.key"
    assert found.state == Path("/var/lib/knnper")
    assert found.base == tmp_path
    assert found.data.name == "image_folder"
    assert (found.train, found.share_metrics) == (False, True)
    assert found.service.tls is not None
    assert found.service.tls.key == tmp_path / "a.key"


def test_a_relative_path_of_the_file_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _file(tmp_path, WHOLE)
    monkeypatch.chdir(tmp_path)
    assert read_client(Path("client.yaml")).file == tmp_path / "client.yaml"


def test_little_is_needed(tmp_path: Path) -> None:
    text = (
        "{name: a, server: 'h:1', insecure: true, data: {name: image_folder, path: d}}"
    )
    found = read_client(_file(tmp_path, text))
    assert found.state == tmp_path / "state"
    assert found.service == ServiceSettings()
    assert (found.tls, found.key, found.insecure) == (None, None, True)


def test_overrides_come_last(tmp_path: Path) -> None:
    path = _file(tmp_path, WHOLE)
    changes = ["train=true", "service.port=0", "data.path=elsewhere"]
    found = read_client(path, changes)
    assert found.train
    assert found.service.port == 0


def test_all_problems_are_told_together(tmp_path: Path) -> None:
    problems = _problems(
        tmp_path,
        "name: a b\nserver: 3\nsecure: true\nservice: {port: 70000}\n"
        "data: {name: image_folders}\n",
    )
    assert set(problems) == {"name", "server", "secure", "service.port", "data.name"}
    assert "did you mean 'insecure'?" in problems["secure"]
    assert "did you mean 'image_folder'?" in problems["data.name"]
    assert "from 0 to 65535" in problems["service.port"]


def test_without_a_word_on_security_both_parts_of_it_are_asked_for(
    tmp_path: Path,
) -> None:
    problems = _problems(
        tmp_path, "{name: a, server: 'h:1', data: {name: image_folder, path: d}}"
    )
    assert set(problems) == {"tls", "key"}
    assert "insecure: true" in problems["key"]


def test_insecure_goes_with_neither_certificate_nor_key(tmp_path: Path) -> None:
    problems = _problems(tmp_path, WHOLE + "insecure: true\n")
    assert set(problems) == {"insecure"}
    assert "together with tls and key" in problems["insecure"]


@pytest.mark.parametrize("wrong", [":84430", "", "/path:80"])
def test_a_server_is_a_host_and_a_port(tmp_path: Path, wrong: str) -> None:
    problems = _problems(tmp_path, WHOLE.replace(":8443", wrong))
    assert "expected HOST:PORT" in problems["server"]


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("", "document", "found null, expected keys such as name"),
        ("a: [", "line 2, column 1", "invalid YAML"),
        (WHOLE.replace("data: {", "data: ["), "line 7, column 39", "invalid YAML"),
        (WHOLE.replace("data:", "train: true\ndatas:"), "line 8, column 1", "twice"),
    ],
)
def test_what_is_no_mapping_is_refused(
    tmp_path: Path, text: str, place: str, words: str
) -> None:
    problems = _problems(tmp_path, text)
    assert any(words in message for message in problems.values()), problems


def test_data_has_to_be_described(tmp_path: Path) -> None:
    kept = [line for line in WHOLE.splitlines() if not line.startswith("data")]
    assert "found nothing" in _problems(tmp_path, "\n".join(kept))["data"]
    problems = _problems(tmp_path, WHOLE.replace("path: pictures", "paths: 3"))
    assert "did you mean 'path'?" in problems["data.paths"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        read_client(tmp_path / "client.yaml")


def test_limits_are_safe_where_none_are_given(tmp_path: Path) -> None:
    assert read_client(_file(tmp_path, WHOLE)).limits == LimitSettings()
    text = WHOLE + "limits: {methods: [fedavg], training_rounds: null, days: null}\n"
    found = read_client(_file(tmp_path, text)).limits
    assert (found.methods, found.training_rounds) == (("fedavg",), None)
    assert found.min_examples == LimitSettings.min_examples > 1


def test_wrong_limits_are_told_together(tmp_path: Path) -> None:
    text = (
        "limits: {methods: [knnper], models: [mpl], experiment: abc, days: 0, "
        "min_exampels: 3, min_steps: 0}\n"
    )
    problems = _problems(tmp_path, WHOLE + text)
    assert set(problems) == {
        "limits.methods.0",
        "limits.models.0",
        "limits.experiment",
        "limits.days",
        "limits.min_exampels",
        "limits.min_steps",
    }
    assert "did you mean 'knn_per'?" in problems["limits.methods.0"]
    assert "did you mean 'mlp'?" in problems["limits.models.0"]
    assert "did you mean 'min_examples'?" in problems["limits.min_exampels"]


def test_a_new_client_has_the_defaults_before_its_eyes(tmp_path: Path) -> None:
    text = client_yaml("site-a", Address("h", 1), insecure=True)
    shown = yaml.safe_load(text)["limits"]
    assert shown.keys() == {one.name for one in fields(LimitSettings)}
    assert read_client(_file(tmp_path, text)).limits == LimitSettings()
