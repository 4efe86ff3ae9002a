"""Who is answered, and with which headers."""

import stat
from pathlib import Path

import httpx
import pytest

from client.service.access import (
    SECURITY_HEADERS,
    Tokens,
    read_or_create_owner_token,
)
from knnper.config.errors import RunError
from tests.client.service.small_service import TOKEN, asking, small_served, some_inputs

SECRET = (
    ("GET", "/info"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/examples/1/image"),
    ("GET", "/no/such/path"),
    ("POST", "/predict"),
    ("POST", "/examples"),
    ("DELETE", "/examples"),
)


def test_only_who_has_the_token_is_answered(tmp_path: Path) -> None:
    served = small_served(tmp_path / "store")
    with asking(served) as client:
        address = str(client.base_url)
        for method, path in SECRET:
            for headers in ({}, {"Authorization": f"Bearer {TOKEN}x"}):
                answer = httpx.request(method, f"{address}{path}", headers=headers)
                assert answer.status_code == 401, (method, path)
                assert answer.json()["error"] == "unauthorized"
                assert answer.headers["www-authenticate"].startswith("Bearer")
        for path in ("/", "/page.css", "/page.js", "/health", "/ready"):
            assert httpx.get(f"{address}{path}").status_code == 200, path


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("Bearer s3cret", True),
        ("bearer  s3cret ", True),
        ("Bearer s3cre", False),
        ("Bearer s3crets", False),
        ("Basic s3cret", False),
        ("s3cret", False),
        ("Bearer", False),
        ("", False),
        ("Bearer sécret", False),
    ],
)
def test_a_header_must_bear_the_token(header: str, expected: bool) -> None:
    assert (Tokens(None, "s3cret").caller(header) is not None) is expected


def test_without_a_token_other_machines_and_their_pages_are_refused(
    tmp_path: Path,
) -> None:
    with asking(small_served(tmp_path / "store"), token=None) as client:
        port = client.base_url.port
        body = {"inputs": some_inputs(1).tolist()}
        for headers, status in (
            ({}, 200),
            ({"Host": f"localhost:{port}"}, 200),
            ({"Origin": f"http://127.0.0.1:{port}"}, 200),
            ({"Origin": "http://127.0.0.1:1"}, 403),
            ({"Origin": "http://evil.example"}, 403),
            ({"Origin": "null"}, 403),
            ({"Host": f"evil.example:{port}"}, 403),
        ):
            answer = client.post("/predict", json=body, headers=headers)
            assert answer.status_code == status, headers


def test_every_answer_has_the_headers_that_browsers_heed(tmp_path: Path) -> None:
    with asking(small_served(tmp_path / "store")) as client:
        answers = [
            client.get("/"),
            client.get("/info"),
            client.get("/no/such/path"),
            client.put("/predict"),
            httpx.get(f"{client.base_url}/info"),
        ]
    assert [one.status_code for one in answers] == [200, 200, 404, 405, 401]
    for answer in answers:
        for name, value in SECURITY_HEADERS.items():
            assert answer.headers[name] == value
        assert "server" not in answer.headers
        assert not any(name.startswith("access-control") for name in answer.headers)


def test_all_methods_of_a_path_are_named(tmp_path: Path) -> None:
    with asking(small_served(tmp_path / "store")) as client:
        answer = client.put("/examples")
    assert answer.headers["allow"] == "DELETE, POST"


def test_the_page_names_nothing_from_elsewhere(tmp_path: Path) -> None:
    with asking(small_served(tmp_path / "store")) as client:
        for path in ("/", "/page.css", "/page.js"):
            text = client.get(path).text
            assert "http:" not in text
            assert "https:" not in text
            assert "//" not in text.replace("// ", "")


def test_a_token_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = read_or_create_owner_token(path)
    assert len(token) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_or_create_owner_token(path) == token
    assert [one.name for one in tmp_path.iterdir()] == ["token"]


def test_a_token_file_that_is_no_secret_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("short")
    path.chmod(0o600)
    with pytest.raises(RunError, match="5 characters, expected at least 16"):
        read_or_create_owner_token(path)
    path.chmod(0o640)
    with pytest.raises(RunError, match="found mode 0640, expected 0600"):
        read_or_create_owner_token(path)
    with pytest.raises(RunError, match="cannot be used"):
        read_or_create_owner_token(tmp_path / "no folder" / "token")
