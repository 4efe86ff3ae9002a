"""Who is answered, and with which headers."""

import hashlib
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from knnper.client.service.access import (
    SCOPES,
    SECURITY_HEADERS,
    Scope,
    Tokens,
    add_token,
    read_or_create_owner_token,
    revoke_token,
)
from knnper.errors import RunError
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


INCLUDED = {
    *(("predict", "probabilities"), ("predict", "neighbors")),
    ("probabilities", "neighbors"),
}
Scoped = tuple[httpx.Client, dict[Scope, str]]


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


def test_a_header_must_bear_the_token() -> None:
    tokens = Tokens(Path("no such folder"), "s3cret")
    assert all(map(tokens.caller, ("Bearer s3cret", "bearer  s3cret ")))
    near = ("Bearer s3cre", "Bearer s3crets", "Basic s3cret", "Bearer sécret")
    assert not any(map(tokens.caller, (*near, "s3cret", "Bearer", "")))


NEEDED: tuple[tuple[Scope, str, str], ...] = (
    ("predict", "POST", "/predict"),
    ("read", "GET", "/examples/1/image"),
    ("add", "POST", "/examples"),
    ("delete", "DELETE", "/examples"),
    ("metrics", "GET", "/metrics"),
)


@pytest.fixture(scope="module")
def scoped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scoped]:
    """Give a service, and a token of each scope."""
    folder = tmp_path_factory.mktemp("scoped")
    tokens = {scope: add_token(folder, scope, [scope]) for scope in SCOPES}
    with asking(small_served(folder / "store"), state=folder) as client:
        yield client, tokens


def bearing(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize(("needed", "method", "path"), NEEDED)
@pytest.mark.parametrize("scope", SCOPES)
def test_a_token_may_what_its_scopes_say_and_no_more(
    scoped: Scoped, scope: Scope, needed: Scope, method: str, path: str
) -> None:
    client, tokens = scoped
    answer = client.request(
        method, path, json={"inputs": []}, headers=bearing(tokens[scope])
    )
    if scope == needed or (needed, scope) in INCLUDED:
        # A prediction or change of nothing is refused for itself.
        assert answer.status_code in (200, 422)
        return
    assert answer.status_code == 403
    assert answer.json()["error"] == "forbidden"
    assert f"--scope {needed}" in answer.json()["message"]
    assert f'scope="{needed}"' in answer.headers["www-authenticate"]


LEAST = "label class_name"
ALL = (
    f"{LEAST} probabilities global_probabilities adapted_probabilities "
    "knn_probabilities neighbors"
)


@pytest.mark.parametrize(
    ("scope", "of_one", "of_all"),
    [
        ("predict", LEAST, "predictions model"),
        ("probabilities", f"{LEAST} probabilities", "predictions model"),
        ("neighbors", ALL, "predictions model knn_weight num_stored"),
    ],
)
def test_a_prediction_tells_what_the_scope_gives(
    scoped: Scoped, scope: Scope, of_one: str, of_all: str
) -> None:
    client, tokens = scoped
    body, headers = {"inputs": some_inputs(1).tolist()}, bearing(tokens[scope])
    answer = client.post("/predict", json=body, headers=headers).json()
    assert set(answer) == set(of_all.split())
    assert set(answer["predictions"][0]) == set(of_one.split())
    info = client.get("/info", headers=headers).json()
    assert (info["token"], "store" in info) == (scope, False)
    assert ("knn_weight" in info) == ("accuracy" in info) == (scope == "neighbors")
    own = set(info["scopes"])
    assert own == {scope} | {one for one, other in INCLUDED if other == scope}
    info = client.get("/info", headers=bearing(tokens["read"])).json()
    assert info["store"]["num_stored"] == 9
    assert "knn_weight" not in info


def test_tokens_come_and_go_while_a_service_runs(tmp_path: Path) -> None:
    body = {"inputs": some_inputs(1).tolist()}
    with asking(small_served(tmp_path / "store"), state=tmp_path) as client:
        token = add_token(tmp_path, "tablet", ["predict"])
        headers = bearing(token)
        assert client.post("/predict", json=body, headers=headers).status_code == 200
        revoke_token(tmp_path, "tablet")
        answer = client.post("/predict", json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]) == (401, "unauthorized")
        assert client.post("/predict", json=body).status_code == 200, "the owner's"


def test_a_token_is_not_kept_as_it_is_and_its_name_is_unique(tmp_path: Path) -> None:
    token = add_token(tmp_path, "tablet", ["predict"])
    assert len(token) >= 32
    kept = (tmp_path / "tokens.json").read_text()
    assert token not in kept
    assert hashlib.sha256(token.encode()).hexdigest() in kept
    for name in ("tablet", "owner", "a/b", ""):
        with pytest.raises(RunError):
            add_token(tmp_path, name, ["predict"])
    with pytest.raises(RunError, match="tablet"):
        revoke_token(tmp_path, "phone")


def test_tokens_that_cannot_be_read_are_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, token = Tokens(tmp_path, TOKEN), add_token(tmp_path, "tablet", ["predict"])
    assert tokens.caller(f"Bearer {token}") is not None
    (tmp_path / "tokens.json").write_text('[{"name": "tablet", "scopes": ["root"]}]')
    assert tokens.caller(f"Bearer {token}") is None
    owner = tokens.caller(f"Bearer {TOKEN}")
    assert owner is not None
    assert owner.scopes == set(SCOPES)
    assert caplog.text.count("tokens.json") == 1
    with pytest.raises(RunError, match=r"tokens\.json"):
        Tokens(tmp_path, TOKEN)


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


def test_browsers_are_told_to_load_nothing_else(tmp_path: Path) -> None:
    with asking(small_served(tmp_path / "store")) as client:
        assert client.put("/examples").headers["allow"] == "DELETE, POST"
        texts = [client.get(path).text for path in ("/", "/page.css", "/page.js")]
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
    for text in texts:
        assert not any(
            one in text.replace("// ", "") for one in ("http:", "https:", "//")
        )


def test_the_owners_token_is_made_once_and_is_a_secret(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = read_or_create_owner_token(path)
    assert len(token) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_or_create_owner_token(path) == token
    assert [one.name for one in tmp_path.iterdir()] == ["token"]
    path.write_text("short")
    for mode, words in ((0o600, "16"), (0o640, "0640")):
        path.chmod(mode)
        with pytest.raises(RunError, match=words):
            read_or_create_owner_token(path)
    with pytest.raises(RunError, match="cannot be used"):
        read_or_create_owner_token(tmp_path / "no folder" / "token")
