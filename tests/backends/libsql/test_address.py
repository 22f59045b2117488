import pytest

from perdure.backends.libsql import LibsqlStore
from perdure.backends.libsql.address import is_remote, parse_url


@pytest.mark.parametrize(
    ("url", "leads_to"),
    [
        ("libsql://db-me.turso.io", "https://db-me.turso.io"),
        ("libsql://h:8080?tls=0", "http://h:8080"),
        ("libsql://h:8080/ns/?tls=1", "https://h:8080/ns"),
        ("https://h", "https://h"),
        ("http://127.0.0.1:8080/", "http://127.0.0.1:8080"),
        ("wss://h", "https://h"),
        ("ws://h:81", "http://h:81"),
        ("http://[::1]:8080", "http://[::1]:8080"),
        ("https://h:443", "https://h"),
    ],
)
def test_every_form_of_url_leads_to_its_server(url: str, leads_to: str) -> None:
    assert is_remote(url)
    assert parse_url(url).address.url == leads_to


@pytest.mark.parametrize("url", ["file:./x.db", "x.db", "/abs/x.db", "./libsql/x.db"])
def test_paths_are_no_servers(url: str) -> None:
    assert not is_remote(url)


def test_tls_can_be_switched_off_for_libsql_only() -> None:
    assert parse_url("libsql://localhost:8080", tls=False).address.url == "http://localhost:8080"
    with pytest.raises(ValueError, match="contradicts"):
        parse_url("https://localhost", tls=False)
    with pytest.raises(ValueError, match="0 or 1"):
        parse_url("libsql://localhost?tls=no")


def test_a_token_in_the_url_is_found_and_not_shown() -> None:
    target = parse_url("libsql://h?authToken=secret")
    assert target.token == "secret"
    assert "secret" not in f"{target!r} {target.address!r} {target.address.label}"


@pytest.mark.parametrize(
    "url",
    [
        "libsql://user:secret@h", "libsql://h?authtoken=secret", "libsql://h?secret", "libsql://h:secret", "libsql://[secret",
        "libsql://?authToken=secret", "postgresql://h/secret", "libsql://h#secret",
    ],
)  # fmt: skip
def test_a_bad_libsql_url_is_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="libSQL URL") as refusal:
        parse_url(url)
    assert "secret" not in f"{refusal.value!r}{refusal.value.__cause__!r}"
    assert refusal.value.__suppress_context__ or refusal.value.__context__ is None


@pytest.mark.parametrize("url", ["http://db.test:8080", "ws://10.0.0.5", "http://[fe80::1]:8080", "http://localhost.test"])
def test_no_token_is_sent_in_plain_text_over_a_network_unless_asked_for(url: str) -> None:
    with pytest.raises(ValueError, match="without encryption; use libsql:// or https://, or pass tls=False"):
        LibsqlStore(url, auth_token="secret")
    with pytest.raises(ValueError, match="without encryption") as refusal:
        LibsqlStore(f"{url}?authToken=secret")
    assert "secret" not in repr(refusal.value)
    for asked in (LibsqlStore(url, auth_token="secret", tls=False), LibsqlStore(f"{url}?tls=0&authToken=secret")):
        assert asked._connections.target.token == "secret"
    LibsqlStore(url)  # without a token there is nothing to protect


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8080", "http://[::1]:8080", "ws://localhost", "https://db.test", "libsql://db.test"]
)
def test_a_token_may_stay_on_the_machine_or_be_encrypted(url: str) -> None:
    assert LibsqlStore(url, auth_token="secret")._connections.target.token == "secret"
