from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from knnper.client.settings import (
    LimitSettings,
    ServerTrust,
    ServiceCertificate,
    ServiceSettings,
    read_client,
)
from knnper.datastore.private_answers import PrivateAnswerSettings
from knnper.errors import ConfigError
from knnper.own import CLOSED, Door
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

LITTLE = "name: a\nserver: 'h:1'\ndata: {name: image_folder, path: d}\n"


def _file(folder: Path, text: str) -> Path:
    path = folder / "client.yaml"
    path.write_text(text)
    return path


def _problems(folder: Path, text: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        read_client(_file(folder, text))
    return {problem.place: problem.message for problem in caught.value.problems}


def test_private_answers_of_the_service_are_read_and_checked(tmp_path: Path) -> None:
    exact = read_client(_file(tmp_path, LITTLE + "insecure: true\n"))
    assert exact.service.privacy is None
    text = LITTLE + "insecure: true\nservice: {privacy: {epsilon: 2, threshold: 0.6}}\n"
    assert read_client(_file(tmp_path, text)).service.privacy == PrivateAnswerSettings(
        epsilon=2, threshold=0.6
    )
    wrong = "{epsilon: 0, delta: 1, threshold: 1.5, noise: 3}"
    text = LITTLE + f"insecure: true\nservice: {{privacy: {wrong}}}\n"
    assert set(_problems(tmp_path, text)) == {
        f"service.privacy.{name}" for name in ("epsilon", "delta", "threshold", "noise")
    }


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        ("clip_norm: 1", "expected both"),
        ("noise_multiplier: 8", "expected both"),
        ("clip_norm: 1, noise_multiplier: 0, epsilon_run: 2", "without noise"),
        ("epsilon_year: 2", "without noise"),
    ],
)
def test_noise_of_a_site_needs_all_its_settings(
    tmp_path: Path, privacy: str, words: str
) -> None:
    text = LITTLE + f"insecure: true\nlimits: {{privacy: {{{privacy}}}}}\n"
    assert words in _problems(tmp_path, text)["limits.privacy"]


def test_paths_are_relative_to_the_file_and_overrides_come_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = read_client(_file(tmp_path, WHOLE))
    assert (settings.name, settings.data.name) == ("site-a", "image_folder")
    assert settings.tls == ServerTrust(tmp_path / "ca.crt")
    assert settings.key == tmp_path / "keys/site-a.key"
    assert (settings.state, settings.base) == (Path("/var/lib/knnper"), tmp_path)
    assert (settings.train, settings.share_metrics) == (False, True)
    certificate = ServiceCertificate(tmp_path / "a.crt", tmp_path / "a.key")
    assert settings.service.tls == certificate
    monkeypatch.chdir(tmp_path)
    assert read_client(Path("client.yaml")).file == tmp_path / "client.yaml"
    changed = read_client(
        settings.file, ["train=true", "service.port=0", "data.path=x"]
    )
    assert (changed.train, changed.service.port) == (True, 0)


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    problems = _problems(
        tmp_path,
        "name: a b\nserver: 3\nsecure: true\nservice: {port: 70000}\n"
        "data: {name: image_folders}\n",
    )
    assert set(problems) == {"name", "server", "secure", "service.port", "data.name"}
    assert "did you mean 'insecure'?" in problems["secure"]
    assert "did you mean 'image_folder'?" in problems["data.name"]
    assert "65535" in problems["service.port"]


def test_either_insecure_or_both_certificate_and_key(tmp_path: Path) -> None:
    for text, words in (
        (LITTLE, "insecure: true"),
        (WHOLE + "insecure: true\n", "together with insecure"),
    ):
        problems = _problems(tmp_path, text)
        assert set(problems) == {"tls", "key"}
        assert words in problems["key"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "found null, expected keys such as name"),
        ("a: [", "invalid YAML"),
        (WHOLE.replace("data: {", "data: ["), "invalid YAML"),
        (WHOLE.replace("data:", "train: true\ndatas:"), "twice"),
        (WHOLE.replace(":8443", ":84430"), "expected HOST:PORT"),
        (WHOLE.replace(":8443", ""), "expected HOST:PORT"),
        (WHOLE.replace(":8443", "/path:80"), "expected HOST:PORT"),
        ("name: a\nserver: 'h:1'\ninsecure: true", "found nothing"),
        (WHOLE.replace("path: pictures", "paths: 3"), "did you mean 'path'?"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, text: str, words: str) -> None:
    problems = _problems(tmp_path, text)
    assert any(words in message for message in problems.values()), problems
    with pytest.raises(ConfigError, match="there is no such file"):
        read_client(tmp_path / "missing.yaml")


def test_wrong_limits_are_reported_together(tmp_path: Path) -> None:
    text = (
        "limits: {methods: [knnper], models: [mpl], experiment: abc, days: 0, "
        "min_exampels: 3, min_steps: 0}\n"
    )
    problems = _problems(tmp_path, WHOLE + text)
    wrong = "methods.0 models.0 experiment days min_exampels min_steps"
    assert set(problems) == {f"limits.{limit}" for limit in wrong.split()}
    assert "did you mean 'knn_per'?" in problems["limits.methods.0"]
    assert "did you mean 'mlp'?" in problems["limits.models.0"]
    assert "did you mean 'min_examples'?" in problems["limits.min_exampels"]


def test_a_new_client_has_the_defaults_before_its_eyes(tmp_path: Path) -> None:
    text = client_yaml("site-a", Address("h", 1), insecure=True)
    shown = yaml.safe_load(text)["limits"]
    assert shown.keys() == {setting.name for setting in fields(LimitSettings)}
    assert read_client(_file(tmp_path, text)).limits == LimitSettings()


def test_little_is_needed(tmp_path: Path) -> None:
    settings = read_client(_file(tmp_path, LITTLE + "insecure: true"))
    assert settings.state == tmp_path / "state"
    assert settings.service == ServiceSettings()
    assert (settings.tls, settings.key, settings.insecure) == (None, None, True)


def test_limits_are_safe_where_none_are_given(tmp_path: Path) -> None:
    assert read_client(_file(tmp_path, WHOLE)).limits == LimitSettings()
    text = WHOLE + "limits: {methods: [fedavg], training_rounds: null, days: null}\n"
    limits = read_client(_file(tmp_path, text)).limits
    assert (limits.methods, limits.training_rounds) == (("fedavg",), None)
    assert limits.min_examples == LimitSettings.min_examples > 1


def test_what_an_experiment_may_use_of_the_sites_own(tmp_path: Path) -> None:
    text = f"{LITTLE}insecure: true\nlimits: {{models: ['m:Net'], methods: ['m:M']}}\n"
    text += "own_code: {folder: code, allowed: ['m:Net']}\npretrained: {a: w/a.pt}\n"
    door = read_client(_file(tmp_path, text)).door
    assert door == Door(tmp_path / "code", ("m:Net",), {"a": tmp_path / "w/a.pt"})
    assert read_client(_file(tmp_path, f"{LITTLE}insecure: true")).door == CLOSED
    problems = _problems(
        tmp_path, f"{LITTLE}insecure: true\nown_code: {{allowed: [Net]}}"
    )
    assert "expected text that matches" in problems["own_code.allowed.0"]
